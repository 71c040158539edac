"""Programs that train several networks, or bare tensors: what a bad step of one of them has to do with the others."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import nanguard
from helpers import line
from nanguard.autopilot.entry import Autopilot
from nanguard.autopilot.summary import sentence
from nanguard.cli.speech import logging_to
from nanguard.errors import ReplayError
from nanguard.incidents.reader import load
from nanguard.records.diagnosis import Diagnosis
from nanguard.records.panel import repeated
from nanguard.replay.program import program_of
from nanguard.source.arguments import names_of_parts

BARE = """
    import torch
    import torch.nn.functional as F

    torch.manual_seed(0)
    w = (torch.randn(4, 3) * 0.1).requires_grad_()
    b = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adam([w, b], lr=1e-2)
    for step in range(8):
        x = torch.rand(6, 4)
        scale = torch.full((6, 1), 1000.0 if step == BAD else 1.0)
        z = torch.exp(torch.cat([x, scale], 1)[:, 4:] / 2) * (x @ w + b)
        loss = F.binary_cross_entropy(torch.sigmoid(z - z.detach()), torch.ones(6, 3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

TWO = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    G = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
    D = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    G_solver = torch.optim.RMSprop(G.parameters(), lr=G_RATE)
    D_solver = torch.optim.RMSprop(D.parameters(), lr=1e-4)
    for step in range(14):
        G_solver.zero_grad()
        (-D(G(torch.randn(6, 2))).mean()).backward()
        G_solver.step()
        D_solver.zero_grad()
        fake = D(G(torch.randn(6, 2)).detach())
        (fake.mean() * FACTOR).backward()
        D_solver.step()
"""


def run(tmp_path: Path, text: str, **values: Any) -> tuple[dict[str, Any], Autopilot]:
    """Runs a program under the autopilot. ``values`` replace names in its text."""
    for name, value in values.items():
        text = text.replace(name, str(value))
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(text))
    program = ModuleType("__main__")
    names = vars(program)
    names["__file__"] = str(file)
    with pytest.MonkeyPatch.context() as patch, nanguard.install(run_dir=tmp_path / "run") as autopilot:
        patch.setitem(sys.modules, "__main__", program)
        try:
            exec(compile(file.read_text(), str(file), "exec"), names)
        except RuntimeError as error:
            names["error"] = error
            autopilot.end()
    return names, autopilot


def first(autopilot: Autopilot) -> Diagnosis:
    diagnosis = autopilot.incidents[0].diagnosis
    assert diagnosis is not None
    return diagnosis


# ---- programs of bare tensors that raise -----------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 5])
def test_bare_tensors_that_raise_because_of_nan_are_explained(tmp_path: Path, bad: int) -> None:
    names, autopilot = run(tmp_path, BARE, BAD=bad)
    assert "between 0 and 1" in str(names["error"])
    (incident,) = autopilot.incidents
    assert incident.reading.step == bad
    assert incident.reading.found == ("input",)
    diagnosis = first(autopilot)
    assert (diagnosis.cause, diagnosis.op) == ("exp_overflow", "exp")
    assert diagnosis.source is not None
    assert "torch.exp" in diagnosis.source.text


def test_a_step_of_bare_tensors_has_no_model_to_replay(tmp_path: Path) -> None:
    run(tmp_path, BARE, BAD=5)
    with pytest.raises(ReplayError, match="calls no module"):
        program_of(load(tmp_path / "run" / "incidents" / "0001"))


def test_bare_tensors_that_raise_for_another_reason_are_not(tmp_path: Path) -> None:
    text = BARE.replace("scale = torch.full", "x @ x if step == 5 else x\n        scale = torch.full")
    names, autopilot = run(tmp_path, text, BAD=-1)
    assert "mat1 and mat2" in str(names["error"])
    assert autopilot.incidents == ()


def test_a_loss_of_a_step_that_was_refused_is_not_why_a_program_raises_later(tmp_path: Path) -> None:
    text = """
        import torch
        from torch import nn

        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(6):
            x = torch.randn(6, 4)
            if step == 3:
                x[1, 1] = float("nan")
            out = model(x)
            if step == 4:
                out + torch.zeros(5, 1)
            loss = out.pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """
    names, autopilot = run(tmp_path, text)
    assert "must match the size" in str(names["error"])
    assert [incident.reading.step for incident in autopilot.incidents] == [3]


def test_the_traceback_of_a_torch_call_that_is_noted_has_no_line_of_ours(tmp_path: Path) -> None:
    text = """
        import torch

        w = torch.zeros(3, requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=1e-3)
        for step in range(3):
            loss = (w + torch.ones(3 + step)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(text))
    environment = {**os.environ, "PYTHONPATH": str(Path(nanguard.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    plain, guarded = (
        subprocess.run(
            [sys.executable, *before, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        for before in ([], ["-m", "nanguard", "run"])
    )
    _, found, trace = guarded.stderr.partition("Traceback (most recent call last)")
    assert found + trace == plain.stderr


def test_tensors_in_a_list_have_names() -> None:
    assert names_of_parts("[x, self.c[0]]", ["[0]", "[1]"]) == ["x", "self.c[0]"]
    assert names_of_parts("x", [""]) == ["x"]
    assert names_of_parts("hidden", ["[0]", "[1]"]) == ["hidden[0]", "hidden[1]"]
    assert names_of_parts("targets", ['["mask"]', ".boxes"]) == ['targets["mask"]', "targets.boxes"]
    assert names_of_parts("(x, y)", ["[0]", "[1][0]", "[1]['z'].t"]) == ["x", "y[0]", "y['z'].t"]
    assert names_of_parts("a + b", ["[0]", "[1]"]) == ["(a + b)[0]", "(a + b)[1]"]
    assert names_of_parts("[x", ["[0]", "[1]"]) == ["([x)[0]", "([x)[1]"]
    assert names_of_parts("[*x, y]", ["[0]", "[1]"]) == ["([*x, y])[0]", "([*x, y])[1]"]


# ---- what another optimizer trains -----------------------------------------------------------------------------------


def test_a_weight_that_another_optimizer_trains_is_not_data(tmp_path: Path) -> None:
    names, autopilot = run(tmp_path, TWO, G_RATE="1e38", FACTOR="1.0")
    found = [each.diagnosis for each in autopilot.incidents if each.diagnosis is not None]
    diagnosis = next(each for each in found if each.network == "D, trained by D_solver")
    assert (diagnosis.phase, diagnosis.cause) == ("parameter", "learning_rate_too_high")
    assert "which another optimizer trains" in diagnosis.because
    assert "RMSprop trains it with lr=1e+38" in diagnosis.because
    assert all(bool(p.isfinite().all()) for p in names["G"].parameters())


def test_an_absurd_learning_rate_is_to_blame_for_a_damaged_weight_and_for_an_update(tmp_path: Path) -> None:
    _, autopilot = run(tmp_path, TWO, G_RATE="1e38", FACTOR="1.0")
    found = [(each.outcome.verdict.kind, each.reading.found, each.diagnosis) for each in autopilot.incidents]
    damage = next(diagnosis for kind, _, diagnosis in found if kind == "damage")
    update = next(diagnosis for _, seen, diagnosis in found if "update" in seen)
    assert damage is not None
    assert update is not None
    assert damage.cause == update.cause == "learning_rate_too_high"
    assert "1e+38" in damage.because
    assert "lr=1e+38" in update.because
    assert update.source is not None
    assert "G_solver = " in update.source.text


def test_a_bare_tensor_that_another_optimizer_trains_is_not_data(tmp_path: Path) -> None:
    text = """
        import torch

        torch.manual_seed(0)
        w = torch.randn(4, 1).requires_grad_()
        v = torch.empty(1).fill_(float("nan")).requires_grad_()
        one = torch.optim.SGD([w], lr=1e-3)
        two = torch.optim.SGD([v], lr=1e-3)
        for step in range(2):
            one.zero_grad()
            (torch.randn(6, 4) @ w + v).pow(2).mean().backward()
            one.step()
    """
    _, autopilot = run(tmp_path, text)
    diagnosis = first(autopilot)
    assert (diagnosis.phase, diagnosis.cause) == ("parameter", "uninitialized_memory")
    assert "parameter v" in diagnosis.because


def test_running_statistics_that_overflow_in_the_pass_of_another_network_are_not_called_corrupt() -> None:
    with nanguard.install() as autopilot:
        G, D = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1), nn.Sigmoid())
        solvers = [torch.optim.Adam(D.parameters(), lr=1e25), torch.optim.Adam(G.parameters())]
        for solver in solvers:
            solver.zero_grad()
            with contextlib.suppress(RuntimeError):  # all elements of input should be between 0 and 1
                nn.BCELoss()(D(G(torch.rand(6, 4))), torch.ones(6, 1)).backward()
            solver.step()
        autopilot.end()
    assert [incident.diagnosis.cause for incident in autopilot.incidents] == ["learning_rate_too_high"]


def test_a_later_fault_is_located_in_programs_with_a_loss_scale_for_each_network() -> None:
    """Each step changes the scale: were that on the tape, a step would depend on all before it."""
    with nanguard.install() as autopilot:
        G, D = nn.Linear(4, 4), nn.Linear(4, 1)
        solvers = [torch.optim.Adam(net.parameters()) for net in (D, G)]
        scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in solvers]
        for step in range(5):
            real = torch.rand(6, 4)
            for solver, scaler in zip(solvers, scalers, strict=True):
                with torch.autocast("cpu", torch.bfloat16):
                    score = D(G(real)).mean() if solver is solvers[1] else D(real).mean()
                    loss = torch.log(score.float().square() * (step != 3 or solver is solvers[0]))  # logarithm
                solver.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(solver)
                scaler.update()
    found = [incident.diagnosis for incident in autopilot.incidents]
    assert [(each.step, each.cause, each.source.line) for each in found] == [(3, "log_of_zero", line("logarithm"))]


def test_lines_about_many_steps_name_the_network(tmp_path: Path) -> None:
    _, autopilot = run(tmp_path, TWO, G_RATE="1e-4", FACTOR='float("inf")')
    line = repeated(autopilot.incidents[1], same_as=0, count=2)
    assert line == " nanguard  step 1  same as step 0 (D): step skipped (2 times now)"
    told = sentence(autopilot, unsound=())
    assert "28 steps, 14 not applied" in told
    assert "the last 14 steps (D, trained by D_solver) in a row had no effect" in told


def test_a_learning_rate_of_ten_is_named_after_one_step() -> None:
    torch.manual_seed(0)
    with nanguard.install() as autopilot:
        model = nn.Linear(30, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=10.0)
        for _ in range(3):
            optimizer.zero_grad()
            torch.exp(model(torch.rand(8, 30)).abs()).mean().backward()
            optimizer.step()
    diagnosis = first(autopilot)
    assert diagnosis.cause == "learning_rate_too_high"
    assert "with lr=10" in diagnosis.because


# ---- the terminal ----------------------------------------------------------------------------------------------------


def test_a_panel_does_not_begin_behind_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with logging_to(Console(file=stream, width=80), alone=True):
        for _ in tqdm(range(2), mininterval=0):
            logging.getLogger("nanguard").warning(" nanguard  step 0  the loss is NaN")
    lines = stream.getvalue().replace("\r", "\n").splitlines()
    assert lines.count(" nanguard  step 0  the loss is NaN") == 2


def test_in_a_program_that_logs_itself_a_panel_does_not_begin_behind_a_progress_bar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    handler = logging.StreamHandler(stream)
    logging.getLogger("nanguard").addHandler(handler)
    try:
        with nanguard.install():
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in tqdm(range(1), mininterval=0):
                model(torch.full((2, 2), math.nan)).mean().backward()
                optimizer.step()
    finally:
        logging.getLogger("nanguard").removeHandler(handler)
    lines = stream.getvalue().replace("\r", "\n").splitlines()
    assert " nanguard  step 0  the loss is NaN: step skipped, nothing changed" in lines


def test_steps_that_are_too_long_are_to_blame_for_what_another_network_computes() -> None:
    """The first network grows by the learning rate, step by step, and makes the targets of the second one overflow."""
    torch.manual_seed(0)
    x = torch.ones(4, 1)
    with nanguard.install() as autopilot:
        far, near = nn.Linear(1, 1, bias=False), nn.Linear(1, 1)
        nn.init.constant_(far.weight, 0.3)
        far_optimizer = torch.optim.Adam(far.parameters(), lr=8)
        near_optimizer = torch.optim.SGD(near.parameters(), lr=1e-30)
        while not autopilot.incidents:
            with torch.no_grad():
                y = far(x).exp()
            near_optimizer.zero_grad()
            nn.functional.mse_loss(near(x), y).backward()
            near_optimizer.step()
            far_optimizer.zero_grad()
            (-far(x).mean()).backward()
            far_optimizer.step()
    found = first(autopilot)
    assert found.cause == "learning_rate_too_high"
    assert "weight grew from 0.3 to 48.3 in 6 steps of Adam with lr=8" in found.because
