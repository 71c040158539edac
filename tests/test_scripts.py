"""``nanguard run`` on programs that nobody changed: ``scripts/`` has them as people write them, healthy and faulty.

Each is run by plain Python and under nanguard, in a process of its own. What is wrong with a faulty one was written
down here, and on the lines marked ``# guilty``, before nanguard was asked.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nanguard

SCRIPTS = Path(__file__).parent / "scripts"
OUT = "OUT"
"""Stands for the file that a program writes its weights to, in its arguments; also a variable of its environment."""

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), reason="needs a C++ compiler"
)


@dataclass(frozen=True)
class Healthy:
    """``notes`` are what nanguard may say of it besides its last line.

    If it ``leaves_out`` bad batches itself, it is told why, and nothing is done about them.
    """

    script: str
    args: tuple[str, ...] = (OUT,)
    status: int = 0
    notes: str | None = None
    leaves_out: int = 0
    marks: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return self.script


@dataclass(frozen=True)
class Faulty:
    """``where`` is the file with the guilty lines, if not the script; a package is run with ``-m``."""

    script: str
    ops: set[str]
    causes: set[str]
    args: tuple[str, ...] = (OUT,)
    phases: set[str] = field(default_factory=lambda: {"forward"})
    where: str = ""

    def __str__(self) -> str:
        return self.script

    @property
    def file(self) -> Path:
        return SCRIPTS / (self.where or f"{self.script}.py")

    @property
    def lines(self) -> list[int]:
        return [n for n, line in enumerate(self.file.read_text().splitlines(), 1) if "# guilty" in line]


HEALTHY = [
    Healthy("actor_critic", status=3),
    Healthy("amp_routine"),
    Healthy("careful", status=1, leaves_out=4),
    Healthy("compiled", marks=(needs_compiler, pytest.mark.campaign)),
    Healthy("ensemble"),
    Healthy("fine_tune"),
    Healthy("gan"),
    Healthy("language_model", ("--lr", "0.01", OUT)),
    Healthy("lbfgs_fit", notes="LBFGS"),
    Healthy("memory_saver"),
    Healthy("meta_learning"),
    Healthy("mlp"),
    Healthy("polynomial"),
    Healthy("resume", ("--out", OUT)),
    Healthy("spawned"),
]

FAULTY = [
    Faulty("accumulation", {"div"}, {"zero_over_zero"}),
    Faulty("amp_records", {"addmm", "linear", "_to_copy"}, {"input_nonfinite"}, phases={"data"}),
    Faulty("attention", {"softmax", "_softmax"}, {"masked_softmax_all_neg_inf"}),
    Faulty("cnn", {"div"}, {"zero_over_zero"}),
    Faulty("functional", {"log"}, {"log_of_zero"}),
    Faulty("gan", {"log"}, {"log_of_zero"}, ("--radius", "20", "--g-lr", "0.05", "--steps", "40", OUT)),
    Faulty("half_precision", {"addmm", "linear"}, {"overflow_fp16"}),
    Faulty("house_prices", {"pow", "mean"}, {"gradient_explosion", "overflow_any_precision"}),
    Faulty("last_batch", {"std"}, {"std_of_single_element"}, ("--save", OUT)),
    Faulty("lbfgs_decay", {"exp"}, {"exp_overflow"}),
    Faulty("listings", {"log"}, {"log_of_zero"}, ("--out", OUT)),
    Faulty("logistic_regression", {"log"}, {"log_of_zero"}),
    Faulty(
        "lstm_forecast", {"div", "lstm", "mkldnn_rnn_layer", "cudnn_rnn"}, {"input_nonfinite"}, ("--out", OUT), {"data"}
    ),
    Faulty("memory_saver", {"sqrt"}, {"sqrt_grad_at_zero"}, ("--doubles", OUT), {"backward"}),
    Faulty(
        "own_optimizer",
        {"div", "RMSPropFromSlide"},
        {"zero_over_zero", "div_by_zero", "optimizer_eps_underflow"},
        phases={"optimizer"},
    ),
    Faulty("rbm", {"exp"}, {"exp_overflow"}),
    Faulty("recurrent", {"mm", "addmm", "pow", "mean"}, {"gradient_explosion", "overflow_any_precision"}),
    Faulty("retrieval.train", {"pow"}, {"pow_negative_base"}, ("--out", OUT), where="retrieval/pooling.py"),
    Faulty("rotations", {"acos"}, {"acos_asin_domain"}, phases={"forward", "backward"}),
    Faulty("scaling", {"sqrt"}, {"sqrt_grad_at_zero"}, phases={"backward"}),
    Faulty("siamese_trainer", {"sqrt"}, {"sqrt_grad_at_zero"}, ("--out", OUT), {"backward"}),
    Faulty("softmax_by_hand", {"exp"}, {"exp_overflow"}),
    Faulty("two_towers", {"div"}, {"division_by_near_zero_norm", "zero_over_zero"}),
    Faulty("unit_vectors", {"div"}, {"custom_backward_bug"}, phases={"backward"}),
    Faulty("vae", {"exp"}, {"exp_overflow"}),
]

REST = {
    *(
        "actor_critic",
        "amp_records",
        "ensemble",
        "functional",
        "house_prices",
        "last_batch",
        "listings",
        "meta_learning",
    ),
    *("polynomial", "rbm", "recurrent", "resume", "rotations", "siamese_trainer", "softmax_by_hand", "two_towers"),
    *("unit_vectors", "lstm_forecast", "logistic_regression", "fine_tune"),
}
"""Run in the whole campaign only."""

COLD = {"actor_critic", "careful", "compiled", "listings", "logistic_regression", "retrieval.train", "spawned"}
"""Started as a user starts them: what is special about them has to do with how a program begins and ends."""

KNOWN: dict[tuple[type, str], list[str]] = {}
"""What nanguard gets wrong. The case must fail until this is mended."""


@dataclass(frozen=True)
class Ran:
    """What a program did."""

    folder: Path
    status: int

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def tensors(self) -> dict[str, Tensor]:
        assert (self.folder / "out.pt").exists(), f"nothing was saved:\n{self.stderr}"
        return dict(tensors_in(torch.load(self.folder / "out.pt", weights_only=True)))

    @property
    def words(self) -> list[str]:
        """Lines of nanguard on stderr."""
        return [line for line in self.stderr.splitlines() if line.startswith("nanguard: ")]

    @property
    def bad(self) -> list[str]:
        return [name for name, tensor in self.tensors.items() if not tensor.isfinite().all()]


def tensors_in(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from tensors_in(value, f"{name}.{key}")


class Warm:
    """Starts programs from a Python that has imported torch, which takes longer than most of them run."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).parent / "warm.py")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )

    def run(self, arguments: list[str], folder: Path) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        job = {"arguments": arguments, "cwd": str(folder), "env": {OUT: str(folder / "out.pt")}}
        job |= {"stdout": str(folder / "stdout"), "stderr": str(folder / "stderr")}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        there, _, _ = select.select([self.process.stdout], [], [], 300)
        assert there, f"still running after 300 s: {arguments}"
        answer = self.process.stdout.readline()
        assert answer, f"ended before its programs did: {self.process.args}"
        return int(answer)

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)  # with a program that may hang
        self.process.communicate(timeout=300)


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    one = Warm()
    yield one
    one.close()


def both_ways(case: Healthy | Faulty, tmp_path: Path, warm: Warm) -> tuple[Ran, Ran]:
    """The program by plain Python and under nanguard."""
    plain, guarded = (
        Ran(folder := tmp_path / name, status_of(case, folder, arguments, warm))
        for name, arguments in (("plain", []), ("guarded", ["-m", "nanguard", "run"]))
    )
    return plain, guarded


def status_of(case: Healthy | Faulty, folder: Path, arguments: list[str], warm: Warm) -> int:
    """Runs the program with ``folder`` as the current one."""
    folder.mkdir()
    package = case.script.partition(".")[0]
    if package != case.script:
        shutil.copytree(SCRIPTS / package, folder / package)
        arguments = [*arguments, "-m", case.script]
    else:
        arguments = [*arguments, str(SCRIPTS / f"{case.script}.py")]
    weights = str(folder / "out.pt")
    arguments += [weights if arg == OUT else arg for arg in case.args]
    if case.script not in COLD:
        return warm.run(arguments, folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", OUT: weights}
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=300
        ).returncode


def each_of(programs: list[Any]) -> pytest.MarkDecorator:
    params = []
    for case in programs:
        marks = list(getattr(case, "marks", ()))
        if str(case) in REST:
            marks.append(pytest.mark.campaign)
        if wrong := KNOWN.get((type(case), str(case))):
            marks.append(pytest.mark.xfail(reason="; ".join(wrong), strict=True))
        params.append(pytest.param(case, id=str(case), marks=marks))
    return pytest.mark.parametrize("case", params)


@each_of(HEALTHY)
def test_a_healthy_program_is_the_same_program(case: Healthy, tmp_path: Path, warm: Warm) -> None:
    plain, guarded = both_ways(case, tmp_path, warm)
    assert (plain.status, guarded.status) == (case.status, case.status), guarded.stderr
    assert guarded.stdout == plain.stdout != ""
    before, after = plain.tensors, guarded.tensors
    assert list(before) == list(after) != []
    assert [name for name in before if not torch.equal(before[name], after[name])] == []

    told = [line for line in guarded.words if case.notes is None or not line.startswith(f"nanguard: {case.notes}")]
    assert len(told) == 1, guarded.stderr
    rest = [line for line in guarded.stderr.splitlines() if line not in guarded.words]
    run = nanguard.read_run(guarded.folder / "nanguard-runs" / case.script)
    assert run.is_over
    assert not run.troubles
    assert run.steps
    assert len(run.incidents) == case.leaves_out
    if case.leaves_out:
        assert all(incident.outcome.action.rung is None for incident in run.incidents)
        assert rest[-len(plain.stderr.splitlines()) :] == plain.stderr.splitlines()
    else:
        assert "none of them non-finite" in told[0]
        assert rest == plain.stderr.splitlines()


@each_of(FAULTY)
def test_a_faulty_program_ends_with_finite_weights_and_its_guilty_line_is_named(
    case: Faulty, tmp_path: Path, warm: Warm
) -> None:
    plain, guarded = both_ways(case, tmp_path, warm)
    assert plain.bad, "the program is not as faulty as it is said to be"
    assert guarded.status == plain.status == 0, guarded.stderr
    assert list(guarded.tensors) == list(plain.tensors)
    assert guarded.bad == []

    places = "|".join(re.escape(f"{case.file.name}:{line}") for line in case.lines)
    row = rf"^ +where +(first used at |probably )*({places})\b.* \(({'|'.join(case.ops)}), "
    assert re.search(row, guarded.stderr, re.MULTILINE), guarded.stderr
    assert re.search(r"not applied, .*weights and optimizer state finite", guarded.words[-1])
    assert "Traceback" not in guarded.stderr

    run = nanguard.read_run(guarded.folder / "nanguard-runs" / case.script.rpartition(".")[2])
    assert run.is_over
    assert not run.troubles
    diagnoses = [incident.diagnosis for incident in run.incidents if incident.diagnosis is not None]
    known = [each for each in diagnoses if each.cause != "unknown"]
    assert known
    assert any(each.source is not None for each in known)
    for each in known:  # all of them: one that is wrong is worse than none
        assert each.cause in case.causes
        assert each.op in case.ops
        assert each.phase in case.phases
        if each.source is None:
            assert each.capture == "graph"  # two lines of the program could have done it
            continue
        assert (Path(each.source.file).name, each.source.line) in [(case.file.name, line) for line in case.lines]


def test_every_program_is_run() -> None:
    cases = {(type(case), str(case)) for case in [*HEALTHY, *FAULTY]}
    assert {name for _, name in cases} == {path.stem for path in SCRIPTS.glob("*.py")} | {"retrieval.train"}
    assert KNOWN.keys() <= cases
