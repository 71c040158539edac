"""The programs of tests/scripts with the GPU as their default device: plain, and under ``nanguard run``.

    PYTHONPATH=src python benchmarks/scripts.py                 # about two minutes with 12 processes at a time
    PYTHONPATH=src python benchmarks/scripts.py --fused         # their optimizers fused: the host learns of a step late
    PYTHONPATH=src python benchmarks/scripts.py --device cpu --only mlp gan

No program is changed: a ``sitecustomize.py`` in front of the path sets the default device before it begins. Plain
programs that cannot run so (they call ``.numpy()`` on what is on the GPU now) are listed and not counted. A faulty one
is located if the *first* incident of its run names the cause, the operation and the line that tests/test_scripts.py has
written down.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import nanguard  # noqa: E402
from test_scripts import (  # type: ignore[import-not-found]  # noqa: E402
    FAULTY,
    HEALTHY,
    OUT,
    SCRIPTS,
    Faulty,
    Healthy,
    tensors_in,
)

SITECUSTOMIZE = '''
import os
import torch

device = os.environ["SCRIPTS_DEVICE"]


class Generator(torch.Generator):
    """Samplers make one without a device, and draw with it on the default device."""

    def __new__(cls, device=device):
        return super().__new__(cls, device)


if device != "cpu":
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_default_device(device)
    torch.Generator = Generator

if os.environ["SCRIPTS_FUSED"] == "1":
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):

        def init(self, *args, _init=kind.__init__, **kwargs):
            if "foreach" not in kwargs and "capturable" not in kwargs:
                kwargs.setdefault("fused", True)
            _init(self, *args, **kwargs)

        kind.__init__ = init
'''


@dataclass(frozen=True)
class Row:
    """``verdict``: what became of the program. ``first``: the diagnosis of the first incident, in a few words."""

    script: str
    kind: str
    verdict: str
    first: str = ""
    located: bool = False
    finite: bool = True


def run(case: Healthy | Faulty, folder: Path, arguments: list[str], environment: dict[str, str]) -> int:
    """Runs the program in ``folder``; its exit status."""
    folder.mkdir(parents=True)
    package = case.script.partition(".")[0]
    if package != case.script:
        shutil.copytree(SCRIPTS / package, folder / package)
        arguments = [*arguments, "-m", case.script]
    else:
        arguments = [*arguments, str(SCRIPTS / f"{case.script}.py")]
    arguments += [str(folder / "out.pt") if arg == OUT else arg for arg in case.args]
    environment = {**environment, OUT: str(folder / "out.pt")}
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        program = subprocess.Popen(
            [sys.executable, *arguments], cwd=folder, env=environment, stdout=out, stderr=err, start_new_session=True
        )
        try:
            return program.wait(timeout=90)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)  # with the workers it has started
            err.write(b"\nstopped after 90 s")
            return program.wait()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / "out.pt"
    if not path.exists():
        return {}
    return dict(tensors_in(torch.load(path, weights_only=True, map_location="cpu")))


def differing(plain: dict[str, torch.Tensor], guarded: dict[str, torch.Tensor]) -> list[str]:
    if list(plain) != list(guarded):
        return sorted({*plain} ^ {*guarded})
    return [name for name in plain if not torch.equal(plain[name], guarded[name])]


def compare(case: Healthy | Faulty, folder: Path, environment: dict[str, str]) -> Row:
    kind = "healthy" if isinstance(case, Healthy) else "faulty"
    status = run(case, folder / "plain", [], environment)
    if status != getattr(case, "status", 0):
        last = (folder / "plain" / "stderr").read_text().strip().splitlines()[-1:]
        return Row(case.script, kind, f"cannot run so by itself: {' '.join(last)[:100]}")
    guarded_status = run(case, folder / "guarded", ["-m", "nanguard", "run"], environment)
    if guarded_status != status:
        last = (folder / "guarded" / "stderr").read_text().strip().splitlines()[-1:]
        return Row(case.script, kind, f"FAILS under nanguard run: {' '.join(last)[:100]}", finite=False)
    plain, guarded = tensors(folder / "plain"), tensors(folder / "guarded")
    if isinstance(case, Healthy):
        return _healthy(case, folder, plain, guarded, environment)
    return _faulty(case, folder, plain, guarded)


def _healthy(
    case: Healthy, folder: Path, plain: dict[str, Any], guarded: dict[str, Any], environment: dict[str, str]
) -> Row:
    outputs = [(folder / which / "stdout").read_text() for which in ("plain", "guarded")]
    if outputs[0] == outputs[1] and not differing(plain, guarded):
        return Row(case.script, "healthy", "identical in output and weights")
    run(case, folder / "again", [], environment)
    if differing(plain, tensors(folder / "again")) or outputs[0] != (folder / "again" / "stdout").read_text():
        return Row(case.script, "healthy", "not deterministic by itself")
    return Row(case.script, "healthy", f"DIFFERS: {differing(plain, guarded)[:3] or 'output'}", finite=False)


def _faulty(case: Faulty, folder: Path, plain: dict[str, Any], guarded: dict[str, Any]) -> Row:
    if all(tensor.isfinite().all() for tensor in plain.values()):
        return Row(case.script, "faulty", "does not fail on this device")
    bad = [name for name, tensor in guarded.items() if not tensor.isfinite().all()]
    log = nanguard.read_run(folder / "guarded" / "nanguard-runs" / case.script.rpartition(".")[2])
    first = log.incidents[0].diagnosis if log.incidents else None
    if first is None:
        return Row(case.script, "faulty", "finite, not explained" if not bad else f"NaN in {bad[:3]}", finite=not bad)
    place = "" if first.source is None else f"{Path(first.source.file).name}:{first.source.line}"
    lines = {f"{case.file.name}:{line}" for line in case.lines}
    is_right = first.cause in case.causes and first.op in case.ops and first.phase in case.phases and place in lines
    told = f"{first.cause}, {first.op or 'no op'}, {first.phase}, {place or 'no line'}"
    return Row(case.script, "faulty", "finite" if not bad else f"NaN in {bad[:3]}", told, is_right, not bad)


def write(rows: list[Row], device: str, fused: bool, out: Path) -> None:
    machine = torch.cuda.get_device_name(0) if device == "cuda" else f"CPU {platform.machine()}"
    date = datetime.now(timezone.utc).date().isoformat()
    stem = f"scripts{'-fused' if fused else ''}-{machine.lower().replace(' ', '-').replace('_', '-')}-{date}"
    faulty = [row for row in rows if row.kind == "faulty" and row.first]
    healthy = [row for row in rows if row.kind == "healthy" and not row.verdict.startswith("cannot")]
    same = sum(row.verdict.startswith("identical") for row in healthy)
    lines = [
        f"# The programs of tests/scripts on {machine}",
        "",
        f"- torch: {torch.__version__}, nanguard {nanguard.__version__}, {date}",
        f"- optimizers: {'fused where torch has it' if fused else 'as the programs make them'}",
        f"- healthy: {same} of {len(healthy)} identical in output and weights",
        f"- faulty: {sum(row.located for row in faulty)} of {len(faulty)} located at their first occurrence (cause, "
        f"operation and line), {sum(row.finite for row in faulty)} with finite weights at the end",
        "",
        "| program | | what became of it | first diagnosis | located |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {row.script} | {row.kind} | {row.verdict} | {row.first} | "
            f"{('yes' if row.located else '**no**') if row.first else ''} |"
            for row in rows
        ),
    ]
    out.mkdir(parents=True, exist_ok=True)
    facts = {"machine": machine, "torch": torch.__version__, "date": date, "rows": [asdict(row) for row in rows]}
    (out / f"{stem}.json").write_text(json.dumps(facts, indent=1) + "\n")
    (out / f"{stem}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--fused", action="store_true", help="make optimizers fused unless a program chooses itself")
    parser.add_argument("--only", nargs="*", default=None, metavar="SCRIPT")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here: --device cpu runs the programs as tests/test_scripts.py does")
    cases = [case for case in [*HEALTHY, *FAULTY] if options.only is None or case.script in options.only]
    with tempfile.TemporaryDirectory() as top:
        (Path(top) / "sitecustomize.py").write_text(SITECUSTOMIZE)
        path = os.pathsep.join([top, str(ROOT / "src")])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        environment |= {"SCRIPTS_DEVICE": options.device, "SCRIPTS_FUSED": str(int(options.fused))}
        environment |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

        def one(numbered: tuple[int, Healthy | Faulty]) -> Row:
            place, case = numbered
            row = compare(case, Path(top) / str(place), environment)
            print(f"{case.script}: {row.verdict} {row.first}", file=sys.stderr, flush=True)
            return row

        with ThreadPoolExecutor(options.processes) as pool:
            rows = list(pool.map(one, enumerate(cases)))
    write(rows, options.device, options.fused, options.out)


if __name__ == "__main__":
    main()
