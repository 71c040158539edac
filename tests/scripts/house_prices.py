"""Linear regression the old way, through .data."""

import sys

import torch

torch.manual_seed(2)
torch.set_num_threads(1)

rooms = torch.randint(1, 8, (100, 1)).float()
area = 25 * rooms + 10 * torch.randn(100, 1)
x = torch.cat([rooms, area], 1)
y = 3 * area + 20 * rooms + 30 * torch.randn(100, 1)

w = torch.zeros(2, 1, requires_grad=True)
learning_rate = 1e-3

for i in range(40):
    predicted = x.mm(w)
    loss = (predicted - y).pow(2).mean()  # guilty
    loss.backward()
    w.data -= learning_rate * w.grad.data
    w.grad.data.zero_()
    if i % 10 == 0:
        print(i, loss.data)

torch.save(w.data, sys.argv[1])
