"""RMSprop as a class of one's own, after the formula on the slide."""

import sys

import torch
from torch import nn
from torch.optim import Optimizer


class RMSPropFromSlide(Optimizer):
    def __init__(self, params, lr=1e-2, decay=0.9):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["square"] = torch.zeros_like(p)
                square = state["square"]
                square.mul_(group["decay"]).add_((1 - group["decay"]) * p.grad * p.grad)
                p.sub_(group["lr"] * p.grad / square.sqrt())  # guilty
        return loss


torch.manual_seed(18)
torch.set_num_threads(1)
x = torch.randn(64, 5)
x[:, 3] = 0.0  # a column without a single entry
y = x.sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(5, 1))
optimizer = RMSPropFromSlide(model.parameters())
for step in range(20):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(step, "loss", round(loss.item(), 4))
torch.save(model.state_dict(), sys.argv[1])
