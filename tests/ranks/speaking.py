"""What a rank does in the cases of ``test_integration_speechbrain.py`` with several ranks."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

import test_integration_speechbrain as recipes
from helpers import differences


class OnRanks(recipes.Recipe):
    """Without an average, which cannot copy DDP."""

    def on_fit_start(self) -> None:
        recipes.sb.Brain.on_fit_start(self)
        self.told: list[Any] = []
        self.average = torch.nn.Module()
        self.average.update_parameters = lambda model: None  # type: ignore[assignment]


def make() -> Any:
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    brain = recipes.make(OnRanks, distributed_backend="gloo")
    brain.modules["net"][1] = torch.nn.LayerNorm(8)  # SyncBatchNorm, which SpeechBrain makes of others, needs a GPU
    return brain


def own_share(batches: list[recipes.Batch]) -> list[recipes.Batch]:
    half = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    return [(x[half], y[half], name) for x, y, name in batches]


def guarded(*, fault: str) -> dict[str, Any]:
    """Rank 1 has a bad batch."""
    batches = recipes.make_batches()
    bad = recipes.spoiled(batches, 3, fault) if dist.get_rank() == 1 else batches
    brain = make()
    with recipes.attach(brain) as guard:
        recipes.fit(brain, own_share(bad), own_share(batches))
    expected = recipes.fit(make(), own_share(batches[:3] + batches[4:]), own_share(batches))
    (incident,) = guard.incidents
    assert incident.diagnosis is not None
    return {
        "differences": differences(recipes.facts(brain), recipes.facts(expected)),
        "applied": guard.counts["applied"],
        "cause": incident.diagnosis.cause,
        "line": incident.diagnosis.source.text if incident.diagnosis.source else "",
    }
