"""Fits a decay to a measurement with LBFGS, with the learning rate of the manual and no line search."""

import sys

import torch

torch.manual_seed(12)
torch.set_num_threads(1)

t = torch.linspace(0, 200, 200)
measured = 3.0 * torch.exp(-0.4 * t) + 0.5 + 0.02 * torch.randn(200)

amplitude = torch.tensor(1.0, requires_grad=True)
rate = torch.tensor(1.0, requires_grad=True)
offset = torch.tensor(0.0, requires_grad=True)
optimizer = torch.optim.LBFGS([amplitude, rate, offset], lr=1.0, max_iter=4)


def closure():
    optimizer.zero_grad()
    model = amplitude * torch.exp(-rate * t) + offset  # guilty
    loss = ((model - measured) ** 2).mean()
    loss.backward()
    return loss


for i in range(6):
    loss = optimizer.step(closure)
    print(f"{i}: {loss.item():.4f}")

torch.save({"amplitude": amplitude.detach(), "rate": rate.detach(), "offset": offset.detach()}, sys.argv[1])
