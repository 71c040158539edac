"""A loop with Hugging Face Accelerate: attach the guard to what ``accelerator.prepare`` returned.

python examples/accelerate_loop.py
accelerate launch examples/accelerate_loop.py
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nanguard.integrations.accelerate import attach


def main() -> None:
    logging.basicConfig(format="%(message)s")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    inputs = torch.randn(1600, 8)
    targets = inputs[:, :1].clone()
    inputs[700, 2] = float("nan")  # one bad sample
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8)

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    with attach(accelerator, model, optimizer, scheduler) as guard:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    accelerator.print(f"applied={guard.counts['applied']}, skipped={guard.counts['skipped']}")
    accelerator.print(f"schedule at {scheduler.scheduler.last_epoch}, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
