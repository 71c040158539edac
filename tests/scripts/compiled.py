"""A compiled model."""

import sys

import torch
from torch import nn

torch.manual_seed(35)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
compiled = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 8)
y = x.prod(1, keepdim=True)
for step in range(10):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(compiled(x), y)
    loss.backward()
    optimizer.step()
    print(step, loss.item())
torch.save(model.state_dict(), sys.argv[1])
