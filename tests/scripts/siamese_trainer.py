"""Contrastive learning with a class-based trainer."""

import argparse
import dataclasses
import logging

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logger = logging.getLogger("trainer")


@dataclasses.dataclass
class Config:
    out: str
    lr: float = 0.01
    epochs: int = 3
    margin: float = 1.0
    seed: int = 17


class Contrastive(nn.Module):
    def __init__(self, margin):
        super().__init__()
        self.margin = margin

    def forward(self, a, b, same):
        distance = (a - b).pow(2).sum(dim=1).sqrt()  # guilty
        return (same * distance.pow(2) + (1 - same) * torch.relu(self.margin - distance).pow(2)).mean()


class Trainer:
    def __init__(self, config):
        self.config = config
        torch.manual_seed(config.seed)
        self.net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 4))
        self.criterion = Contrastive(config.margin)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=config.lr, momentum=0.9, nesterov=True)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.loader = DataLoader(self._pairs(), batch_size=16, shuffle=True)
        self.history = []

    def _pairs(self):
        a = torch.randn(160, 6)
        same = (torch.rand(160) < 0.5).float()
        b = torch.where(same[:, None] > 0, a + 0.1 * torch.randn(160, 6), torch.randn(160, 6))
        b[44], same[44] = a[44], 1.0  # the same picture twice
        return TensorDataset(a, b, same)

    def train_step(self, batch):
        a, b, same = batch
        self.optimizer.zero_grad()
        loss = self.criterion(self.net(a), self.net(b), same)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def fit(self):
        for epoch in range(self.config.epochs):
            losses = [self.train_step(batch) for batch in self.loader]
            self.history.append(sum(losses) / len(losses))
            self.scheduler.step()
            logger.info("epoch %d done", epoch)
            print(f"epoch {epoch}: {self.history[-1]:.4f}")
        torch.save(self.net.state_dict(), self.config.out)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    for field in dataclasses.fields(Config):
        parser.add_argument(f"--{field.name}", type=field.type, default=None)
    given = {key: value for key, value in vars(parser.parse_args()).items() if value is not None}
    Trainer(Config(**given)).fit()
