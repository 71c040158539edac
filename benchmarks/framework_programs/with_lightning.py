"""A LightningModule with a schedule for each step, an EMA, a logged mean, EarlyStopping and ModelCheckpoint."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.callbacks.weight_averaging import WeightAveraging
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from framework_programs.common import NUM_EPOCHS, Batch, Epochs, Facts, Net, facts, loader

PACKAGE = "lightning"


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Means(Callback):
    def __init__(self) -> None:
        self.means: list[float] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.means.append(float(trainer.callback_metrics["loss"]))


class Average(WeightAveraging):
    """Keeps the average when training ends, to be looked at."""

    def __init__(self) -> None:
        super().__init__(multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.kept: Any = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.kept = self._average_model


class Program:
    def __init__(self, *, is_guarded: bool) -> None:
        self.module, self.seen, self.average = Module(), Means(), Average()
        self.checkpoint = ModelCheckpoint(tempfile.mkdtemp(), monitor="loss", save_top_k=1)
        callbacks: list[Callback] = [self.seen, self.average, EarlyStopping("loss"), self.checkpoint]
        if is_guarded:
            from nanguard.integrations.lightning import GuardCallback

            callbacks.insert(0, GuardCallback())
        self.trainer = Trainer(
            max_epochs=NUM_EPOCHS,
            accelerator="cpu",
            logger=False,
            callbacks=callbacks,
            gradient_clip_val=1.0,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def train(self, epochs: Epochs) -> None:
        self.trainer.fit(self.module, loader(epochs))

    def facts(self) -> Facts:
        average = None if self.average.kept is None else self.average.kept.module
        found = facts(self.module.net, self.trainer.optimizers[0], average)
        found.means = self.seen.means
        score = self.checkpoint.best_model_score
        found.best = [] if score is None else [float(score)]
        return found
