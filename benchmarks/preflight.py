"""What preflight finds before it happens: the programs of the zoo with a healthy prefix of their batches.

    python benchmarks/preflight.py                                  the open cases
    python benchmarks/preflight.py --cases benchmarks/zoo/own       the others

A faulty case is given the batches from before the step at which it becomes non-finite (``step`` of its label, or
``loss_step`` if something is wrong from the start and shows later); a healthy one is given all its batches. A fault is
found if a finding names its line. A case that fails at its first step has no healthy prefix, and is left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import platform
import sys
import time
import warnings
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import torch

import nanguard
from nanguard.preflight_checks.record import PreflightFinding, PreflightReport, Reach
from zoo import ZOO, load, scale_of

MINUTES = 1.0


def examined(path: Path, minutes: float) -> PreflightReport | None:
    """None if there is no healthy batch."""
    case = load(path)
    facts = case.CASE
    model, optimizer, batches, loss_fn = case.build(0)
    step = facts["step"] if facts["step"] != 0 else facts.get("loss_step", 0)
    healthy = list(islice(batches, step))
    if not healthy:
        return None
    return nanguard.preflight(
        model,
        loss_fn,
        healthy[0],
        optimizer,
        more_batches=healthy[1:],
        precision=facts["precision"],
        loss_scale=scale_of(case) if facts.get("loop") == "scaler" else None,
        minutes=minutes,
    )


def row(path: Path, report: PreflightReport | None, seconds: float) -> dict[str, Any]:
    label = load(path).CASE
    findings = () if report is None else report.findings
    told = {
        "id": path.stem,
        "healthy": label["cause"] == "none",
        "latent": report is not None,
        "cause": label["cause"],
        "phase": label["phase"],
        "seconds": round(seconds, 1),
        "findings": [_told(finding) for finding in findings],
    }
    right = [finding for finding in findings if label["line"] and label["line"] in _line(finding)]
    told["found"] = bool(right)
    told["reach"] = right[0].reach if right else ""
    told["cause_right"] = any(f.diagnosis.cause in [label["cause"], *label.get("cause_alt", [])] for f in right)
    return told


def _line(finding: PreflightFinding) -> str:
    return "" if finding.diagnosis.source is None else finding.diagnosis.source.text


def _told(finding: PreflightFinding) -> dict[str, Any]:
    diagnosis = finding.diagnosis
    return {
        "severity": finding.severity,
        "reach": finding.reach,
        "stress": finding.stress,
        "cause": diagnosis.cause,
        "op": diagnosis.op,
        "module": diagnosis.module,
        "line": _line(finding),
    }


def summary(rows: list[dict[str, Any]]) -> str:
    latent = [each for each in rows if not each["healthy"] and each["latent"]]
    found = [each for each in latent if each["found"]]
    takes = [f"{reach} {count}" for reach in get_args(Reach) if (count := sum(e["reach"] == reach for e in found))]
    healthy = [each for each in rows if each["healthy"]]
    false = [each for each in healthy if each["findings"]]
    lines = [
        f"faults found before they happen: {len(found)} of {len(latent)}"
        f" ({sum(e['cause_right'] for e in found)} with the right cause)",
        f"healthy programs with a report: {len(false)} of {len(healthy)}",
        f"left out, since they fail at the first step: {sum(not e['latent'] for e in rows)}",
        f"by what it takes: {', '.join(takes)}",
    ]
    return "\n".join(lines)


def page(rows: list[dict[str, Any]], cases: Path) -> str:
    """The result as a document."""
    today = datetime.date.today().isoformat()
    where = f"CPU {platform.machine()}, torch {torch.__version__}, one thread"
    lines = [f"# Preflight on {cases.name}: {where}, {today}", "", "```", summary(rows), "```", ""]
    lines += ["| case | cause | found | takes | findings | s |", "| --- | --- | --- | --- | --- | ---: |"]
    for each in rows:
        found = "left out" if not each["latent"] else "" if each["healthy"] else "yes" if each["found"] else "no"
        told = "; ".join(f"{f['severity']} {f['cause']} ({f['reach']})" for f in each["findings"])
        lines.append(f"| {each['id']} | {each['cause']} | {found} | {each['reach']} | {told} | {each['seconds']} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="What preflight finds before it happens.")
    parser.add_argument("--cases", type=Path, default=ZOO / "cases", help="a folder of cases")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for each case")
    parser.add_argument("--out", type=Path, help="a name to write to, as .json and .md")
    parser.add_argument("--only", nargs="*", help="ids of cases")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each finding")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("nanguard").setLevel(logging.CRITICAL)
    rows = []
    paths = [path for path in sorted(args.cases.glob("*.py")) if not args.only or path.stem in args.only]
    for number, path in enumerate(paths, start=1):
        print(f"\r{number}/{len(paths)} {path.stem:40s}", end="", file=sys.stderr, flush=True)
        began = time.monotonic()
        try:
            report = examined(path, args.minutes)
        except Exception as error:  # one program that cannot be run says nothing about the others
            print(f"\n{path.stem}: {type(error).__name__}: {error}", file=sys.stderr)
            report = PreflightReport(findings=(), num_steps=0, seconds=0.0)
        rows.append(row(path, report, time.monotonic() - began))
        if args.verbose and report is not None:
            print(f"\n{path.stem}: {rows[-1]['found']}\n{report}\n{report.refused}")
    print(f"\r{summary(rows)}")
    if args.out is not None:
        args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(page(rows, args.cases))


if __name__ == "__main__":
    main()
