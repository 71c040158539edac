"""Programs that other people wrote, plain and under `nanguard run`: healthy, and with faults in their data.

    python benchmarks/third_party.py --repositories DIR --packages SITE     # all programs, and a dated table
    python benchmarks/third_party.py --repositories DIR --only mnist,vae    # some of them, printed only
    python benchmarks/third_party.py --repositories DIR --gpu --fused --faults-only --jobs 12

DIR holds one folder OWNER+NAME with the files of each repository in third_party_programs/, at the commit given there.
SITE is a folder with the packages that the programs import (`pip install --no-deps --target SITE ...`). Each run has
its own copy of the program's repository in a temporary folder, with generated data. No program is edited: faults enter
through generated files, options of the program, or third_party_programs/hook/sitecustomize.py, which also hashes
the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from nanguard import read_run
from nanguard.records.diagnosis import Diagnosis
from third_party_programs.programs import PROGRAMS
from third_party_programs.records import Expected, Fault, Program

HERE = Path(__file__).parent / "third_party_programs"

METHOD = (
    "Each program runs in its own process, plain and under `nanguard run` with default options, one thread. Healthy: "
    "the same exit status, standard output (without times) and hash of all weights and buffers. Faulty: weights finite "
    "at the end, and the first incident right in everything it says: cause, op, module, line and sample."
)

ON_CPU = {"--no-cuda": (), "--no_cuda": (), "--disable-cuda": (), "--cuda": (), "--device=cpu": ("--device=cuda",)}
"""Options that keep a program on the CPU (``--cuda`` turns it off where we give it), and what a GPU needs instead."""

NO_END = 124
"""The exit status of a run that was stopped, as of ``timeout``."""

TIMES = (
    r"(?i)\b(time|ms/batch|sps|iter_dt)\b[:=]?[ \t]*\d+(\.\d+)?( ?m?s\b)?([ \t]*\([ \t]*\d+\.\d+\))?[ \t]*",
    r"\d+(\.\d+)? ?(ms|s|it/s|s/it)\b",
    r"\d\d:\d\d(:\d\d)?",
    r"mfu -?[\d.]+%",
)
"""What a program prints of the clock, with its mean and the blanks that align it."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What one process did."""

    status: int
    seconds: float
    stdout: str
    stderr: str
    weights: dict[str, Any]
    rows: tuple[int, ...]
    diagnosis: Diagnosis | None
    num_incidents: int


def run(
    program: Program,
    args: argparse.Namespace,
    *,
    guarded: bool,
    fault: Fault | None,
    keep: Path | None,
    timeout: float | None = None,
) -> Ran:
    with tempfile.TemporaryDirectory(prefix="third-party-") as temporary:
        root = Path(temporary)
        folder = _prepare(program, Path(args.repositories), root, fault)
        began = time.perf_counter()
        command = [sys.executable]
        if guarded:
            command += ["-m", "nanguard", "run", "--run-dir", str(root / "run")]
        command += [*program.command, *(fault.args if fault else ())]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=_environment(program, args, root, folder, fault),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout or args.timeout,
                stdin=subprocess.DEVNULL,
                check=False,
            )
            status, stdout, stderr = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as error:
            status, stdout = NO_END, _text(error.stdout)
            stderr = _text(error.stderr) + f"\nno end after {timeout or args.timeout} s"
        seconds = time.perf_counter() - began
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            name = f"{'guarded' if guarded else 'plain'}-{fault.name if fault else 'healthy'}"
            (keep / f"{name}.txt").write_text(f"$ {' '.join(command)}\n{stdout}\n---- stderr\n{stderr}")
        incidents = _incidents(root / "run") if guarded else []
        return Ran(
            status=status,
            seconds=seconds,
            stdout=_without_times(stdout, root, program),
            stderr=stderr,
            weights=_weights(root),
            rows=_rows(root),
            diagnosis=incidents[0] if incidents else None,
            num_incidents=len(incidents),
        )


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _prepare(program: Program, repositories: Path, root: Path, fault: Fault | None) -> Path:
    source = repositories / program.repository.replace("/", "+")
    if not source.is_dir():
        raise SystemExit(f"{source} is not a folder; put a copy of github.com/{program.repository} there")
    shutil.copytree(source, root / "repository", ignore=shutil.ignore_patterns(".git", "*.gif", "*.png", "*.ipynb"))
    folder = root / "repository" / program.folder
    (fault.data if fault is not None and fault.data is not None else program.data)(folder)
    return folder


def _environment(
    program: Program, args: argparse.Namespace, root: Path, folder: Path, fault: Fault | None
) -> dict[str, str]:
    settings = {
        "folder": str(root),
        "batches": program.batches,
        "env_steps": program.env_steps,
        "weights": program.weights,
        "fault": fault.hook if fault is not None else None,
        "fused": args.fused,
    }
    if program.seed is not None:
        settings["seed"] = program.seed
    paths = [
        str(HERE / "hook"),
        *(str(folder / path) for path in program.paths),
        *([args.packages] if args.packages else []),
    ]
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        **program.environment,
        "THIRD_PARTY_HOOK": json.dumps(settings),
        "PYTHONPATH": os.pathsep.join([*paths, *([inherited] if inherited else [])]),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
        "COLUMNS": "120",
    }


def _without_times(text: str, root: Path, program: Program) -> str:
    text = text.replace(str(root), "ROOT")
    for pattern in (*TIMES, *program.volatile):
        text = re.sub(pattern, "TIME", text)
    return text


def _weights(root: Path) -> dict[str, Any]:
    """Of the process with the most tensors: others load data."""
    found = [json.loads(path.read_text()) for path in sorted(root.glob("weights-*.json"))]
    return max(found, key=lambda facts: int(facts["tensors"]), default={})


def _rows(root: Path) -> tuple[int, ...]:
    path = root / "fault.jsonl"
    notes = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return tuple(note["row"] for note in notes if "row" in note)


def _incidents(folder: Path) -> list[Diagnosis | None]:
    """The diagnoses of all incidents, those of children that train too."""
    logs = sorted(folder.parent.glob(f"{folder.name}*/**/*.jsonl"))
    runs = {path.parent for path in logs}
    return [incident.diagnosis for path in sorted(runs) for incident in read_run(path).incidents]


# ---- judging ---------------------------------------------------------------------------------------------------------


def wrong_parts(said: Diagnosis | None, expected: Expected, rows: Sequence[int]) -> list[str]:
    """What the first diagnosis has wrong; nothing if it is wholly right."""
    if said is None:
        return ["no diagnosis"]
    wrong = []
    if not any(re.fullmatch(cause, said.cause) for cause in expected.causes):
        wrong.append(f"cause {said.cause}")
    if not re.fullmatch(expected.op, said.op):
        wrong.append(f"op {said.op or 'none'}")
    if not re.fullmatch(expected.module, said.module):
        wrong.append(f"module {said.module or 'none'}")
    line = said.source.text if said.source is not None else ""
    if not any(re.search(pattern, line) for pattern in expected.lines):
        wrong.append(f"line {said.source}: {line.strip()}" if said.source is not None else "no line")
    right_rows = set(rows[:1]) if rows else ({expected.sample} if expected.sample is not None else set())
    if said.samples and not expected.any_sample and set(said.samples) != right_rows:
        wrong.append(f"samples {list(said.samples)[:8]}, not {sorted(right_rows)}")
    return wrong


def try_program(program: Program, args: argparse.Namespace) -> dict[str, Any]:
    keep = Path(args.keep) / program.name if args.keep else None
    if args.faults_only:
        print(program.name, flush=True)
        faults = [_try_fault(program, fault, args, keep) for fault in program.faults]
        return {**_facts(program), "seconds": [], "differences": ["not run"], "faults": faults}
    plain = run(program, args, guarded=False, fault=None, keep=keep)
    guarded = run(program, args, guarded=True, fault=None, keep=keep)
    differences = [
        what
        for what, one, other in (
            ("exit status", plain.status, guarded.status),
            ("output", plain.stdout, guarded.stdout),
            ("weights", plain.weights, guarded.weights),
        )
        if one != other
    ]
    if plain.status != 0 or not plain.weights.get("tensors"):
        differences.append(f"the plain program failed: {plain.stderr.strip().splitlines()[-1:]}")
    if guarded.num_incidents:
        differences.append(f"{guarded.num_incidents} incidents in a healthy run")
    seconds = [round(plain.seconds, 1), round(guarded.seconds, 1)]
    print(f"{program.name}: {differences or 'identical'} {seconds}", flush=True)
    chosen = () if args.healthy_only else program.faults
    patience = 10 + 3 * plain.seconds  # some programs never end if they train on NaN
    faults = [_try_fault(program, fault, args, keep, patience) for fault in chosen]
    return {**_facts(program), "seconds": seconds, "differences": differences, "faults": faults}


def _facts(program: Program) -> dict[str, Any]:
    return {
        "name": program.name,
        "repository": program.repository,
        "commit": program.commit,
        "command": " ".join(program.command),
    }


def _try_fault(
    program: Program, fault: Fault, args: argparse.Namespace, keep: Path | None, patience: float = 0
) -> dict[str, Any]:
    plain = None
    if not args.faults_only:
        plain = run(program, args, guarded=False, fault=fault, keep=keep, timeout=patience)
    guarded = run(program, args, guarded=True, fault=fault, keep=keep)
    said = guarded.diagnosis
    wrong = wrong_parts(said, fault.expected, guarded.rows)
    outcome = {
        "name": fault.name,
        "what": fault.what,
        "plain": _end_of(plain),
        "finite": bool(guarded.weights.get("finite")),
        "status": guarded.status,
        "incidents": guarded.num_incidents,
        "right": not wrong,
        "wrong": wrong,
        "said": None
        if said is None
        else {
            "cause": said.cause,
            "op": said.op,
            "module": said.module,
            "line": str(said.source or ""),
            "text": (said.source.text if said.source else "").strip(),
            "samples": list(said.samples)[:8],
        },
        "row": guarded.rows[:1],
        "seconds": [round(ran.seconds, 1) for ran in (plain, guarded) if ran is not None],
    }
    print(
        f"  {fault.name}: plain {outcome['plain']}; guarded {'finite' if outcome['finite'] else 'NOT FINITE'}, "
        f"{wrong or 'right'}; said {outcome['said']}; row {outcome['row']}",
        flush=True,
    )
    return outcome


def _end_of(plain: Ran | None) -> str:
    if plain is None:
        return ""
    if plain.status == NO_END:
        return "does not end"
    if plain.weights.get("finite") is False:
        return "NaN or Inf in the weights"
    return "finite" if plain.status == 0 else f"ended with status {plain.status}"


# ---- the table -------------------------------------------------------------------------------------------------------


def table(results: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    faults = [fault for result in results for fault in result["faults"]]
    identical = sum(not result["differences"] for result in results)
    ran = [result for result in results if result["differences"] != ["not run"]]
    healthy = (
        f"{identical} of {len(ran)} programs are identical when healthy." if ran else "No healthy program was run."
    )
    finite, right = sum(fault["finite"] for fault in faults), sum(fault["right"] for fault in faults)
    lines = [
        "# Third-party programs under `nanguard run`",
        "",
        *(f"- {name}: {value}" for name, value in facts.items()),
        "",
        METHOD,
        "",
        f"**{healthy} Of {len(faults)} faults, {finite} end with finite weights, and {right} "
        f"({right / max(len(faults), 1):.0%}) are explained wholly right the first time.**{_ends_of(faults)}",
        "",
        "| program | healthy | fault | plain | guarded | explained | what was said |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        healthy = "identical" if not result["differences"] else "; ".join(map(str, result["differences"]))
        first = f"[{result['name']}](https://github.com/{result['repository']}/tree/{result['commit']})"
        for fault in result["faults"] or [None]:
            cells = [first, healthy]
            cells += ["", "", "", "", ""] if fault is None else _cells(fault)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
            first = healthy = ""
    return "\n".join(lines) + "\n"


def _ends_of(faults: list[dict[str, Any]]) -> str:
    """How the faulty programs end without the guard."""
    ends = Counter(fault["plain"] for fault in faults if fault["plain"])
    return f" Without the guard: {', '.join(f'{end} ({times})' for end, times in ends.most_common())}." if ends else ""


def _cells(fault: dict[str, Any]) -> list[str]:
    said = fault["said"] or {}
    where = " ".join(part for part in (said.get("op", ""), said.get("module", ""), said.get("line", "")) if part)
    words = f"{said['cause']}: {where}" if said else ""
    if said.get("samples"):
        words += f", sample {', '.join(map(str, said['samples']))}"
    return [
        fault["what"],
        fault["plain"],
        "finite" if fault["finite"] else "**not finite**",
        "right" if fault["right"] else f"**wrong**: {'; '.join(fault['wrong'])}",
        words,
    ]


def _for_gpu(command: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for each in command for word in ON_CPU.get(each, (each,)))


def _options() -> list[str]:
    """Those of this run, without the places of files."""
    places, words = ("--repositories", "--packages", "--keep", "--out"), iter(sys.argv[1:])
    return [f"{word} {'...' if word in places and next(words) else ''}".strip() for word in words]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repositories", required=True, help="the folder with the repositories")
    parser.add_argument("--packages", help="a folder with packages that the programs import")
    parser.add_argument("--only", help="names of programs, separated by commas; nothing is written")
    parser.add_argument("--faults-only", action="store_true", help="only the faulty programs under the guard")
    parser.add_argument("--healthy-only", action="store_true", help="only the healthy programs, plain and guarded")
    parser.add_argument("--without", default="", help="names of programs that cannot run here, separated by commas")
    parser.add_argument("--gpu", action="store_true", help="let the programs use the GPU")
    parser.add_argument("--fused", action="store_true", help="make optimizers fused unless a program chooses itself")
    parser.add_argument("--jobs", type=int, default=1, help="so many programs at once")
    parser.add_argument("--keep", help="where to keep the output of all runs")
    parser.add_argument("--resume", action="store_true", help="keep what a run of this day has written, and go on")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for one run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"--jobs must be at least 1, not {args.jobs}")
    if args.gpu and not torch.cuda.is_available():
        parser.error("--gpu needs an NVIDIA GPU, and torch sees none here")
    if args.packages:
        args.packages = str(Path(args.packages).resolve())
        sys.path.append(args.packages)  # the generators need some of them too
    only = set(args.only.split(",")) if args.only else None
    left_out = set(args.without.split(","))
    chosen = [p for p in PROGRAMS if (only is None or p.name in only) and p.name not in left_out]
    if args.gpu:
        chosen = [replace(program, command=_for_gpu(program.command)) for program in chosen]
    date = datetime.now(timezone.utc).date().isoformat()
    machine = torch.cuda.get_device_name() if args.gpu else f"cpu {platform.machine()}"
    facts = {
        "machine": machine,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": date,
        "command": f"`PYTHONPATH=src python benchmarks/third_party.py {' '.join(_options())}`",
    }
    of_kind = ("-faults" if args.faults_only else "") + ("-fused" if args.fused else "")
    path = args.out / f"third-party{of_kind}-{re.sub('[^a-z0-9]+', '-', machine.lower())}-{date}.json"
    is_written = only is None and not args.healthy_only
    results = json.loads(path.read_text())["programs"] if is_written and args.resume and path.exists() else []
    known = {result["name"] for result in results}
    with ThreadPoolExecutor(args.jobs) as jobs:
        for result in jobs.map(lambda program: try_program(program, args), [p for p in chosen if p.name not in known]):
            results.append(result)
            if is_written:
                path.write_text(json.dumps({**facts, "method": METHOD, "programs": results}, indent=1))
                path.with_suffix(".md").write_text(table(results, facts))
    print(table(results, facts))


if __name__ == "__main__":
    main()
