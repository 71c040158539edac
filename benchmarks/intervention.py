"""Does acting on a warning help? Trains every program of the fleet with rungs that answer warnings, and without.

    PYTHONPATH=src python benchmarks/intervention.py                # the open runs with one seed: some ten minutes
    PYTHONPATH=src python benchmarks/intervention.py --only fail_drift

Both runs are guarded, watched with the same monitor and trained in the loop of fleet.py; they differ in the rungs for
warnings alone. A run finishes if it reaches its last step without the event that fleet/README.md defines; a loss above
three times its best for less than the last 50 steps does not count. A healthy run has to be the same with and without,
to the bit.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import platform
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fleet import FLEET, PROBE_EVERY, Watched, load, observe_policy, watch
from nanguard.monitor.observer import Monitor
from nanguard.policy.policy import Policy
from nanguard.policy.rungs import LowerLR, RaisePrecision, Rung
from nanguard.step.observers import Observer

ANSWERS: dict[str, Rung] = {
    'RaisePrecision("module", when="alert", times=8)': RaisePrecision("module", when="alert", times=8),
    'RaisePrecision("model", when="alert", times=1)': RaisePrecision("model", when="alert", times=1),
    'LowerLR(0.3, when="alert", times=6)': LowerLR(0.3, when="alert", times=6),
}


class Answers(Observer):
    """Collects what was done about warnings."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def on_event(self, event: str, fields: Any) -> None:
        if event == "answered":
            self.told.append({name: fields[name] for name in ("step", "module", "response", "did")})


def run(path: Path, seed: int, answers: Sequence[Rung]) -> tuple[Watched, list[dict[str, Any]], int | None]:
    """What became of the run, what was done about warnings, and the step of the first one."""
    monitors: list[Monitor] = []
    collected = Answers()

    def watcher(model: nn.Module) -> Sequence[Observer]:
        monitors.append(Monitor(probe_every=PROBE_EVERY))
        return [monitors[0], collected]

    base = observe_policy()
    policy = Policy(
        [*answers, *base.ladder], divergence=None, max_norm=None, max_consecutive_skips=None, max_skipped_share=None
    )
    seen = watch(load(path), seed, watcher, policy)
    first = next((alert.step for alert in monitors[0].alerts if alert.state == "raised"), None)
    return seen, collected.told, first


def event_of(seen: Watched) -> int | None:
    """The step at which the run failed. ``weights`` are there if it reached its end: then only its loss can be bad."""
    if seen.event is not None and seen.weights and len(seen.losses) - seen.event < 50:
        return None
    return seen.event


def last_loss(seen: Watched) -> float | None:
    """The mean of the last 50 losses; None if one is not finite."""
    losses = seen.losses[-50:]
    return math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else None


def compare(path: Path, seed: int) -> dict[str, Any]:
    plain, _, first = run(path, seed, ())
    acted, told, _ = run(path, seed, tuple(ANSWERS.values()))
    same = plain.losses == acted.losses and all(map(torch.equal, plain.weights, acted.weights))
    return {
        "id": path.stem,
        "seed": seed,
        "first_alert": first,
        "without": {"event": event_of(plain), "steps": len(plain.losses), "loss": last_loss(plain)},
        "acting": {"event": event_of(acted), "steps": len(acted.losses), "loss": last_loss(acted)},
        "best_before": best(plain),
        "same": same,
        "answers": told,
    }


def best(seen: Watched) -> float:
    """The lowest mean of 50 losses in a row of the run without acting: what it had reached before it failed."""
    losses = [loss for loss in seen.losses if math.isfinite(loss)]
    means = [math.fsum(losses[i : i + 50]) / 50 for i in range(max(1, len(losses) - 49))]
    return min(means)


def in_words(answers: Sequence[dict[str, Any]]) -> str:
    if not answers:
        return "nothing"
    counts: dict[str, int] = {}
    for each in answers:
        did = each["did"] if each["response"] == "raise_precision" else "learning rate times 0.3"
        did = did.replace(" from now on", "")
        counts[did] = counts.get(did, 0) + 1
    return "; ".join(did if number == 1 else f"{did} ({number} times)" for did, number in counts.items())


def outcome(end: dict[str, Any]) -> str:
    return f"finished, loss {end['loss']:.4g}" if end["event"] is None else f"failed at step {end['event']:,}"


def markdown(facts: dict[str, Any]) -> str:
    rows = facts["rows"]
    failing = [row for row in rows if row["without"]["event"] is not None]
    healthy = [row for row in rows if row["without"]["event"] is None]
    warned = [row for row in failing if row["answers"]]
    saved = [row for row in failing if row["acting"]["event"] is None]
    later = [row for row in failing if row not in saved and row["acting"]["event"] > row["without"]["event"]]
    changed = [row["id"] for row in healthy if not row["same"]]
    rungs = "; ".join(f"`{rung}`" for rung in facts["rungs"])
    lines = [
        f"# Acting on warnings, {facts['device']}, {facts['date']}",
        "",
        f"torch {facts['torch']}, seed {facts['seed']}, `probe_every={PROBE_EVERY}`. Rungs for warnings: {rungs}.",
        "",
        f"- failing runs: {len(failing)}; a warning was answered in {len(warned)}",
        f"- finish if warnings are answered: **{len(saved)} of {len(failing)}**; without: 0",
        f"- fail later than without: {len(later)}",
        f"- healthy runs: {len(healthy)}; the same to the bit: {len(healthy) - len(changed)}"
        + (f" (not: {', '.join(changed)})" if changed else ""),
        "",
        "| run | without | first warning | what was done | acting | best loss without |",
        "| --- | --- | ---: | --- | --- | ---: |",
    ]
    for row in failing:
        first = "" if row["first_alert"] is None else f"{row['first_alert']:,}"
        cells = [row["id"], outcome(row["without"]), first, in_words(row["answers"]), outcome(row["acting"])]
        lines.append("| " + " | ".join([*cells, f"{row['best_before']:.4g}"]) + " |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=FLEET / "runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="runs whose name begins with this")
    parser.add_argument("--out", type=Path, help="folder to write to; nothing is written without it")
    args = parser.parse_args()
    logging.getLogger("nanguard").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = []
    for path in sorted(args.runs.glob(f"{args.only}*.py")):
        began = time.perf_counter()
        row = compare(path, args.seed)
        rows.append(row)
        took = time.perf_counter() - began
        ends = f"{outcome(row['without'])} -> {outcome(row['acting'])}, same {row['same']}"
        print(f"{path.stem:34} {ends}; {in_words(row['answers'])} ({took:.0f} s)", flush=True)
    facts = {
        "device": f"CPU {platform.machine()}",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "seed": args.seed,
        "rungs": list(ANSWERS),
        "rows": rows,
    }
    text = markdown(facts)
    print(f"\n{text}")
    if args.out is not None:
        path = args.out / f"intervention-cpu-{platform.machine().replace('_', '-')}-{facts['date']}.json"
        path.write_text(json.dumps(facts, indent=1) + "\n")
        path.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
