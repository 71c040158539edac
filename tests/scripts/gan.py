"""A GAN on a ring of eight Gaussians, with the losses as in the paper."""

import argparse
import math

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--g-lr", type=float, default=1e-3)
parser.add_argument("--radius", type=float, default=1.0)
parser.add_argument("--steps", type=int, default=150)
opt = parser.parse_args()

torch.manual_seed(7)
torch.set_num_threads(1)


def mlp(*sizes):
    layers = []
    for i in range(len(sizes) - 1):
        layers += [nn.Linear(sizes[i], sizes[i + 1]), nn.LeakyReLU(0.2)]
    return layers[:-1]


G = nn.Sequential(*mlp(8, 32, 32, 2))
D = nn.Sequential(*mlp(2, 32, 32, 1), nn.Sigmoid())
optimizer_G = torch.optim.Adam(G.parameters(), lr=opt.g_lr, betas=(0.5, 0.999))
optimizer_D = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))

for step in range(opt.steps):
    angles = 2 * math.pi * torch.randint(0, 8, (64,)) / 8
    real = opt.radius * torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(64, 2)
    fake = G(torch.randn(64, 8))

    optimizer_D.zero_grad()
    d_loss = -(torch.log(D(real)) + torch.log(1 - D(fake.detach()))).mean()  # guilty
    d_loss.backward()
    optimizer_D.step()

    optimizer_G.zero_grad()
    g_loss = torch.log(1 - D(fake)).mean()  # guilty
    g_loss.backward()
    optimizer_G.step()
    if step % 50 == 49:
        print(f"[{step + 1}/{opt.steps}] D {d_loss.item():.3f} G {g_loss.item():.3f}")

torch.save({"G": G.state_dict(), "D": D.state_dict()}, opt.out)
