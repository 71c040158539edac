"""That a healthy run is left alone: models train under the default guard, and everything it has to say is counted.

    PYTHONPATH=src python benchmarks/healthy.py                        # on a GPU
    PYTHONPATH=src python benchmarks/healthy.py --device cpu --smoke   # does the script itself work?

A GPT of 124M parameters, a ResNet-18 with BatchNorm and an LSTM train on random data in bf16 and fp32, by
``guard.step`` and in a loop of their own, where the model's calls are noted too. An incident, a routine overflow, a
dropped part or a warning would each be a false alarm: none is expected.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
import nanguard

METHOD = (
    "Fused AdamW at 3e-4 under Guard(model, optimizer, precision=...), all else by default. Random data, new in each "
    "step. An alarm is an incident, an overflow of the loss scale, anything lost or undone, or a warning in the log."
)
STYLES = ("step", "own loop")
PRECISIONS = ("bf16", "fp32")


class BasicBlock(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            convolution = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.around = nn.Sequential(convolution, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.around(x))


class ResNet(nn.Module):
    """ResNet-18, with the small stem that 32x32 images get."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        blocks: list[nn.Module] = []
        for stage, (before, after) in enumerate(itertools.pairwise(widths)):
            blocks += [BasicBlock(before, after, 2 if stage else 1), BasicBlock(after, after, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(8 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class Recurrent(nn.Module):
    """Two layers of LSTM over a sequence, and a class at its end."""

    def __init__(self, size: int, width: int, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.LSTM(size, width, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x)[0][:, -1])
        return out


@dataclass(frozen=True, kw_only=True)
class Program:
    """What trains: a model, its loss, and where its next batch comes from."""

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, Any], Tensor]


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def programs(*, smoke: bool) -> list[Program]:
    workload = (models.SMOKE_WORKLOADS if smoke else models.WORKLOADS)["large"]
    size, images, width = (4, 16, 4) if smoke else (128, 32, 64)
    length, features, hidden = (8, 4, 16) if smoke else (128, 64, 512)
    shape = workload.batch_size, workload.config.context + 1

    def tokens(g: torch.Generator) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(workload.config.vocabulary, shape, generator=g)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    def pictures(g: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 3, images, images, generator=g), torch.randint(10, (size,), generator=g)

    def sequences(g: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(size, length, features, generator=g), torch.randint(10, (size,), generator=g)

    def recurrent() -> nn.Module:
        return Recurrent(features, hidden, 10)

    return [
        Program(name=str(workload), build=lambda: models.GPT(workload.config), draw=tokens, loss=models.loss_fn),
        Program(name=f"ResNet-18, width {width}", build=lambda: ResNet(width, 10), draw=pictures, loss=classify),
        Program(name=f"LSTM, width {hidden}", build=recurrent, draw=sequences, loss=classify),
    ]


class Warnings(logging.Handler):
    """Keeps what the guard's log has to complain about."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def train(program: Program, device: torch.device, precision: Any, style: str, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    with device:
        model = program.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    generator, warnings = torch.Generator().manual_seed(1), Warnings()
    logging.getLogger("nanguard").addHandler(warnings)
    losses: list[Tensor] = []
    try:
        guard = nanguard.Guard(model, optimizer, precision=precision)
        batches = (tuple(t.to(device) for t in program.draw(generator)) for _ in range(steps))
        for batch in guard.epoch(batches):
            if style == "step":
                loss = guard.step(program.loss, batch)
            else:
                with guard.autocast():
                    loss = program.loss(model, batch)
                guard.backward(loss)
                guard.update()
            losses.append(loss.detach())
    finally:
        logging.getLogger("nanguard").removeHandler(warnings)
    counts = {name: number for name, number in guard.counts.items() if number}
    first, last = losses[0].item(), losses[-1].item()
    assert math.isfinite(first)
    assert math.isfinite(last)
    return {
        "program": program.name,
        "precision": precision,
        "style": style,
        "steps": steps,
        "applied": counts.pop("applied", 0),
        "counts": counts,
        "incidents": [
            {
                "step": incident.reading.step,
                "verdict": incident.outcome.verdict.kind,
                "diagnosis": None if incident.diagnosis is None else str(incident.diagnosis),
            }
            for incident in guard.incidents
        ],
        "warnings": warnings.said,
        "loss": [first, last],
    }


def num_alarms(row: dict[str, Any]) -> int:
    counted: int = sum(row["counts"].values())
    return counted + len(row["incidents"]) + len(row["warnings"])


def as_markdown(facts: dict[str, Any]) -> str:
    lines = [
        f"# Healthy runs: {facts['device']}, {facts['date']}",
        "",
        f"torch {facts['torch']}, Python {facts['python']}. {METHOD}",
        "",
        "| model | precision | loop | steps applied | incidents | overflows | other counts | warnings | loss |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in facts["runs"]:
        counts = dict(row["counts"])
        overflows = counts.pop("backed_off", 0)
        first, last = row["loss"]
        lines.append(
            f"| {row['program']} | {row['precision']} | {row['style']} | {row['applied']} of {row['steps']} "
            f"| {len(row['incidents'])} | {overflows} | {sum(counts.values())} | {len(row['warnings'])} "
            f"| {first:.3f} to {last:.3f} |"
        )
    alarms, steps = sum(map(num_alarms, facts["runs"])), sum(row["steps"] for row in facts["runs"])
    return "\n".join([*lines, "", f"{alarms} false alarms in {steps:,} steps.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="What the guard has to say about healthy runs: nothing, one hopes.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--smoke", action="store_true", help="minute models and few steps, to try the script itself")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    device = torch.device(args.device)
    steps = min(args.steps, 12) if args.smoke else args.steps
    logging.getLogger("nanguard").setLevel(logging.WARNING)
    runs = [
        train(program, device, precision, style, steps)
        for program in programs(smoke=args.smoke)
        for precision in PRECISIONS
        for style in STYLES
    ]
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    facts = {
        "device": name,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "method": METHOD,
        "runs": runs,
    }
    text = as_markdown(facts)
    print(text)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"healthy-{name.lower().replace(' ', '-').replace('_', '-')}-{facts['date']}.json"
    path.write_text(json.dumps(facts, indent=1) + "\n")
    path.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
