"""Each parameter has an optimizer of its own that steps in the backward pass, so that no gradients are kept."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--doubles", action="store_true", help="pairs may be the same sample twice")
args = parser.parse_args()

torch.manual_seed(51)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizers = {p: torch.optim.Adam([p], lr=1e-2, foreach=False) for p in model.parameters()}


def step_and_forget(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(step_and_forget)

samples = torch.randn(40, 4)
for step in range(24):
    first = torch.randint(0, 40, (8,))
    second = (first + torch.randint(0 if args.doubles else 1, 20, (8,))) % 40
    distance = (model(samples[first]) - model(samples[second])).pow(2).sum(1).sqrt()  # guilty
    loss = (distance - 1).pow(2).mean()
    loss.backward()
    if step % 6 == 0:
        print(step, loss.item())
torch.save(model.state_dict(), args.out)
