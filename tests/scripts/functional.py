"""Logistic regression with torch.autograd.grad: no optimizer, no .grad, new weights each step."""

import sys

import torch

torch.manual_seed(50)
torch.set_num_threads(1)


def loss_of(weights, x, y):
    p = torch.sigmoid(x @ weights)
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()  # guilty


x = 100 * torch.randn(50, 3)
y = (x[:, 0] + 40 * torch.randn(50) > 0).float()
weights = torch.zeros(3, requires_grad=True)
for step in range(20):
    loss = loss_of(weights, x, y)
    (gradient,) = torch.autograd.grad(loss, [weights])
    weights = (weights - gradient).detach().requires_grad_()
    print(step, loss.item())
torch.save(weights.detach(), sys.argv[1])
