"""The same training in a plain loop and under the guard."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

from nanguard.demo.gpt import GPT, Batch, loss_fn
from nanguard.demo.text import CHARACTERS, CONTEXT, VOCABULARY, TextData
from nanguard.guard import Guard

LR = 0.003
HOT_LR = 0.3
"""The learning rate of queries and keys, a hundred times too high. Failures of weeks happen within a minute."""

MAX_NORM = 1.0
LAST_STEPS = 20
"""The final loss is the mean over this many last steps."""

PROMPT = "alice "


@dataclass(slots=True)
class TrainingProgress:
    """The progress of a run: losses, loss scale, number of applied steps, and whether weights are finite."""

    losses: list[float] = field(default_factory=list)
    scale: float = 0.0
    applied: int = 0
    weights_finite: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of a run."""

    steps: int
    applied: int
    skipped: tuple[int, ...]
    losses: tuple[float, ...]
    final_loss: float
    held_out_loss: float
    scale: float
    weights_finite: bool
    raised: tuple[str, ...]
    sample: str

    def as_dict(self) -> dict[str, Any]:
        """All fields but the list of losses."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "losses"}


def fresh(seed: int) -> tuple[GPT, AdamW]:
    """A new model and its optimizer. Queries and keys have their own learning rate."""
    torch.manual_seed(seed)
    model = GPT(vocabulary=VOCABULARY, context=CONTEXT)
    hot = [p for name, p in model.named_parameters() if ".query." in name or ".key." in name]
    others = [p for name, p in model.named_parameters() if ".query." not in name and ".key." not in name]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": hot, "lr": HOT_LR}]
    return model, AdamW(groups, lr=LR, weight_decay=0.0)


def plain_loop(model: nn.Module, optimizer: Optimizer, data: TextData) -> Iterator[TrainingProgress]:
    """A usual fp16 loop: autocast, a GradScaler, clipping. Ends when the weights are no longer finite."""
    scaler = torch.amp.GradScaler("cpu")
    told = TrainingProgress()

    def count(*_: object) -> None:
        told.applied += 1

    optimizer.register_step_post_hook(count)
    for epoch in data.epochs:
        for batch in epoch:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_fn(model, batch)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            told.losses.append(loss.item())
            told.scale = scaler.get_scale()
            told.weights_finite = is_finite(model)
            yield told
            if not told.weights_finite:
                return


def guarded_loop(guard: Guard, data: TextData) -> Iterator[TrainingProgress]:
    told = TrainingProgress()
    for epoch in data.epochs:
        for batch in guard.epoch(epoch):
            loss = guard.step(loss_fn, batch)
            told.losses.append(loss.item())
            reading = None if guard.last_outcome is None else guard.last_outcome.verdict.reading
            told.scale = math.nan if reading is None or reading.scale is None else reading.scale
            told.applied = guard.counts["applied"]
            yield told


def guard_of(model: nn.Module, optimizer: Optimizer, run_dir: Path) -> Guard:
    return Guard(model, optimizer, precision="fp16", max_norm=MAX_NORM, clip="global", run_dir=run_dir)


def guarded_result(guard: Guard, model: GPT, told: TrainingProgress, data: TextData, seed: int) -> Result:
    skipped = tuple(incident.reading.step for incident in guard.incidents if not incident.outcome.applied)
    return result_of(model, told, data, seed, skipped=skipped, raised=guard.kept_fp32)


def result_of(
    model: GPT,
    told: TrainingProgress,
    data: TextData,
    seed: int,
    *,
    skipped: tuple[int, ...] = (),
    raised: tuple[str, ...] = (),
) -> Result:
    model.eval()
    counted = [loss for step, loss in enumerate(told.losses) if step not in skipped][-LAST_STEPS:]
    return Result(
        steps=len(told.losses),
        applied=told.applied,
        skipped=skipped,
        losses=tuple(told.losses),
        final_loss=sum(counted) / len(counted) if counted else math.nan,
        held_out_loss=held_out_loss(model, data.held_out),
        scale=told.scale,
        weights_finite=is_finite(model),
        raised=raised,
        sample=write(model, torch.Generator().manual_seed(seed)),
    )


def is_finite(model: nn.Module) -> bool:
    return all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@torch.no_grad()
def held_out_loss(model: nn.Module, batch: Batch) -> float:
    return loss_fn(model, batch).item()


@torch.no_grad()
def write(model: GPT, generator: torch.Generator, length: int = 60) -> str:
    """The text that the model writes after ``PROMPT``; empty if its outputs are non-finite."""
    numbers = [1 + CHARACTERS.index(c) for c in PROMPT]
    while len(numbers) < length:
        logits: Tensor = model(torch.tensor([numbers]))[0, -1, 1:]
        if not logits.isfinite().all():
            return ""
        drawn = torch.multinomial((logits / 0.7).softmax(dim=0), 1, generator=generator)
        numbers.append(1 + int(drawn))
    return "".join(CHARACTERS[number - 1] for number in numbers)
