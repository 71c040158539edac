"""Looks after itself: leaves out batches with a NaN loss, masks with where, and complains about the result."""

import sys

import torch
from torch import nn

torch.manual_seed(40)
torch.set_num_threads(1)


class NotGoodEnoughError(Exception):
    pass


x = torch.randn(160, 6)
x[77, 2] = float("nan")  # a hole in the table
y = torch.where(x[:, :1] > 0, torch.log(x[:, :1].clamp(min=1e-3)), torch.zeros(()))
model = nn.Sequential(nn.Linear(6, 24), nn.ELU(), nn.Linear(24, 1))
optimizer = torch.optim.NAdam(model.parameters(), lr=5e-3)
num_left_out = 0
best = torch.tensor(float("inf"))
for epoch in range(4):
    for rows in torch.arange(160).split(16):
        loss = nn.functional.smooth_l1_loss(model(x[rows]), y[rows])
        if not torch.isfinite(loss):
            num_left_out += 1
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        best = torch.minimum(best, loss.detach())
    print(f"epoch {epoch}: best {best.item():.4f}, left out {num_left_out}")
torch.save(model.state_dict(), sys.argv[1])
if best > 1e-6:
    raise NotGoodEnoughError(f"{best.item():.4f}")
