"""A loop as Fabric's documentation has it, with clipping and a schedule."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric

from framework_programs.common import Epochs, Facts, Net, facts, lower

PACKAGE = "lightning"


class Program:
    def __init__(self, *, is_guarded: bool) -> None:
        self.fabric = Fabric(accelerator="cpu", devices=1)
        self.net = Net()
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.02)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
        self.model, self.optimizer = self.fabric.setup(self.net, optimizer)
        self.means: list[float] = []
        self.best: list[float] = []
        self.guard: Any = None
        if is_guarded:
            from nanguard.integrations.fabric import attach

            self.guard = attach(self.fabric, self.model, self.optimizer, self.schedule)

    def train(self, epochs: Epochs) -> None:
        for batches in epochs:
            losses = []
            for x, y in batches:
                loss = F.cross_entropy(self.model(x), y)
                self.fabric.backward(loss)
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                if self.guard is None or not self.guard.loop.was_refused:
                    losses.append(loss.item())
            self.means.append(sum(losses) / len(losses))
            self.best = lower(self.means[-1], self.best)

    def facts(self) -> Facts:
        found = facts(self.net, self.optimizer.optimizer)
        found.means, found.best = self.means, self.best
        return found
