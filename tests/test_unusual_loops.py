"""Unusual loops: adversarial directions, no optimizer, agents that raise, rates that are far too high."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import nanguard
from nanguard.records.diagnosis import Diagnosis

SYNCS = pytest.mark.parametrize("sync", ["late", "eager"])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def line(mark: str) -> int:
    """The number of the line that ends in this comment."""
    lines = inspect.getsource(sys.modules[__name__]).splitlines()
    return next(number for number, text in enumerate(lines, 1) if text.endswith(f"# {mark}"))


def found_in(autopilot: Any) -> list[Diagnosis]:
    return [incident.diagnosis for incident in autopilot.incidents]


def place(found: Diagnosis) -> tuple[str, int | None]:
    return found.op, None if found.source is None else found.source.line


@SYNCS
def test_a_loss_after_the_last_clearing_counts_even_if_its_gradients_are_finite(sync: Any) -> None:
    """Virtual adversarial training: the gradients of the first loss are cleared, but those of the second are used."""
    data, labels = torch.rand(24, 4), torch.arange(24) % 3
    labels[12:16] = -100
    with nanguard.install(sync=sync) as autopilot:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = SGD(model.parameters(), lr=0.1, fused=True)
        changed = []
        for x, y in DataLoader(TensorDataset(data, labels), batch_size=4):
            before = model[0].weight.detach().clone()
            optimizer.zero_grad()
            direction = torch.rand(4, 4, requires_grad=True)
            F.log_softmax(model(x + direction), 1).mean().backward()
            assert direction.grad is not None
            model.zero_grad()
            smooth = F.log_softmax(model(x + 0.1 * direction.grad), 1).mean()
            loss = F.cross_entropy(model(x), y) + smooth  # no label
            loss.backward()
            optimizer.step()
            changed.append(not torch.equal(before, model[0].weight))
    assert changed[:4] == [True, True, True, False]
    (found,) = found_in(autopilot)
    assert (found.cause, place(found)) == ("all_labels_ignored", ("nll_loss_forward", line("no label")))
    assert found.dataset_indices == (12, 13, 14, 15)
