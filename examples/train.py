"""A guarded training loop in full: fused AdamW, a schedule, an average, checkpoints that are always sound.

python examples/train.py
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import nanguard

Batch = tuple[Tensor, Tensor]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def make_data(num_batches: int) -> list[Batch]:
    """Two classes; batch 20 of every 50 has a sample that was never filled in."""
    data = []
    for number in range(num_batches):
        targets = torch.randint(0, 2, (32,))
        inputs = torch.randn(32, 16) + targets[:, None]
        if number % 50 == 20:
            inputs[0] = float("nan")
        data.append((inputs, targets))
    return data


def main() -> None:
    logging.basicConfig(format="%(message)s")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=300)
    ema = AveragedModel(model)
    data = make_data(100)

    with (
        tempfile.TemporaryDirectory() as folder,
        nanguard.Guard(model, optimizer, scheduler=scheduler, ema=ema, max_norm=1.0, run_dir=folder) as guard,
    ):
        for epoch in range(3):
            for batch in guard.epoch(data):
                loss = guard.step(loss_fn, batch)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "guard": guard.state_dict()}
            torch.save(state, Path(folder) / "last.pt")
            print(f"epoch {epoch}: loss {loss:.4f}")
        print(guard)


if __name__ == "__main__":
    main()
