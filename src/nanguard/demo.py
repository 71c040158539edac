"""A small training run that dies in a plain loop and finishes under the guard: ``nanguard demo``.

A conv net learns eight short voice-like commands from synthetic recordings, in bf16. Two of the recordings are the
kind that real data sets have: one is digital silence, and one has a pop that is louder than its file format can hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from nanguard.guard import Guard

Batch = tuple[Tensor, Tensor]

RATE, LENGTH, BATCH_SIZE = 8000, 4000, 32
COMMANDS = ("hold", "rise", "fall", "arch", "step up", "step down", "warble", "hiss")

# ---- data ------------------------------------------------------------------------------------------------------------


def record(number: int, generator: torch.Generator) -> Batch:
    """``number`` half-second clips of random commands, and which commands they are.

    A command is the way its pitch moves. Voices differ in pitch and loudness, and every room has its noise.
    """

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(number, 1).uniform_(low, high, generator=generator)

    t = torch.linspace(0, 1, LENGTH)
    step = (t > 0.5).float()
    hiss = torch.randn(LENGTH, generator=generator)
    octaves = torch.stack([0 * t, t, -t, 1 - (2 * t - 1).abs(), step, -step, (40 * t).sin() / 3, hiss])
    labels = torch.randint(len(COMMANDS), (number,), generator=generator)
    pitch = uniform(500, 1200) * 2 ** octaves[labels]
    voice = uniform(0.1, 0.9) * (2 * math.pi * pitch.cumsum(1) / RATE).sin()
    return voice + uniform(0.05, 0.5) * torch.randn(number, LENGTH, generator=generator), labels


def training_data(steps: int, generator: torch.Generator) -> list[Batch]:
    """One batch a step. Clips are kept in fp16, to save space; two of them are not as they should be."""
    clips, labels = record(steps * BATCH_SIZE, generator)
    quarter, half = steps // 4 * BATCH_SIZE, steps // 2 * BATCH_SIZE
    silent = int(torch.randint(quarter, half, (), generator=generator))
    popped = int(torch.randint(half, half + quarter, (), generator=generator))
    clips[silent] = 0.0  # the microphone was muted
    clips[popped, LENGTH // 2] = 1e5  # somebody dropped it: fp16 ends at 65504, so this sample is stored as Inf
    return list(zip(clips.half().split(BATCH_SIZE), labels.split(BATCH_SIZE), strict=True))


# ---- model -----------------------------------------------------------------------------------------------------------


def log_energies(clips: Tensor) -> Tensor:
    """What the net sees of the clips, (batch, 1, frequency, time)."""
    x = clips.float()
    x = (x - x.mean(dim=1, keepdim=True)) / x.std(dim=1, keepdim=True)  # silence: 0/0.  an Inf: Inf - Inf
    spectrum = torch.stft(x, n_fft=256, hop_length=128, window=torch.hann_window(256), return_complex=True)
    return (spectrum.abs().square() + 1e-3).log().unsqueeze(1)


class CommandNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = self._block(1, 16)
        self.middle = self._block(16, 32)
        self.top = self._block(32, 64)
        self.pool = nn.AdaptiveAvgPool2d((1, 4))
        self.classifier = nn.Linear(64 * 4, len(COMMANDS))

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, clips: Tensor) -> Tensor:
        x = self.top(self.middle(self.stem(log_energies(clips))))
        logits: Tensor = self.classifier(self.pool(x).flatten(1))
        return logits


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    clips, labels = batch
    return F.cross_entropy(model(clips), labels)


# ---- the two loops: they yield the loss of each step -----------------------------------------------------------------


def plain_loop(model: nn.Module, optimizer: Optimizer, batches: Iterable[Batch]) -> Iterator[float]:
    for batch in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_fn(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def guarded_loop(guard: Guard, batches: Iterable[Batch]) -> Iterator[float]:
    for batch in guard.epoch(batches):
        loss = guard.step(loss_fn, batch)
        yield loss.item()


# ---- the comparison --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one run came to."""

    losses: list[float]
    skipped: tuple[int, ...]
    accuracy: float
    weights_finite: bool
    statistics_finite: bool

    @property
    def died_at(self) -> int | None:
        """The step from which on every loss is non-finite, if there is one."""
        finite = [step for step, loss in enumerate(self.losses) if math.isfinite(loss)]
        alive = finite[-1] + 1 if finite else 0
        return alive if alive < len(self.losses) else None


def compare(*, seed: int, steps: int, run_dir: Path, console: Console) -> tuple[Result, Result]:
    """Trains the same model on the same data twice, plain and guarded, and tells ``console`` how it goes."""
    generator = torch.Generator().manual_seed(seed)
    batches = training_data(steps, generator)
    held_out = record(512, generator)

    model, optimizer = _fresh(seed)
    losses = _watch("plain loop", plain_loop(model, optimizer, batches), steps, console)
    plain = _result(model, losses, (), held_out)

    model, optimizer = _fresh(seed)
    with _logging_to(console), Guard(model, optimizer, precision="bf16", max_norm=5.0, run_dir=run_dir) as guard:
        losses = _watch("guarded", guarded_loop(guard, batches), steps, console)
    skipped = tuple(incident.reading.step for incident in guard.incidents)
    return plain, _result(model, losses, skipped, held_out)
