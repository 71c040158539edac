"""Precisions, loss scaling, and what is routine about an overflow."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanguard
from helpers import TinyNet, build, differences, everything, loss_fn, make_batches, own_step, poisoned
from nanguard.testing import Fault, inject
from optimizers import ALL


def test_auto_is_fp32_on_a_cpu_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model, opt = build(ALL["AdamW loop"])
    with caplog.at_level(logging.INFO, "nanguard"):
        guard = nanguard.Guard(model, opt)
    assert guard.precision == "fp32"
    assert "guarding in fp32 (asked for auto) on cpu" in caplog.text


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_the_forward_pass_runs_in_the_precision_asked_for(precision: Any, dtype: torch.dtype) -> None:
    model, opt = build(ALL["AdamW loop"])
    guard = nanguard.Guard(model, opt, precision=precision)
    with guard.autocast():
        assert model.inp(make_batches(1)[0][0]).dtype is dtype


def overflow_at(steps: tuple[int, ...]) -> Fault:
    return Fault(into="gradient", name="out.weight", value="inf", steps=steps)


@pytest.mark.parametrize("style", ["step", "own loop"])
@pytest.mark.parametrize("sync", ["eager", "late"])
def test_an_overflow_that_backing_off_cures_is_a_note_not_an_incident(
    sync: Any, style: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, opt = build(ALL["fused AdamW"])
    policy = nanguard.Policy([nanguard.Skip(0)])
    guard = nanguard.Guard(model, opt, precision="fp16", sync=sync, policy=policy)
    with caplog.at_level(logging.INFO, "nanguard"), inject(guard, overflow_at((3, 4))):
        for batch in guard.epoch(make_batches(10)):
            if style == "step":
                guard.step(loss_fn, batch)
                continue
            own_step(guard, batch)
    assert guard.counts["backed_off"] == 2
    assert guard.counts["applied"] == 8
    assert guard.counts["lost"] == 0, "as with a GradScaler, an overflow costs its own step only"
    assert guard.incidents == ()
    assert guard.state_dict()["scaler"]["scale"] == 65536 / 4
    assert caplog.text.count("overflowed at loss scale") == 2
    assert all(record.levelno < logging.WARNING for record in caplog.records)


@pytest.mark.parametrize("sync", ["eager", "late"])
def test_the_first_overflow_may_come_before_there_is_optimizer_state(sync: Any) -> None:
    model, opt = build(ALL["fused SGD momentum"])
    guard = nanguard.Guard(model, opt, precision="fp16", sync=sync)
    with inject(guard, overflow_at((0,))):
        for batch in guard.epoch(make_batches(6)):
            own_step(guard, batch)
    assert guard.counts["backed_off"] == 1
    assert all(t.abs().max() < 10 for s in opt.state.values() for t in s.values()), "no uninitialised momentum"


def test_an_overflow_at_the_floor_is_an_incident() -> None:
    model, opt = build(ALL["AdamW loop"])
    scale = nanguard.LossScale(initial=4.0, floor=2.0)
    guard = nanguard.Guard(model, opt, precision="fp16", loss_scale=scale)
    with inject(guard, overflow_at((0, 1, 2))):
        for batch in make_batches(4):
            guard.step(loss_fn, batch)
    assert [i.reading.step for i in guard.incidents] == [1, 2]
    assert guard.incidents[0].reading.scale == 2.0
    assert (guard.counts["backed_off"], guard.counts["skipped"], guard.counts["applied"]) == (1, 2, 1)


def test_a_non_finite_loss_is_an_incident_whatever_the_scale() -> None:
    model, opt = build(ALL["AdamW loop"])
    guard = nanguard.Guard(model, opt, precision="fp16")
    guard.step(loss_fn, poisoned(make_batches(1), 0)[0])
    assert guard.incidents[0].reading.found[0] == "loss"


@pytest.mark.parametrize("sync", ["eager", "late"])
def test_the_scale_moves_as_torchs_own_scaler_does(sync: Any) -> None:
    options = nanguard.LossScale(initial=1024.0, growth=2.0, backoff=0.5, interval=3)
    model, opt = build(ALL["fused AdamW"])
    guard = nanguard.Guard(model, opt, precision="fp16", loss_scale=options, sync=sync, max_norm=None)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=3)
    twin, twin_opt = build(ALL["fused AdamW"])
    theirs, ours = [], []
    for step, batch in enumerate(make_batches(14)):
        fault = overflow_at((step,)) if step in (4, 5, 9) else overflow_at((10_000,))
        torch.manual_seed(step)
        with inject(twin, fault, clock=lambda step=step: step):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_fn(twin, batch)
            scaler.scale(loss).backward()
            scaler.step(twin_opt)
            scaler.update()
            twin_opt.zero_grad()
        torch.manual_seed(step)
        with inject(guard, fault):
            guard.step(loss_fn, batch)
            guard.settle()
        theirs.append(scaler.get_scale())
        ours.append(guard.state_dict()["scaler"]["scale"])
    assert ours == theirs
    assert len(set(ours)) > 2
    only_here = differences(everything(model, [opt]), everything(twin, [twin_opt]))
    assert only_here == ["model.norm.num_batches_tracked", "model.norm.running_mean", "model.norm.running_var"]
    assert int(model.norm.num_batches_tracked) == 11, "torch's scaler leaves skipped steps in the statistics"


def test_dropping_gradients_is_ignored_with_a_warning_under_a_scaler(caplog: pytest.LogCaptureFixture) -> None:
    model, opt = build(ALL["AdamW loop"])
    guard = nanguard.Guard(
        model, opt, precision="fp16", policy=nanguard.Policy([nanguard.DropBadGradients(), nanguard.Skip()])
    )
    assert "DropBadGradients is ignored in fp16" in caplog.text
    before = everything(model, [opt])
    with inject(guard, overflow_at((0,))):
        guard.step(loss_fn, make_batches(1)[0])
    assert differences(before, everything(model, [opt])) == []
    assert guard.counts["backed_off"] == 1


@pytest.mark.parametrize(
    "options",
    [{"initial": 0.5}, {"floor": 0.0}, {"initial": float("inf")}, {"growth": 1.0}, {"backoff": 1.0}, {"interval": 0}],
)
def test_a_loss_scale_that_cannot_work_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="LossScale needs"):
        nanguard.LossScale(**options)


def test_fp16_parameters_are_refused_under_loss_scaling() -> None:
    model = TinyNet().half()
    with pytest.raises(ValueError, match=r"inp\.weight"):
        nanguard.Guard(model, torch.optim.AdamW(model.parameters()), precision="fp16")


class DoubleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(6, 4).bfloat16()
        self.high = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.high(self.low(x.bfloat16()).double())


@pytest.mark.parametrize("clip", ["group", "global", "agc", "zscore"])
def test_parameters_of_several_dtypes_train_and_are_protected(clip: str) -> None:
    model, opt = build(lambda p: torch.optim.AdamW(p, lr=1e-2), model=DoubleNet())
    guard = nanguard.Guard(model, opt, precision="fp32", clip=clip, max_norm=0.1)
    batches = make_batches(3)
    guard.step(loss_fn, batches[0])
    before = everything(model, [opt])
    guard.step(loss_fn, poisoned(batches, 1)[1])
    assert differences(before, everything(model, [opt])) == []
    guard.step(loss_fn, batches[2])
    assert guard.counts["applied"] == 2
