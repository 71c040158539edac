"""How early and how right warnings are: runs every program of the fleet under the guard and writes down its warnings.

    python benchmarks/fleet.py                                      the open runs, scored
    python benchmarks/fleet.py --runs DIR --out alerts.json --seeds 0,1

Each run is trained in the loop that fleet/README.md describes, with its own clipping, scheduler and GradScaler. The
guard observes it through ``HostedLoop`` and never interferes: it could only refuse a non-finite step, and with that the
run is over. Of a run only ``build``, ``make_scaler`` and the entries ``precision``, ``steps``, ``loop`` and
``max_norm`` are used; its labels are read by fleet/score.py alone.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import math
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from nanguard.hosted.loop import HostedLoop
from nanguard.monitor.observer import Monitor
from nanguard.monitor.quantities import KINDS
from nanguard.policy.policy import Policy
from nanguard.policy.rungs import Skip
from nanguard.records.alert import Alert
from nanguard.step.observers import Observer

FLEET = Path(__file__).parent / "fleet"

PROBE_EVERY = 5
"""A step of these runs takes a millisecond, and they fail after some hundred: the default would hardly look."""

_FROZEN_FOR = 50
_BEST_OF = 50
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

Watcher = Callable[[nn.Module], Observer | Sequence[Observer]]
"""Makes what watches a run."""


@dataclass(frozen=True)
class TrainedStep:
    """The model after a step, and what happened in it."""

    model: nn.Module
    loss: float
    scale: float
    is_scaled: bool
    has_finite_gradients: bool


@dataclass
class Watched:
    """What became of a run. ``event`` is the first step that failed, None if there is none."""

    losses: list[float] = field(default_factory=list)
    event: int | None = None
    frozen_for: int = 0
    weights: list[Tensor] = field(default_factory=list)
    """At the end, if it was reached."""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fleet_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def observe_policy() -> Policy:
    """Only a non-finite step is refused, any number of times."""
    return Policy(
        [Skip(times=None)], divergence=None, max_norm=None, max_consecutive_skips=None, max_skipped_share=None
    )


def train(
    program: ModuleType,
    seed: int,
    watcher: Watcher | None,
    steps: int | None = None,
    policy: Policy | None = None,
) -> Generator[TrainedStep, None, None]:
    """Yields after each step. ``watcher`` None trains without nanguard; ``policy`` None only observes."""
    run = program.RUN
    torch.manual_seed(seed)
    model, optimizer, scheduler, batch_of, loss_fn = program.build(seed)
    scaler: Any = program.make_scaler() if run["loop"] == "scaler" else None
    made = [] if watcher is None else watcher(model)
    observers = [made] if isinstance(made, Observer) else list(made)
    loop = None
    if watcher is not None:
        loop = HostedLoop(
            model,
            optimizer,
            schedulers=scheduler,
            policy=policy or observe_policy(),
            observers=observers,
            diagnose="off",
            capture="none",
        )
    try:
        dtype = _DTYPES.get(run["precision"])
        for step in range(run["steps"] if steps is None else min(steps, run["steps"])):
            batch = batch_of(step)
            optimizer.zero_grad()
            if loop is not None:
                loop.before_forward()
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = loss_fn(model, batch)
            if loop is not None:
                loop.after_forward(loss)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(optimizer)
            if loop is not None:
                loop.measure(optimizer, grad_scaler=scaler)
            finite = all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
            if run.get("max_norm"):
                nn.utils.clip_grad_norm_(model.parameters(), run["max_norm"])
            update = optimizer.step if scaler is None else lambda: scaler.step(optimizer)
            if loop is None:
                update()
            else:
                loop.step(optimizer, update, grad_scaler=scaler)
            if scaler is not None:
                scaler.update()
            if scheduler is not None:
                scheduler.step()
            scale = 1.0 if scaler is None else scaler.get_scale()
            yield TrainedStep(model, loss.item(), scale, scaler is not None, finite)
    finally:
        if loop is not None:
            loop.close()


def watch(program: ModuleType, seed: int, watcher: Watcher, policy: Policy | None = None) -> Watched:
    """Runs one program to its first failure, or to its end."""
    with contextlib.closing(train(program, seed, watcher, policy=policy)) as steps:
        return _watch(steps)


def _watch(steps: Iterator[TrainedStep]) -> Watched:
    seen = Watched()
    before: list[Tensor] = []
    for step, made in enumerate(steps):
        seen.losses.append(made.loss)
        weights = [p.detach().clone() for p in made.model.parameters()]
        same = bool(before) and all(map(torch.equal, before, weights))
        seen.frozen_for = seen.frozen_for + 1 if same else 0
        before = weights
        bad_weight = not all(bool(weight.isfinite().all()) for weight in weights)
        bad_gradient = not made.has_finite_gradients and not made.is_scaled
        is_stuck = made.scale < 1 or seen.frozen_for >= _FROZEN_FOR
        if not math.isfinite(made.loss) or bad_weight or bad_gradient or is_stuck:
            seen.event = step
            return seen
    seen.weights = before
    seen.event = diverged_at(seen.losses)
    return seen


def diverged_at(losses: list[float]) -> int | None:
    """The step from which on the loss stays above three times its best mean of 50 steps, to the end."""
    means = [math.fsum(losses[i : i + _BEST_OF]) / _BEST_OF for i in range(len(losses) - _BEST_OF + 1)]
    if not means or min(means) <= 0:
        return None
    last_good = max(place for place, loss in enumerate(losses) if loss <= 3 * min(means))
    return None if last_good == len(losses) - 1 else last_good + 1


def alerts_of(monitor: Monitor) -> list[dict[str, Any]]:
    return plain_alerts(monitor.alerts)


def plain_alerts(alerts: Sequence[Alert]) -> list[dict[str, Any]]:
    """In the format of fleet/score.py."""
    told = [alert for alert in alerts if alert.state != "withdrawn"]
    return [
        {"step": a.step, "module": a.module, "predicted": a.crossing, "quantity": a.quantity, "state": a.state}
        for a in told
    ]


def score_one(path: Path, seed: int, kinds: Collection[str], every: int) -> dict[str, Any]:
    monitors: list[Monitor] = []

    def watcher(model: nn.Module) -> Observer:
        monitor = Monitor(probe_every=every, kinds=kinds)
        monitor.bind(model, lambda event, **fields: None)
        monitors.append(monitor)
        return monitor

    seen = watch(load(path), seed, watcher)
    row = {"id": path.stem, "seed": seed, "steps": len(seen.losses), "event": seen.event}
    return {**row, "alerts": alerts_of(monitors[0])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=FLEET / "runs")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--only", default="", help="runs whose name begins with this")
    parser.add_argument("--kinds", default=",".join(KINDS), help="what may raise a warning")
    parser.add_argument("--probe-every", type=int, default=PROBE_EVERY)
    args = parser.parse_args()
    logging.getLogger("nanguard").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = []
    for seed in map(int, args.seeds.split(",")):
        for path in sorted(args.runs.glob(f"{args.only}*.py")):
            began = time.perf_counter()
            row = score_one(path, seed, args.kinds.split(","), args.probe_every)
            rows.append(row)
            first = [f"{a['step']} {a['module'] or '-'} -> {a['predicted']}" for a in row["alerts"][:3]]
            took = time.perf_counter() - began
            print(
                f"{path.stem:34} seed {seed}  {row['steps']:5} steps, event {row['event']}, {took:.1f} s: {first}",
                flush=True,
            )
    out = args.out or Path("alerts.json")
    out.write_text(json.dumps(rows, indent=1))
    if args.out is None:
        subprocess.run([sys.executable, FLEET / "score.py", out, "--runs", args.runs, "-v"], check=True)


if __name__ == "__main__":
    main()
