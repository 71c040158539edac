"""The benchmark of the early warning, on a small part of the fleet."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import fleet
import fleet_ablation
import intervention
from nanguard.monitor.observer import Monitor
from nanguard.monitor.quantities import KINDS
from nanguard.step.observers import Observer

RUNS = fleet.FLEET / "runs"
USED = ("precision", "steps", "loop", "max_norm")


def unlabelled(name: str, steps: int | None = None) -> ModuleType:
    """A run without its labels: reading one is an error."""
    program = fleet.load(RUNS / f"{name}.py")
    program.RUN = {key: value for key, value in program.RUN.items() if key in USED}
    program.RUN["steps"] = min(steps or program.RUN["steps"], program.RUN["steps"])
    return program


def watcher(monitors: list[Monitor], every: int = 5) -> fleet.Watcher:
    def make(model: nn.Module) -> Observer:
        monitors.append(Monitor(probe_every=every))
        return monitors[-1]

    return make


@pytest.mark.parametrize("name", ["fail_scaler_wnorm_collapse", "fail_vae_logvar_fp16", "fail_gan_log0_fp32"])
def test_a_watched_run_is_the_plain_run_to_the_bit(name: str) -> None:
    program = unlabelled(name, steps=12)
    plain, watched = fleet.train(program, 0, None), fleet.train(program, 0, watcher([], every=2))
    for one, other in zip(plain, watched, strict=True):
        assert one.loss == other.loss
        assert one.scale == other.scale
        assert all(map(torch.equal, one.model.parameters(), other.model.parameters()))


def test_a_failing_run_is_warned_of_and_a_healthy_one_is_not(tmp_path: Path) -> None:
    monitors: list[Monitor] = []
    seen = fleet.watch(unlabelled("fail_drift_gain_fp16"), 0, watcher(monitors))
    assert seen.event is not None
    first = monitors[0].alerts[0]
    assert first.module == "mix"
    assert first.step <= seen.event - 50
    assert fleet.watch(unlabelled("healthy_near_fp16_limit", steps=150), 0, watcher(monitors)).event is None
    assert monitors[1].alerts == []
    row = {"id": "fail_drift_gain_fp16", "seed": 0, "steps": len(seen.losses), "event": seen.event}
    out = tmp_path / "alerts.json"
    out.write_text(json.dumps([{**row, "alerts": fleet.alerts_of(monitors[0])}]))
    scored = subprocess.run([sys.executable, fleet.FLEET / "score.py", out], capture_output=True, text=True, check=True)
    assert "at lead>=50 1/1" in scored.stdout
    assert "module 1/1" in scored.stdout


@pytest.mark.campaign
def test_acting_on_the_warning_lets_a_failing_run_finish() -> None:
    row = intervention.compare(RUNS / "fail_underflow_lossweight_fp16.py", 0)
    assert row["without"]["event"] is not None
    assert row["acting"]["event"] is None
    assert not row["same"]
    assert row["first_alert"] < row["answers"][0]["step"] < row["without"]["event"]
    facts = {
        "device": "x",
        "date": "today",
        "torch": "2",
        "seed": 0,
        "rungs": list(intervention.ANSWERS),
        "rows": [row],
    }
    assert "finish if warnings are answered: **1 of 1**" in intervention.markdown(facts)


@pytest.mark.parametrize(
    ("losses", "step"),
    [([1.0] * 60 + [4.0] * 60, 60), ([1.0] * 60 + [4.0] * 50 + [1.0], None), ([1.0] * 120, None), ([-1.0] * 90, None)],
)
def test_a_run_has_diverged_if_its_loss_stays_high(losses: list[float], step: int | None) -> None:
    assert fleet.diverged_at(losses) == step


def test_what_may_warn_can_be_chosen() -> None:
    row = fleet.score_one(RUNS / "fail_lr_deeplinear_sharpen.py", 0, KINDS[:1], 5)
    assert row["id"] == "fail_lr_deeplinear_sharpen"
    assert row["steps"] == row["event"] + 1


def test_a_horizon_is_chosen_without_the_family_that_is_judged() -> None:
    short, long = 0.7, 1.0
    steps = 10_000
    by_horizon = {
        short: {
            "quiet": fleet_ablation.Count(1, 2, 0, steps),
            "loud": fleet_ablation.Count(1, 2, 0, steps),
            "easy": fleet_ablation.Count(2, 2, 0, steps),
        },
        long: {
            "quiet": fleet_ablation.Count(2, 2, 0, steps),
            "loud": fleet_ablation.Count(1, 2, 9, steps),
            "easy": fleet_ablation.Count(2, 2, 0, steps),
        },
    }
    assert fleet_ablation.chosen_without(by_horizon) == {"quiet": short, "loud": long, "easy": short}


def test_what_was_measured_can_be_read_again_with_another_horizon() -> None:
    row, calls = fleet_ablation.record(RUNS / "fail_drift_gain_fp16.py", 0, 5)
    near, far = (fleet_ablation.read_again(calls, KINDS, horizon) for horizon in (0.1, 1.0))
    assert far
    assert not near or far[0].step <= near[0].step
    labels = {row["id"]: fleet.load(RUNS / f"{row['id']}.py").RUN}
    rows = [{**row, "alerts": fleet.plain_alerts(far)}]
    assert fleet_ablation.counted(rows, labels) == fleet_ablation.Count(1, 1, 0, 0)
