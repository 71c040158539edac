"""Standardises each batch by itself. 65 samples, batches of 16."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--save", default="model.pt")
args = parser.parse_args()

torch.manual_seed(20)
torch.set_num_threads(1)


class Standardize(nn.Module):
    def forward(self, x):
        return (x - x.mean(0)) / (x.std(0) + 1e-5)  # guilty


x = 100 + 15 * torch.randn(65, 4)
y = (x.sum(1) > 400).float()
model = nn.Sequential(Standardize(), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
criterion = nn.BCEWithLogitsLoss()
for epoch in range(args.epochs):
    for xb, yb in DataLoader(TensorDataset(x, y), batch_size=args.batch_size, shuffle=True):
        optimizer.zero_grad()
        criterion(model(xb), yb).backward()
        optimizer.step()
    print(f"epoch {epoch + 1}/{args.epochs}")
torch.save(model.state_dict(), args.save)
