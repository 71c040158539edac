"""Saves a checkpoint in the middle, starts over with new objects and goes on."""

import argparse
import copy
import pickle
from pathlib import Path

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()


def build():
    model = nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.5)


def train(model, optimizer, scheduler, steps):
    for step in steps:
        x = torch.randn(32, 4)

        def closure(x=x):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), x.pow(2).sum(1, keepdim=True))
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        scheduler.step()
        if step % 5 == 0:
            print(step, f"{loss.item():.5f}", scheduler.get_last_lr())


torch.manual_seed(38)
torch.set_num_threads(1)
checkpoint = Path("checkpoint.pt")
model, optimizer, scheduler = build()
optimizer.register_step_post_hook(lambda *_: None)
train(model, optimizer, scheduler, range(15))
print(type(optimizer).__name__, isinstance(optimizer, torch.optim.Adam), sorted(optimizer.state_dict()))
torch.save(
    {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
    },
    checkpoint,
)
print(len(pickle.dumps(optimizer.state_dict())) == len(pickle.dumps(copy.deepcopy(optimizer).state_dict())))

torch.manual_seed(0)
model, optimizer, scheduler = build()
saved = torch.load(checkpoint, weights_only=True)
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
scheduler.load_state_dict(saved["scheduler"])
torch.set_rng_state(saved["rng"])
train(model, optimizer, scheduler, range(15, 30))
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}, args.out)
