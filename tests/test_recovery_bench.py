"""The benchmark of recoveries counts rightly, and its runs fail as they should."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
DEADLY = (
    "poisoned_batch",
    "huge_outlier",
    "nan_weight",
    "huge_weight",
    "bad_shard",
    "batchnorm_poison",
    "adam_state",
    "gan",
    "nan_microbatch",
    "half_optimizer",
    "zero_distance",
)
"""Scenarios whose fault strikes in a short run too."""


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("numpy")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import divergences
    import recovery
    import rivals

    class StepParts:
        SCENARIOS, Plain, measure, main = divergences.SCENARIOS, rivals.Plain, recovery.measure, recovery.main

        @staticmethod
        def build(name: str = "noisy", *, steps: int = 20, faulty: bool = True) -> Any:
            return divergences.SCENARIOS[name].build(0, steps, faulty)

    return StepParts


def saved(run: Any) -> Any:
    return copy.deepcopy([each.state_dict() for each in (run.model, *run.optimizers, *run.schedulers)])


def restore(run: Any, states: Any) -> None:
    for each, state in zip((run.model, *run.optimizers, *run.schedulers), copy.deepcopy(states), strict=True):
        each.load_state_dict(state)


def test_a_plain_run_loses_nothing_and_changes_nothing(parts: Any) -> None:
    result = parts.measure(parts.build(), parts.Plain)
    assert (result["finished"], result["lost"], result["recomputed"], result["interventions"]) == (True, 0, 0, {})


def test_a_batch_left_out_is_lost(parts: Any) -> None:
    class Skips(parts.Plain):
        def update(self, loss: Any) -> None:
            if self.watch.batch in (5, 6):
                self.clear()
            else:
                super().update(loss)

    result = parts.measure(parts.build(), Skips)
    assert (result["lost"], result["recomputed"], result["interventions"]) == (2, 0, {"skipped": 2})


@pytest.mark.parametrize("replays", [False, True])
def test_what_is_undone_is_lost_unless_it_is_made_again(parts: Any, replays: bool) -> None:
    class RollsBack(parts.Plain):
        def train(self) -> None:
            batches = self.run.batches
            self.run.batches = batches[:10]
            super().train()
            state = saved(self.run)
            self.run.batches = batches[10:15]
            super().train()
            restore(self.run, state)
            self.run.batches = batches[10:] if replays else batches[15:]
            super().train()
            self.run.batches = batches

    result = parts.measure(parts.build(), RollsBack)
    assert result["interventions"] == {"rolled back": 1}
    assert (result["lost"], result["recomputed"]) == ((0, 5) if replays else (5, 0))


def test_edited_weights_keep_the_history_of_the_nearest_known_ones(parts: Any) -> None:
    class Perturbs(parts.Plain):
        def update(self, loss: Any) -> None:
            super().update(loss)
            if self.watch.batch == 10:
                with torch.no_grad():
                    next(self.run.model.parameters())[0, 0].add_(1e-3)

    result = parts.measure(parts.build(), Perturbs)
    assert (result["lost"], result["interventions"]) == (0, {"edited": 1})


def test_changes_of_learning_rate_and_precision_are_seen(parts: Any) -> None:
    class Changes(parts.Plain):
        def update(self, loss: Any) -> None:
            if self.watch.batch == 7:
                self.run.precision = "fp32"
                for scheduler in self.run.schedulers:
                    scheduler.base_lrs = [lr / 2 for lr in scheduler.base_lrs]
            super().update(loss)

    assert parts.measure(parts.build(), Changes)["interventions"] == {"learning rate": 1, "precision": 1}


def test_half_an_update_of_two_optimizers_is_a_lost_batch(parts: Any) -> None:
    class Half(parts.Plain):
        def update(self, loss: Any) -> None:
            self.clip()
            for optimizer in self.run.optimizers[: 1 if self.watch.batch == 4 else 2]:
                optimizer.step()
            self.tick()

    result = parts.measure(parts.build("gan", faulty=False), Half)
    assert (result["lost"], result["interventions"]) == (1, {"skipped": 1})


@pytest.mark.parametrize("name", DEADLY)
def test_a_plain_loop_does_not_survive_and_its_clean_twin_does(parts: Any, name: str) -> None:
    steps = 80
    assert parts.measure(parts.build(name, steps=steps, faulty=False), parts.Plain)["finished"]
    assert not parts.measure(parts.build(name, steps=steps), parts.Plain)["finished"]


def test_the_script_writes_its_tables(parts: Any, tmp_path: Path) -> None:
    wanted = ["--only", "poisoned_batch,noisy", "--contenders", "nanguard,plain,isfinite,arc,stabilityguard"]
    assert parts.main([*wanted, "--quick", "--out", str(tmp_path)]) == 0
    (data,) = tmp_path.glob("recovery-*-quick-*.json")
    result = json.loads(data.read_text())
    row = result["table"]["poisoned_batch"]
    assert (row["plain"]["finished"], row["isfinite"]["finished"], row["nanguard"]["finished"]) == (False, True, True)
    assert (row["isfinite"]["lost"], row["nanguard"]["lost"]) == (1, 1)
    assert result["table"]["noisy"]["nanguard"]["interventions"] == 0
    page = data.with_suffix(".md").read_text()
    assert "| poisoned_batch |" in page
    assert "leaves healthy runs alone: yes" in page
    assert all(package in page for package in result["missing"])
