"""What each signal of the early warning contributes, and what the horizon does: the fleet is trained once, read often.

    PYTHONPATH=src python benchmarks/fleet_ablation.py --seeds 0,1 --out table.md
    PYTHONPATH=src python benchmarks/fleet_ablation.py --seeds 0,1 --horizons 0.7,0.8,0.9,1.0

Every run is trained once with everything measured, as fleet.py does. What the probes have measured is then read again
by the same code with fewer kinds of quantities, and scored by fleet/score.py. (The values that a run measures do not
depend on what may warn.) With --horizons, they are read with these horizons too, and one family of runs at a time is
left out: the horizon is chosen on all others, and judged on that one.
"""

from __future__ import annotations

import argparse
import json
import logging
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fleet
from nanguard.monitor.observer import Monitor
from nanguard.monitor.quantities import KINDS, Samples
from nanguard.monitor.warner import HORIZON, Warner
from nanguard.records.alert import Alert

LATER = ("attention", "moment", "spectral", "collapse")
ROWS: dict[str, tuple[str, ...]] = {
    "outputs against the largest number": ("overflow",),
    "... and operands against zero": ("overflow", "zero"),
    "... and gradients that vanish": ("overflow", "zero", "gradient"),
    "... and updates against weights": ("overflow", "zero", "gradient", "update"),
    "... and the loss and its scale": ("overflow", "zero", "gradient", "update", "loss", "scale"),
    **{f"... and {kind}": (*[k for k in KINDS if k not in LATER], kind) for kind in LATER},
    "all but outputs": tuple(kind for kind in KINDS if kind != "overflow"),
    "the loss alone": ("loss",),
    "all": KINDS,
}
NAIVE = (
    "| naive: loss z-score > 4 | .43 | .40 | .52 | | | 21 | 2/8 |",
    "| naive: gradient norm z-score > 4 | .78 | .68 | .67 | | | 35 | 7/8 |",
    "| naive: gradient norm > 10x its running median | .39 | .34 | .20 | | | 6 | 0/8 |",
)

COLUMNS = (
    "recall at lead>=10",
    "at lead>=50",
    "by chance",
    "module",
    "time within 2x",
    "false alarms per 10,000 healthy steps",
    "claims on sudden faults",
)

MOST_FALSE_ALARMS = 1.0
"""In 10,000 healthy steps: a horizon with more is not chosen."""

Call = tuple[str, Any]
Row = dict[str, Any]
Recorded = list[tuple[Row, list[Call]]]


class Recording(Warner):
    """Writes down what it is told."""

    def __init__(self) -> None:
        super().__init__(())
        self.calls: list[Call] = []

    def hear(self, loss: float) -> None:
        self.calls.append(("hear", loss))

    def look(self, step: int, samples: Samples) -> list[Alert]:
        self.calls.append(("look", (step, dict(samples))))
        return []


@dataclass(frozen=True)
class Count:
    """Failing runs that were hit 50 steps ahead, and false alarms on healthy ones."""

    hits: int
    failing: int
    false_alarms: int
    healthy_steps: int

    def __add__(self, other: Count) -> Count:
        return Count(
            self.hits + other.hits,
            self.failing + other.failing,
            self.false_alarms + other.false_alarms,
            self.healthy_steps + other.healthy_steps,
        )

    @property
    def false_alarm_rate(self) -> float:
        return 10_000 * self.false_alarms / max(1, self.healthy_steps)

    def __str__(self) -> str:
        return (
            f"{self.hits}/{self.failing} | {self.false_alarms} in {self.healthy_steps:,} | {self.false_alarm_rate:.2f}"
        )


NOTHING = Count(0, 0, 0, 0)


def read_again(calls: list[Call], kinds: Collection[str], horizon: float = HORIZON) -> list[Alert]:
    warner, alerts = Warner(kinds, horizon=horizon), []
    for what, told in calls:
        if what == "hear":
            warner.hear(told)
        else:
            alerts += warner.look(*told)
    return alerts


def all_again(recorded: Recorded, kinds: Collection[str], horizon: float = HORIZON) -> list[Row]:
    return [{**row, "alerts": fleet.plain_alerts(read_again(calls, kinds, horizon))} for row, calls in recorded]


def record(path: Path, seed: int, every: int) -> tuple[Row, list[Call]]:
    recording = Recording()

    def watcher(model: nn.Module) -> Monitor:
        monitor = Monitor(probe_every=every)
        monitor._warner = recording
        return monitor

    seen = fleet.watch(fleet.load(path), seed, watcher)
    return {"id": path.stem, "seed": seed, "steps": len(seen.losses), "event": seen.event}, recording.calls


def record_all(runs: Path, seeds: Collection[int], every: int) -> Recorded:
    recorded = []
    for seed in seeds:
        for path in sorted(runs.glob("*.py")):
            began = time.perf_counter()
            recorded.append(record(path, seed, every))
            print(f"{path.stem:34} seed {seed}  {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    return recorded


# ---- scores ----------------------------------------------------------------------------------------------------------


def scored(rows: list[Row], labels: Mapping[str, Any]) -> dict[str, str]:
    """The columns, from what fleet/score.py prints."""
    with tempfile.TemporaryDirectory() as folder:
        alerts, known = Path(folder) / "alerts.json", Path(folder) / "labels.json"
        alerts.write_text(json.dumps(rows))
        known.write_text(json.dumps(labels))
        command = [sys.executable, str(fleet.FLEET / "score.py"), str(alerts), "--labels", str(known)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: re.search(rf"{re.escape(name)} ([\d./]+)", text) for name in COLUMNS}
    return {name: "" if each is None else each[1] for name, each in found.items()}


def counted(rows: list[Row], labels: Mapping[str, Any]) -> Count:
    columns = scored(rows, labels)
    hits, failing = map(int, columns["at lead>=50"].split("/"))
    steps = sum(row["steps"] for row in rows if labels[row["id"]]["kind"] == "healthy")
    rate = float(columns["false alarms per 10,000 healthy steps"])
    return Count(hits, failing, round(rate * steps / 10_000), steps)


def signal_rows(recorded: Recorded, labels: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, kinds in ROWS.items():
        lines.append(f"| {name} | {' | '.join(scored(all_again(recorded, kinds), labels).values())} |")
        print(lines[-1], flush=True)
    return lines


def horizon_rows(
    recorded: Recorded, labels: Mapping[str, Any], horizons: Collection[float], kinds: Collection[str]
) -> list[str]:
    """A row for each horizon, and one for the horizons that are chosen without the family that is judged."""
    by_horizon = {}
    for horizon in horizons:
        rows = all_again(recorded, kinds, horizon)
        families = sorted({labels[row["id"]]["family"] for row in rows})
        by_horizon[horizon] = {
            family: counted([row for row in rows if labels[row["id"]]["family"] == family], labels)
            for family in families
        }
    lines = [f"| {horizon} | {sum(counts.values(), NOTHING)} |" for horizon, counts in by_horizon.items()]
    chosen = chosen_without(by_horizon)
    judged = sum((by_horizon[horizon][family] for family, horizon in chosen.items()), NOTHING)
    lines.append(f"| chosen without the family that is judged | {judged} |")
    usual = max(chosen.values(), key=list(chosen.values()).count)
    lines += [f"{usual} is chosen, but for:" if set(chosen.values()) != {usual} else f"{usual} is always chosen."]
    for family, horizon in chosen.items():
        if horizon != usual:
            at_usual, at_chosen = by_horizon[usual][family], by_horizon[horizon][family]
            lines.append(f"- {family}: {horizon}, {at_chosen} (with {usual}: {at_usual})")
    print("\n".join(lines), flush=True)
    return lines


def chosen_without(by_horizon: Mapping[float, Mapping[str, Count]]) -> dict[str, float]:
    """For each family, the horizon that is best on all others: most hits, then fewest false alarms, then shortest."""
    families = next(iter(by_horizon.values()))
    chosen = {}
    for family in families:
        others = {
            horizon: sum((count for name, count in counts.items() if name != family), NOTHING)
            for horizon, counts in by_horizon.items()
        }
        allowed = {horizon: count for horizon, count in others.items() if count.false_alarm_rate <= MOST_FALSE_ALARMS}
        ranks = {horizon: (-count.hits, count.false_alarms, horizon) for horizon, count in (allowed or others).items()}
        chosen[family] = min(ranks, key=lambda horizon: ranks[horizon])
    return chosen


def numbers(text: str) -> list[float]:
    """Of the command line, separated by commas."""
    return [float(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=fleet.FLEET / "runs")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--probe-every", type=int, default=fleet.PROBE_EVERY)
    parser.add_argument(
        "--horizons",
        type=numbers,
        default=[],
        help="read again with these too, such as 0.7,0.8, and leave out one family at a time",
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help="what may warn if horizons are compared")
    parser.add_argument("--measured", type=Path, help="a file of what the runs measured: read if there is one, or made")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    logging.getLogger("nanguard").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if args.measured is not None and args.measured.exists():
        recorded: Recorded = pickle.loads(args.measured.read_bytes())
    else:
        recorded = record_all(args.runs, [int(seed) for seed in args.seeds.split(",")], args.probe_every)
        if args.measured is not None:
            args.measured.write_bytes(pickle.dumps(recorded))
    labels = {path.stem: fleet.load(path).RUN for path in sorted(args.runs.glob("*.py"))}
    lines = [*NAIVE, *signal_rows(recorded, labels)]
    if args.horizons:
        lines += ["", *horizon_rows(recorded, labels, args.horizons, args.kinds.split(","))]
    if args.out is not None:
        args.out.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
