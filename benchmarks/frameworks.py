"""One NaN batch in each framework: alone, under nanguard run, and with its integration. A dated table.

    python benchmarks/frameworks.py                  # all frameworks, printed and written to results/
    python benchmarks/frameworks.py --only timm      # one, printed

Each program in framework_programs/ trains the same small model in the way of its framework, on a CPU. Everything is
compared with a run of the same program, alone, whose data never had the batch: "same" means equal to the bit.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import logging
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "integrations" / "index.md"
MARKED = re.compile(r"(<!-- frameworks:begin -->\n).*?(<!-- frameworks:end -->)", re.DOTALL)
FRAMEWORKS = {
    "lightning": "Lightning",
    "fabric": "Lightning Fabric",
    "transformers": "Hugging Face Trainer",
    "accelerate": "Accelerate",
    "speechbrain": "SpeechBrain",
    "timm": "timm's train.py",
}
COLUMNS = {
    "weights": "weights",
    "optimizer": "optimizer",
    "buffers": "BatchNorm",
    "average": "EMA",
    "schedule": "schedule",
    "means": "mean loss",
    "best": "best checkpoint",
}
KINDS = {"alone": "alone", "run": "under `nanguard run`", "attached": "**with its integration**"}
METHOD = (
    "A small model with BatchNorm trains for three epochs of eight batches; one value of one batch of the first epoch "
    "is NaN. Everything is compared with a run of the same program, alone, whose data never had that batch: *same* is "
    "equal to the bit. *Mean loss*: of each epoch, or as the framework logs it. *Best checkpoint*: the loss by which "
    "the framework, or the loop, has chosen it. –: the program has no such thing."
)
SKIPPED = 77
"""The exit status of a framework that cannot be run here."""


def compared(found: Any, expected: Any) -> str:
    """``same``, ``NaN``, ``differs``; empty if the program has no such thing."""
    if not found and not expected:
        return ""
    if any(not bool(torch.isfinite(torch.as_tensor(value)).all()) for value in found):
        return "NaN"
    if len(found) == len(expected) and all(map(_is_equal, found, expected)):
        return "same"
    return "differs" if found else "none"


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return bool(one == other) or (math.isnan(one) and math.isnan(other))


def run_one(name: str, kinds: Sequence[str]) -> dict[str, Any]:
    """In this process: the perfect run, and the runs with the bad batch."""
    programs = importlib.import_module(f"framework_programs.with_{name}")
    from framework_programs.common import make_epochs, with_nan, without_batch

    epochs = make_epochs()
    perfect, _ = _trained(programs, without_batch(epochs), is_guarded=False)
    rows: dict[str, Any] = {"version": importlib.metadata.version(programs.PACKAGE)}
    for kind in kinds:
        found, ended = _trained(programs, with_nan(epochs), is_guarded=kind == "attached")
        told = {column: compared(getattr(found, column), getattr(perfect, column)) for column in COLUMNS}
        rows[kind] = {**told, "ended": ended}
    return rows


def _trained(programs: Any, epochs: Any, *, is_guarded: bool) -> tuple[Any, str]:
    program = programs.Program(is_guarded=is_guarded)
    try:
        program.train(epochs)
    except Exception as error:
        return program.facts(), f"ends with {type(error).__name__} ({str(error).split('. ')[0]})."
    return program.facts(), ""


def run_apart(name: str) -> dict[str, Any]:
    """In processes of their own: frameworks hold state of the process, and one process is under ``nanguard run``."""
    rows = _process([], name, ("alone", "attached"))
    if "skipped" not in rows:
        rows["run"] = _process(["-m", "nanguard", "run"], name, ("alone",))["alone"]
    return rows


def _process(command: list[str], name: str, kinds: Sequence[str]) -> dict[str, Any]:
    source = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *command, str(Path(__file__).resolve()), "--one", name, "--kinds", ",".join(kinds)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)
    if done.returncode == SKIPPED:
        return {"skipped": done.stdout.strip()}
    if done.returncode != 0:
        raise RuntimeError(f"{name} failed:\n{done.stdout}\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def table(results: dict[str, Any]) -> str:
    lines = [f"| | | {' | '.join(COLUMNS.values())} |", f"| --- | --- |{' --- |' * len(COLUMNS)}"]
    notes = []
    for name, rows in results["frameworks"].items():
        title = FRAMEWORKS[name]
        if "skipped" in rows:
            notes.append(f"{title} was not run: {rows['skipped']}.")
            continue
        for kind, how in KINDS.items():
            cells = [rows[kind][column] or "–" for column in COLUMNS]
            first = f"{title} {rows['version']}" if kind == "alone" else ""
            lines.append(f"| {first} | {how} | {' | '.join(cells)} |")
        notes += [f"{title}, {how}: {rows[kind]['ended']}" for kind, how in KINDS.items() if rows[kind]["ended"]]
    where = f"{results['machine']}, torch {results['torch']}, {results['date']}."
    return "\n".join([*lines, "", " ".join([where, *notes])]) + "\n"


def newest() -> dict[str, Any]:
    paths = sorted(RESULTS.glob("frameworks-*.json"), key=lambda path: path.stem[-10:])
    result: dict[str, Any] = json.loads(paths[-1].read_text())
    return result


def filled(page: str, results: dict[str, Any]) -> str:
    """The page with the table of these results."""
    return MARKED.sub(lambda match: match[1] + table(results) + match[2], page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="one of " + ", ".join(FRAMEWORKS))
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--kinds", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args.one, args.kinds.split(","))
        return
    names = [name for name in FRAMEWORKS if args.only in ("", name)]
    results: dict[str, Any] = {
        "machine": f"cpu-{platform.machine()}",
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "frameworks": {name: run_apart(name) for name in names},
    }
    print(table(results))
    if not args.only:
        path = RESULTS / f"frameworks-{results['machine'].replace('_', '-')}-{results['date']}.json"
        path.write_text(json.dumps(results, indent=1) + "\n")
        path.with_suffix(".md").write_text(f"# One NaN batch in each framework\n\n{METHOD}\n\n{table(results)}")
        PAGE.write_text(filled(PAGE.read_text(), results))


def use_packages_without_kernels() -> None:
    """Torchvision and torchaudio have no CPU build for every torch; timm and SpeechBrain import them, and that is all.

    torchvision may lie apart, in a folder of that name in the environment.
    """
    apart = Path(sys.prefix) / "torchvision"
    if apart.exists():
        sys.path.append(str(apart))
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    if importlib.util.find_spec("torchaudio") is None:
        stand_in = types.ModuleType("torchaudio")
        stand_in.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
        sys.modules["torchaudio"] = stand_in


def one(name: str, kinds: Sequence[str]) -> None:
    """What a process of its own does. The result is the last line that it prints."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    use_packages_without_kernels()
    try:
        rows = run_one(name, kinds)
    except ModuleNotFoundError as error:
        print(f"{error.name} is not installed")
        sys.exit(SKIPPED)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
