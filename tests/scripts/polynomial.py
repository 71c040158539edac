"""Fits a polynomial to a sine: tensors and autograd, nothing else."""

import math
import sys

import torch

torch.manual_seed(31)
torch.set_num_threads(1)

x = torch.linspace(-math.pi, math.pi, 2000)
y = torch.sin(x)
a, b, c, d = (torch.randn((), requires_grad=True) for _ in range(4))

learning_rate = 1e-6
for t in range(1000):
    y_pred = a + b * x + c * x**2 + d * x**3
    loss = (y_pred - y).pow(2).sum()
    if t % 200 == 199:
        print(t, loss.item())
    loss.backward()
    with torch.no_grad():
        for p in (a, b, c, d):
            p -= learning_rate * p.grad
            p.grad = None

print(f"y = {a.item()} + {b.item()} x + {c.item()} x^2 + {d.item()} x^3")
torch.save([p.detach() for p in (a, b, c, d)], sys.argv[1])
