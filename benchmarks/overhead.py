"""What a guarded step costs, as a ratio against the plain training loop, and what the usual checks cost.

    PYTHONPATH=src python benchmarks/overhead.py                         # the whole table
    PYTHONPATH=src python benchmarks/overhead.py --syncs                 # does a late guarded step ever sync?
    PYTHONPATH=src python benchmarks/overhead.py --profile               # where the host time of a step goes
    PYTHONPATH=src python benchmarks/overhead.py --device cpu --smoke    # does the script itself work?

All variants live in one process with their own copy of the model. A round runs short blocks of steps: plain,
variant, plain, variant, ..., plain, the variants shuffled anew each round. A variant's ratio in a round is
its time over the mean of the plain blocks right before and after it, so a drift of the clock speed cancels
out. The table gives the median over rounds, and the range in which that median lies with 95% certainty.
`plain_again` is the plain loop once more: it is off by the noise, and a smaller difference means nothing.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import math
import os
import platform
import pstats
import random
import shlex
import subprocess
import sys
import time
import traceback
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from models import SMOKE_WORKLOADS, WORKLOADS
from variants import VARIANTS, Plain, Rig

MODES = ("eager", "compile")
NUM_BATCHES = 8
METHOD = (
    "A ratio is the wall-clock time of a step over the plain loop's, measured in interleaved blocks in one "
    "process: the median over rounds (where it lies with 95% certainty). bf16 autocast, fused AdamW with two groups, "
    "max norm 1.0, garbage collection off. `plain_again` is the baseline measured again: the noise floor."
)
_START = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - _START:6.1f}s] {text}", flush=True)


# ── Measuring ────────────────────────────────────────────────────────────────────────────────────────────


Block = tuple[float, float]
"""Milliseconds per step, and their ratio to those of the plain blocks before and after."""


def summary(blocks: list[Block], steps: int) -> dict[str, Any]:
    ms, ratios = map(list, zip(*blocks, strict=True))
    counts = {"blocks": len(blocks), "steps_per_block": steps}
    return {**counts, "ratio": spread(ratios), "ms": spread(ms), "ratios": [round(r, 5) for r in ratios]}


def spread(values: list[float]) -> dict[str, float]:
    points = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    p10, median, p90 = torch.tensor(values, dtype=torch.float64).quantile(points).tolist()
    low, high = median_range(values)
    found = {"median": median, "low": low, "high": high, "p10": p10, "p90": p90}
    return {name: round(value, 5) for name, value in found.items()}


def median_range(values: list[float]) -> tuple[float, float]:
    """The range in which the true median lies with at least 95% certainty, whatever the noise looks like.

    Each value is below the true median with probability one half. The range leaves out as many values at either end as
    a fair coin allows. With fewer than six values there is no such range, and this is the smallest and the largest.
    """
    values, num = sorted(values), len(values)
    left_out, tail = 0, 0.0
    while (tail := tail + math.comb(num, left_out) / 2**num) <= 0.025:
        left_out += 1
    first = max(left_out - 1, 0)
    return values[first], values[num - 1 - first]


def synchronize(rig: Rig) -> None:
    if rig.device.type == "cuda":
        torch.cuda.synchronize(rig.device)


def free(rig: Rig) -> None:
    """Gives back the memory of variants that nobody refers to any more."""
    gc.unfreeze()
    gc.collect()
    if rig.device.type == "cuda":
        torch.cuda.empty_cache()


def time_block(rig: Rig, variant: Plain, steps: int) -> float:
    """Milliseconds per step over one block, from an idle device to an idle device."""
    gc.collect()
    gc.disable()
    try:
        synchronize(rig)
        start = time.perf_counter()
        variant.run(steps)
        synchronize(rig)
        return (time.perf_counter() - start) / steps * 1e3
    finally:
        gc.enable()


def warm_up(rig: Rig, name: str, steps: int) -> Plain:
    """Builds a variant and runs it until everything that happens only once has happened."""
    start = time.perf_counter()
    variant = VARIANTS[name](rig)
    loss = variant.run(steps).item()
    if not loss < float("inf"):
        raise RuntimeError(f"{name} on {rig.workload.name}: loss {loss} in warm-up; there is nothing to time")
    say(f"  ready: {name} ({time.perf_counter() - start:.1f}s, loss {loss:.3f})")
    return variant


def interleave(
    rig: Rig, plain: Plain, variants: dict[str, Plain], rounds: int, steps: int
) -> dict[str, dict[str, Any]]:
    """Times every variant in every round, each between two blocks of `plain`, and sums up."""
    blocks: dict[str, list[Block]] = {name: [] for name in ("plain", *variants)}
    gc.collect()
    gc.freeze()  # so that collecting before each block looks at the little that is new, not at all of torch
    for index in range(rounds):
        order = list(variants)
        random.Random(index).shuffle(order)
        time_block(rig, plain, steps)  # not counted: the device may have idled
        before = time_block(rig, plain, steps)
        blocks["plain"].append((before, 1.0))
        for name in order:
            ms = time_block(rig, variants[name], steps)
            after = time_block(rig, plain, steps)
            blocks[name].append((ms, 2 * ms / (before + after)))
            blocks["plain"].append((after, 1.0))
            before = after
        say(f"  round {index + 1}/{rounds}: plain {before:.3f} ms a step")
    return {name: summary(each, steps) for name, each in blocks.items()}


def peak_memory(rig: Rig, name: str) -> int:
    """Bytes that a variant alone needs at its peak: model, optimizer, gradients, activations, guard."""
    free(rig)
    base = torch.cuda.memory_allocated(rig.device)
    torch.cuda.reset_peak_memory_stats(rig.device)
    VARIANTS[name](rig).run(4)
    return torch.cuda.max_memory_allocated(rig.device) - base


def measure(rig: Rig, names: list[str], rounds: int, steps: int) -> dict[str, Any]:
    """One section of the result: one workload in one mode. A variant that raises is left out and named."""
    failed: dict[str, str] = {}

    def ready(wanted: list[str]) -> dict[str, Plain]:
        variants = {}
        for name in wanted:
            try:
                variants[name] = warm_up(rig, name, max(3, steps // 2))
            except Exception as error:  # the other variants' figures are good without this one
                failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                say(f"  FAILED: {name}\n{traceback.format_exc()}")
        return variants

    say(f"{rig.workload.name}, {rig.mode}: {rig.workload}")
    torch.compiler.reset()
    plain = warm_up(rig, "plain", max(3, steps // 2))
    fast = ready([n for n in names if not VARIANTS[n].slow and n != "plain"])
    timings = interleave(rig, plain, fast, rounds, steps)
    fast.clear()
    free(rig)
    if slow := ready([n for n in names if VARIANTS[n].slow and rig.mode == "eager"]):
        slow_timings = interleave(rig, plain, slow, max(2, rounds // 3), max(2, steps // 2))
        timings |= {name: slow_timings[name] for name in slow}
        slow.clear()
    del plain
    memory = {}
    if rig.device.type == "cuda":
        memory = {n: peak_memory(rig, n) for n in timings if n == "plain" or n.startswith("guard")}
        say("  peak memory: " + ", ".join(f"{n} {size / 2**20:.1f} MiB" for n, size in memory.items()))
    free(rig)
    return {
        "model": rig.workload.name,
        "mode": rig.mode,
        "workload": str(rig.workload),
        "variants": timings,
        "peak_memory_bytes": memory,
        "failed": failed,
    }


# ── Reporting ────────────────────────────────────────────────────────────────────────────────────────────


def header(device: torch.device) -> dict[str, Any]:
    """Where, when and how: what a reader needs to repeat the measurement."""
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"
    return {
        "machine": machine,
        "cpu_cores": os.cpu_count(),
        "driver": driver_version() if device.type == "cuda" else None,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": command(sys.argv[1:]),
    }


def driver_version() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.check_output(query, text=True, timeout=20).splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def command(arguments: list[str]) -> str:
    """The command line without `--out`, which changes where the result lies and nothing in it."""
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--out":
            next(rest, None)
        elif not argument.startswith("--out="):
            kept.append(argument)
    return f"PYTHONPATH=src {shlex.join(['python', 'benchmarks/overhead.py', *kept])}"


def markdown(result: dict[str, Any]) -> str:
    """The result as a page: one table per model, a column per mode."""
    lines = [f"# Overhead of a guarded step, {result['machine']}, {result['date']}", ""]
    fields = ("machine", "cpu_cores", "driver", "cuda", "torch", "python", "date")
    lines += [f"- {key.replace('_', ' ')}: {result[key]}" for key in fields if result[key] is not None]
    lines += [f"- command: `{result['command']}`", "", METHOD, ""]
    for model in dict.fromkeys(section["model"] for section in result["sections"]):
        lines += model_table([section for section in result["sections"] if section["model"] == model])
    used = {name for section in result["sections"] for name in section["variants"]}
    lines += ["## Variants", "", *(f"- `{n}`: {v.__doc__}" for n, v in VARIANTS.items() if n in used)]
    return "\n".join(lines) + "\n"


def model_table(sections: list[dict[str, Any]]) -> list[str]:
    modes = [section["mode"] for section in sections]
    lines = [f"## {sections[0]['model']}: {sections[0]['workload']}", ""]
    lines += ["| variant | " + " | ".join(f"{mode}, ratio | {mode}, ms a step" for mode in modes) + " |"]
    lines += ["| --- |" + " ---: | ---: |" * len(modes)]
    for name in VARIANTS:
        found = [section["variants"].get(name) for section in sections]
        if any(found):
            lines.append(f"| `{name}` | " + " | ".join(cells(name, timing) for timing in found) + " |")
    lines.append("")
    for section in sections:
        memory = section["peak_memory_bytes"]
        if memory:
            sizes = ", ".join(f"`{name}` {size / 2**20:,.1f} MiB" for name, size in memory.items())
            lines.append(f"- peak memory, {section['mode']}: {sizes}")
        lines += [f"- `{name}` failed, {section['mode']}: {why}" for name, why in section["failed"].items()]
    return lines if lines[-1] == "" else [*lines, ""]


def cells(name: str, timing: dict[str, Any] | None) -> str:
    if timing is None:
        return "|"
    ratio, ms = timing["ratio"], timing["ms"]
    text = "1" if name == "plain" else f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
    return f"{text} | {ms['median']:.3f}"


def write(path: Path, text: str) -> None:
    """Writes the whole file or leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def save(result: dict[str, Any], folder: Path, *, smoke: bool) -> Path:
    slug = "-".join(result["machine"].lower().replace("_", "-").split()) + ("-smoke" if smoke else "")
    path = folder / f"overhead-{slug}-{result['date']}.json"
    write(path, json.dumps(result) + "\n")
    write(path.with_suffix(".md"), markdown(result))
    return path


# ── Looking closer ───────────────────────────────────────────────────────────────────────────────────────


def check_syncs(rig: Rig, name: str) -> bool:
    """20 steps while any call that makes the host wait for the device raises."""
    variant = VARIANTS[name](rig)
    variant.run(5)
    synchronize(rig)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            variant.step(next(variant.batches))
    except RuntimeError:
        say(f"SYNC in {name}, {rig.workload.name}, {rig.mode}\n{traceback.format_exc()}")
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    variant.finish()
    say(f"no sync: 20 steps of {name}, {rig.workload.name}, {rig.mode}")
    return True


def profile(rig: Rig, name: str, *, steps: int = 300, top: int = 40) -> None:
    """Prints where the host time of a step goes, in microseconds per step of the Python thread."""
    subject, plain = warm_up(rig, name, 50), warm_up(rig, "plain", 50)
    for label, variant in (("plain", plain), (name, subject), ("plain", plain), (name, subject)):
        say(f"unprofiled: {label} {time_block(rig, variant, steps) * 1e3:.0f} us a step")
    profiler = cProfile.Profile()
    synchronize(rig)
    profiler.runcall(subject.run, steps)
    stats: dict[tuple[str, int, str], Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    rows = sorted(stats.items(), key=lambda row: row[1][2], reverse=True)
    say(f"{name}, {rig.workload.name}, {rig.mode}: per step under cProfile, {top} of {len(rows)} functions")
    print(f"{'calls':>8} {'own us':>9} {'total us':>9}  function")
    for (file, line, function), (_, calls, own, total, _) in rows[:top]:
        place = function if file == "~" else f"{'/'.join(Path(file).parts[-2:])}:{line} {function}"
        print(f"{calls / steps:8.2f} {own / steps * 1e6:9.1f} {total / steps * 1e6:9.1f}  {place}")


# ── Command line ─────────────────────────────────────────────────────────────────────────────────────────


def parse() -> argparse.Namespace:
    def names(accepted: Any) -> Any:
        def split(text: str) -> list[str]:
            if unknown := [name for name in text.split(",") if name not in accepted]:
                raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; accepted are {', '.join(accepted)}")
            return text.split(",")

        return split

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--models", type=names(WORKLOADS), default=list(WORKLOADS), help=",".join(WORKLOADS))
    p.add_argument("--modes", type=names(MODES), help="eager,compile (--smoke: eager)")
    p.add_argument("--variants", type=names(VARIANTS), help=",".join(VARIANTS))
    p.add_argument("--rounds", type=int, help="rounds per section (30)")
    p.add_argument("--steps-large", type=int, help="steps in a block of the large model (4)")
    p.add_argument("--steps-tiny", type=int, help="steps in a block of the tiny model (20)")
    p.add_argument("--smoke", action="store_true", help="minute sizes, to try the script itself")
    p.add_argument("--syncs", action="store_true", help="instead of timing: does a late step sync?")
    p.add_argument("--profile", action="store_true", help="instead of timing: host time, tiny model")
    p.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder to write to")
    args = p.parse_args()
    rounds, large, tiny = (2, 2, 2) if args.smoke else (30, 4, 20)
    args.rounds = args.rounds or rounds
    args.modes = args.modes or list(MODES[:1] if args.smoke else MODES)
    args.steps = {"large": args.steps_large or large, "tiny": args.steps_tiny or tiny}
    return args


def main() -> int:
    args = parse()
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # every variant compiles a model of its own,
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # and none may quietly go back to eager

    def rig(model: str, mode: str) -> Rig:
        workload = (SMOKE_WORKLOADS if args.smoke else WORKLOADS)[model]
        batches = workload.batches(device, num=NUM_BATCHES)
        return Rig(workload=workload, mode=mode, device=device, batches=batches)

    def chosen(default: list[str]) -> list[str]:
        wanted = {name: VARIANTS[name].missing() for name in args.variants or default}
        for name, why in wanted.items():
            if why:
                say(f"left out: {name}: {why}")
        return [name for name, why in wanted.items() if not why]

    if args.profile:
        for name in chosen(["guard"]):
            profile(rig("tiny", args.modes[0]), name, steps=20 if args.smoke else 300)
    if args.syncs and device.type != "cuda":
        say("syncs: skipped, there is no CUDA device to wait for")
    elif args.syncs:
        late = chosen(["guard", "guard_global", "guard_own_loop"])
        rigs = [rig(model, mode) for model in args.models for mode in args.modes]
        passed = [check_syncs(each, name) for each in rigs for name in late]
        say(f"syncs: {'passed' if late and all(passed) else 'FAILED'} ({sum(passed)} of {len(passed)})")
        return 0 if late and all(passed) else 1
    if args.profile or args.syncs:
        return 0

    result: dict[str, Any] = {**header(device), "sections": []}
    say(f"{result['machine']}, torch {result['torch']}, Python {result['python']}")
    names = chosen(list(VARIANTS))
    for model in args.models:
        for mode in args.modes:
            result["sections"].append(measure(rig(model, mode), names, args.rounds, args.steps[model]))
            path = save(result, args.out, smoke=args.smoke)  # now: an interrupted run keeps this much
    print(f"\n{markdown(result)}")
    say(f"written: {path} and {path.with_suffix('.md').name}")
    return 1 if any(section["failed"] for section in result["sections"]) else 0


if __name__ == "__main__":
    sys.exit(main())
