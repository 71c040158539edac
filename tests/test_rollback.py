"""Snapshots and the way back: the continuation after a rollback is the run that started from that state, to the bit."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset

import nanguard
from helpers import TinyNet, build, differences, everything, loss_fn, make_batches, own_step, poisoned
from nanguard import Guard, Policy, Rollback, Skip, Snapshots
from nanguard.recovery.mitigations import ActiveMitigations
from nanguard.testing import Fault, inject
from optimizers import ALL

RING = Snapshots(every=10, keep=3)
SYNCS = ["eager", "late"]


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = TinyNet(), TinyNet(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.generator(x) + self.critic(x)


def states(guard: Guard, *more: Any) -> dict[str, Any]:
    rng = {"torch": torch.get_rng_state(), "numpy": np.random.get_state()[1].tolist()}
    return everything(guard.model, guard.optimizers, *more, rng)


SETUPS: dict[str, tuple[str, str, Any]] = {
    "AdamW fused": ("fused AdamW", "fp32", None),
    "SGD momentum": ("SGD momentum", "fp32", None),
    "fused SGD momentum": ("fused SGD momentum", "fp32", None),
    "Adagrad": ("Adagrad", "fp32", None),
    "fused Adagrad": ("fused Adagrad", "fp32", None),
    "Lion of a third party": ("Lion", "fp32", None),
    "Adafactor": ("Adafactor", "fp32", None),
    "fp16 with a scaler": ("fused AdamW", "fp16", None),
    "bf16": ("fused AdamW", "bf16", None),
    "OneCycle": ("fused AdamW", "fp32", lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=500)),
    "cosine": ("fused AdamW", "fp32", lambda o: lr_scheduler.CosineAnnealingLR(o, 100, eta_min=1e-5)),
    "warm-up and cosine": (
        "SGD momentum",
        "fp32",
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=15), lr_scheduler.CosineAnnealingLR(o, 100)], [15]
        ),
    ),
    "milestones": ("fused AdamW", "fp32", lambda o: lr_scheduler.MultiStepLR(o, [12, 25, 31])),
}


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("setup", SETUPS)
def test_the_same_twenty_steps_follow_a_rollback(setup: str, where: Any, tmp_path: Path) -> None:
    optimizer, precision, make_schedule = SETUPS[setup]
    model, opt = build(ALL[optimizer])
    schedule = None if make_schedule is None else make_schedule(opt)
    ema = torch.optim.swa_utils.AveragedModel(model)
    ring = Snapshots(every=10, keep=3, where=where)
    more = [] if schedule is None else [schedule]
    guard = Guard(
        model, opt, scheduler=schedule, precision=precision, ema=ema, snapshots=ring, run_dir=tmp_path, clip="zscore"
    )
    batches = make_batches(64)
    for batch in batches[:31]:
        guard.step(loss_fn, batch)
    for batch in batches[31:51]:
        guard.step(loss_fn, batch)
    guard.settle()
    at = next(step for step in guard.snapshots if step == 31)
    first = states(guard, ema, *more)
    guard.roll_back(steps=20)
    assert guard.counts["undone"] == 51 - at
    for batch in batches[at:51]:
        guard.step(loss_fn, batch)
    guard.settle()
    assert differences(first, states(guard, ema, *more)) == []


@pytest.mark.parametrize("sync", SYNCS)
def test_two_optimizers_go_back_together(sync: Any) -> None:
    torch.manual_seed(0)
    model = Gan()
    opts = [
        torch.optim.AdamW(model.generator.parameters(), fused=True),
        torch.optim.SGD(model.critic.parameters(), lr=1e-2, momentum=0.9, fused=True),
    ]
    guard = Guard(model, opts, precision="fp32", snapshots=RING, sync=sync)
    batches = make_batches(64)
    for batch in batches[:51]:
        guard.step(loss_fn, batch)
    guard.settle()
    first = states(guard)
    guard.roll_back(steps=20)
    for batch in batches[31:51]:
        guard.step(loss_fn, batch)
    guard.settle()
    assert differences(first, states(guard)) == []


class Noisy(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Draws from torch's, Python's and NumPy's generators for every sample, as augmentation does."""

    def __init__(self, size: int) -> None:
        self.x, self.y = torch.randn(size, 6), torch.randint(0, 3, (size,))

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] + 0.1 * torch.randn(6) + 0.1 * float(np.random.rand()), self.y[i]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(320):
            yield torch.randn(6) + i / 320, torch.tensor(i % 3)


def loader_of(kind: str) -> Any:
    torch.manual_seed(3)
    data = Noisy(320)
    if kind == "list":
        return make_batches(40)
    if kind == "shuffled":
        return DataLoader(data, batch_size=8, shuffle=True)
    if kind == "generator":
        return DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(5))
    if kind == "workers":
        # Not forked: this process has threads, whose locks a forked one would find taken for ever.
        return DataLoader(data, batch_size=8, shuffle=True, num_workers=1, multiprocessing_context="spawn")
    if kind == "stream":
        return DataLoader(Stream(), batch_size=8)
    if kind == "distributed":
        sampler = torch.utils.data.DistributedSampler(data, num_replicas=2, rank=0)
        return DataLoader(data, batch_size=4, sampler=sampler)
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it calls what torch has deprecated
        return stateful.StatefulDataLoader(data, batch_size=8, shuffle=True)


KINDS = ["list", "shuffled", "generator", "stream", "distributed", "stateful"]


def run(
    kind: str, *, sync: str, fault: bool, at: int = 44, epochs: int = 3, ladder: Any = None, style: str = "step"
) -> tuple[Any, Guard, list[Tensor]]:
    """Three epochs; with a fault, a moment turns NaN in the second and the run goes back by itself."""
    loader = loader_of(kind)
    model, opt = build(ALL["fused AdamW"])
    policy = Policy(ladder or [Rollback()])
    schedule = lr_scheduler.StepLR(opt, 1, 0.5)
    guard = Guard(
        model, opt, precision="fp32", sync=sync, policy=policy, snapshots=RING, scheduler=schedule, schedule_per="epoch"
    )
    torch.manual_seed(7)
    np.random.seed(7)
    seen: list[Tensor] = []
    faults = [Fault(into="optimizer_state", name="out.weight.exp_avg", steps=(at,), times=1)] if fault else []
    with inject(guard, *faults) as injector:
        for epoch in range(epochs):
            if kind == "distributed":
                loader.sampler.set_epoch(epoch)
            for batch in guard.epoch(loader):
                seen.append(batch[0].clone())
                if style == "step":
                    guard.step(loss_fn, batch)
                else:
                    own_step(guard, batch)
    assert len(injector.fired) == fault
    return states(guard, schedule), guard, seen


@pytest.mark.parametrize("style", ["step", "own loop"])
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "at",
    [
        pytest.param(46, marks=pytest.mark.campaign, id="within an epoch"),
        pytest.param(41, id="into the epoch before"),
    ],
)
def test_a_run_that_went_back_ends_as_the_one_that_did_not(at: int, kind: str, sync: str, style: str) -> None:
    clean, _, batches = run(kind, sync=sync, fault=False, style=style)
    state, guard, seen = run(kind, sync=sync, fault=True, style=style, at=at)
    assert guard.counts["rolled_back"] == 1
    assert differences(clean, state) == []
    assert len(seen) > len(batches), "batches came again"
    assert all(torch.equal(a, b) for a, b in zip(batches[-70:], seen[-70:], strict=True))
    assert guard.current_epoch == 3


@pytest.mark.parametrize("style", ["step", "own loop"])
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("at", [46, 47, 48, 49])
def test_a_batch_may_make_several_steps(at: int, sync: str, style: str) -> None:
    """As with a critic that learns twice: the run goes back to between two batches, whichever step it was."""

    def learn(*faults: Fault) -> tuple[Any, Guard]:
        model, opt = build(ALL["fused AdamW"])
        guard = Guard(model, opt, precision="fp32", sync=sync, policy=Policy([Rollback()]), snapshots=RING)
        torch.manual_seed(1)
        with inject(guard, *faults):
            for batch in guard.epoch(make_batches(40)):
                for _ in range(2):
                    if style == "step":
                        guard.step(loss_fn, batch)
                    else:
                        own_step(guard, batch)
        return states(guard), guard

    clean, _ = learn()
    state, guard = learn(Fault(into="weight", name="out.weight", steps=(at,), times=1))
    assert guard.counts["rolled_back"] == 1
    assert differences(clean, state) == []


def test_with_workers_too() -> None:
    clean, _, _ = run("workers", sync="eager", fault=False, epochs=2)
    state, guard, _ = run("workers", sync="eager", fault=True, epochs=2)
    assert guard.counts["rolled_back"] == 1
    assert differences(clean, state) == []


# ---- another process -----------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys, torch, numpy as np
sys.path.insert(0, {tests!r})
from test_rollback import *

def main(folder, kill_at):
    loader = loader_of("shuffled")
    model, opt = build(ALL["fused AdamW"])
    schedule = lr_scheduler.CosineAnnealingLR(opt, 200)
    ema = torch.optim.swa_utils.AveragedModel(model)
    guard = Guard(model, opt, precision="fp16", scheduler=schedule, ema=ema, run_dir=folder, clip="zscore",
                  sync={sync!r}, snapshots=Snapshots(every=10, keep=2, where="disk"))
    torch.manual_seed(7)
    np.random.seed(7)
    done = guard.resume()
    print("resumed", done)
    for epoch in range(guard.current_epoch, 3):
        for batch in guard.epoch(loader):
            guard.step(loss_fn, batch)
            if guard.current_step == kill_at:
                guard._engine.ring.close()
                os._exit(9)
    guard.close()
    torch.save(states(guard, ema, schedule), folder + "/end.pt")

main(sys.argv[1], int(sys.argv[2]))
"""


def test_a_killed_run_goes_on_in_another_process_and_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(tests=str(Path(__file__).parent), sync="late"))

    def start(name: str, kill_at: int) -> subprocess.CompletedProcess[str]:
        (tmp_path / name).mkdir(exist_ok=True)
        command = [sys.executable, str(program), str(tmp_path / name), str(kill_at)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)

    whole = start("whole", -1)
    assert whole.returncode == 0, whole.stderr
    assert start("killed", 57).returncode == 9
    again = start("killed", 101)
    assert again.returncode == 9, again.stderr
    assert "resumed 51" in again.stdout
    last = start("killed", -1)
    assert last.returncode == 0, last.stderr
    assert "resumed 91" in last.stdout
    ends = [torch.load(tmp_path / name / "end.pt", weights_only=False) for name in ("whole", "killed")]
    assert differences(*ends) == []


def test_resuming_needs_a_disk_and_finds_nothing_at_first(tmp_path: Path) -> None:
    model, opt = build(ALL["fused AdamW"])
    with pytest.raises(nanguard.ProtocolError, match="needs snapshots on disk"):
        Guard(model, opt, snapshots=None).resume()
    with pytest.raises(ValueError, match="needs snapshots on disk"):
        Guard(model, opt, snapshots=RING).resume()
    with pytest.raises(ValueError, match="give the guard a run_dir"):
        Guard(model, opt, snapshots=Snapshots(where="disk"))
    assert Guard(model, opt, run_dir=tmp_path, snapshots=Snapshots(where="disk")).resume() is None


def test_a_torn_snapshot_is_passed_over_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def guarded() -> Guard:
        model, opt = build(ALL["fused AdamW"])
        return Guard(model, opt, precision="fp32", run_dir=tmp_path, snapshots=Snapshots(every=10, where="disk"))

    with guarded() as guard:
        for batch in make_batches(40):
            guard.step(loss_fn, batch)
        steps = guard.snapshots
    newest = sorted((tmp_path / "snapshots").glob("step-*/tensors.safetensors"))[-1]
    newest.write_bytes(newest.read_bytes()[:-7])
    assert guarded().resume() == steps[-2]
    assert f"step {steps[-1]}" in caplog.text or newest.parent.name in caplog.text


def test_what_would_not_fit_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    model, opt = build(ALL["fused AdamW"])
    monkeypatch.setattr("nanguard.state.snapshots.memory.free_bytes", lambda *_, **__: 1_000)
    with pytest.raises(ValueError, match="free"):
        Guard(model, opt, snapshots=Snapshots(where="host"))


def test_where_memory_is_short_none_are_taken_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, opt = build(ALL["fused AdamW"])
    monkeypatch.setattr("nanguard.state.snapshots.memory.free_bytes", lambda *_, **__: 1_000)
    guard = Guard(model, opt, precision="fp32")
    for batch in make_batches(20):
        guard.step(loss_fn, batch)
    assert guard.snapshots == ()
    assert caplog.text.count("no snapshots are taken") == 1


def test_precision_is_raised_in_the_autocast_of_the_program_too() -> None:
    """As the panel says: a model in fp32 from now on computes in fp32, whatever the program asks for."""
    policy = Policy([Rollback(raise_precision=True)])
    kinds = []
    with nanguard.install(policy=policy) as autopilot:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step, (x, _) in enumerate(make_batches(30)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x)
            kinds.append(out.dtype)
            optimizer.zero_grad()
            out.float().square().mean().backward()
            optimizer.step()
            if step == 20:
                with torch.no_grad():
                    model.weight[0, 0] = torch.nan
    (incident,) = autopilot.incidents
    assert incident.outcome.is_rollback
    assert "in fp32 from now on" in incident.outcome.did
    assert set(kinds[:20]) == {torch.bfloat16}
    assert set(kinds[23:]) == {torch.float32}


def test_a_model_that_cannot_be_kept_in_fp32_is_told_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.DataParallel(TinyNet())
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), precision="fp32")
    mitigations = ActiveMitigations(guard._parts)
    assert mitigations.raise_model(0, None) is None
    assert not mitigations.active
    assert "the model cannot be kept in fp32: the model is in DataParallel" in caplog.text


def test_rolling_back_without_a_snapshot_is_an_error_that_says_why() -> None:
    model, opt = build(ALL["fused AdamW"])
    with pytest.raises(nanguard.ProtocolError, match="there is no good snapshot"):
        Guard(model, opt, snapshots=None).roll_back()


def test_a_candidate_is_good_only_after_later_steps_and_never_replaces_a_good_one() -> None:
    model, opt = build(ALL["fused AdamW"])
    guard = Guard(model, opt, precision="fp32", policy=Policy([Skip(99)]), snapshots=Snapshots(every=10, keep=1))
    seen = []
    for batch in poisoned(make_batches(40), 11, 13, 15, 17, 19, 22, 24, 26, 28):
        guard.step(loss_fn, batch)
        seen.append(guard.snapshots)
    guard.settle()
    assert seen[0] == (0,), "the start is good; what was taken after a step is not yet known to be"
    assert seen[11] == (1,)
    assert seen[28] == (1,), "none of the candidates in the bad stretch was kept"
    assert guard.snapshots[0] > 28
