"""Training runs out of memory: what is held for recovery is given back, and no snapshot ever ends a run."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import TinyNet, build, differences, everything, loss_fn, make_batches, own_step
from nanguard import Guard, Snapshots
from nanguard.state.snapshots.copies import Copier
from optimizers import ALL

RING = Snapshots(every=10, keep=2)
SYNCS = ["eager", "late"]


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Needy:
    """A loss function that runs out of memory at these calls, in the forward pass or half-way through the backward.

    It draws from every generator, so that a step that is run again with other random numbers ends elsewhere.
    """

    def __init__(self, *calls: int, in_backward: bool = False) -> None:
        self.calls, self.in_backward, self.number = calls, in_backward, 0

    def __call__(self, model: TinyNet, batch: Any) -> Tensor:
        self.number += 1
        noise = 1 + 0.01 * (random.random() + float(np.random.rand()))
        loss = loss_fn(model, (batch[0] * noise, batch[1]))
        if self.number not in self.calls:
            return loss
        if not self.in_backward:
            model.eval()
            raise out_of_memory()
        model.inp.weight.register_hook(self._fail_once())  # the layers above have their gradients by then
        return loss

    def _fail_once(self) -> Callable[[Tensor], None]:
        left = iter([True])

        def fail(_: Tensor) -> None:
            if next(left, False):
                raise out_of_memory()

        return fail


def trained(sync: str, how: str, loss: Needy) -> tuple[dict[str, Any], Guard]:
    random.seed(0)
    np.random.seed(0)
    model, opt = build(ALL["fused AdamW"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 80)
    guard = Guard(
        model,
        opt,
        scheduler=schedule,
        precision="fp32",
        sync=sync,  # type: ignore[arg-type]
        accumulate=3 if how == "accumulated" else 1,
        drop_bad_microbatches=how == "dropping",
        snapshots=RING,
    )
    batches, losses = make_batches(60), []
    if how in ("micro-batches", "dropping"):
        losses = [guard.step(loss, microbatches=batches[i : i + 3]) for i in range(0, 60, 3)]
    else:
        losses = [guard.step(loss, batch) for batch in batches]
    guard.settle()
    rng = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()[1].tolist()}
    return everything(model, [opt], schedule, rng, torch.stack(losses)), guard


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "how",
    ["plain", "micro-batches", *(pytest.param(how, marks=pytest.mark.campaign) for how in ("accumulated", "dropping"))],
)
@pytest.mark.parametrize("sync", SYNCS)
def test_the_step_is_run_again_with_the_memory_of_the_snapshots(
    sync: str, how: str, in_backward: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """To the bit the run in which it never happened; the second micro-batch of a step fails."""
    clean, _ = trained(sync, how, Needy())
    state, guard = trained(sync, how, Needy(53, in_backward=in_backward))
    assert differences(clean, state) == []
    assert guard.model.training
    assert caplog.text.count("those in memory are dropped") == 1
    assert "ran out of memory: nanguard gave back what it held, and runs it again" in caplog.text
    assert guard.incidents == ()


def test_the_ring_is_dropped_before_the_step_is_run_again() -> None:
    model, opt = build(ALL["fused AdamW"])
    guard = Guard(model, opt, precision="fp32", snapshots=RING)
    seen: list[tuple[int, ...]] = []

    def loss(model: TinyNet, batch: Any) -> Tensor:
        seen.append(guard.snapshots)
        if len(seen) == 36:
            raise out_of_memory()
        return loss_fn(model, batch)

    for batch in make_batches(60):
        guard.step(loss, batch)
    assert seen[35] == (21, 31)
    assert seen[36] == (), "given back"
    assert guard.snapshots, "and begun anew"


def test_what_does_not_fit_the_second_time_either_is_raised_and_leaves_no_trace() -> None:
    model, opt = build(ALL["fused AdamW"])
    guard = Guard(model, opt, precision="fp32", snapshots=RING)
    batches = make_batches(40)
    for batch in batches[:30]:
        guard.step(loss_fn, batch)
    guard.settle()
    before = everything(model, [opt])
    loss = Needy(1, 2)
    with pytest.raises(torch.OutOfMemoryError):
        guard.step(loss, batches[30])
    assert loss.number == 2
    assert differences(before, everything(model, [opt])) == []
    model.train()
    for batch in batches[31:]:
        guard.step(loss_fn, batch)
    guard.settle()
    assert guard.counts["applied"] == 39


def test_where_nothing_is_held_the_error_comes_at_once() -> None:
    model, opt = build(ALL["fused AdamW"])
    guard = Guard(model, opt, precision="fp32", snapshots=None)
    loss = Needy(1)
    with pytest.raises(torch.OutOfMemoryError):
        guard.step(loss, make_batches(1)[0])
    assert loss.number == 1


@pytest.mark.parametrize("where", ["autocast", "backward"])
def test_in_a_loop_of_your_own_the_memory_is_there_for_the_second_try(where: str) -> None:
    model, opt = build(ALL["fused AdamW"])
    guard = Guard(model, opt, precision="fp32", snapshots=RING)
    batches = make_batches(40)
    for batch in batches[:30]:
        own_step(guard, batch)
    assert guard.snapshots
    loss = Needy(1, in_backward=where == "backward")
    with pytest.raises(torch.OutOfMemoryError):
        with guard.autocast():
            value = loss(model, batches[30])
        guard.backward(value)
    assert guard.snapshots == ()


def test_a_snapshot_that_does_not_fit_never_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory may be pinned by others between our look at it and the copy."""
    model, opt = build(ALL["fused AdamW"])
    guard = Guard(model, opt, precision="fp32", snapshots=RING)
    take = Copier.take

    def short(self: Copier, *args: Any, **kwargs: Any) -> Any:
        if guard.current_step >= 30:
            raise RuntimeError("CUDA error: out of memory")
        return take(self, *args, **kwargs)

    monkeypatch.setattr(Copier, "take", short)
    for batch in make_batches(80):
        guard.step(loss_fn, batch)
    guard.settle()
    assert guard.counts["applied"] == 80
    assert guard.snapshots == ()
    assert caplog.text.count("does not fit into memory") == 1


def test_other_errors_of_a_copy_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    model, opt = build(ALL["fused AdamW"])
    guard = Guard(model, opt, precision="fp32", snapshots=RING)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("expected scalar type Float")

    monkeypatch.setattr(Copier, "take", broken)
    with pytest.raises(RuntimeError, match="expected scalar type"):
        guard.step(loss_fn, make_batches(1)[0])


def test_fewer_snapshots_are_kept_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gc.collect()  # guards of other tests that nothing refers to any more share the memory for snapshots
    model, opt = build(ALL["fused AdamW"])
    probe = Guard(model, opt, precision="fp32", snapshots=RING)
    each = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    each += 2 * sum(p.numel() * p.element_size() for p in model.parameters())
    assert probe.snapshots == ()
    monkeypatch.setattr("nanguard.state.snapshots.memory.free_bytes", lambda *_, **__: 4 * 2 * each)
    caplog.set_level("INFO", logger="nanguard")
    guard = Guard(model, opt, precision="fp32", snapshots=Snapshots(every=10, keep=3))
    for batch in make_batches(60):
        guard.step(loss_fn, batch)
        assert len(guard.snapshots) <= 1
    assert "1 kept of 3, since memory is short" in caplog.text
    assert "in host memory" in caplog.text
    guard.roll_back()


@pytest.mark.campaign
def test_the_benchmark_runs(tmp_path: Path) -> None:
    script = Path(__file__).parent.parent / "benchmarks" / "memory.py"
    command = [sys.executable, "-W", "ignore", str(script), "--smoke", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run([*command, "--only", "install()"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("memory-cpu*.json"))) == 1
    assert "| install() | lives |" in next(tmp_path.glob("memory-cpu*.md")).read_text()
