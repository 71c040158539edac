"""What the tape costs: a launch-bound step under ``nanguard.install()``, with and without it, and its peak memory.

The loss is written by hand, so that the tape has about 40 rows a step. Blocks of steps alternate between the two.
Without the tape nothing can be diagnosed either (``diagnose="off"``): the difference is what both cost together.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

import nanguard


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return out


def loss_of(out: Tensor, target: Tensor, rounds: int) -> Tensor:
    """Four calls a round, besides a few."""
    loss = (out.softmax(-1).clamp_min(1e-6).log() * target).sum(-1).mean()
    for _ in range(rounds):
        loss = loss + (out * 0.01).pow(2).mean()
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--blocks", type=int, default=6)
    args = parser.parse_args()

    def wait() -> None:
        if args.device == "cuda":
            torch.cuda.synchronize()

    def block(diagnose: str | None) -> tuple[float, int]:
        torch.manual_seed(0)
        autopilot = None if diagnose is None else nanguard.install(diagnose=diagnose)  # type: ignore[arg-type]
        model = nn.Sequential(*(Block(args.width) for _ in range(args.layers))).to(args.device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        x = torch.randn(args.batch, args.width, device=args.device)
        target = torch.rand(args.batch, args.width, device=args.device)
        for step in range(args.steps + 10):
            if step == 10:
                wait()
                if args.device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                began = time.perf_counter()
            optimizer.zero_grad()
            loss_of(model(x), target, args.rounds).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        wait()
        seconds = (time.perf_counter() - began) / args.steps
        peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else 0
        if autopilot is not None:
            autopilot.uninstall()
        return seconds, peak

    kinds: dict[str, str | None] = {"plain": None, "without tape": "off", "with tape": "auto"}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    peaks: dict[str, int] = {}
    for _ in range(args.blocks):
        for name, diagnose in kinds.items():
            seconds, peaks[name] = block(diagnose)
            times[name].append(seconds)
    base = statistics.median(times["plain"])
    for name, each in times.items():
        middle = statistics.median(each)
        print(f"{name:13} {middle * 1e3:8.3f} ms  {middle / base:6.3f}x  peak {peaks[name] / 2**20:8.1f} MiB")


if __name__ == "__main__":
    main()
