"""What the run log costs: time of a guarded step with it over one without, and the size of the log of a long run.

    PYTHONPATH=src python benchmarks/runlog.py            # two minutes on one core
    PYTHONPATH=src python benchmarks/runlog.py --smoke    # does the script itself work?

Loops on the CPU, where the host's time is all there is: a minute net, whose step is hardly more than the calls it is
made of, and a small one. Guards that differ in ``run_dir`` alone train the same net on the same batch by turns, in
blocks; a number is the median over rounds of the ratio of a block to the mean of the plain ones before and after it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanguard
from nanguard.records.steps import Reading
from nanguard.runlog.writer import EVERY_STEP_UNTIL, RunLog

METHOD = (
    "One thread, fp32, fused AdamW, sync='eager', snapshots=None, diagnose='off'. Ratio of the processor's time for a "
    "block of guarded steps with a run log to the mean of those without around it; median, and 10th and 90th "
    "percentile, over rounds."
)
NETS: dict[str, Callable[[], nn.Module]] = {
    "minute: a linear layer of 8": lambda: nn.Linear(8, 8),
    "small: five linear layers of 256": lambda: nn.Sequential(
        *(layer for _ in range(5) for layer in (nn.Linear(256, 256), nn.ReLU()))
    ),
}


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch), batch)


def make_guard(name: str, run_dir: str | None) -> tuple[nanguard.Guard, Tensor]:
    torch.manual_seed(0)
    model = NETS[name]()
    batch = torch.randn(32, next(model.parameters()).shape[1])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    guard = nanguard.Guard(
        model, optimizer, precision="fp32", sync="eager", snapshots=None, diagnose="off", run_dir=run_dir
    )
    return guard, batch


def time_of(guard: nanguard.Guard, batch: Tensor, number: int) -> float:
    """Seconds a step, of the processor's time: others may be using the machine too."""
    began = time.process_time()
    for _ in range(number):
        guard.step(loss_fn, batch)
    return (time.process_time() - began) / number


def measure(name: str, rounds: int, number: int) -> dict[str, Any]:
    """Ratios of a loop with a log, and of one without, to the plain one between whose blocks each runs."""
    with tempfile.TemporaryDirectory() as folder:
        plain = make_guard(name, None)
        others = {"with a run log": make_guard(name, folder), "without, again (noise)": make_guard(name, None)}
        for each in (plain, *others.values()):
            time_of(*each, number)
        ratios: dict[str, list[float]] = {other: [] for other in others}
        seconds = []
        for _ in range(rounds):
            before = time_of(*plain, number)
            for other, each in others.items():
                between = time_of(*each, number)
                after = time_of(*plain, number)
                ratios[other].append(2 * between / (before + after))
                seconds.append(after)
                before = after
        others["with a run log"][0].close()
    return {
        "net": name,
        "step_us": statistics.median(seconds) * 1e6,
        "ratios": {k: spread(v) for k, v in ratios.items()},
    }


def spread(values: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(values, n=10)
    return {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[-1]}


def write_long(steps: int, groups: int) -> dict[str, Any]:
    """A log of a healthy run: how large, how long it takes to write a step of it and to read all."""
    with tempfile.TemporaryDirectory() as folder:
        log = RunLog(folder)
        log.write("run", schema=2)
        norms, lrs = tuple(0.7312345678901234 + g for g in range(groups)), (0.0003,) * groups

        def write(first: int, last: int) -> float:
            began = time.perf_counter()
            for step in range(first, last):
                loss = 2.0 + 1.0 / (step + 1.0)
                reading = Reading(step=step, epoch=step // 5000, batch=step % 5000, loss=loss, norms=norms, lrs=lrs)
                log.write_step(reading, skipped=False)
            return (time.perf_counter() - began) / max(1, last - first) * 1e6

        each, thinned = write(0, min(steps, EVERY_STEP_UNTIL)), write(min(steps, EVERY_STEP_UNTIL), steps)
        log.close()
        size = log.path.stat().st_size
        began = time.perf_counter()
        run = nanguard.read_run(folder)
        took = time.perf_counter() - began
    return {
        "steps": steps,
        "groups": groups,
        "megabytes": size / 1e6,
        "written": len(run.steps),
        "us_first": each,
        "us_later": thinned,
        "read_seconds": took,
    }


def as_markdown(facts: dict[str, Any]) -> str:
    lines = [
        f"# What the run log costs: {facts['device']}, {facts['date']}",
        "",
        f"torch {facts['torch']}, Python {facts['python']}. {METHOD}",
        "",
        "| net | a guarded step | with a run log | without, again (noise) |",
        "| --- | ---: | ---: | ---: |",
    ]
    for row in facts["loops"]:
        told = [f"{r['median']:.3f} ({r['p10']:.3f} to {r['p90']:.3f})" for r in row["ratios"].values()]
        lines.append(f"| {row['net']} | {row['step_us']:,.0f} us | {' | '.join(told)} |")
    lines += [
        "",
        f"Logs of healthy runs. The first {EVERY_STEP_UNTIL:,} steps are all written, of later ones fewer and fewer.",
        "",
        "| steps | parameter groups | size | steps in it | time of one of the first | of a later one | to read it |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in facts["logs"]:
        size = f"{row['megabytes']:.1f} MB | {row['written']:,}"
        times = f"{row['us_first']:.1f} us | {row['us_later']:.1f} us | {row['read_seconds']:.2f} s"
        lines.append(f"| {row['steps']:,} | {row['groups']} | {size} | {times} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="What the run log costs, in time and in bytes.")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=100, help="steps in a block")
    parser.add_argument("--smoke", action="store_true", help="few steps, to try the script itself")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rounds, number, long = (3, 5, 10_000) if args.smoke else (args.rounds, args.steps, 1_000_000)
    facts = {
        "device": f"CPU {platform.machine()}",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "method": METHOD,
        "rounds": rounds,
        "steps_in_a_block": number,
        "loops": [measure(name, rounds, number) for name in NETS],
        "logs": [write_long(long, groups) for groups in (1, 8)],
    }
    text = as_markdown(facts)
    print(text)
    if not args.smoke:
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / f"runlog-cpu-{platform.machine().replace('_', '-')}-{facts['date']}.json"
        path.write_text(json.dumps(facts, indent=1) + "\n")
        path.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
