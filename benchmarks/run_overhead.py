"""What `nanguard run` costs: ordinary programs with `python` and with `nanguard run`, each run a process of its own.

    PYTHONPATH=src python benchmarks/run_overhead.py                     # GPU and CPU; some minutes
    PYTHONPATH=src python benchmarks/run_overhead.py --rows cpu
    PYTHONPATH=src python benchmarks/run_overhead.py --smoke             # does the script itself work?

The programs are those of `run_programs.py`, which know nothing of nanguard. A healthy program and its guarded twin
take turns, a block of a few steps each (`turns.py`): a ratio is that of a guarded block to the plain blocks right
before and after it.

With faults, whole runs alternate, and the plain one is the same program without the fault. The ratio is that of the
total times, and the size of the run folder and the lines on a terminal of 80 columns are counted as well.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fcntl import ioctl
from importlib.util import find_spec
from pathlib import Path
from termios import TIOCSWINSZ
from typing import Any

import torch

from overhead import Block, header, say, spread, write
from turns import Player, steps_needed, take_turns

HERE = Path(__file__).parent
METHOD = (
    "Each program is a process of its own. Healthy: the plain and the guarded program take turns, a block of some "
    "steps each, after a warm-up. A ratio is the time of a guarded block over that of the plain blocks before and "
    "after it: the median (where it lies with 95% certainty). Two processes of the same program differ by some "
    "percent, so small programs are started anew several times; both of a pair run on the same two cores, and each "
    "begins first in half of the pairs. On the GPU this is wall-clock time until the device has done the block, on the "
    "CPU the processor's time, with one thread. With faults: whole runs alternate, and the ratio is that of their "
    "total times (smallest to largest). Lines are those that nanguard prints to a terminal of 80 columns."
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """``most`` is the goal for the ratio, ``most_ms`` for what a step may take longer: either is enough on a CPU.

    ``steps`` is the length of a block, or of the whole run if it has faults. ``pairs`` of processes have ``rounds``
    each. If it is not ``guarded``, the plain program is compared with itself, which shows what differs by chance.
    """

    name: str
    program: str
    device: str
    steps: int
    most: float
    most_ms: float | None = None
    fault: str = "none"
    pairs: int = 1
    rounds: int = 100
    guarded: bool = True


ROWS = (  # a block takes more than half a second: a program that has waited finds none of its code in the caches
    Row(name="124M GPT, bf16", program="large_gpt", device="cuda", steps=25, rounds=24, most=1.01),
    Row(name="launch-bound GPT, bf16", program="tiny_gpt", device="cuda", steps=50, pairs=8, rounds=10, most=1.05),
    Row(name="one fault that is not located", program="tiny_gpt", device="cuda", steps=4000, fault="once", most=1.05),
    Row(name="a fault every tenth step", program="tiny_gpt", device="cuda", steps=2000, fault="every10", most=1.3),
    Row(name="MLP", program="mlp", device="cpu", steps=1000, pairs=4, rounds=6, most=1.10, most_ms=0.1),
    Row(name="CNN with BatchNorm", program="cnn", device="cpu", steps=200, pairs=4, rounds=6, most=1.10, most_ms=0.1),
    Row(name="LSTM", program="lstm", device="cpu", steps=500, pairs=4, rounds=6, most=1.10, most_ms=0.1),
    Row(name="GAN, two optimizers", program="gan", device="cpu", steps=500, pairs=4, rounds=6, most=1.10, most_ms=0.1),
    Row(
        name="GPT of two layers",
        program="characters",
        device="cpu",
        steps=50,
        pairs=4,
        rounds=6,
        most=1.10,
        most_ms=0.1,
    ),
    Row(name="one fault that is not located", program="characters", device="cpu", steps=3000, fault="once", most=1.05),
    Row(name="the same in the MLP", program="mlp", device="cpu", steps=8000, fault="once", most=1.05),
    Row(name="a fault every tenth step", program="cnn", device="cpu", steps=2000, fault="every10", most=1.3),
)
WARM_UP = 60
FAULTY_ROUNDS = 2
MOST_BYTES, MOST_LINES = 50 << 20, 60


# ── Programs ─────────────────────────────────────────────────────────────────────────────────────────────


def program(row: Row, folder: Path, *, steps: int, block: int, guarded: bool) -> list[str]:
    words = [str(HERE / "run_programs.py"), row.program, "--device", row.device, "--steps", str(steps)]
    words += ["--block", str(block), "--warm-up", str(min(WARM_UP, steps // 4)), "--times", str(folder / "times.json")]
    words += ["--fault", row.fault if guarded else "none"]
    return [sys.executable, *(guard(folder / "run") if guarded else []), *words]


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
    subprocess.run(command, stderr=theirs, stdout=subprocess.DEVNULL, env=environment(), check=False)
    os.close(theirs)
    reader.join()
    os.close(ours)
    return b"".join(text).decode(errors="replace").splitlines()


def environment() -> dict[str, str]:
    return {**os.environ, "TERM": "dumb", "OMP_NUM_THREADS": "1"}


# ── A row of the table ───────────────────────────────────────────────────────────────────────────────────


def measure(row: Row, *, smoke: bool) -> dict[str, Any]:
    result = measure_faulty(row, smoke) if row.fault != "none" else measure_healthy(row, smoke)
    say(f"  {row.device}, {row.name}: {result['ratio']:.3f} ({result['low']:.3f} to {result['high']:.3f})")
    result |= {"name": row.name, "program": row.program, "device": row.device, "fault": row.fault}
    result |= {"most": row.most, "most_ms": row.most_ms}
    return {**result, "is_reached": is_reached(result)}


def measure_healthy(row: Row, smoke: bool) -> dict[str, Any]:
    block, rounds, pairs = (2, 4, 1) if smoke else (row.steps, row.rounds, row.pairs)
    steps = steps_needed(WARM_UP, block, rounds)
    plain: list[float] = []
    blocks: list[Block] = []
    for pair in range(1, pairs + 1):
        with tempfile.TemporaryDirectory() as folder, same_cores(pair):

            def player(guarded: bool, folder: str = folder) -> Player:
                own = tempfile.mkdtemp(dir=folder)
                command = program(row, Path(own), steps=steps, block=block, guarded=guarded)
                return Player(command, env=environment(), stdout=subprocess.DEVNULL)

            if pair % 2:
                one, other = player(guarded=False), player(guarded=row.guarded)
            else:  # on a GPU the second one to begin is slower, by one or two percent
                other, one = player(guarded=row.guarded), player(guarded=False)
            of_plain, of_guarded = take_turns(one, other, rounds)
        plain += of_plain
        blocks += of_guarded
        if pairs > 1:
            ratio_of_pair = statistics.median(ratio for _, ratio in of_guarded)
            say(f"  {row.device}, {row.name}: {ratio_of_pair:.3f} in pair {pair} of {pairs}")
    ms, ratios = (list(values) for values in zip(*blocks, strict=True))
    ratio = spread(ratios)
    return {
        "steps": block,
        "pairs": pairs,
        "rounds": len(blocks),
        "ratio": ratio["median"],
        "low": ratio["low"],
        "high": ratio["high"],
        "ratios": [round(r, 5) for r in ratios],
        "plain_ms": statistics.median(plain),
        "guarded_ms": statistics.median(ms),
    }


@contextmanager
def same_cores(pair: int) -> Iterator[None]:
    """Both programs of a pair get the same two cores: they take turns, and those of a virtual machine are not alike.

    Each pair gets two others, if there are more.
    """
    cores = sorted(os.sched_getaffinity(0))
    first = 2 * pair % max(1, len(cores) - 1)
    os.sched_setaffinity(0, cores[first : first + 2])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def measure_faulty(row: Row, smoke: bool) -> dict[str, Any]:
    steps, rounds = (80, 1) if smoke else (row.steps, FAULTY_ROUNDS)
    plain, guarded = [run(row, steps, guarded=False)], []
    for _ in range(rounds):
        guarded.append(run(row, steps, guarded=True))
        plain.append(run(row, steps, guarded=False))
    totals = zip(
        (r["total"] for r in guarded), (r["total"] for r in plain), (r["total"] for r in plain[1:]), strict=False
    )
    ratios = [2 * total / (before + after) for total, before, after in totals]
    return {
        "steps": steps,
        "rounds": rounds,
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "ratios": ratios,
        "plain_s": statistics.median(r["total"] for r in plain),
        "guarded_s": statistics.median(r["total"] for r in guarded),
        "bytes": max(r["bytes"] for r in guarded),
        "lines": max(r["lines"] for r in guarded),
    }


def run(row: Row, steps: int, *, guarded: bool) -> dict[str, Any]:
    """The total time of a whole run in seconds, bytes in the run folder, and lines on the terminal."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = program(row, folder, steps=steps, block=10, guarded=guarded)
        lines = on_terminal(command)
        if not (folder / "times.json").exists():
            raise RuntimeError(f"{' '.join(command)} has failed:\n" + "\n".join(lines))
        size = sum(file.stat().st_size for file in (folder / "run").rglob("*") if file.is_file())
        return {**json.loads((folder / "times.json").read_text()), "bytes": size, "lines": len(lines)}


def is_reached(result: dict[str, Any]) -> bool:
    if result["fault"] != "none":
        return bool(result["ratio"] <= result["most"] and result["bytes"] < MOST_BYTES and result["lines"] < MOST_LINES)
    by_ms = result["most_ms"] is not None and result["guarded_ms"] - result["plain_ms"] <= result["most_ms"]
    return bool(result["ratio"] <= result["most"] or by_ms)


def as_markdown(facts: dict[str, Any]) -> str:
    lines = [f"# What `nanguard run` costs: {facts['machine']}, {facts['date']}", ""]
    fields = ("machine", "cpu_cores", "driver", "cuda", "torch", "python", "date")
    lines += [f"- {key.replace('_', ' ')}: {facts[key]}" for key in fields if facts[key] is not None]
    lines += [f"- command: `{facts['command']}`", "", METHOD, ""]
    lines += ["| device | program | blocks or steps | plain | guarded | ratio | goal | folder | lines | reached |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"]
    for row in facts["rows"]:
        is_faulty = row["fault"] != "none"
        plain = f"{row['plain_s']:.2f} s" if is_faulty else f"{row['plain_ms']:.3f} ms"
        guarded = f"{row['guarded_s']:.2f} s" if is_faulty else f"{row['guarded_ms']:.3f} ms"
        goal = f"{row['most']:.2f}" + ("" if row["most_ms"] is None else f" or {row['most_ms']} ms")
        size, printed = (f"{row['bytes'] / 2**20:.1f} MB", row["lines"]) if is_faulty else ("", "")
        length = f"{row['steps']:,} steps" if is_faulty else f"{row['rounds']} blocks of {row['steps']} steps"
        lines.append(
            f"| {row['device']} | {row['name']} | {length} | {plain} | {guarded} | {row['ratio']:.3f} "
            f"({row['low']:.3f} to {row['high']:.3f}) | {goal} | {size} | {printed} "
            f"| {'yes' if row['is_reached'] else '**no**'} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    if sys.argv[1:2] == ["--guard-program"]:
        guard_program(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="only those whose device, program, fault or name contains this")
    parser.add_argument("--pairs", type=int, help="so many pairs of processes for each healthy program")
    parser.add_argument("--noise", action="store_true", help="healthy programs against themselves, both not guarded")
    parser.add_argument("--smoke", action="store_true", help="few steps, to try the script itself")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    rows = [row for row in ROWS if row.device == "cpu" or on_gpu]
    wanted = [text for text in args.rows.split(",") if text]
    if wanted:
        rows = [row for row in rows if any(text in f"{row}" for text in wanted)]
    if args.pairs is not None:
        rows = [replace(row, pairs=args.pairs) for row in rows]
    if args.noise:
        rows = [replace(row, name=f"{row.name}, plain twice", guarded=False) for row in rows if row.fault == "none"]
    if args.pairs is not None and args.pairs < 1:
        parser.error(f"--pairs must be at least 1, not {args.pairs}")
    if not rows:
        names = ", ".join(repr(row.name) for row in ROWS if row.device == "cpu" or on_gpu)
        parser.error(f"--rows {args.rows} matches no row that can be measured here; there are {names}")
    facts: dict[str, Any] = {**header(torch.device("cuda" if on_gpu else "cpu")), "method": METHOD, "rows": []}
    facts["command"] = facts["command"].replace("overhead.py", "run_overhead.py")
    slug = "-".join(facts["machine"].lower().replace("_", "-").split())
    path = args.out / f"run-overhead-{slug}-{facts['date']}{'-noise' if args.noise else ''}.json"
    for row in rows:
        facts["rows"].append(measure(row, smoke=args.smoke))
        if not args.smoke:  # now: an interrupted run keeps this much
            write(path, json.dumps(facts, indent=1) + "\n")
            write(path.with_suffix(".md"), as_markdown(facts))
    print(as_markdown(facts))


if __name__ == "__main__":
    main()
