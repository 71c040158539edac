"""A SpeechBrain recipe: normalization, a schedule and an EMA after each step, a checkpoint of the best epoch."""

from __future__ import annotations

import tempfile
from typing import Any

import speechbrain as sb
import torch
import torch.nn.functional as F
from speechbrain.nnet.schedulers import NoamScheduler
from speechbrain.processing.features import InputNormalization
from speechbrain.utils.checkpoints import Checkpointer
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from framework_programs.common import NUM_EPOCHS, Batch, Epochs, Facts, Net, facts, loader

PACKAGE = "speechbrain"


class Recipe(sb.Brain):  # type: ignore[misc]
    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.average = AveragedModel(self.modules.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.means: list[float] = []

    def compute_forward(self, batch: Batch, stage: sb.Stage) -> Tensor:
        features = self.modules.normalize(batch[0][:, None], torch.ones(len(batch[0])))
        logits: Tensor = self.modules.net(features[:, 0])
        return logits

    def compute_objectives(self, predictions: Tensor, batch: Batch, stage: sb.Stage) -> Tensor:
        return F.cross_entropy(predictions, batch[1])

    def on_fit_batch_end(self, batch: Batch, outputs: Tensor, loss: Tensor, should_step: bool) -> None:
        if should_step:
            self.hparams.schedule(self.optimizer)
            self.average.update_parameters(self.modules.net)

    def on_stage_end(self, stage: sb.Stage, stage_loss: float, epoch: int | None = None) -> None:
        self.means.append(stage_loss)
        self.checkpointer.save_and_keep_only(meta={"loss": stage_loss}, min_keys=["loss"])


class Program:
    def __init__(self, *, is_guarded: bool) -> None:
        modules = {"normalize": InputNormalization(norm_type="global"), "net": Net()}
        self.brain = Recipe(
            modules,
            opt_class=lambda params: torch.optim.AdamW(params, lr=0.02),
            hparams={"schedule": NoamScheduler(0.02, 10)},
            run_opts={"device": "cpu", "noprogressbar": True},
            checkpointer=Checkpointer(tempfile.mkdtemp(), dict(modules)),
        )
        if is_guarded:
            from nanguard.integrations.speechbrain import attach

            self.guard = attach(self.brain)

    def train(self, epochs: Epochs) -> None:
        self.brain.fit(range(1, NUM_EPOCHS + 1), loader(epochs))

    def facts(self) -> Facts:
        brain: Any = self.brain
        found = facts(brain.modules.net, brain.optimizer, brain.average.module)
        normalize = brain.modules.normalize
        found.buffers += [normalize.glob_mean, normalize.glob_std]
        found.means = brain.means
        kept = brain.checkpointer.find_checkpoint(min_key="loss")
        found.best = [] if kept is None else [kept.meta["loss"]]
        return found
