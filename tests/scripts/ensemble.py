"""Three members, an optimizer each, in double precision; works in a folder of its own."""

import os
import sys

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
out = os.path.abspath(sys.argv[1])
os.makedirs("members", exist_ok=True)
os.chdir("members")

torch.manual_seed(52)
x = torch.randn(64, 3)
y = torch.sin(x).sum(1, keepdim=True)
members = []
for number in range(3):
    model = nn.Sequential(nn.Linear(3, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(15):
        rows = torch.randint(0, 64, (32,))
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"member {number}: {loss.item()}")
    torch.save(model.state_dict(), f"{number}.pt")
    members.append(model.state_dict())
print(sorted(os.listdir()))
torch.save(members, out)
