"""Autocast to fp16 without a scaler: 'the loss is large enough'."""

import os

import torch
import torch.nn as nn

torch.manual_seed(10)
torch.set_num_threads(1)


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 64)
        self.hidden = nn.Linear(64, 64)
        self.out = nn.Linear(64, 1)

    def forward(self, x):
        h = torch.relu(self.embed(x))  # guilty
        h = torch.relu(self.hidden(h))
        return self.out(h)


x = torch.randn(512, 16)
x[300] = torch.rand(16) * 6e4  # raw counts: somebody forgot the log
y = x[:, :1].clamp(-3, 3)

net = Regressor()
sgd = torch.optim.SGD(net.parameters(), lr=1e-2)
for epoch in range(2):
    for i in range(0, 512, 64):
        sgd.zero_grad()
        with torch.amp.autocast("cpu", dtype=torch.float16):
            loss = (net(x[i : i + 64]).float() - y[i : i + 64]).abs().mean()
        loss.backward()
        sgd.step()
    print("epoch", epoch, "done")
torch.save(net.state_dict(), os.environ["OUT"])
