"""Putting tensors back: small and large, replaced and reshaped, added and removed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers import INF, NAN
from nanguard.state.undo import Undo

CPU = torch.device("cpu")
UP, DOWN = torch.ones(()), torch.zeros(())


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("small", torch.arange(4.0))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.ones(600, 600, dtype=torch.bool))
        self.register_buffer("table", torch.zeros(600, 600))
        self.register_buffer("low", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("missing", None)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("wide", torch.ones(1, 3).expand(4, 3))

    def spoil(self) -> None:
        self.small.fill_(NAN)
        self.count += 1
        self.table[3, 3] = INF
        self.low = torch.full((3,), NAN, dtype=torch.bfloat16)
        self.missing = torch.full((2,), NAN)
        self.empty = torch.full((2,), NAN)
        self.wide = torch.full((4, 3), NAN)


def noted() -> tuple[Buffers, Undo, dict[str, torch.Tensor]]:
    module = Buffers()
    undo = Undo(CPU)
    undo.watch_buffers(module)
    module.small.add_(1)
    return module, undo, {k: v.clone() for k, v in module.named_buffers()}


def unchanged(module: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    now = dict(module.named_buffers())
    return now.keys() == before.keys() and all(torch.equal(v, before[k]) for k, v in now.items())


@pytest.mark.parametrize("by_device", [False, True])
def test_everything_is_put_back(by_device: bool) -> None:
    module, undo, before = noted()
    for _ in range(2):
        for_the_host = undo.note_()
        module.spoil()
        if by_device:
            undo.undo_where_(UP)
            undo.put_back(for_the_host)
        else:
            undo.undo_()
        assert unchanged(module, before)


def test_where_the_flag_is_down_nothing_is_put_back() -> None:
    module, undo, _ = noted()
    undo.note_()
    module.spoil()
    undo.undo_where_(DOWN)
    assert module.small.isnan().all()
    assert module.count.item() == 8
    assert module.table[3, 3].item() == INF


def test_watched_buffers_show_what_they_hold_and_untouched_large_ones_cost_nothing() -> None:
    module, undo, _ = noted()
    for _ in range(10):  # so often it may not be known yet whether torch counts all writes
        undo.note_()
    names, peaks = undo.peaks()
    assert set(names) == {"small", "low", "wide"}
    module.spoil()
    names, peaks = undo.peaks()
    bad = [name for name, peak in zip(names, torch.cat(peaks).tolist(), strict=True) if not peak < INF]
    assert set(bad) == {"small", "low", "table", "wide"}


def test_a_buffer_of_another_shape_is_replaced_by_the_host() -> None:
    module, undo, before = noted()
    undo.note_()
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
    undo.watch_buffers(module)
    undo.note_()
    module.late.fill_(NAN)
    undo.undo_where_(UP)
    assert torch.equal(module.late, torch.ones(2))


def test_batchnorm_statistics_are_put_back_though_torch_counts_no_write() -> None:
    norm = nn.BatchNorm1d(3)
    undo = Undo(CPU)
    undo.watch_buffers(norm)
    undo.note_()
    version = norm.running_mean._version
    norm(torch.full((4, 3), NAN))
    assert norm.running_mean._version == version, "if torch counts it one day, small buffers need not be copied always"
    undo.undo_where_(UP)
    assert torch.equal(norm.running_mean, torch.zeros(3))
    assert norm.num_batches_tracked.item() == 0


def test_a_buffer_replaced_by_one_that_cannot_be_written_to_is_put_back_by_the_host() -> None:
    module, undo, before = noted()
    for replacement in (torch.ones(1).expand(4), torch.arange(4.0).add(1)):
        module.small = replacement
        for_the_host = undo.note_()
        before["small"] = module.small.clone()
        undo.undo_where_(UP)  # must not try to write to it
        undo.undo_()
        module.small = torch.full((4,), NAN)
        undo.undo_where_(UP)
        undo.put_back(for_the_host)
        assert torch.equal(module.small, before["small"])
        undo.note_()
        undo.undo_where_(UP)
        undo.undo_()
        assert torch.equal(module.small, before["small"])


def test_a_large_buffer_that_is_written_to_behind_torchs_back_from_the_first_step_on_is_put_back() -> None:
    """As a codebook that is a moving average: ``self.codes.data.copy_(codes)``."""
    module, undo, before = noted()
    for step in range(12):
        undo.note_()
        module.table.data.add_(1)
        if step in (1, 11):
            undo.undo_()
    assert module.table[0, 0].item() == 10
    undo.note_()
    module.table.data.fill_(NAN)
    assert "table" in undo.peaks()[0]
    assert not undo.are_sound()
    undo.undo_where_(UP)
    assert module.table[0, 0].item() == 10


def test_a_large_buffer_that_is_first_written_to_behind_torchs_back_much_later_is_not_rewound() -> None:
    module, undo, _ = noted()
    for _ in range(10):
        undo.note_()
    module.table.data.add_(1)
    undo.note_()
    undo.undo_()
    assert module.table[0, 0].item() == 1, "such a write cannot be seen, but an old copy must not come back either"


def test_a_buffer_that_held_infinities_before_may_go_on_holding_them() -> None:
    module = nn.Module()
    module.register_buffer("mask", torch.zeros(1, 1))
    undo = Undo(CPU)
    undo.watch_buffers(module)
    for size in (2, 3, 3):
        undo.note_()
        if module.mask.shape[0] != size:
            module.mask = torch.full((size, size), -INF).triu(1)
        _, peaks = undo.peaks()
        assert all(peak.isfinite().all() for peak in peaks)


def test_a_buffer_may_be_taken_away_and_its_module_replaced() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), Buffers())
    undo = Undo(CPU)
    undo.watch_buffers(module)
    module[1].small = None
    undo.note_()
    module[0] = nn.BatchNorm1d(5)
    undo.watch_buffers(module)
    undo.note_()
    module[0](torch.full((4, 5), NAN))
    undo.undo_where_(UP)
    assert torch.equal(module[0].running_mean, torch.zeros(5))


def test_what_was_noted_need_not_be_noted_again_until_something_is_written() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    undo = Undo(torch.device("cpu"))
    undo.watch_buffers(model)
    undo.note_()
    assert undo.is_noted()
    assert undo.are_sound()
    model(torch.randn(4, 2))
    assert not undo.is_noted(), "a forward pass of BatchNorm shows, though torch does not count all that it writes"
    undo.note_()
    model.eval()(torch.randn(4, 2))
    assert undo.is_noted()
    model[1].running_mean = torch.zeros(2)
    assert not undo.is_noted(), "a tensor was replaced"
    model[1].running_mean[0] = NAN
    assert not undo.are_sound()
