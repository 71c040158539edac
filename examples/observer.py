"""An observer that prints one line every 100 steps. It watches the run and never changes it.

python examples/observer.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanguard
from nanguard.records.steps import Incident, Outcome

Batch = tuple[Tensor, Tensor]


class Progress(nanguard.Observer):
    """Prints the step, the mean loss since the last line and the gradient norm; and each incident at once."""

    def __init__(self, every: int = 100) -> None:
        self.every = every
        self.losses: list[float] = []

    def on_heard(self, outcome: Outcome) -> None:
        reading = outcome.verdict.reading
        if outcome.applied:
            self.losses.append(reading.loss)
        if (reading.step + 1) % self.every == 0 and self.losses:
            loss = sum(self.losses) / len(self.losses)
            print(f"step {reading.step + 1}: loss {loss:.3f}, gradient norm {reading.norms[0]:.3f}")
            self.losses.clear()

    def on_incident(self, incident: Incident) -> None:
        print(f"step {incident.reading.step}: {incident.outcome.action.response}")


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    inputs = torch.randn(400, 16, 8)
    inputs[150, 0, 0] = float("nan")  # one bad sample
    data = [(x, x[:, :1].nan_to_num()) for x in inputs]
    with nanguard.Guard(model, optimizer, observers=[Progress()]) as guard:
        for batch in guard.epoch(data):
            guard.step(loss_fn, batch)


if __name__ == "__main__":
    main()
