"""A loop as Accelerate's documentation has it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator

from framework_programs.common import Epochs, Facts, Net, facts, lower

PACKAGE = "accelerate"


class Program:
    def __init__(self, *, is_guarded: bool) -> None:
        self.accelerator = Accelerator(cpu=True)
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(net, optimizer, scheduler)
        self.means: list[float] = []
        self.best: list[float] = []
        if is_guarded:
            from nanguard.integrations.accelerate import attach

            self.guard = attach(self.accelerator, self.model, self.optimizer, self.scheduler)

    def train(self, epochs: Epochs) -> None:
        for batches in epochs:
            losses = []
            for x, y in batches:
                loss = F.cross_entropy(self.model(x), y)
                self.accelerator.backward(loss)
                self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                if not self.accelerator.optimizer_step_was_skipped:
                    losses.append(loss.item())
            self.means.append(sum(losses) / len(losses))
            self.best = lower(self.means[-1], self.best)

    def facts(self) -> Facts:
        found = facts(self.accelerator.unwrap_model(self.model), self.optimizer.optimizer)
        found.means, found.best = self.means, self.best
        return found
