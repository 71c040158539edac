"""A SpeechBrain recipe, guarded by one line: a NaN in one utterance costs one step, and nothing else.

pip install 'nanguard[speechbrain]' torchaudio
python examples/speechbrain_brain.py
"""

from __future__ import annotations

from typing import Any

import speechbrain as sb
import torch
import torch.nn.functional as F
from speechbrain.nnet.schedulers import NoamScheduler
from speechbrain.processing.features import InputNormalization
from torch import Tensor, nn
from torch.utils.data import DataLoader

from nanguard.integrations.speechbrain import attach

Batch = tuple[Tensor, Tensor]


class Recipe(sb.Brain):  # type: ignore[misc]
    """Which word is it? Features are normalized, and the schedule moves with each step."""

    def compute_forward(self, batch: Batch, stage: sb.Stage) -> Tensor:
        features = self.modules.normalize(batch[0], torch.ones(len(batch[0])))
        logits: Tensor = self.modules.net(features.mean(dim=1))
        return logits

    def compute_objectives(self, predictions: Tensor, batch: Batch, stage: sb.Stage) -> Tensor:
        return F.cross_entropy(predictions, batch[1])

    def on_fit_batch_end(self, batch: Batch, outputs: Tensor, loss: Tensor, should_step: bool) -> None:
        if should_step:  # False after a skipped step
            self.hparams.schedule(self.optimizer)

    def on_stage_end(self, stage: sb.Stage, stage_loss: float, epoch: int | None = None) -> None:
        print(f"epoch {epoch}, {stage.name.lower()} loss {stage_loss:.3f}")


def make_batches(number: int) -> list[Batch]:
    words = torch.randint(0, 4, (number, 16))
    means = 2 * torch.eye(4, 20)
    return [(torch.randn(16, 30, 20) + means[labels][:, None], labels) for labels in words]


def loader(batches: Any) -> DataLoader[Batch]:
    return DataLoader(batches, batch_size=None)


def main() -> None:
    torch.manual_seed(0)
    train, valid = make_batches(60), make_batches(10)
    train[25][0][3, 7, 2] = float("nan")  # one value of one utterance
    net = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    hparams: dict[str, Any] = {"schedule": NoamScheduler(lr_initial=0.01, n_warmup_steps=20)}
    brain = Recipe(
        {"normalize": InputNormalization(norm_type="global"), "net": net},
        opt_class=lambda params: torch.optim.AdamW(params, lr=0.01),
        hparams=hparams,
        run_opts={"device": "cpu", "noprogressbar": True},
    )
    with attach(brain) as guard:
        brain.fit(range(1, 4), loader(train), loader(valid))
    print(f"{guard.counts['applied']} steps applied, {guard.counts['skipped']} skipped")
    print(f"schedule at step {hparams['schedule'].n_steps}, weights finite: {not guard.unsound()}")


if __name__ == "__main__":
    main()
