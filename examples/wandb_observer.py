"""What happens in a guarded run, in Weights & Biases. Offline by default: WANDB_MODE=online sends it.

pip install 'nanguard[wandb]'
python examples/wandb_observer.py
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanguard
from nanguard.integrations.loggers import WandB

Batch = tuple[Tensor, Tensor]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def main() -> None:
    os.environ.setdefault("WANDB_MODE", "offline")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    inputs = torch.randn(400, 16, 8)
    inputs[150, 0, 0] = float("nan")  # one bad sample
    data = [(x, x[:, :1].nan_to_num()) for x in inputs]
    with nanguard.Guard(model, optimizer, observers=[WandB(every=20)]) as guard:
        for batch in guard.epoch(data):
            guard.step(loss_fn, batch)
    print(f"{guard.counts['applied']} steps applied, {guard.counts['skipped']} skipped: see the run in ./wandb")


if __name__ == "__main__":
    main()
