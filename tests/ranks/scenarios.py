"""What a rank does in each case of ``test_ranks.py``. Every function returns plain data."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

import nanguard
from helpers import NAN, TinyNet, everything, loss_fn, make_batches
from nanguard.testing import Fault, inject

Result = dict[str, Any]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=5e-2, momentum=0.9, fused=True),
    "AdamW, not fused": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW for halves": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4, fused=True),
    "SGD, not fused": lambda p: torch.optim.SGD(p, lr=5e-2),
}
HOOKS = {"allreduce": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook}
MAX_NORM = 0.5
PATIENT = nanguard.Policy([nanguard.Skip(99)])


# ---- models --------------------------------------------------------------------------------------------------------


class Branching(TinyNet):
    """Has a layer that only odd ranks use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + self.odd(y) if dist.get_rank() % 2 else y


class Looking(nn.Module):
    """Its gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table((x[:, 0].abs() * 3).long().clamp(max=9)))


class Recording(nn.Module):
    """Writes the largest input into a buffer that the loss never sees."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 3)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.largest.copy_(torch.maximum(self.largest, x.detach().max()))
        return self.out(x.nan_to_num())


class Spare(TinyNet):
    """Has a parameter that trains under no optimizer, though it gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.spare


MODELS = {"TinyNet": TinyNet, "Branching": Branching, "Looking": Looking, "Recording": Recording, "Spare": Spare}


# ---- training ------------------------------------------------------------------------------------------------------


class Setup:
    """Model, optimizer, schedule and random numbers, the same each time one is made."""

    def __init__(
        self,
        optimizer: str = "AdamW",
        *,
        model: str = "TinyNet",
        ddp: dict[str, Any] | None = None,
        hook: str | None = None,
        wrapped: bool = True,
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = MODELS[model]()
        params = [p for name, p in self.model.named_parameters() if name != "spare"]
        if wrapped:
            self.model = DistributedDataParallel(self.model, **(ddp or {}))
            if hook is not None:
                self.model.register_comm_hook(None, HOOKS[hook])
        self.optimizer = OPTIMIZERS[optimizer](params)
        self.scheduler = CosineAnnealingLR(self.optimizer, 50)
        torch.manual_seed(100 + dist.get_rank())  # for dropout, which is to differ between ranks

    def guard(self, **options: Any) -> nanguard.Guard:
        options = {"precision": "fp32", "max_norm": MAX_NORM, "clip": "global", "policy": PATIENT, **options}
        return nanguard.Guard(self.model, self.optimizer, scheduler=self.scheduler, **options)

    def step(self) -> bool:
        """What a plain loop does after backward; whether anything was clipped."""
        norm = nn.utils.clip_grad_norm_([p for g in self.optimizer.param_groups for p in g["params"]], MAX_NORM)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return bool(norm > MAX_NORM)

    def state(self) -> dict[str, str]:
        return digests(everything(self.model, [self.optimizer], self.scheduler))

    def meet(self) -> None:
        """A forward pass without gradients, in which DDP sends the buffers of rank 0 to all."""
        self.model.eval()
        with torch.no_grad():
            self.model(batches(1)[0][0])

    def is_finite(self) -> bool:
        states = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        return all(bool(t.isfinite().all()) for t in [*self.model.state_dict().values(), *states])


def digests(state: dict[str, Any]) -> dict[str, str]:
    """Short names for values: two are equal exactly when the values are, to the bit."""

    def digest(value: Any) -> str:
        if isinstance(value, Tensor):
            raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return hashlib.sha256(f"{value.dtype}{tuple(value.shape)}".encode() + raw).hexdigest()[:16]
        if isinstance(value, dict):
            return digest(sorted((str(k), digest(v)) for k, v in value.items()))
        return hashlib.sha256(repr(value).encode()).hexdigest()[:16]

    return {key: digest(value) for key, value in state.items()}


def batches(number: int) -> list[Any]:
    """This rank's own."""
    return make_batches(number, seed=10 + dist.get_rank())


def train_one(guard: nanguard.Guard, batch: Any, style: str, loss_of: Any = loss_fn) -> Tensor:
    if style == "step":
        loss: Tensor = guard.step(loss_of, batch)
        return loss
    with guard.autocast():
        loss = loss_of(guard.model, batch)
    guard.backward(loss)
    guard.update()
    return loss.detach()


def fault(into: str, *steps: int, rank: int, name: str = "inp.weight", **more: Any) -> Fault:
    return Fault(into=into, name=name if into == "gradient" else None, steps=steps, ranks=(rank,), **more)


def told(guard: nanguard.Guard) -> list[Result]:
    """The incidents, as this rank knows them."""
    return [
        {
            "step": incident.reading.step,
            "response": incident.outcome.action.response,
            "lost": incident.outcome.lost,
            "gradients": list(incident.reading.gradients),
            "buffers": list(incident.reading.buffers),
            "ranks": [
                {"rank": flags.rank, "loss": flags.loss, "gradients": flags.gradients}
                for flags in incident.reading.ranks
            ],
        }
        for incident in guard.incidents
    ]


def num_buckets(model: Any) -> int:
    """How many buckets DDP reduced in its last step."""
    data = model._get_ddp_logging_data()
    return len((data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]).split(","))


# ---- scenarios -----------------------------------------------------------------------------------------------------


def skips(
    *, into: str, sync: str, style: str, names: Sequence[str] = ("inp.weight", "inp.weight"), **setup: Any
) -> Result:
    """Faults on rank 1 at step 4, with nothing in flight, and at step 8, with steps in flight behind it."""
    ours = Setup(**setup)
    guard = ours.guard(sync=sync)
    faults = [fault(into, step, rank=1, name=name) for step, name in zip((4, 8), names, strict=True)]
    before, after = {}, {}
    with inject(guard, *faults) as injector:
        for step, batch in enumerate(batches(14)):
            if step == 4:
                guard.settle()
                before = ours.state()
            train_one(guard, batch, style, lambda model, batch: injector.loss(loss_fn(model, batch)))
            if step == 4:
                guard.settle()
                after = ours.state()
        guard.settle()
    end, incidents = ours.state(), told(guard)
    left_out = {step for each in incidents for step in range(each["step"], each["step"] + each["lost"] + 1)}
    ours.meet()
    return {
        "fired": sorted({fired.step for fired in injector.fired}),
        "before": before,
        "after": after,
        "end": end,
        "without those steps": plain_without(left_out, 14, **setup),
        "met": ours.state(),
        "finite": ours.is_finite(),
        "incidents": incidents,
        "counts": guard.counts,
        "buckets": num_buckets(ours.model),
    }


def plain_without(left_out: set[int], number: int, **setup: Any) -> dict[str, str]:
    """A plain DDP run that computes some steps and throws them away, buffers included."""
    ours = Setup(**setup)
    for step, batch in enumerate(batches(number)):
        buffers = [buffer.clone() for buffer in ours.model.buffers()]
        loss_fn(ours.model, batch).backward()
        if step not in left_out:
            ours.step()
            continue
        ours.optimizer.zero_grad()
        for buffer, old in zip(ours.model.buffers(), buffers, strict=True):
            buffer.copy_(old)
    return ours.state()


def halts(*, into: str, sync: str, style: str) -> Result:
    """Patience for one step, faults on rank 1 at steps 2 and 5."""
    ours = Setup()
    guard = ours.guard(sync=sync, policy=nanguard.Policy([nanguard.Skip(1)]))
    raised: Result | None = None
    reached = 0
    with inject(guard, fault(into, 2, 5, rank=1)) as injector:
        try:
            for batch in batches(12):
                train_one(guard, batch, style, lambda model, batch: injector.loss(loss_fn(model, batch)))
                reached += 1
            guard.settle()
        except nanguard.NonFiniteError as error:
            raised = {"step": error.incident.reading.step, "at": reached, "message": str(error)}
    dist.barrier()
    return {"raised": raised, "state": ours.state(), "finite": ours.is_finite(), "incidents": told(guard)}


def several(*, sync: str, style: str, optimizer: str, settle_each: bool = False) -> Result:
    """Faults of several kinds at several steps on both ranks, the first and the last step among them."""
    ours = Setup(optimizer)
    guard = ours.guard(sync=sync)
    faults = (
        fault("loss", 0, rank=1),
        fault("gradient", 3, 15, rank=1),
        fault("input", 4, 11, rank=0),
        fault("loss", 9, rank=0),
        fault("gradient", 9, rank=1, name="out.bias"),
    )
    losses = []
    with inject(guard, *faults) as injector:
        for batch in batches(16):
            losses.append(train_one(guard, batch, style, lambda model, batch: injector.loss(loss_fn(model, batch))))
            if settle_each:
                guard.settle()
        guard.settle()
    counts = guard.counts
    rerun = counts.pop("rerun")
    return {
        "end": ours.state(),
        "losses": [str(loss.item()) for loss in losses],
        "incidents": [{key: value for key, value in each.items() if key != "lost"} for each in told(guard)],
        "counts": counts,
        "rerun": rerun,
    }


def healthy(*, precision: str, style: str = "step", **setup: Any) -> Result:
    """30 steps in a plain loop with ``clip_grad_norm_``, and guarded in both ways."""
    ends, num_clipped = {}, 0
    ours = Setup(**setup)
    for batch in batches(30):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_fn(ours.model, batch)
        loss.backward()
        num_clipped += ours.step()
    ends["plain"] = ours.state()
    buckets = num_buckets(ours.model)
    for sync in ("eager", "late"):
        ours = Setup(**setup)
        guard = ours.guard(sync=sync, precision=precision)
        for batch in batches(30):
            train_one(guard, batch, style)
        guard.settle()
        ends[sync] = ours.state()
    return {"ends": ends, "clipped": num_clipped, "buckets": buckets}


class Unsized:
    """A loader that cannot say how long it is."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = list(items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


def accumulation(*, sync: str, style: str, loader: str = "list") -> Result:
    """Two epochs of 7 micro-batches, two to a step, so that each epoch ends with a step of one.

    A smaller step has the mean of what it has, but in an own loop, where the guard cannot know that no more will come.
    Where it is not known which micro-batch is the last, DDP has to reduce them all.
    """
    data = batches(7)
    plain = Setup()
    for _ in range(2):
        for chunk in chunks(data):
            divisor = 2 if style == "own loop" else len(chunk)
            for place, batch in enumerate(chunk, start=1):
                reduces = place == len(chunk) or loader != "list"
                with contextlib.nullcontext() if reduces else plain.model.no_sync():
                    (loss_fn(plain.model, batch) / divisor).backward()
            plain.step()

    ours = Setup()
    guard = ours.guard(sync=sync, accumulate=1 if style == "microbatches" else 2)
    for _ in range(2):
        if style == "step":
            for batch in guard.epoch(data if loader == "list" else Unsized(data)):
                guard.step(loss_fn, batch)
        elif style == "microbatches":
            for chunk in guard.epoch(list(chunks(data))):
                guard.step(loss_fn, microbatches=chunk)
        else:
            for chunk in guard.epoch(list(chunks(data))):
                for place, batch in enumerate(chunk, start=1):
                    with contextlib.nullcontext() if place == len(chunk) else ours.model.no_sync():
                        with guard.autocast():
                            loss = loss_fn(ours.model, batch)
                        guard.backward(loss)
                guard.update()
    end = ours.state()
    ours.meet()
    return {"end": end, "plain": plain.state(), "met": ours.state(), "counts": guard.counts}


def chunks(data: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(data), 2):
        yield data[start : start + 2]


def bad_microbatch(*, sync: str, loader: str = "list") -> Result:
    """A NaN gradient on rank 1 in the first micro-batch of step 2, which DDP does not reduce alone if it can help."""
    ours = Setup()
    guard = ours.guard(sync=sync, accumulate=2)
    data = batches(11)
    with inject(guard, fault("gradient", 2, rank=1, times=1)) as injector:
        for batch in guard.epoch(data if loader == "list" else Unsized(data)):
            guard.step(loss_fn, batch)
    ours.meet()
    return {
        "fired": len(injector.fired),
        "met": ours.state(),
        "finite": ours.is_finite(),
        "incidents": told(guard),
        "counts": guard.counts,
    }


def run_log(*, sync: str) -> Result:
    """Every rank is given a folder of its own, to see who writes; and who warns."""
    warnings: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    handler, log = Keep(logging.WARNING), logging.getLogger("nanguard")
    log.addHandler(handler)
    ours = Setup()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        with ours.guard(sync=sync, run_dir=run_dir) as guard, inject(guard, fault("gradient", 3, rank=1)):
            for batch in batches(6):
                guard.step(loss_fn, batch)
            guard.settle()
        path = run_dir / "run.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else None
        exists = path.exists()
    log.removeHandler(handler)
    return {"exists": exists, "lines": lines, "warnings": warnings, "incidents": told(guard)}


def unwrapped(*, into: str, sync: str, style: str) -> Result:
    """Every rank trains a model of its own, with no averaging between them; faults on rank 0."""
    ours = Setup(wrapped=False)
    guard = ours.guard(sync=sync)
    before, after = {}, {}
    with inject(guard, fault(into, 4, 8, rank=0)) as injector:
        for step, batch in enumerate(batches(14)):
            if step == 4:
                guard.settle()
                before = ours.state()
            train_one(guard, batch, style, lambda model, batch: injector.loss(loss_fn(model, batch)))
            if step == 4:
                guard.settle()
                after = ours.state()
        guard.settle()
    incidents = told(guard)
    left_out = {step for each in incidents for step in range(each["step"], each["step"] + each["lost"] + 1)}
    return {
        "fired": sorted({fired.step for fired in injector.fired}),
        "before": before,
        "after": after,
        "end": ours.state(),
        "without those steps": plain_without(left_out, 14, wrapped=False),
        "finite": ours.is_finite(),
        "incidents": incidents,
    }


def bad_buffer(
    *, sync: str, style: str, precision: str = "fp32", overflow: bool = False, drop_bad_gradients: bool = False
) -> Result:
    """On rank 1 only, a buffer turns NaN at step 3 while the loss stays finite; where asked, gradients overflow too."""
    ours = Setup(model="Recording")
    first = [nanguard.DropBadGradients()] if drop_bad_gradients else []
    guard = ours.guard(sync=sync, precision=precision, policy=nanguard.Policy([*first, nanguard.Skip(99)]))
    data = batches(8)
    if dist.get_rank() == 1:
        data[3][0][0, 0] = NAN
    faults = [fault("gradient", 3, rank=1, name="out.weight", value="inf")] if overflow else []
    with inject(guard, *faults):
        for batch in data:
            train_one(guard, batch, style)
        guard.settle()
    kinds = [incident.outcome.verdict.kind for incident in guard.incidents]
    ours.meet()
    return {
        "met": ours.state(),
        "finite": ours.is_finite(),
        "incidents": told(guard),
        "kinds": kinds,
        "counts": guard.counts,
    }


def dropped_gradient() -> Result:
    """``drop_bad_gradients`` with a NaN gradient of one parameter on rank 1 at step 3."""
    ours = Setup()
    guard = ours.guard(sync="eager", policy=nanguard.Policy([nanguard.DropBadGradients(), nanguard.Skip()]))
    with inject(guard, fault("gradient", 3, rank=1)):
        data = batches(8)
        for batch in data[:3]:
            guard.step(loss_fn, batch)
        before = ours.state()
        guard.step(loss_fn, data[3])
        changed = sorted(key for key, value in ours.state().items() if before[key] != value)
        for batch in data[4:]:
            guard.step(loss_fn, batch)
    dropped = [list(incident.reading.dropped_gradients) for incident in guard.incidents]
    ours.meet()
    return {
        "met": ours.state(),
        "finite": ours.is_finite(),
        "incidents": told(guard),
        "dropped": dropped,
        "changed": changed,
    }


def nothing_left() -> Result:
    """``drop_bad_gradients`` without DDP: on rank 0 all gradients are NaN at step 3, behind a finite loss."""
    ours = Setup(wrapped=False)
    guard = ours.guard(sync="eager", policy=nanguard.Policy([nanguard.DropBadGradients(), nanguard.Skip()]))
    names = [name for name, _ in ours.model.named_parameters()]
    with inject(guard, *(fault("gradient", 3, rank=0, name=name) for name in names)):
        for batch in batches(6):
            guard.step(loss_fn, batch)
    return {"finite": ours.is_finite(), "incidents": told(guard), "counts": guard.counts}


def overflows(*, sync: str, style: str) -> Result:
    """fp16: Inf gradients on rank 1 at step 3, a routine overflow."""
    ours = Setup()
    guard = ours.guard(sync=sync, precision="fp16")
    with inject(guard, fault("gradient", 3, rank=1, value="inf")):
        for batch in batches(8):
            train_one(guard, batch, style)
        guard.settle()
    ours.meet()
    return {
        "met": ours.state(),
        "finite": ours.is_finite(),
        "incidents": told(guard),
        "counts": guard.counts,
        "scale": guard.state_dict()["scaler"],
    }


def own_group(*, sync: str) -> Result:
    """DDP over a group of its own, here of one rank each, while the guard asks all ranks."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    group = groups[dist.get_rank()]
    plain = Setup(ddp={"process_group": group})
    for batch in batches(6):
        loss_fn(plain.model, batch).backward()
        plain.step()
    ours = Setup(ddp={"process_group": group})
    guard = ours.guard(sync=sync)
    for batch in batches(6):
        guard.step(loss_fn, batch)
    guard.settle()
    return {"plain": plain.state(), "end": ours.state()}


def spare_gradient(*, sync: str) -> Result:
    """A parameter that no optimizer has gets a NaN gradient on rank 1 at step 3."""
    ours = Setup(model="Spare")
    guard = ours.guard(sync=sync)
    with inject(guard, fault("gradient", 3, rank=1, name="spare")) as injector:
        for batch in batches(8):
            guard.step(loss_fn, batch)
        guard.settle()
    ours.meet()
    return {
        "fired": len(injector.fired),
        "met": ours.state(),
        "finite": ours.is_finite(),
        "incidents": told(guard),
    }


def backward_elsewhere(*, sync: str) -> Result:
    """A backward pass outside the guard, on all ranks, that is NaN on rank 1 and thrown away."""
    ours = Setup()
    guard = ours.guard(sync=sync)
    for step, batch in enumerate(batches(6)):
        if step == 3:
            F.cross_entropy(ours.model(batch[0]) * (NAN if dist.get_rank() == 1 else 1.0), batch[1]).backward()
            ours.optimizer.zero_grad()
        guard.step(loss_fn, batch)
    guard.settle()
    return {"incidents": told(guard), "counts": guard.counts}


def sparse() -> Result:
    """A model with sparse gradients, healthy and with a NaN on rank 1 at step 3."""
    plain = Setup("SGD, not fused", model="Looking")
    for batch in batches(6):
        loss_fn(plain.model, batch).backward()
        plain.optimizer.step()
        plain.scheduler.step()
        plain.optimizer.zero_grad()
    ours = Setup("SGD, not fused", model="Looking")
    guard = ours.guard(sync="eager", max_norm=None)
    for batch in batches(6):
        guard.step(loss_fn, batch)
    hit = Setup("SGD, not fused", model="Looking")
    guard = hit.guard(sync="eager", max_norm=None)
    with inject(guard, fault("gradient", 3, rank=1, name="table.weight")):
        for batch in batches(6):
            guard.step(loss_fn, batch)
    return {
        "plain": plain.state(),
        "end": ours.state(),
        "hit": hit.state(),
        "finite": hit.is_finite(),
        "incidents": told(guard),
    }
