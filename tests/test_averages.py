"""Averaged models: a bad batch is left out of their statistics, and the end says whether they are finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD, swa_utils

import nanguard
from helpers import TinyNet, differences, everything, make_batches, poisoned

Batches = list[tuple[Tensor, Tensor]]


def averaged(batches: Batches, for_statistics: Batches) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = TinyNet()
    model.drop.p = 0.0
    optimizer = SGD(model.parameters(), lr=0.1)
    average = swa_utils.AveragedModel(model)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model)
    swa_utils.update_bn(for_statistics, average)
    return average, everything(average, [])


@pytest.mark.parametrize("place", [0, 2, 4])
def test_one_bad_batch_is_left_out_of_the_statistics(place: int, caplog: pytest.LogCaptureFixture) -> None:
    batches = make_batches(5)
    _, without = averaged(batches, batches[:place] + batches[place + 1 :])
    plain, healthy = averaged(batches, batches)
    with nanguard.install() as autopilot:
        assert differences(healthy, averaged(batches, batches)[1]) == []
        average, state = averaged(batches, poisoned(batches, place))
        assert autopilot.unsound() == ()
    assert differences(without, state) == []
    assert f"update_bn: batch {place} left out" in caplog.text
    assert plain.training is average.training


def test_an_average_that_is_not_finite_is_named_at_the_end() -> None:
    with nanguard.install() as autopilot:
        average, _ = averaged(make_batches(3), make_batches(2))
        average.module.norm.running_var[0] = torch.nan
        assert autopilot.unsound() == ("average.norm.running_var",)
