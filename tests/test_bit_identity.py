"""A healthy guarded run is the plain run; a late run with faults is the eager run with the same faults. To the bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import nanguard
from helpers import INF, build, differences, everything, loss_fn, make_batches, own_step, poisoned
from nanguard.testing import Fault, inject
from optimizers import ALL, FUSED, NOT_FUSED

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def plain_run(make: Any, precision: str, max_norm: float | None, accumulate: int = 1) -> dict[str, Any]:
    model, opt = build(make)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 60)
    dtype = PRECISIONS[precision]
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    for place, batch in enumerate(make_batches(50), start=1):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = loss_fn(model, batch)
        scaler.scale(loss / accumulate).backward()
        if place % accumulate:
            continue
        scaler.unscale_(opt)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)
        schedule.step()
    return everything(model, [opt], schedule, torch.get_rng_state())


def guarded_run(
    make: Any, precision: Any, max_norm: float | None, accumulate: int = 1, sync: Any = "eager", style: str = "step"
) -> dict[str, Any]:
    model, opt = build(make)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 60)
    guard = nanguard.Guard(
        model,
        opt,
        scheduler=schedule,
        precision=precision,
        clip="global",
        max_norm=max_norm,
        accumulate=accumulate,
        sync=sync,
    )
    for place, batch in enumerate(guard.epoch(make_batches(50)), start=1):
        if style == "step":
            guard.step(loss_fn, batch)
            continue
        with guard.autocast():
            loss = loss_fn(model, batch)
        guard.backward(loss)
        if place % accumulate == 0:
            guard.update()
    assert guard.counts["skipped"] == guard.counts["backed_off"] == 0
    return everything(model, [opt], schedule, torch.get_rng_state())


@pytest.mark.parametrize("style", ["step", "own loop"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", [*NOT_FUSED, "fused AdamW", "fused SGD momentum"])
def test_a_healthy_guarded_run_is_the_plain_run(name: str, precision: str, style: str) -> None:
    plain = plain_run(ALL[name], precision, 0.5)
    assert differences(plain, guarded_run(ALL[name], precision, 0.5, style=style)) == []


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("max_norm", [0.5, None])
@pytest.mark.parametrize("accumulate", [1, 5])
def test_a_healthy_late_run_is_the_plain_run(precision: str, max_norm: float | None, accumulate: int) -> None:
    plain = plain_run(ALL["fused AdamW"], precision, max_norm, accumulate)
    assert differences(plain, guarded_run(ALL["fused AdamW"], precision, max_norm, accumulate, "late")) == []


def test_global_clipping_sums_in_the_models_order_whatever_the_groups() -> None:
    def grouped(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        groups = [[p for p in params if p.dim() < 2], [p for p in reversed(params) if p.dim() >= 2]]
        return torch.optim.AdamW([{"params": groups[0], "weight_decay": 0.0}, {"params": groups[1]}], fused=True)

    for max_norm in (0.5, 0.05):
        plain = plain_run(grouped, "fp32", max_norm)
        assert differences(plain, guarded_run(grouped, "fp32", max_norm)) == []


def noisy_loss(model: nn.Module, batch: Any) -> Tensor:
    """Draws from Python's, NumPy's and torch's generators inside the step."""
    noise = random.random() * float(np.random.rand()) * torch.rand(())
    return loss_fn(model, (batch[0] + noise, batch[1]))


def faulty_run(make: Any, precision: Any, sync: Any, accumulate: int, clip: Any = "group") -> dict[str, Any]:
    random.seed(0)
    np.random.seed(0)
    model, opt = build(make)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    cycles = bool({"momentum", "betas"} & opt.defaults.keys())
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.05, 80, cycle_momentum=cycles)
    guard = nanguard.Guard(
        model,
        opt,
        scheduler=schedule,
        precision=precision,
        sync=sync,
        ema=ema,
        clip=clip,
        accumulate=accumulate,
        policy=nanguard.Policy([nanguard.Skip(20)]),
    )
    batches = poisoned(poisoned(make_batches(40), 0, 7, 8, 9), 21, 39, value=INF)
    gradient = Fault(into="gradient", name="out.bias", value="inf", steps=(4, 13))
    with inject(guard, gradient) as injector:
        losses = [guard.step(noisy_loss, batch) for batch in guard.epoch(batches)]
    draws = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    counts = {k: v for k, v in guard.counts.items() if k not in ("rerun", "lost")}
    kinds = [(i.reading.step, i.reading.found, i.outcome.action) for i in guard.incidents]
    assert {f.step for f in injector.fired} == {4, 13} if accumulate == 1 else injector.fired
    return everything(model, [opt], schedule, ema, torch.stack(losses).nan_to_num(-1.0), draws, counts, kinds)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.campaign), 2])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", FUSED)
def test_a_late_run_with_faults_is_the_eager_run(name: str, precision: str, accumulate: int) -> None:
    eager = faulty_run(ALL[name], precision, "eager", accumulate)
    assert differences(eager, faulty_run(ALL[name], precision, "late", accumulate)) == []


@pytest.mark.parametrize("clip", ["global", "agc", "zscore", nanguard.ZScore(warmup=4, window=8, threshold=0.5)])
def test_so_it_is_with_every_way_to_clip(clip: Any) -> None:
    eager = faulty_run(ALL["fused AdamW"], "bf16", "eager", 1, clip)
    assert differences(eager, faulty_run(ALL["fused AdamW"], "bf16", "late", 1, clip)) == []


def test_a_learning_rate_set_by_the_user_goes_with_its_step() -> None:
    ends = {}
    for sync in ("eager", "late"):
        model, opt = build(ALL["fused AdamW"])
        guard = nanguard.Guard(model, opt, precision="fp32", sync=sync)
        for place, batch in enumerate(guard.epoch(poisoned(make_batches(12), 3, 7))):
            opt.param_groups[0]["lr"] = 1e-2 / (place + 1)
            guard.step(loss_fn, batch)
        ends[sync] = everything(model, [opt])
    assert differences(ends["eager"], ends["late"]) == []


def test_losses_of_steps_that_ran_again_are_corrected_in_place() -> None:
    model, opt = build(ALL["fused SGD"])
    guard = nanguard.Guard(model, opt, precision="fp32", sync="late")
    batches = poisoned(make_batches(3), 0)
    losses = [guard.step(loss_fn, batch) for batch in batches]
    guard.settle()
    model, opt = build(ALL["fused SGD"])
    eager = nanguard.Guard(model, opt, precision="fp32", sync="eager")
    assert torch.equal(torch.stack(losses[1:]), torch.stack([eager.step(loss_fn, b) for b in batches][1:]))
    assert guard.counts["rerun"] == 1


def test_a_wake_in_the_users_own_loop_is_lost_and_says_so() -> None:
    model, opt = build(ALL["fused AdamW"])
    guard = nanguard.Guard(model, opt, precision="fp32", sync="late")
    for batch in guard.epoch(poisoned(make_batches(10), 4)):
        own_step(guard, batch)
    assert guard.counts == {"applied": 8, "skipped": 1, "lost": 1, "rerun": 0, "backed_off": 0}
    assert guard.incidents[0].outcome.lost == 1
    assert int(opt.state[model.out.weight]["step"]) == 8


@pytest.mark.parametrize("style", ["step", "own loop"])
def test_a_guard_without_options_neither_clips_nor_changes_anything_else(style: str) -> None:
    """On a CPU, where the default precision is fp32; the gradients are far larger than usual limits."""
    ends = []
    for guarded in (False, True):
        model, opt = build(ALL["fused AdamW"])
        guard = nanguard.Guard(model, opt) if guarded else None
        for inputs, targets in make_batches(20):
            batch = (inputs * 1e3, targets)
            if guard is None:
                (loss_fn(model, batch) * 1e4).backward()
                opt.step()
                opt.zero_grad()
            elif style == "step":
                guard.step(lambda model, batch: loss_fn(model, batch) * 1e4, batch)
            else:
                with guard.autocast():
                    loss = loss_fn(model, batch) * 1e4
                guard.backward(loss)
                guard.update()
        ends.append(everything(model, [opt], None, torch.get_rng_state()))
    assert differences(*ends) == []
