"""Ridge regression with LBFGS and a line search."""

import sys

import torch
from torch import nn

torch.manual_seed(34)
torch.set_num_threads(1)
x = torch.randn(200, 5)
y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0]) + 0.1 * torch.randn(200)
model = nn.Linear(5, 1)
optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x).squeeze(1), y) + 1e-3 * model.weight.pow(2).sum()
    loss.backward()
    return loss


for i in range(5):
    print(i, optimizer.step(closure).item())
torch.save(model.state_dict(), sys.argv[1])
