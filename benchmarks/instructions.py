"""What nanguard adds to a step on the host, in instructions of the processor: the same number on a busy machine.

    PYTHONPATH=src python benchmarks/instructions.py                 # needs valgrind; about ten minutes
    PYTHONPATH=src python benchmarks/instructions.py --rows MLP,GAN
    PYTHONPATH=src python benchmarks/instructions.py --smoke         # does the script itself work?

Wall-clock times of small steps differ by several percent between two processes of one program, and by more on a machine
that others use. So a change of the hot path is judged by this count first, and by `run_overhead.py` and `overhead.py`
afterwards.

Each program runs under callgrind, plain and guarded, in one process with one thread, and some steps after a warm-up are
counted. "As on a GPU" means a fused optimizer, and a host that hears of a step later, without the kernels of a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import nanguard
from overhead import header, say, write
from run_programs import GPTS, OTHERS, Fault

HERE = Path(__file__).parent
CPU = torch.device("cpu")
METHOD = (
    "Instructions of a step, in thousands, as callgrind counts them, with one thread. Each program runs plain and "
    "guarded in one process; the steps after a warm-up are counted. Kernels of the processor are part of the count."
)
Train = Callable[["Counter", int], None]


class Counter:
    """Counts the instructions from one step to a later one. Stands for the timer of `run_programs.py`."""

    def __init__(self, first: int, num_steps: int) -> None:
        self._first, self._last = first, first + num_steps
        self._num_steps = 0

    def step(self) -> None:
        self._num_steps += 1
        if self._num_steps == self._first:
            _control("--instr=on")
        elif self._num_steps == self._last:
            _control("--dump=steps")
            _control("--instr=off")


def _control(what: str) -> None:
    subprocess.run(["callgrind_control", what, str(os.getpid())], stdout=subprocess.DEVNULL, check=True)


# ── Programs ─────────────────────────────────────────────────────────────────────────────────────────────


def of_run_programs(name: str) -> Train:
    def train(counter: Counter, steps: int) -> None:
        OTHERS[name]()(CPU, steps, Fault("none", steps), counter)

    return train


def gpt() -> tuple[Any, Any, torch.optim.Optimizer]:
    workload = GPTS["smoke_gpt"]
    model = workload.build(CPU)
    return model, workload.batches(CPU, num=8), torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def plain_gpt(counter: Counter, steps: int) -> None:
    model, batches, optimizer = gpt()
    for step in range(steps):
        tokens, targets = batches[step % 8]
        loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        counter.step()


def guard_step(counter: Counter, steps: int) -> None:
    model, batches, optimizer = gpt()
    with nanguard.Guard(model, optimizer, max_norm=1.0, sync="late") as guard:
        for step in range(steps):
            guard.step(lambda model, batch: model(*batch), batches[step % 8])
            counter.step()


def own_loop(counter: Counter, steps: int) -> None:
    model, batches, optimizer = gpt()
    with nanguard.Guard(model, optimizer, max_norm=1.0, sync="late") as guard:
        for step in range(steps):
            with guard.autocast():
                loss = model(*batches[step % 8])
            guard.backward(loss)
            guard.update()
            counter.step()


@dataclass(frozen=True, kw_only=True)
class Row:
    """``guarded`` is another program than ``plain``; None: the same under ``install(sync=...)``."""

    name: str
    plain: Train
    guarded: Train | None = None
    sync: Any = "auto"


ROWS = (
    Row(name="nanguard run: MLP", plain=of_run_programs("mlp")),
    Row(name="nanguard run: LSTM", plain=of_run_programs("lstm")),
    Row(name="nanguard run: CNN with BatchNorm", plain=of_run_programs("cnn")),
    Row(name="nanguard run: GAN, two optimizers", plain=of_run_programs("gan")),
    Row(name="nanguard run: GPT, as on a GPU", plain=plain_gpt, sync="late"),
    Row(name="guard.step: GPT, as on a GPU", plain=plain_gpt, guarded=guard_step),
    Row(name="your own loop: GPT, as on a GPU", plain=plain_gpt, guarded=own_loop),
)


# ── Under callgrind ──────────────────────────────────────────────────────────────────────────────────────


def count(names: list[str], warm_up: int, num_steps: int) -> None:
    """Runs the programs in this process: callgrind writes a file for each, in the order of the rows."""
    torch.set_num_threads(1)
    for row in ROWS:
        if row.name not in names:
            continue
        for guarded in (False, True):
            torch.manual_seed(0)
            counter, steps = Counter(warm_up, num_steps), warm_up + num_steps + 1
            if not guarded:
                row.plain(counter, steps)
            elif row.guarded is not None:
                row.guarded(counter, steps)
            else:
                with tempfile.TemporaryDirectory() as folder, nanguard.install(run_dir=folder, sync=row.sync):
                    row.plain(counter, steps)


def measure(rows: list[Row], warm_up: int, num_steps: int) -> list[dict[str, Any]]:
    """Thousands of instructions per step: plain, guarded, and what is added."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}", sys.executable]
        command += [__file__, "--count", json.dumps([row.name for row in rows]), str(warm_up), str(num_steps)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        files = [Path(f"{out}.{number}") for number in range(1, 2 * len(rows) + 1)]
        if done.returncode or not all(file.exists() for file in files):
            raise RuntimeError(f"callgrind ended with status {done.returncode}:\n{done.stderr[-2000:]}")
        counts = [_total(file) / num_steps / 1e3 for file in files]
    found = []
    for row, plain, guarded in zip(rows, counts[::2], counts[1::2], strict=True):
        found.append({"name": row.name, "plain": round(plain, 1), "guarded": round(guarded, 1)})
        say(f"  {row.name}: {plain:,.0f} and {guarded:,.0f} thousand")
    return found


def _total(file: Path) -> int:
    totals = [line.split()[1] for line in file.read_text(errors="replace").splitlines() if line.startswith("totals:")]
    return int(totals[-1])


# ── The table ────────────────────────────────────────────────────────────────────────────────────────────


def as_markdown(facts: dict[str, Any]) -> str:
    kept = ("machine", "torch", "python", "date", "command")
    lines = [f"# Instructions that nanguard adds to a step, {facts['date']}", ""]
    lines += [f"- {name}: {facts[name]}" if name != "command" else f"- command: `{facts[name]}`" for name in kept]
    lines += ["", facts["method"], "", "| | plain | guarded | added | ratio |", "| --- | ---: | ---: | ---: | ---: |"]
    for row in facts["rows"]:
        plain, guarded = row["plain"], row["guarded"]
        lines.append(
            f"| {row['name']} | {plain:,.0f} | {guarded:,.0f} | {guarded - plain:,.0f} | {guarded / plain:.3f} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    if sys.argv[1:2] == ["--count"]:
        count(json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="only those whose name contains one of these words")
    parser.add_argument("--smoke", action="store_true", help="few steps, to try the script itself")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    if shutil.which("callgrind_control") is None:
        parser.error("valgrind is not installed: apt-get install valgrind")
    wanted = [text for text in args.rows.split(",") if text]
    rows = [row for row in ROWS if not wanted or any(text in row.name for text in wanted)]
    if not rows:
        parser.error(f"--rows {args.rows} matches no row; there are {', '.join(row.name for row in ROWS)}")
    facts: dict[str, Any] = {**header(CPU), "method": METHOD}
    facts["command"] = facts["command"].replace("overhead.py", "instructions.py")
    facts["rows"] = measure(rows, *((30, 5) if args.smoke else (100, 40)))
    if not args.smoke:
        slug = "-".join(facts["machine"].lower().replace("_", "-").split())
        path = args.out / f"instructions-{slug}-{facts['date']}.json"
        write(path, json.dumps(facts, indent=1) + "\n")
        write(path.with_suffix(".md"), as_markdown(facts))
    print(as_markdown(facts))


if __name__ == "__main__":
    main()
