"""Sums up a series with a recurrent layer of one's own, without gates, norms or clipping."""

import sys

import torch
from torch import nn

torch.manual_seed(21)
torch.set_num_threads(1)


class Recurrent(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.width = width
        self.enter = nn.Linear(1, width)
        self.again = nn.Linear(width, width, bias=False)
        self.leave = nn.Linear(width, 1)
        nn.init.eye_(self.again.weight)

    def forward(self, x):
        state = x.new_zeros(x.shape[0], self.width)
        for t in range(x.shape[1]):
            state = torch.relu(self.enter(x[:, t]) + self.again(state))  # guilty
        return self.leave(state)  # guilty


model = Recurrent()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(25):
    x = torch.rand(32, 50, 1)
    target = x.sum(dim=1)
    loss = ((model(x) - target) ** 2).mean()  # guilty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, f"{loss.item():.3g}")
torch.save(model.state_dict(), sys.argv[1])
