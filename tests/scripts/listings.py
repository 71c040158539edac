"""Learns the logarithm of prices; two workers load the listings."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Listings(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(13)
        self.features = torch.rand(size, 6, generator=generator)
        self.prices = torch.exp(self.features.sum(1) + 3).round()
        self.prices[size // 2 + 5] = 0  # price on request

    def __len__(self):
        return len(self.prices)

    def __getitem__(self, i):
        return {"features": self.features[i], "price": self.prices[i]}


def run(out, epochs):
    torch.manual_seed(13)
    torch.set_num_threads(1)
    loader = DataLoader(Listings(200), batch_size=20, shuffle=True, num_workers=2)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    for epoch in range(epochs):
        for batch in loader:
            predicted = model(batch["features"]).squeeze(1)
            loss = (predicted - torch.log(batch["price"])).pow(2).mean()  # guilty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: last loss {loss:.3f}")
    torch.save(model.state_dict(), out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    run(options.out, options.epochs)
