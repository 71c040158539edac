"""The variables of the program's functions are the program's: they are never read, kept or cleared."""

from __future__ import annotations

import ast
import gc
import importlib
import os
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanguard
from helpers import NAN
from nanguard.source.frames import source_at

SOURCE = Path(nanguard.__file__).parent

STEPS = """
    def steps(w, optimizer, net=lambda x: x):
        for number in range(4):
            loss = torch.log(net(w) - (net(w) if number == 1 else 0.0)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
"""

PROGRAMS = {
    "a class body": """
        class Experiment:
            rate = 0.1
            w = torch.ones(2, requires_grad=True)
            optimizer = torch.optim.SGD([w], lr=rate)
            steps(w, optimizer)
            print(rate, w.tolist(), type(optimizer).__name__)
    """,
    "exec with its own locals": """
        scope = {}
        code = "rate = 0.1\\nw = torch.ones(2, requires_grad=True)\\noptimizer = torch.optim.SGD([w], lr=rate)\\n"
        exec(compile(code + "steps(w, optimizer)\\nprint(rate, w.tolist())", __file__, "exec"), globals(), scope)
        print(sorted(scope))
    """,
    "locals() before the optimizer": """
        def main(rate=0.1, epochs=3):
            config = locals()
            w = torch.ones(2, requires_grad=True)
            optimizer = torch.optim.SGD([w], lr=config["rate"])
            steps(w, optimizer)
            print(sorted(config), config["epochs"], w.tolist())
        main()
    """,
    "locals() in a module": """
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.seen = []
            def forward(self, x):
                seen = locals()
                y = x * 1.0
                self.seen.append(sorted(seen))
                return y
        def main():
            net, w = Net(), torch.ones(2, requires_grad=True)
            optimizer = torch.optim.SGD([w], lr=0.1)
            here = locals()
            steps(w, optimizer, net)
            print(sorted(here), net.seen[:2], net.seen[-1], w.tolist())
        main()
    """,
}


@pytest.mark.parametrize(
    "options", [pytest.param([], id="plainly"), pytest.param(["--trace"], id="traced", marks=pytest.mark.campaign)]
)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.campaign] if place % 2 else ()) for place, case in enumerate(PROGRAMS)],
)
def test_the_programs_variables_are_what_they_were(case: str, options: list[str], tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("import torch\n" + textwrap.dedent(STEPS) + textwrap.dedent(PROGRAMS[case]))
    plain, guarded = (
        subprocess.run(
            [sys.executable, *by, program.name],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        for by in ([], ["-m", "nanguard", "run", *options])
    )
    assert (plain.returncode, guarded.returncode) == (0, 0), guarded.stderr
    assert "nan" in plain.stdout
    assert "nan" not in guarded.stdout
    names = [line.partition("nan")[0] for line in plain.stdout.splitlines()]
    assert all(name.rpartition("[")[0] in guarded.stdout for name in names), guarded.stdout
    assert "1 not applied" in guarded.stderr


class Big:
    """Something whose end can be seen."""


@pytest.mark.parametrize("trace", [False, True])
def test_what_the_program_deletes_is_gone_at_once(trace: bool) -> None:
    class Net(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            big = Big()
            ends.append(weakref.ref(big))
            out = w * 2
            del big
            gone.append(ends[-1]() is None)
            return torch.log(out)

    ends: list[Any] = []
    gone: list[bool] = []

    def train() -> None:
        net, w = Net(), torch.ones(2, requires_grad=True)
        big = Big()
        ends.append(weakref.ref(big))
        optimizer = torch.optim.SGD([w], lr=0.1)
        for factor in (1.0, NAN, 1.0):
            optimizer.zero_grad()
            (net(w) * factor).sum().backward()
            optimizer.step()
        del big
        gone.append(ends[0]() is None)

    gc.disable()
    try:
        with nanguard.install(trace=trace) as autopilot:
            train()
    finally:
        gc.enable()
    assert len(autopilot.incidents) == 1
    assert all(gone)


MAY_READ = {
    "dataset_lines.py",  # of a dataset that reads one record again: these calls are ours
    "given.py",  # of a program that has ended with an error
    "last_loss.py",  # the same
    "tape_recorder.py",  # of a function of torch that runs compiled code
}


def test_no_code_of_ours_reads_the_variables_of_a_frame() -> None:
    found = []
    for path in SOURCE.rglob("*.py"):
        if path.name in MAY_READ:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            named = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if named in ("f_locals", "locals", "getargvalues", "getinnerframes", "currentframe"):
                found.append(f"{path.name}:{node.lineno}")
    assert found == []


def test_a_trace_knows_modules_by_their_calls_and_by_their_code() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def attend(self, x: Tensor) -> Tensor:
            return torch.log(x * self.w - self.bad)

        def forward(self, x: Tensor, bad: float) -> Tensor:
            self.bad = bad
            return self.attend(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList([Block(), Block(), Block()]), nn.Linear(2, 2)

        def encode(self, x: Tensor, bad: float) -> Tensor:
            for number, block in enumerate(self.blocks):
                x = block(x, bad if number == 1 else 0.0) + 1.0
            return x

    def train() -> None:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        for bad in (0.0, 1.0):
            optimizer.zero_grad()
            net.encode(torch.ones(2), bad).sum().backward()
            optimizer.step()

    before = nn.Module._call_impl
    with nanguard.install(trace=True) as autopilot:
        train()
    assert nn.Module._call_impl is before
    (incident,) = autopilot.incidents
    assert incident.diagnosis is not None
    assert (incident.diagnosis.op, incident.diagnosis.module) == ("log", "blocks.1")


def test_files_of_the_same_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vision", "text"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "losses_of_a_test.py").write_text("import torch\n\n\nloss = torch.nn.functional.mse_loss\n")
    monkeypatch.syspath_prepend(tmp_path)
    vision = importlib.import_module("vision.losses_of_a_test")
    assert vision.__file__ is not None
    assert str(source_at(vision.__file__, 4)) == "losses_of_a_test.py:4"
    importlib.import_module("text.losses_of_a_test")
    assert str(source_at(vision.__file__, 4)) == "vision/losses_of_a_test.py:4"
    assert source_at(vision.__file__, 4).file == vision.__file__
    for name in ("vision", "vision.losses_of_a_test", "text", "text.losses_of_a_test"):
        monkeypatch.delitem(sys.modules, name)
