"""Training runs that go wrong for real, each with a clean twin, and healthy ones that only look alarming.

A scenario builds the same tiny run twice from one seed: as it fails, and without the fault. Data are made anew for
every batch, targets are noisy and the learning rate ends near zero, so that the held-out loss settles on the noise that
nobody can learn: a run that lost a few batches ends within 1% of its clean twin, one that lost its way does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import tasks
from nanguard.testing import Fault
from tasks import Batch, Draw

NAN = float("nan")
LossFn = Callable[[nn.Module, Batch], Tensor]
Schedule = Callable[[int], float]


@dataclass(kw_only=True)
class Run:
    """One training run, ready to begin. ``parts`` are the modules that each optimizer trains."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    loss_fn: LossFn
    batches: list[Batch]
    held_out: Batch
    schedule: Schedule
    precision: str = "fp32"
    max_norm: float = 1.0
    accumulate: int = 1
    faults: tuple[Fault, ...] = ()
    parts: Sequence[nn.Module] = ()
    score: LossFn | None = None  # what the held-out set is judged by; None for loss_fn
    schedulers: list[LambdaLR] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = self.parts or (self.model,)
        self.schedulers = [LambdaLR(optimizer, self.schedule) for optimizer in self.optimizers]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """``build(seed, steps, faulty)`` makes the run; without the fault it is the clean twin."""

    title: str
    build: Callable[[int, int, bool], Run]
    steps: int = 400
    healthy: bool = False


# ---- putting a run together ------------------------------------------------------------------------------------------


def cosine(steps: int, *, warmup: int = 20) -> Schedule:
    return lambda n: min((n + 1) / warmup, 1.0) * 0.5 * (1 + math.cos(math.pi * min(n / steps, 1.0)))


def prepare(
    seed: int,
    steps: int,
    draw: Draw,
    build: Callable[[], nn.Module] = tasks.mlp,
    loss_fn: LossFn = tasks.squares,
    *,
    size: int = 64,
    lr: float = 5e-3,
    schedule: Schedule | None = None,
    precision: str = "fp32",
    accumulate: int = 1,
    optimize: Callable[[nn.Module], list[Optimizer]] | None = None,
) -> Run:
    """A run with AdamW and a learning rate that falls to zero, unless told otherwise."""
    batches = [Batch(i, *draw(size)) for i in range(steps)]
    held_out = Batch(-1, *draw(8192), late=True)
    torch.manual_seed(seed)
    model = build()
    return Run(
        model=model,
        optimizers=optimize(model) if optimize else [AdamW(model.parameters(), lr=lr)],
        loss_fn=loss_fn,
        batches=batches,
        held_out=held_out,
        schedule=schedule or cosine(steps // accumulate),
        precision=precision,
        accumulate=accumulate,
    )


def change(run: Run, ids: Iterable[int], how: Callable[[Batch], Batch]) -> None:
    for i in ids:
        run.batches[i] = how(run.batches[i])


def put(value: float) -> Callable[[Batch], Batch]:
    """Puts one value into one sample of a batch."""

    def hit(batch: Batch) -> Batch:
        x = batch.x.clone()
        x[3].view(-1)[5] = value
        return batch._replace(x=x)

    return hit


# ---- divergences -----------------------------------------------------------------------------------------------------


def attention_overflow(seed: int, steps: int, faulty: bool) -> Run:
    schedule, precision = cosine(steps, warmup=steps // 5), "fp16" if faulty else "fp32"
    return prepare(seed, steps, tasks.recall(seed), tasks.Recall, lr=0.1, schedule=schedule, precision=precision)


def poisoned_batch(seed: int, steps: int, faulty: bool) -> Run:
    run = prepare(seed, steps, tasks.regression(seed), precision="bf16")
    change(run, [steps * 2 // 5] if faulty else [], put(NAN))
    return run


def huge_outlier(seed: int, steps: int, faulty: bool) -> Run:
    run = prepare(seed, steps, tasks.regression(seed))
    change(run, [steps * 2 // 5] if faulty else [], put(1e25))
    return run


def peak(steps: int, height: float) -> Schedule:
    """A plateau, a rise to the peak, and a cosine down to zero."""
    start, top = steps // 5, steps * 2 // 5

    def factor(n: int) -> float:
        if n < top:
            return min((n + 1) / 20, 1.0) + (height - 1) * max(n - start, 0) / (top - start)
        return height * 0.5 * (1 + math.cos(math.pi * min((n - top) / (steps - top), 1.0)))

    return factor


def high_learning_rate(seed: int, steps: int, faulty: bool) -> Run:
    def sgd(model: nn.Module) -> list[Optimizer]:
        return [SGD(model.parameters(), lr=0.01, momentum=0.9)]

    schedule = peak(steps, 40.0 if faulty else 1.0)
    run = prepare(seed, steps, tasks.regression(seed, units=8), schedule=schedule, optimize=sgd)
    run.max_norm = 5.0
    return run


def nan_weight(seed: int, steps: int, faulty: bool) -> Run:
    run = prepare(seed, steps, tasks.regression(seed), precision="bf16")
    run.faults = (Fault(into="weight", name="2.weight", value="nan", steps=(steps // 2,), seed=seed),) * faulty
    return run


def huge_weight(seed: int, steps: int, faulty: bool) -> Run:
    run = prepare(seed, steps, tasks.classes(seed), lambda: tasks.mlp(outputs=5), tasks.entropy)
    run.faults = (Fault(into="weight", name="2.weight", value="bitflip", steps=(steps // 2,), seed=seed),) * faulty
    return run


def bad_shard(seed: int, steps: int, faulty: bool) -> Run:
    run = prepare(seed, steps, tasks.regression(seed), precision="bf16")
    change(run, range(steps // 2, steps // 2 + steps // 10) if faulty else [], put(NAN))
    return run


def batchnorm_poison(seed: int, steps: int, faulty: bool) -> Run:
    run = prepare(seed, steps, tasks.waves(seed), tasks.Pitch, tasks.entropy, size=32)
    change(run, [steps // 2] if faulty else [], put(1e20))
    return run


def adam_state(seed: int, steps: int, faulty: bool) -> Run:
    run = prepare(seed, steps, tasks.regression(seed), precision="bf16")
    name = "2.weight.exp_avg_sq"
    run.faults = (Fault(into="optimizer_state", name=name, value="nan", steps=(steps // 2,), seed=seed),) * faulty
    return run


def scale_collapse(seed: int, steps: int, faulty: bool) -> Run:
    draw, precision = tasks.regression(seed, units=8), "fp16" if faulty else "fp32"
    run = prepare(seed, steps, draw, tasks.Listener, precision=precision)
    loud = range(steps * 2 // 5, steps * 2 // 3) if faulty else []
    change(run, loud, lambda batch: batch._replace(x=batch.x * 1e6))
    return run


def gan(seed: int, steps: int, faulty: bool) -> Run:
    def one_each(model: nn.Module) -> list[Optimizer]:
        rates = {"generator": 5e-3, "critic": 2e-3}
        return [AdamW(model.get_submodule(name).parameters(), lr=lr) for name, lr in rates.items()]

    run = prepare(seed, steps, tasks.pictures(seed), tasks.Painter, tasks.contest, optimize=one_each)
    run.parts, run.score = tuple(run.model.children()), tasks.likeness
    run.faults = (Fault(into="gradient", name="critic.0.weight", steps=(steps // 2,), seed=seed),) * faulty
    return run


def nan_microbatch(seed: int, steps: int, faulty: bool) -> Run:
    run = prepare(seed, steps, tasks.regression(seed), size=16, precision="bf16", accumulate=4)
    change(run, [steps // 2 + 2] if faulty else [], put(NAN))
    return run


def half_optimizer(seed: int, steps: int, faulty: bool) -> Run:
    run = prepare(seed, steps, tasks.regression(seed), lambda: tasks.TwoHeads(half=faulty), tasks.staged)
    change(run, range(steps // 2, steps), lambda batch: batch._replace(late=True))
    return run


def long_sequences(seed: int, steps: int, faulty: bool) -> Run:
    run = prepare(seed, steps, tasks.adding(seed), tasks.Adder, lr=3e-3)
    rare = tasks.adding(seed + 1, length=2000)
    change(run, range(steps // 4, steps, 60) if faulty else [], lambda batch: Batch(batch.id, *rare(64)))
    return run


def zero_distance(seed: int, steps: int, faulty: bool) -> Run:
    run = prepare(seed, steps, tasks.distances(seed), tasks.Ruler)
    change(run, range(steps // 4, steps, steps // 4) if faulty else [], lambda batch: batch._replace(x=twice(batch.x)))
    return run


def twice(x: Tensor) -> Tensor:
    """Makes the first pair the same point twice."""
    return torch.cat([x[:1, :1].expand(1, 2, -1), x[1:]])


# ---- healthy runs ----------------------------------------------------------------------------------------------------


def noisy(seed: int, steps: int, faulty: bool) -> Run:
    return prepare(seed, steps, tasks.regression(seed, noise=2.0), size=4, lr=3e-3, precision="bf16")


def heavy_tails(seed: int, steps: int, faulty: bool) -> Run:
    return prepare(seed, steps, tasks.heavy(tasks.regression(seed), seed))


def warm_restarts(seed: int, steps: int, faulty: bool) -> Run:
    cycle = cosine(steps // 4, warmup=1)
    return prepare(
        seed, steps, tasks.regression(seed), schedule=lambda n: cycle(n % (steps // 4)), precision="bf16", lr=1e-2
    )


def curriculum(seed: int, steps: int, faulty: bool) -> Run:
    run, harder = prepare(seed, steps, tasks.regression(seed, noise=0.1)), tasks.regression(seed + 1, scale=3.0)
    change(run, range(steps // 3, steps), lambda batch: Batch(batch.id, *harder(64)))
    run.held_out = Batch(-1, *harder(8192))
    return run


SCENARIOS: dict[str, Scenario] = {
    "attention_overflow": Scenario(
        title="fp16: attention sharpens until q·k exceeds 65504 on nearly every batch, under any loss scale",
        build=attention_overflow,
        steps=500,
    ),
    "poisoned_batch": Scenario(title="bf16: one batch holds a NaN", build=poisoned_batch),
    "huge_outlier": Scenario(title="fp32: one input of 1e25 makes the loss Inf", build=huge_outlier),
    "high_learning_rate": Scenario(
        title="fp32: the schedule peaks 40 times too high; everything stays finite, and the net dies",
        build=high_learning_rate,
        steps=500,
    ),
    "nan_weight": Scenario(title="bf16: one weight becomes NaN half-way", build=nan_weight),
    "huge_weight": Scenario(
        title="fp32: a bit flips in the exponent of one weight, which is some 1e37 now, and finite", build=huge_weight
    ),
    "bad_shard": Scenario(title="bf16: 40 batches in a row hold NaN", build=bad_shard),
    "batchnorm_poison": Scenario(
        title="fp32: an outlier makes BatchNorm's running variance Inf; only evaluation shows it",
        build=batchnorm_poison,
    ),
    "adam_state": Scenario(
        title="bf16: one entry of Adam's second moment becomes NaN, so finite gradients make a NaN update",
        build=adam_state,
    ),
    "scale_collapse": Scenario(
        title="fp16: 160 batches too loud for fp16; a loss scale that halves on each reaches 0, its inverse Inf",
        build=scale_collapse,
        steps=600,
    ),
    "gan": Scenario(title="fp32: a GAN with two optimizers; a NaN in one gradient of the critic", build=gan),
    "nan_microbatch": Scenario(
        title="bf16: 4 micro-batches make a step, and one of them holds a NaN", build=nan_microbatch, steps=1200
    ),
    "half_optimizer": Scenario(
        title="a head in fp16 comes into use: Adam's second moment and eps are 0 there, so the update is Inf",
        build=half_optimizer,
    ),
    "long_sequences": Scenario(
        title="fp32: now and then a batch of very long sequences, on which a recurrent net explodes",
        build=long_sequences,
    ),
    "zero_distance": Scenario(
        title="fp32: three batches with the same point twice: the loss is finite, sqrt'(0) is not", build=zero_distance
    ),
    "noisy": Scenario(title="bf16: batches of 4, targets mostly noise", build=noisy, healthy=True),
    "heavy_tails": Scenario(title="fp32: heavy-tailed inputs and targets", build=heavy_tails, healthy=True),
    "warm_restarts": Scenario(
        title="bf16: the learning rate jumps back up three times", build=warm_restarts, healthy=True
    ),
    "curriculum": Scenario(
        title="fp32: the task changes after a third, and the loss jumps with it", build=curriculum, healthy=True
    ),
}
