"""A small training run that dies in a plain loop and finishes under the guard: ``nanguard demo``.

A conv net learns eight short voice-like commands from synthetic recordings, in bf16. Two of the recordings are the
kind that real data sets have: one is digital silence, and one has a pop that is louder than its file format can hold.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

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
    batches = [record(BATCH_SIZE, generator) for _ in range(steps)]

    def any_clip(first: int, end: int) -> Tensor:
        batch = int(torch.randint(first, end, (), generator=generator))
        return batches[batch][0][int(torch.randint(BATCH_SIZE, (), generator=generator))]

    any_clip(steps // 4, steps // 2)[:] = 0.0  # the microphone was muted
    any_clip(steps // 2, steps * 3 // 4)[LENGTH // 2] = 1e5  # it was dropped: fp16 ends at 65504, so this becomes Inf
    return [(clips.half(), labels) for clips, labels in batches]


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
        self.pool = nn.AdaptiveAvgPool2d((4, 4))
        self.classifier = nn.Linear(64 * 4 * 4, len(COMMANDS))

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


def compare(*, seed: int, steps: int, run_dir: Path, console: Console) -> tuple[Result, Result]:
    """Trains the same model on the same data twice, plain and guarded, and tells ``console`` how it goes."""
    generator = torch.Generator().manual_seed(seed)
    batches = training_data(steps, generator)
    held_out = record(512, generator)

    model, optimizer = fresh(seed)
    losses = watch("plain", tell_of_nan(plain_loop(model, optimizer, batches), console), steps, console)
    plain = examine(model, losses, (), held_out)

    model, optimizer = fresh(seed)
    with Guard(model, optimizer, precision="bf16", max_norm=5.0, clip="global", run_dir=run_dir) as guard:
        losses = watch("guarded", guarded_loop(guard, batches), steps, console)
    skipped = tuple(incident.reading.step for incident in guard.incidents)
    return plain, examine(model, losses, skipped, held_out)


def fresh(seed: int) -> tuple[CommandNet, AdamW]:
    torch.manual_seed(seed)
    model = CommandNet()
    return model, AdamW(model.parameters(), lr=2e-3)


@torch.no_grad()
def examine(model: nn.Module, losses: list[float], skipped: tuple[int, ...], held_out: Batch) -> Result:
    clips, labels = held_out
    hits = model.eval()(clips).argmax(dim=1) == labels
    return Result(
        losses=losses,
        skipped=skipped,
        accuracy=hits.float().mean().item(),
        weights_finite=all(bool(p.isfinite().all()) for p in model.parameters()),
        statistics_finite=all(bool(b.isfinite().all()) for b in model.buffers()),
    )


# ---- what it says ----------------------------------------------------------------------------------------------------

INTRO = """
A small net learns eight voice-like commands in bf16, twice: same weights, same data, same order. One training clip is
digital silence and one holds an Inf. Every clip is normalised the way people write it, (x - x.mean()) / x.std(): that
is 0/0 for the first and Inf - Inf for the second.
"""


def main(*, seed: int, steps: int, run_dir: Path, out: Console, err: Console) -> int:
    """Runs the demo: progress to ``err``, the comparison to ``out``. Returns the exit status."""
    # On a busy machine threads wait for each other, and the number of cores would show in the numbers.
    torch.set_num_threads(1)
    if not err.quiet:
        out.print(textwrap.fill(" ".join(INTRO.split()), out.width), end="\n\n", markup=False)
    plain, guarded = compare(seed=seed, steps=steps, run_dir=run_dir, console=err)
    out.print(table(plain, guarded))
    out.print(f" run log  {run_dir / 'run.jsonl'}", markup=False, soft_wrap=True)
    died = not plain.weights_finite and not math.isfinite(plain.losses[-1])
    if not died:
        out.print("The plain loop survived, which it should not have: this run shows nothing.")
    if not guarded.weights_finite:
        out.print("The guarded run ended with non-finite weights, which is a bug in nanguard.")
    return 0 if died and guarded.weights_finite else 1


def table(plain: Result, guarded: Result) -> Table:
    both = (plain, guarded)
    finite = {True: "yes", False: "[bold red]no[/]"}
    rows = Table("", Column("plain", justify="right"), Column("guarded", justify="right"), box=SIMPLE_HEAD)
    rows.add_row("steps", *(str(len(r.losses)) for r in both))
    rows.add_row("steps skipped", *(str(len(r.skipped)) for r in both))
    rows.add_row("first loss", *(f"{r.losses[0]:.3f}" for r in both))
    rows.add_row("final loss", *(f"{r.losses[-1]:.3f}" for r in both))
    rows.add_row("held-out accuracy", *(f"{r.accuracy:.1%}" for r in both))
    rows.add_row("weights finite", *(finite[r.weights_finite] for r in both))
    rows.add_row("BatchNorm statistics finite", *(finite[r.statistics_finite] for r in both))
    return rows


def watch(name: str, losses: Iterable[float], steps: int, console: Console) -> list[float]:
    """Runs a loop behind a progress bar, and returns its losses."""
    loss_column = TextColumn("loss {task.fields[loss]:.3f}")
    columns = (TextColumn(f" {name:<8} "), BarColumn(28), MofNCompleteColumn(), loss_column, TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=steps, loss=math.nan)
        seen: list[float] = []
        for loss in losses:
            seen.append(loss)
            progress.update(task, advance=1, loss=loss)
    return seen


def tell_of_nan(losses: Iterable[float], console: Console) -> Iterator[float]:
    """Passes the losses on; says when one is non-finite for the first time, and what became of those after it."""
    later: list[float] | None = None
    for step, loss in enumerate(losses):
        if later is not None:
            later.append(loss)
        elif not math.isfinite(loss):
            later = []
            console.print(f" plain     step {step}  loss {loss}: nothing stops it, the loop goes on", style="red")
        yield loss
    if later is not None:
        finite = sum(map(math.isfinite, later))
        console.print(f" plain     of the {len(later)} losses after that {finite or 'none'} were finite", style="red")
