"""Putting tensors back: small and large, replaced and reshaped, added and removed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers import INF, NAN
from nanguard.undo import Undo

CPU = torch.device("cpu")
UP, DOWN = torch.ones(()), torch.zeros(())


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("small", torch.arange(4.0))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.ones(300, 300, dtype=torch.bool))
        self.register_buffer("table", torch.zeros(300, 300))
        self.register_buffer("low", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("missing", None)
        self.register_buffer("empty", torch.zeros(0))

    def spoil(self) -> None:
        self.small.fill_(NAN)
        self.count += 1
        self.table[3, 3] = INF
        self.low = torch.full((3,), NAN, dtype=torch.bfloat16)


def noted() -> tuple[Buffers, Undo, dict[str, torch.Tensor]]:
    module = Buffers()
    undo = Undo(CPU)
    undo.add_buffers(module)
    module.small.add_(1)
    undo.note_()
    return module, undo, {k: v.clone() for k, v in module.named_buffers()}


def unchanged(module: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(v, before[k]) for k, v in module.named_buffers())


@pytest.mark.parametrize("by_device", [False, True])
def test_everything_is_put_back(by_device: bool) -> None:
    module, undo, before = noted()
    for _ in range(2):
        module.spoil()
        if by_device:
            undo.undo_where_(UP)
        else:
            undo.undo_()
        assert unchanged(module, before)
        undo.note_()


def test_where_the_flag_is_down_nothing_is_put_back() -> None:
    module, undo, _ = noted()
    module.spoil()
    undo.undo_where_(DOWN)
    assert module.small.isnan().all()
    assert module.count.item() == 8
    assert module.table[3, 3].item() == INF


def test_watched_buffers_show_what_they_hold_and_untouched_large_ones_cost_nothing() -> None:
    module, undo, _ = noted()
    names, peaks = undo.peaks()
    assert set(names) == {"small", "low"}
    module.spoil()
    names, peaks = undo.peaks()
    bad = [name for name, peak in zip(names, torch.cat(peaks).tolist(), strict=True) if not peak < INF]
    assert set(bad) == {"small", "low", "table"}


def test_a_buffer_of_another_shape_is_replaced_by_the_host() -> None:
    module, undo, before = noted()
    module.small = torch.zeros(9)
    undo.undo_()
    assert unchanged(module, before)
    module.small = torch.zeros(9)
    undo.note_()
    module.small.fill_(NAN)
    undo.undo_where_(UP)
    assert torch.equal(module.small, torch.zeros(9))


def test_buffers_may_be_added_and_removed_between_epochs() -> None:
    module, undo, _ = noted()
    del module.small
    module.register_buffer("late", torch.ones(2))
    undo.add_buffers(module)
    undo.note_()
    module.late.fill_(NAN)
    undo.undo_where_(UP)
    assert torch.equal(module.late, torch.ones(2))


def test_batchnorm_statistics_are_put_back_though_torch_counts_no_write() -> None:
    norm = nn.BatchNorm1d(3)
    undo = Undo(CPU)
    undo.add_buffers(norm)
    undo.note_()
    version = norm.running_mean._version
    norm(torch.full((4, 3), NAN))
    assert norm.running_mean._version == version, "if torch counts it one day, small buffers need not be copied always"
    undo.undo_where_(UP)
    assert torch.equal(norm.running_mean, torch.zeros(3))
    assert norm.num_batches_tracked.item() == 0
