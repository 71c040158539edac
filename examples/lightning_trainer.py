"""Lightning with a bad batch in each epoch: the run goes on, and all its numbers stay finite.

pip install 'nanguard[lightning]'
python examples/lightning_trainer.py
"""

from __future__ import annotations

import logging
import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from nanguard.integrations.lightning import GuardCallback


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    inputs = torch.randn(640, 16)
    labels = inputs[:, :4].argmax(1)
    inputs[333, 5] = float("nan")  # one damaged record
    guard = GuardCallback()
    with tempfile.TemporaryDirectory() as folder:
        best = ModelCheckpoint(folder, monitor="train_loss_epoch")
        trainer = pl.Trainer(
            max_epochs=5,
            accelerator="cpu",
            precision="bf16-mixed",
            gradient_clip_val=1.0,
            callbacks=[guard, best, EarlyStopping("train_loss_epoch", patience=2)],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Classifier(), DataLoader(TensorDataset(inputs, labels), batch_size=32))
        print(f"epochs: {trainer.current_epoch}, best: {best.best_model_path.rpartition('/')[2]}")
    print(f"mean loss of the last epoch: {float(trainer.callback_metrics['train_loss_epoch']):.3f}")
    print(f"applied={guard.counts['applied']}, skipped={guard.counts['skipped']}")
    diagnosis = guard.incidents[0].outcome.diagnosis
    print(f"cause: {diagnosis.cause}, sample {diagnosis.samples}" if diagnosis else "cause: unknown")


if __name__ == "__main__":
    main()
