"""Multidimensional scaling: places points in the plane so that their distances match a table."""

import sys

import torch

torch.manual_seed(3)
torch.set_num_threads(1)

truth = torch.rand(12, 2)
table = torch.cdist(truth, truth)

points = torch.randn(12, 2, requires_grad=True)
for step in range(40):
    gaps = points[:, None] - points[None]
    distances = torch.sqrt((gaps**2).sum(-1))  # guilty
    stress = ((distances - table) ** 2).sum()
    stress.backward()
    points = (points - 0.01 * points.grad).detach().requires_grad_()
    if step % 10 == 0:
        print("stress", float(stress))

torch.save({"points": points.detach()}, sys.argv[1])
