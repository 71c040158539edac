"""Ordinary training programs, for `run_overhead.py`: it runs them with `python` and with `nanguard run`.

    python benchmarks/run_programs.py tiny_gpt --steps 300 --times times.json

Nothing here knows of nanguard. A program writes how long its steps took, after a warm-up, into a file (see `turns.py`).
`--fault once` makes one step bad in a way that is not located, `--fault every10` every tenth one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import _SMOKE, WORKLOADS, GPTConfig, Workload
from turns import Timer

CHARACTERS = GPTConfig(num_layers=2, num_heads=2, width=64, vocabulary=64, context=32)
GPTS = {
    "large_gpt": WORKLOADS["large"],
    "tiny_gpt": WORKLOADS["tiny"],
    "characters": Workload(name="characters", config=CHARACTERS, batch_size=16),
    "smoke_gpt": Workload(name="smoke_gpt", config=_SMOKE, batch_size=2),
}


class Fault:
    """Makes the gradient of a loss NaN, by a square root of zero that belongs to no module."""

    def __init__(self, kind: str, num_steps: int) -> None:
        self._at = {"none": -1, "once": num_steps // 4, "every10": 0}[kind]
        self._kind, self._step = kind, 0

    def __call__(self, loss: Tensor) -> Tensor:
        self._step += 1
        is_bad = self._step % 10 == 0 if self._kind == "every10" else self._step == self._at
        return loss + (loss * 0).sqrt() if is_bad else loss


def gpt(workload: Workload, device: torch.device, steps: int, fault: Fault, timer: Timer) -> None:
    """In bf16, with clipping and a fused optimizer on a GPU, as most are trained."""
    model = workload.build(device)
    batches = workload.batches(device, num=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    for step in range(steps):
        tokens, targets = batches[step % 8]
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = fault(model(tokens, targets))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        timer.step()


def supervised(model: nn.Module, shape: tuple[int, ...], classes: int) -> Callable[..., None]:
    def train(device: torch.device, steps: int, fault: Fault, timer: Timer) -> None:
        model.to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        x, y = torch.randn(shape, device=device), torch.randint(classes, shape[:1], device=device)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = fault(F.cross_entropy(model(x), y))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            timer.step()

    return train


def mlp() -> Callable[..., None]:
    """A step takes about 0.3 ms."""
    return supervised(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)), (32, 32), 10)


def cnn() -> Callable[..., None]:
    def block(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2))

    net = nn.Sequential(block(1, 8), block(8, 16), block(16, 16), nn.Flatten(), nn.Linear(64, 10))
    return supervised(net, (32, 1, 16, 16), 10)


class Forecast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x)[0][:, -1])
        return out


def lstm() -> Callable[..., None]:
    return supervised(Forecast(), (16, 20, 8), 10)


def gan() -> Callable[..., None]:
    """Two optimizers that step in turns."""

    def train(device: torch.device, steps: int, fault: Fault, timer: Timer) -> None:
        generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16)).to(device)
        critic = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)).to(device)
        of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4)
        of_critic = torch.optim.Adam(critic.parameters(), lr=2e-4)
        ones, zeros = torch.ones(32, 1, device=device), torch.zeros(32, 1, device=device)
        for _ in range(steps):
            real, noise = torch.randn(32, 16, device=device), torch.randn(32, 8, device=device)
            fake = generator(noise)
            of_critic.zero_grad()
            loss = F.binary_cross_entropy_with_logits(critic(real), ones)
            loss = loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros)
            loss.backward()  # type: ignore[no-untyped-call]
            of_critic.step()
            of_generator.zero_grad()
            fault(F.binary_cross_entropy_with_logits(critic(fake), ones)).backward()  # type: ignore[no-untyped-call]
            of_generator.step()
            timer.step()

    return train


OTHERS = {"mlp": mlp, "cnn": cnn, "lstm": lstm, "gan": gan}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=[*GPTS, *OTHERS])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warm-up", type=int, default=60, help="these steps compile, allocate and pin: not timed")
    parser.add_argument("--block", type=int, default=10, help="so many steps are timed together")
    parser.add_argument("--turns", help="pipes to wait for turns with")
    parser.add_argument("--fault", choices=("none", "once", "every10"), default="none")
    parser.add_argument("--times", type=Path, required=True, help="where to write how long the steps took")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = torch.device(args.device)
    fault = Fault(args.fault, args.steps)
    timer = Timer(device, warm_up=args.warm_up, block=args.block, turns=args.turns)
    if args.program in GPTS:
        gpt(GPTS[args.program], device, args.steps, fault, timer)
    else:
        OTHERS[args.program]()(device, args.steps, fault, timer)
    args.times.write_text(json.dumps({"times": timer.times, "total": timer.total()}))


if __name__ == "__main__":
    main()
