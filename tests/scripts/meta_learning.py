"""Learns an initialisation for sine waves (MAML): gradients through gradients, with torch.autograd.grad."""

import os

import torch
import torch.nn.functional as F

torch.manual_seed(32)
torch.set_num_threads(1)


def task():
    amplitude, phase = torch.rand(1) * 4 + 0.1, torch.rand(1) * 3
    return lambda x: amplitude * torch.sin(x + phase)


def net(x, params):
    x = F.relu(F.linear(x, params[0], params[1]))
    x = F.relu(F.linear(x, params[2], params[3]))
    return F.linear(x, params[4], params[5])


shapes = [(24, 1), (24,), (24, 24), (24,), (1, 24), (1,)]
params = [(0.3 * torch.randn(s)).requires_grad_() for s in shapes]
meta = torch.optim.Adam(params, lr=2e-3)

for iteration in range(40):
    total = 0.0
    meta.zero_grad()
    for _ in range(4):
        f = task()
        x_support, x_query = torch.rand(10, 1) * 10 - 5, torch.rand(10, 1) * 10 - 5
        inner = F.mse_loss(net(x_support, params), f(x_support))
        grads = torch.autograd.grad(inner, params, create_graph=True)
        fast = [p - 0.01 * g for p, g in zip(params, grads, strict=True)]
        outer = F.mse_loss(net(x_query, fast), f(x_query)) / 4
        outer.backward()
        total += outer.item()
    meta.step()
    if iteration % 10 == 9:
        print(f"{iteration + 1}: query loss {total:.4f}")

# Adaptation to one task, by hand.
f = task()
x = torch.linspace(-5, 5, 20)[:, None]
adapted = [p.detach().clone().requires_grad_() for p in params]
for _ in range(5):
    loss = F.mse_loss(net(x, adapted), f(x))
    adapted = [p - 0.01 * g for p, g in zip(adapted, torch.autograd.grad(loss, adapted), strict=True)]
print("adapted:", loss.item())
torch.save([p.detach() for p in [*params, *adapted]], os.environ["OUT"])
