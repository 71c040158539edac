"""A loop that is written with Lightning Fabric, with one damaged record. ``attach`` is the only line that is added.

pip install 'nanguard[lightning]'
python examples/fabric_loop.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nanguard.integrations.fabric import attach


def main() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(640, 16)
    labels = inputs[:, :4].argmax(1)
    inputs[333, 5] = float("nan")
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=3e-3))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(inputs, labels), batch_size=32))

    with attach(fabric, model, optimizer, schedule, loader=loader) as guard:
        for _ in range(5):
            for batch, label in loader:
                loss = F.cross_entropy(model(batch), label)
                fabric.backward(loss)
                fabric.clip_gradients(model, optimizer, max_norm=1.0)  # without nanguard it raises at the bad batch
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    print(f"last loss: {loss.item():.3f}, the schedule has counted {schedule.last_epoch} steps")
    print(f"applied={guard.counts['applied']}, skipped={guard.counts['skipped']}")
    diagnosis = guard.incidents[0].outcome.diagnosis
    print(f"cause: {diagnosis.cause}, record {diagnosis.dataset_indices}" if diagnosis else "cause: unknown")


if __name__ == "__main__":
    main()
