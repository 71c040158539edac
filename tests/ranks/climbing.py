"""What a rank does in each case of ``test_ranks_ladder.py``: trouble on one rank, and the ladder climbed by all."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scenarios import MODELS, Result, Setup, batches, digests, fault, train_one
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import nanguard
from helpers import INF, NAN, TinyNet, loss_fn, poisoned
from nanguard import DropBadGradients, Halt, LowerLR, NonFiniteError, Policy, RaisePrecision, Rollback, Skip, Snapshots
from nanguard.state.snapshots.copies import Copier
from nanguard.testing import Fault, inject


def ring(**options: Any) -> Snapshots:
    return Snapshots(**{"every": 5, "confirm": 3, "keep": 3, **options})


def case_folder() -> Path:
    """One for all ranks, the same after a restart."""
    folder = Path(os.environ["CASE_FOLDER"])
    folder.mkdir(exist_ok=True)
    return folder


# ---- models --------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Scores that do not fit into fp16 where the input is large; the softmax of them is NaN there, and fine in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 16), nn.Linear(6, 16), nn.Linear(6, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k = 50 * self.q(x), 50 * self.k(x)
        return ((q @ k.mT) / 50**2).softmax(-1) @ self.v(x)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 6)
        self.attn = Attention()
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attn(self.inp(x)))


class Halved(Attending):
    """All its weights are fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.float16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.out.weight.dtype)).float()


class Centering(TinyNet):
    """What the forward pass gives depends on a buffer, which each rank would fill with data of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_centre", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - self.running_centre
        if self.training:
            self.running_centre.lerp_(x.detach().mean(0), 0.5)
        return super().forward(centred)


MODELS.update(Attending=Attending, Halved=Halved, Centering=Centering)


# ---- data ----------------------------------------------------------------------------------------------------------


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Draws a random number for every sample, as augmentation does."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(size, 6, generator=generator)
        self.y = (self.x @ torch.randn(6, 3, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] + 0.1 * torch.randn(6), self.y[i]


def loader_of(data: str, number: int) -> Any:
    """This rank's part: ``number`` batches."""
    if data == "lists":
        return batches(number)
    dataset = Noisy(8 * number * dist.get_world_size())
    return DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset, seed=3))


def large_on(rank: int, number: int, *places: int, by: float) -> list[tuple[Tensor, Tensor]]:
    """Batches of which those at ``places`` (all, where none are given) are large on one rank."""
    data = batches(number)
    if dist.get_rank() == rank:
        for place in places or range(number):
            data[place] = (data[place][0] * by, data[place][1])
    return data


# ---- training and telling ------------------------------------------------------------------------------------------


class Run:
    """A guarded run, and what was seen of it from outside at every turn of its loop."""

    def __init__(self, *, setup: dict[str, Any] | None = None, **options: Any) -> None:
        self.ours = Setup(**(setup or {}))
        self.guard = self.ours.guard(**options)
        self.turns: list[Any] = []
        self.raised: str | None = None

    def train(
        self,
        loader: Any,
        *faults: Fault,
        epochs: int = 1,
        style: str = "step",
        loss_of: Callable[..., Tensor] = loss_fn,
        at_turn: Callable[[int], Any] = lambda turn: None,
    ) -> None:
        guard = self.guard
        with inject(guard, *faults) as injector:
            for epoch in range(guard.current_epoch, epochs):
                if isinstance(getattr(loader, "sampler", None), DistributedSampler):
                    loader.sampler.set_epoch(epoch)
                for batch in guard.epoch(loader):
                    if at_turn(len(self.turns)) != "go on":
                        train_one(guard, batch, style, lambda model, batch: injector.loss(loss_of(model, batch)))
                    self.turns.append(self._look())
            guard.settle()
        self.fired = len(injector.fired)

    def train_until_halted(self, *args: Any, **options: Any) -> None:
        try:
            self.train(*args, **options)
        except nanguard.NonFiniteError as error:
            self.raised = str(error)

    def _look(self) -> list[Any]:
        guard = self.guard
        rates = [group["lr"] for group in self.ours.optimizer.param_groups]
        return [guard.current_step, guard.current_epoch, guard.snapshots, rates, guard.kept_fp32, guard.precision]

    def told(self) -> Result:
        guard = self.guard
        return {
            "end": self.state(),
            "turns": self.turns,
            "climb": climb(guard),
            "counts": guard.counts,
            "snapshots": guard.snapshots,
            "kept": guard.kept_fp32,
            "finite": self.ours.is_finite(),
            "raised": self.raised,
        }

    def state(self) -> dict[str, str]:
        return {**self.ours.state(), **digests({"rng": torch.get_rng_state()})}


def climb(guard: nanguard.Guard) -> list[Result]:
    """What was decided and done, as far as it must be the same on all ranks."""
    outcomes = [incident.outcome for incident in guard.incidents]
    return [
        {
            "step": outcome.verdict.reading.step,
            "kind": outcome.verdict.kind,
            "cause": outcome.verdict.cause,
            "found": outcome.verdict.reading.found,
            "response": outcome.action.response,
            "rung": outcome.action.rung,
            "count": outcome.action.count,
            "passed": outcome.action.passed,
            "snapshots": outcome.verdict.means.snapshots,
            "mean loss": str(outcome.verdict.reading.mean_loss),
            "did": outcome.did,
            "rerun and lost": (outcome.rerun, outcome.lost),
        }
        for outcome in outcomes
    ]


@functools.cache
def clean(data: str, style: str, number: int, epochs: int, **options: Any) -> dict[str, str]:
    """How a run ends that nothing happens to."""
    run = Run(policy=Policy([Halt()]), sync="eager", snapshots=None, **options)
    run.train(loader_of(data, number), epochs=epochs, style=style)
    return run.state()


@contextmanager
def warnings_of_nanguard() -> Iterator[list[str]]:
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler, log = Keep(logging.WARNING), logging.getLogger("nanguard")
    log.addHandler(handler)
    yield said
    log.removeHandler(handler)


# ---- damage on one rank --------------------------------------------------------------------------------------------


def rolls_back(
    *, into: str, name: str, sync: str, data: str, at: int = 24, value: Any = "nan", style: str = "step", **options: Any
) -> Result:
    """Two epochs of 14 batches; in the second one, something on rank 1 turns bad, once."""
    run = Run(sync=sync, policy=Policy([Rollback()]), snapshots=ring(), **options)
    bad = Fault(into=into, name=name, value=value, steps=(at,), ranks=(1,), times=1, element=0)
    run.train(loader_of(data, 14), bad, epochs=2, style=style)
    return {**run.told(), "fired": run.fired, "clean": clean(data, style, 14, 2, **options)}


def rolls_back_by_hand(*, sync: str, data: str) -> Result:
    """At the twentieth turn of the loop, with steps in flight."""
    run = Run(sync=sync, snapshots=ring())
    did: list[str] = []

    def at_turn(turn: int) -> str:
        if turn != 20:
            return ""
        did.append(run.guard.roll_back(steps=4))
        return "go on"

    run.train(loader_of(data, 14), epochs=2, at_turn=at_turn)
    return {**run.told(), "did": did, "clean": clean(data, "step", 14, 2)}


def steps_over(*, sync: str, data: str) -> Result:
    """NaN losses on rank 1 at three steps in a row; the run goes back and steps over their batches."""
    run = Run(sync=sync, policy=Policy([Skip(2, per=100), Rollback(skip_batches="failed")]), snapshots=ring())
    seen: list[str] = []

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        seen.append(digests({"x": batch[0]})["x"])
        return loss_fn(model, batch)

    run.train(loader_of(data, 14), fault("loss", 22, 23, 24, rank=1), epochs=2, loss_of=loss_of)
    return {**run.told(), "seen": seen}


# ---- divergence ----------------------------------------------------------------------------------------------------

RULE = nanguard.Divergence(window=16, sustain=4)


def diverges(*, sync: str, what: str) -> Result:
    """From batch 40 on the loss of rank 1 explodes while that of rank 0 does not: its weights are off, or its data."""
    weights = torch.randn(6, 3, generator=torch.Generator().manual_seed(4))
    inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(10 + dist.get_rank()))
    data = [(inputs, (inputs @ weights).argmax(1))] * 60
    if what == "data" and dist.get_rank() == 1:
        data = data[:40] + [(20 * x, (y + 1) % 3) for x, y in data[40:]]
    run = Run(sync=sync, policy=Policy([Rollback()], divergence=RULE), snapshots=ring())
    off = Fault(into="weight", name="out.bias", value=200.0, steps=(40,), ranks=(1,), times=1, element=0)
    losses: list[float] = []

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        loss = loss_fn(model, batch)
        losses.append(loss.item())
        return loss

    run.train(data, *([off] if what == "weights" else []), loss_of=loss_of)
    calm = Run(sync="eager", snapshots=None)
    calm.train(data)
    return {**run.told(), "clean": calm.state(), "largest loss": max(losses[10:])}


# ---- precision -----------------------------------------------------------------------------------------------------


def overflows_for_good(*, sync: str, scope: str, wraps: str = "Attending", ddp: dict[str, Any] | None = None) -> Result:
    """fp16: the data of rank 1 are too large for it, in one module, at every step."""
    policy = Policy([Skip(2, per=100), RaisePrecision(scope, retry_after=8, times=None), Halt()])
    run = Run(setup={"model": wraps, "ddp": ddp}, sync=sync, precision="fp16", policy=policy, snapshots=ring())
    run.train(large_on(1, 40, by=30.0))
    return {**run.told(), "scale": run.guard.state_dict()["scaler"]}


def casts(*, sync: str, ddp: dict[str, Any] | None = None) -> Result:
    """fp16 weights: rank 1's data overflow from batch 12 on. Later, now in fp32, a weight of rank 1 turns NaN."""
    policy = Policy([Skip(1, per=100), RaisePrecision("model", lr=0.5), Rollback(), Halt()])
    setup = {"model": "Halved", "optimizer": "AdamW for halves", "ddp": ddp}
    run = Run(setup=setup, sync=sync, policy=policy, snapshots=ring())
    data = large_on(1, 40, *range(12, 40), by=30.0)
    dtypes: list[str] = []

    def at_turn(turn: int) -> None:
        dtypes.append(str(run.ours.model.module.out.weight.dtype))

    run.train(data, Fault(into="weight", name="out.weight", steps=(30,), ranks=(1,), times=1), at_turn=at_turn)
    states = [s for state in run.ours.optimizer.state.values() for s in state.values()]
    kinds = {str(t.dtype) for t in [*run.ours.model.parameters(), *states]}
    return {**run.told(), "dtypes": dtypes, "kinds": sorted(kinds)}


def tries_in_vain(*, sync: str, model: str, precision: str, ddp: dict[str, Any] | None = None) -> Result:
    """NaNs on rank 1, again and again, that no precision helps against: nothing of the attempts stays."""
    ends = []
    for first in ([], [RaisePrecision("module"), RaisePrecision("model"), Skip(0, when="data")]):
        scale = nanguard.LossScale(initial=64.0)
        run = Run(
            setup={"model": model, "ddp": ddp},
            sync=sync,
            precision=precision,
            loss_scale=scale,
            policy=Policy([*first, Skip(99)]),
        )
        run.train(batches(16), fault("loss", 0, 7, 8, 15, rank=1), fault("gradient", 3, rank=1, name="out.bias"))
        ends.append({**run.told(), "scale": run.guard.state_dict()["scaler"]})
    return {**ends[1], "without": ends[0]}


# ---- learning rate, data, gradients --------------------------------------------------------------------------------


def lowers(*, sync: str) -> Result:
    """NaN losses on either rank in turn; the learning rate goes down, and comes back."""
    policy = Policy([Skip(1, per=100), LowerLR(0.5, recover_after=6, times=9), Halt()])
    run = Run(sync=sync, policy=policy)
    run.train(batches(40), fault("loss", 3, 7, 25, rank=1), fault("loss", 5, 16, rank=0))
    return run.told()


def bad_data(*, sync: str, value: str, style: str = "step") -> Result:
    """Some batches of rank 1 hold what no training stands; those of rank 0 are fine."""
    data = batches(24)
    if dist.get_rank() == 1:
        data = poisoned(data, 8, 9, 10, 15, value={"nan": NAN, "inf": INF, "large": 1e38}[value])
    policy = Policy([Skip(1), RaisePrecision("module"), Skip(9, when="data"), Rollback(), Halt()])
    run = Run(sync=sync, precision="bf16", policy=policy, snapshots=ring())
    run.train(data, style=style)
    return run.told()


def drops_gradients(*, ddp: dict[str, Any] | None = None) -> Result:
    """At step 5 different parameters are bad on different ranks; at step 9 all of them on rank 1."""
    run = Run(setup={"ddp": ddp}, sync="eager", policy=Policy([DropBadGradients(), Skip(), Halt()]))
    names = [name for name, _ in run.ours.model.module.named_parameters()]
    states: list[dict[str, str]] = []
    run.train(
        batches(14),
        fault("gradient", 5, rank=0, name="inp.weight"),
        fault("gradient", 5, rank=1, name="out.bias"),
        *(fault("gradient", 9, rank=1, name=name) for name in names),
        at_turn=lambda turn: states.append(run.ours.state()),
    )
    stayed = [[key for key in before if before[key] == after[key]] for before, after in itertools.pairwise(states)]
    dropped = [incident.reading.dropped_gradients for incident in run.guard.incidents]
    return {**run.told(), "stayed": stayed, "dropped": dropped}


# ---- all rungs -----------------------------------------------------------------------------------------------------

ALL_RUNGS = [
    Skip(2),
    RaisePrecision("module"),
    RaisePrecision("model"),
    Skip(3, when="data"),
    Rollback(times=1),
    Rollback(skip_batches="failed", times=1),
    Rollback(lr=0.5, times=2),
    LowerLR(0.5, times=2),
    Halt(),
]


def climbs_to_the_top(*, sync: str, style: str, data: str) -> Result:
    """From step 20 on the loss of rank 1 is NaN whatever is done. The run log is each rank's own, to see who writes."""
    folder = case_folder() / f"rank{dist.get_rank()}"
    run = Run(sync=sync, precision="bf16", policy=Policy(ALL_RUNGS), snapshots=ring(), run_dir=folder)
    run.train_until_halted(loader_of(data, 40), fault("loss", *range(20, 90), rank=1), style=style, epochs=9)
    dist.barrier()
    path = folder / "run.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else None
    return {**run.told(), "log": lines}


def makes_no_progress(*, sync: str) -> Result:
    """From step 6 on the loss of rank 1 is NaN, in short epochs, and the ladder would skip for ever."""
    policy = Policy([Skip(times=None)], max_consecutive_skips=12)
    run = Run(sync=sync, policy=policy, snapshots=None)
    run.train_until_halted(batches(5), fault("loss", *range(6, 90), rank=1), epochs=9)
    return run.told()


# ---- snapshots on disk ---------------------------------------------------------------------------------------------


def newest_first(folder: Path, rank: int) -> list[Path]:
    """Those that are known to be good."""
    paths = (folder / "snapshots" / f"rank-{rank}").glob("step-*")
    return sorted((path for path in paths if path.suffix != ".unconfirmed"), reverse=True)


def tear(folder: Path, number: int) -> None:
    """The last bytes of the newest snapshots of rank 1 are lost."""
    if dist.get_rank() == 1:
        for path in newest_first(folder, 1)[:number]:
            whole = (path / "tensors.safetensors").read_bytes()
            (path / "tensors.safetensors").write_bytes(whole[:-7])
    dist.barrier()


def torn_and_rolled_back(*, sync: str, data: str, number: int) -> Result:
    """The newest snapshots of rank 1 are torn; then a weight of rank 0 turns NaN."""
    folder = case_folder()
    run = Run(sync=sync, policy=Policy([Rollback(), Halt()]), snapshots=ring(where="disk"), run_dir=folder)

    def at_turn(turn: int) -> None:
        if turn == 23:
            run.guard.settle()
            run.guard.close()  # waits for what is being written
            tear(folder, number)

    error = ""
    bad = Fault(into="weight", name="out.weight", steps=(23,), ranks=(0,), times=1)
    try:
        with warnings_of_nanguard() as said:
            run.train(loader_of(data, 14), bad, epochs=2, at_turn=at_turn)
    except NonFiniteError as caught:
        error = f"{type(caught).__name__}: {caught}"
    dist.barrier()
    return {**run.told(), "warned": said, "error": error, "clean": clean(data, "step", 14, 2)}


def runs_out_of_memory(*, sync: str, data: str) -> Result:
    """From step 16 on rank 1 has no memory for snapshots; then a weight of rank 0 turns NaN."""
    run = Run(sync=sync, policy=Policy([Rollback(), Halt()]), snapshots=ring())
    take = Copier.take

    def short(copier: Copier, *args: Any, **options: Any) -> Any:
        if dist.get_rank() == 1 and run.guard.current_step >= 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return take(copier, *args, **options)

    error, there = "", []
    bad = Fault(into="weight", name="out.weight", steps=(23,), ranks=(0,), times=1)
    Copier.take = short  # type: ignore[method-assign]
    try:
        with warnings_of_nanguard() as said:
            run.train(loader_of(data, 14), bad, epochs=2, at_turn=lambda _: there.append(run.guard.snapshots))
    except NonFiniteError as caught:
        error = f"{type(caught).__name__}: {caught}"
    finally:
        Copier.take = take  # type: ignore[method-assign]
    dist.barrier()
    return {**run.told(), "warned": said, "error": error, "there": there[-1]}


def torn_and_resumed(*, sync: str, data: str, lost: str, keep: int = 3) -> Result:
    """A run is left after 24 steps; of what rank 1 had on disk some is lost, and another run goes on with the rest."""
    folder = case_folder()
    options = {"sync": sync, "snapshots": ring(where="disk", keep=keep), "run_dir": folder}

    class Left(Exception):
        pass

    def leave_at(turn: int) -> None:
        if turn == 24:
            raise Left

    run = Run(**options)
    try:
        run.train(loader_of(data, 14), epochs=2, at_turn=leave_at)
    except Left:
        run.guard.close()
    there = run.guard.snapshots
    del run
    gc.collect()
    dist.barrier()
    if dist.get_rank() == 1:
        if lost == "newest":  # as if it had not been confirmed yet
            shutil.rmtree(newest_first(folder, 1)[0])
        elif lost in ("folder", "all but the first"):
            shutil.rmtree(folder / "snapshots" / "rank-1")
    elif lost == "all but the first":
        for path in newest_first(folder, 0)[:-1]:
            shutil.rmtree(path)
    tear(folder, {"newest torn": 1, "all torn": 9}.get(lost, 0))
    again, error = Run(**options), ""
    done = None
    try:
        done = again.guard.resume()
        again.train(loader_of(data, 14), epochs=2)
        again.guard.close()
    except OSError as caught:
        error = f"{type(caught).__name__}: {caught}"
    dist.barrier()
    return {**again.told(), "there": there, "done": done, "error": error, "clean": clean(data, "step", 14, 2)}


def begins_anew(*, sync: str) -> Result:
    """A second run in the place of one that had gone further, without resuming it, has to go back."""
    folder = case_folder()
    options = {"sync": sync, "policy": Policy([Rollback()]), "snapshots": ring(where="disk"), "run_dir": folder}
    first = Run(**options)
    first.train(batches(14), epochs=4)
    first.guard.close()
    run = Run(**options)
    run.train(batches(14), Fault(into="weight", name="out.weight", steps=(24,), ranks=(1,), times=1), epochs=2)
    return {**run.told(), "clean": clean("lists", "step", 14, 2)}


KILLED = [(sync, data) for data in ("sampler", "lists") for sync in ("eager", "late")]


def killed_and_resumed() -> Result:
    """Several runs at once in one process that is ended hard in the middle of a step; other processes go on."""
    folder = case_folder()
    mark = folder / "killed"
    is_first = not mark.exists()
    dist.barrier()
    results: Result = {}
    for sync, data in KILLED:
        place = folder / f"{sync} {data}"
        run = Run(sync=sync, snapshots=ring(where="disk"), run_dir=place)
        if is_first:
            last = (sync, data) == KILLED[-1]
            _train_and_die(run, data, mark=mark if last else None)
            continue
        done = run.guard.resume()
        run.train(loader_of(data, 14), epochs=2)
        run.guard.close()
        results[f"{sync} {data}"] = {**run.told(), "done": done, "clean": clean(data, "step", 14, 2)}
    return results


_LEFT: list[Any] = []


def _train_and_die(run: Run, data: str, mark: Path | None) -> None:
    """Up to step 23, snapshots on their way to the disk; with ``mark``, rank 1 dies there while rank 0 waits for it."""

    class Left(Exception):
        pass

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        if run.guard.current_step == 23:
            if mark is None:
                raise Left
            if dist.get_rank() == 1:
                mark.touch()
                os._exit(9)
        return loss_fn(model, batch)

    try:
        run.train(loader_of(data, 14), epochs=2, loss_of=loss_of)
    except Left:
        _LEFT.append(run)


# ---- a part of the ranks -------------------------------------------------------------------------------------------


def parts(*, sync: str) -> Result:
    """Of three ranks two train together, and go back for a weight of one of them; the third trains on by itself."""
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    mine = groups[dist.get_rank() // 2]
    folder = case_folder() / f"group{dist.get_rank() // 2}"
    options: dict[str, Any] = {"setup": {"ddp": {"process_group": mine}}, "process_group": mine}
    run = Run(**options, sync=sync, policy=Policy([Rollback(), Halt()]), snapshots=ring(where="disk"), run_dir=folder)
    bad = Fault(into="weight", name="out.weight", steps=(24,), ranks=(1,), times=1)
    run.train(batches(14), bad, epochs=2)
    run.guard.close()
    plain = Run(**options, sync="eager", snapshots=None)
    plain.train(batches(14), epochs=2)
    written = sorted(path.name for path in folder.iterdir())
    return {**run.told(), "clean": plain.state(), "written": written}
