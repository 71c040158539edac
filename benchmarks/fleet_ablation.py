"""What each signal of the early warning contributes, and what the horizon does: the fleet is trained once, read often.

    PYTHONPATH=src python benchmarks/fleet_ablation.py --seeds 0,1 --out table.md

Every run is trained once with everything measured, as fleet.py does. What the probes have measured is then read again
by the same code with fewer kinds of quantities, and scored by fleet/score.py. (The values that a run measures do not
depend on what may warn.)
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fleet
from nanguard.monitor.observer import Monitor
from nanguard.monitor.quantities import KINDS
from nanguard.monitor.warner import Samples, Warner
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

Call = tuple[str, Any]


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


def read_again(calls: list[Call], kinds: Collection[str]) -> list[Alert]:
    warner, alerts = Warner(kinds), []
    for what, told in calls:
        if what == "hear":
            warner.hear(told)
        else:
            alerts += warner.look(*told)
    return alerts


def record(path: Path, seed: int, every: int) -> tuple[dict[str, Any], list[Call]]:
    recording = Recording()

    def watcher(model: nn.Module) -> Monitor:
        monitor = Monitor(probe_every=every)
        monitor._warner = recording
        return monitor

    seen = fleet.watch(fleet.load(path), seed, watcher)
    return {"id": path.stem, "seed": seed, "steps": len(seen.losses), "event": seen.event}, recording.calls


def scored(rows: list[dict[str, Any]], runs: Path) -> str:
    """The cells of a row, from what fleet/score.py prints."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "alerts.json"
        path.write_text(json.dumps(rows))
        command = [sys.executable, str(fleet.FLEET / "score.py"), str(path), "--runs", str(runs)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [re.search(rf"{re.escape(name)} ([\d./]+)", text) for name in COLUMNS]
    return " | ".join("" if each is None else each[1] for each in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=fleet.FLEET / "runs")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--probe-every", type=int, default=fleet.PROBE_EVERY)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    logging.getLogger("nanguard").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    recorded = []
    for seed in map(int, args.seeds.split(",")):
        for path in sorted(args.runs.glob("*.py")):
            began = time.perf_counter()
            recorded.append(record(path, seed, args.probe_every))
            print(f"{path.stem:34} seed {seed}  {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    lines = []
    for name, kinds in ROWS.items():
        rows = [{**row, "alerts": fleet.plain_alerts(read_again(calls, kinds))} for row, calls in recorded]
        lines.append(f"| {name} | {scored(rows, args.runs)} |")
        print(lines[-1], flush=True)
    if args.out is not None:
        args.out.write_text("\n".join([*NAIVE, *lines, ""]))


if __name__ == "__main__":
    main()
