"""The Hugging Face Trainer: the loss is logged in each epoch, and the best checkpoint is kept."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainingArguments

from framework_programs.common import Batch, Epochs, Facts, Net, facts

PACKAGE = "transformers"
SIZE = 8


class Classifier(nn.Module):
    """The Trainer wants a model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class InOrder(Trainer):  # type: ignore[misc]
    def _get_train_sampler(self, *args: Any) -> Any:
        return SequentialSampler(self.train_dataset)


def samples(batches: list[Batch]) -> list[dict[str, Tensor]]:
    return [{"x": x, "labels": y} for batch in batches for x, y in zip(*batch, strict=True)]


class Program:
    """All batches are one epoch of the Trainer, which wants epochs of equal length; it logs each eight steps."""

    def __init__(self, *, is_guarded: bool) -> None:
        self.is_guarded = is_guarded
        self.model = Classifier()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.95**step)

    def train(self, epochs: Epochs) -> None:
        batches = [batch for each in epochs for batch in each]
        arguments = TrainingArguments(
            tempfile.mkdtemp(),
            per_device_train_batch_size=SIZE,
            num_train_epochs=1,
            logging_steps=len(batches),
            logging_first_step=False,
            eval_strategy="epoch",
            save_strategy="epoch",
            metric_for_best_model="loss",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        self.trainer = InOrder(
            self.model,
            arguments,
            train_dataset=samples(batches),
            eval_dataset=samples(list(epochs[-1])),
            optimizers=(self.optimizer, self.schedule),
        )
        if self.is_guarded:
            from nanguard.integrations.transformers import attach

            self.guard = attach(self.trainer)
        self.trainer.train()

    def facts(self) -> Facts:
        found = facts(self.model.net, self.optimizer)
        found.means = [entry["loss"] for entry in self.trainer.state.log_history if "loss" in entry]
        best = self.trainer.state.best_metric
        found.best = [] if best is None else [float(best)]
        return found
