"""What `nanguard run` costs: ordinary programs with `python` and with `nanguard run`, each run a process of its own.

    PYTHONPATH=src python benchmarks/run_overhead.py                     # GPU and CPU; some minutes
    PYTHONPATH=src python benchmarks/run_overhead.py --rows cpu
    PYTHONPATH=src python benchmarks/run_overhead.py --smoke             # does the script itself work?

The programs are those of `run_programs.py`, which know nothing of nanguard. Runs alternate: plain, guarded, plain,
guarded. The programs time their own steps, after a warm-up. A ratio is that of a guarded run to the plain runs right
before and after it, and the table gives the median over rounds with the smallest and largest.

If there is a fault, the plain run is the same program without it. The ratio is then that of the total time, and the
size of the run folder and the lines on a terminal of 80 columns are counted as well.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from fcntl import ioctl
from importlib.util import find_spec
from pathlib import Path
from termios import TIOCSWINSZ
from typing import Any

import torch

from overhead import header, say, write

HERE = Path(__file__).parent
METHOD = (
    "Each run is a process of its own; plain and guarded runs alternate. The programs time their own steps after a "
    "warm-up: on the GPU the wall-clock time of blocks of ten steps, on the CPU the processor's time of each step, "
    "with one thread. A ratio is that of a guarded run (its median step, or its total if there are faults) to the mean "
    "of the plain runs before and after it: the median over rounds (smallest to largest). Lines are those that "
    "nanguard prints to a terminal of 80 columns."
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """``most`` is the goal for the ratio, ``most_ms`` for what a step may take longer: either is enough on a CPU."""

    name: str
    program: str
    device: str
    steps: int
    most: float
    most_ms: float | None = None
    fault: str = "none"


ROWS = (
    Row(name="124M GPT, bf16", program="large_gpt", device="cuda", steps=100, most=1.01),
    Row(name="launch-bound GPT, bf16", program="tiny_gpt", device="cuda", steps=1000, most=1.05),
    Row(name="one fault that is not located", program="tiny_gpt", device="cuda", steps=4000, fault="once", most=1.05),
    Row(name="a fault every tenth step", program="tiny_gpt", device="cuda", steps=2000, fault="every10", most=1.3),
    Row(name="MLP", program="mlp", device="cpu", steps=1500, most=1.10, most_ms=0.1),
    Row(name="CNN with BatchNorm", program="cnn", device="cpu", steps=400, most=1.10, most_ms=0.1),
    Row(name="LSTM", program="lstm", device="cpu", steps=800, most=1.10, most_ms=0.1),
    Row(name="GAN, two optimizers", program="gan", device="cpu", steps=800, most=1.10, most_ms=0.1),
    Row(name="GPT of two layers", program="characters", device="cpu", steps=250, most=1.10, most_ms=0.1),
    Row(name="one fault that is not located", program="mlp", device="cpu", steps=8000, fault="once", most=1.05),
    Row(name="a fault every tenth step", program="cnn", device="cpu", steps=2000, fault="every10", most=1.3),
)
MOST_BYTES, MOST_LINES = 50 << 20, 60


# ── One run ──────────────────────────────────────────────────────────────────────────────────────────────


def run(row: Row, steps: int, *, guarded: bool) -> dict[str, Any]:
    """Times of the steps in seconds, their total, bytes in the run folder, and lines on the terminal."""
    with tempfile.TemporaryDirectory() as folder:
        times, run_dir = Path(folder) / "times.json", Path(folder) / "run"
        program = [str(HERE / "run_programs.py"), row.program, "--device", row.device, "--steps", str(steps)]
        program += ["--fault", row.fault if guarded else "none", "--times", str(times)]
        command = [sys.executable, *(guard(run_dir) if guarded else []), *program]
        lines = on_terminal(command)
        if not times.exists():
            raise RuntimeError(f"{' '.join(command)} has failed:\n" + "\n".join(lines))
        size = sum(file.stat().st_size for file in run_dir.rglob("*") if file.is_file())
        return {**json.loads(times.read_text()), "bytes": size, "lines": len(lines)}


def guard(run_dir: Path) -> list[str]:
    """`nanguard run`; if its command line cannot be loaded here, the same without it."""
    if find_spec("typer") and find_spec("rich"):
        return ["-m", "nanguard", "run", "--run-dir", str(run_dir)]
    return [__file__, "--guard-program", str(run_dir)]


def guard_program(run_dir: str, program: str, *args: str) -> None:
    """What `nanguard run` does, without the packages of the command line."""
    from nanguard.autopilot import entry
    from nanguard.autopilot.launch import LaunchedProgram
    from nanguard.hosted.settings import Settings
    from nanguard.run_folder import RunFolder

    launched = LaunchedProgram(program, args, is_module=False)
    settings = Settings(run_dir=RunFolder(Path(run_dir)), script=launched.path, argv=launched.args)
    with entry.begin(settings):
        launched.run()


def on_terminal(command: list[str]) -> list[str]:
    """Runs a command whose stderr is a terminal, and returns the lines that it printed there."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    text: list[bytes] = []

    def read() -> None:
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                return
            if not part:
                return
            text.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    env = {**os.environ, "TERM": "dumb", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, stderr=theirs, stdout=subprocess.DEVNULL, env=env, check=False)
    os.close(theirs)
    reader.join()
    os.close(ours)
    return b"".join(text).decode(errors="replace").splitlines()


# ── All runs of a row ────────────────────────────────────────────────────────────────────────────────────


def measure(row: Row, rounds: int, steps: int) -> dict[str, Any]:
    def value(result: dict[str, Any]) -> float:
        return float(statistics.median(result["times"]) if row.fault == "none" else result["total"])

    plain, guarded = [run(row, steps, guarded=False)], []
    for _ in range(rounds):
        guarded.append(run(row, steps, guarded=True))
        plain.append(run(row, steps, guarded=False))
    pairs = zip(guarded, plain[:-1], plain[1:], strict=True)
    ratios = [2 * value(g) / (value(before) + value(after)) for g, before, after in pairs]
    ms = [1e3 * statistics.median(statistics.median(r["times"]) for r in runs) for runs in (plain, guarded)]
    result = {
        "name": row.name,
        "program": row.program,
        "device": row.device,
        "fault": row.fault,
        "steps": steps,
        "rounds": rounds,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "plain_ms": ms[0],
        "guarded_ms": ms[1],
        "plain_s": statistics.median(r["total"] for r in plain),
        "guarded_s": statistics.median(r["total"] for r in guarded),
        "bytes": max(r["bytes"] for r in guarded),
        "lines": max(r["lines"] for r in guarded),
        "most": row.most,
        "most_ms": row.most_ms,
    }
    say(f"  {row.device}, {row.name}: {result['ratio']:.3f} ({min(ratios):.3f} to {max(ratios):.3f}), {ms[0]:.3f} ms")
    return {**result, "is_reached": is_reached(result)}


def is_reached(result: dict[str, Any]) -> bool:
    by_ms = result["most_ms"] is not None and result["guarded_ms"] - result["plain_ms"] <= result["most_ms"]
    is_small = result["fault"] == "none" or (result["bytes"] < MOST_BYTES and result["lines"] < MOST_LINES)
    return (result["ratio"] <= result["most"] or by_ms) and is_small


def as_markdown(facts: dict[str, Any]) -> str:
    lines = [f"# What `nanguard run` costs: {facts['machine']}, {facts['date']}", ""]
    fields = ("machine", "cpu_cores", "driver", "cuda", "torch", "python", "date")
    lines += [f"- {key.replace('_', ' ')}: {facts[key]}" for key in fields if facts[key] is not None]
    lines += [f"- command: `{facts['command']}`", "", METHOD, ""]
    lines += ["| device | program | steps | plain | guarded | ratio | goal | folder | lines | reached |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"]
    for row in facts["rows"]:
        is_faulty = row["fault"] != "none"
        plain = f"{row['plain_s']:.2f} s" if is_faulty else f"{row['plain_ms']:.3f} ms"
        guarded = f"{row['guarded_s']:.2f} s" if is_faulty else f"{row['guarded_ms']:.3f} ms"
        goal = f"{row['most']:.2f}" + ("" if row["most_ms"] is None else f" or {row['most_ms']} ms")
        size, printed = (f"{row['bytes'] / 2**20:.1f} MB", row["lines"]) if is_faulty else ("", "")
        lines.append(
            f"| {row['device']} | {row['name']} | {row['steps']:,} | {plain} | {guarded} | {row['ratio']:.3f} "
            f"({min(row['ratios']):.3f} to {max(row['ratios']):.3f}) | {goal} | {size} | {printed} "
            f"| {'yes' if row['is_reached'] else '**no**'} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    if sys.argv[1:2] == ["--guard-program"]:
        guard_program(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="only those whose device, program, fault or name contains this")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--smoke", action="store_true", help="few steps, to try the script itself")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    rows = [row for row in ROWS if row.device == "cpu" or on_gpu]
    wanted = [text for text in args.rows.split(",") if text]
    if wanted:
        rows = [row for row in rows if any(text in f"{row}" for text in wanted)]
    rounds = 1 if args.smoke else args.rounds
    results = [measure(row, rounds, 40 if args.smoke else row.steps) for row in rows]
    facts = {**header(torch.device("cuda" if on_gpu else "cpu")), "method": METHOD, "rows": results}
    facts["command"] = facts["command"].replace("overhead.py", "run_overhead.py")
    text = as_markdown(facts)
    print(text)
    if not args.smoke:
        slug = "-".join(facts["machine"].lower().replace("_", "-").split())
        path = args.out / f"run-overhead-{slug}-{facts['date']}.json"
        write(path, json.dumps(facts, indent=1) + "\n")
        write(path.with_suffix(".md"), text)


if __name__ == "__main__":
    main()
