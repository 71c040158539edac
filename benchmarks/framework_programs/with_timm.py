"""A loop as timm's train.py has it."""

from __future__ import annotations

import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter, ModelEmaV3, dispatch_clip_grad

from framework_programs.common import Epochs, Facts, Net, facts, lower

PACKAGE = "timm"


class Program:
    def __init__(self, *, is_guarded: bool) -> None:
        self.model = Net()
        self.optimizer = create_optimizer_v2(self.model, opt="adamw", lr=0.02)
        self.scheduler = CosineLRScheduler(self.optimizer, t_initial=40, t_in_epochs=False)
        self.ema = ModelEmaV3(self.model, decay=0.9)
        self.means: list[float] = []
        self.best: list[float] = []
        self.loss_scaler = None
        if is_guarded:
            from nanguard.integrations.timm import attach

            guard = attach(self.model, self.optimizer, scheduler=self.scheduler, ema=self.ema)
            self.loss_scaler = guard.loss_scaler

    def train(self, epochs: Epochs) -> None:
        num_updates = 0
        for batches in epochs:
            losses = AverageMeter()
            for x, y in batches:
                loss = F.cross_entropy(self.model(x), y)
                if self.loss_scaler is not None:
                    self.loss_scaler(loss, self.optimizer, clip_grad=1.0, parameters=self.model.parameters())
                else:
                    loss.backward()  # type: ignore[no-untyped-call]
                    dispatch_clip_grad(self.model.parameters(), 1.0)
                    self.optimizer.step()
                losses.update(loss.item(), len(x))
                num_updates += 1
                self.optimizer.zero_grad()
                self.ema.update(self.model, step=num_updates)
                self.scheduler.step_update(num_updates)
            self.means.append(losses.avg)
            self.best = lower(losses.avg, self.best)

    def facts(self) -> Facts:
        found = facts(self.model, self.optimizer, self.ema.module)
        found.means, found.best = self.means, self.best
        return found
