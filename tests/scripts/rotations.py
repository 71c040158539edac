"""An autoencoder of directions, called through encode() and decode(); the loss is the angle in between."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(19)
torch.set_num_threads(1)


class Directions(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Linear(3, 3, bias=False)
        self.up = nn.Linear(3, 3, bias=False)
        for linear in (self.down, self.up):
            nn.init.eye_(linear.weight)
            linear.weight.data += 0.1 * torch.randn(3, 3)

    def encode(self, x):
        return self.down(x)

    def decode(self, z):
        return F.normalize(self.up(z), dim=1)


def angle(a, b):
    cosine = (a * b).sum(dim=1)
    return torch.acos(cosine)  # guilty


model = Directions()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
directions = F.normalize(torch.randn(256, 3), dim=1)
for step in range(120):
    batch = directions[torch.randint(0, 256, (64,))]
    loss = angle(model.decode(model.encode(batch)), batch).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 20 == 0:
        print(f"step {step}: {torch.rad2deg(loss.detach()).item():.4f} degrees")
torch.save(model.state_dict(), sys.argv[1])
