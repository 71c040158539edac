"""Programs that raise because of a NaN, before their optimizer steps: the step is explained, and the error goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import nanguard
from helpers import TinyNet, differences, everything, make_batches, poisoned
from nanguard import Guard
from nanguard.records.steps import Incident
from nanguard.runlog.reader import read_run

SCRIPT = """
import sys
import torch
from torch import nn

class Careful(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.norm, self.out = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x):
        out = self.out(self.norm(self.inp(x)))
        if how == "in the model" and not torch.isfinite(out).all():
            raise KeyError("output")
        return out

how = sys.argv[1]
torch.manual_seed(0)
model = Careful()
optimizer = torch.optim.Adam(model.parameters(), fused="fused" in sys.argv)

def loss_of(i, out):
    if how == "BCELoss":
        return nn.BCELoss()(torch.sigmoid(out), torch.ones_like(out))
    if how == "bad target":
        target = torch.ones_like(out)
        if i == 5:
            target = torch.from_numpy(target.numpy().copy())
            target[3, 0] = float("nan")
        return nn.BCELoss()(torch.sigmoid(out), target)
    if how == "multinomial":
        torch.multinomial(torch.softmax(out.flatten(), 0), 1)
    if how == "in the loss":
        out = 30.0 + out - (60.0 if i == 5 else 0.0)
        loss = torch.log(out).mean()
        assert torch.isfinite(loss), "not finite"
        return loss
    return out.pow(2).mean()

def train(i, x):
    optimizer.zero_grad()
    loss = loss_of(i, model(x))
    if how == "exit" and not torch.isfinite(loss):
        sys.exit(3)
    if how == "anomaly":
        with torch.autograd.detect_anomaly():
            loss.backward()
    else:
        loss.backward()
    if how == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()

for i in range(9):
    x = torch.randn(16, 4)
    if i == 5 and how not in ("in the loss", "bad target"):
        x[3, 2] = float("nan")
    if how == "caught":
        try:
            train(i, x)
        except RuntimeError:
            pass
    else:
        train(i, x)
"""

ERRORS: dict[str, tuple[type[BaseException], str]] = {
    "BCELoss": (RuntimeError, "all elements of input should be between 0 and 1"),
    "bad target": (RuntimeError, "all elements of target should be between 0 and 1"),
    "multinomial": (RuntimeError, "probability tensor contains"),
    "anomaly": (RuntimeError, "Function 'PowBackward0' returned nan values"),
    "clip": (RuntimeError, "The total norm of order 2.0"),
    "in the model": (KeyError, "output"),
    "in the loss": (AssertionError, "not finite"),
    "exit": (SystemExit, "3"),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
@pytest.mark.parametrize("how", ERRORS)
@pytest.mark.parametrize("sync", ["eager", "late"])
def test_an_error_that_ends_the_program_is_explained(
    sync: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if sync == "late":
        request.getfixturevalue("as_on_a_gpu")
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", ["train.py", how, "fused" if sync == "late" else ""])
    program = compile(SCRIPT, str(file), "exec")
    kind, said = ERRORS[how]
    names: dict[str, Any] = {"__name__": "__main__"}
    with pytest.raises(kind, match=said), nanguard.install(run_dir=tmp_path / "run") as autopilot:
        exec(program, names)
    assert all(bool(torch.isfinite(buffer).all()) for buffer in names["model"].buffers())
    assert names["model"].norm.num_batches_tracked == 5
    assert autopilot.counts["applied"] == 5
    (incident,) = read_run(tmp_path / "run").incidents
    diagnosis = incident.outcome.diagnosis
    assert incident.outcome.verdict.reading.step == 5
    assert diagnosis is not None
    assert diagnosis.cause == ("log_of_negative" if how == "in the loss" else "input_nonfinite"), diagnosis
    assert ("the program ended" if how == "exit" else f"the program raised {kind.__name__}") in incident.outcome.did
    assert (tmp_path / "run" / "incidents" / "0001" / "incident.json").exists()
    if how in ("bad target", "in the loss"):
        assert (diagnosis.capture, diagnosis.is_line_traced) == ("tape", True)
        assert incident.outcome.verdict.reading.found == (("input",) if how == "bad target" else ("loss",))


def test_the_traceback_is_that_of_the_program_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    source = str(Path(nanguard.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    plain, guarded = (
        subprocess.run(
            [sys.executable, *before, "train.py", "in the model"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        for before in ([], ["-m", "nanguard", "run"])
    )
    assert guarded.returncode == plain.returncode == 1
    told, found, trace = guarded.stderr.partition("Traceback (most recent call last)")
    assert found + trace == plain.stderr
    assert "step 5" in told
    assert "weights and optimizer state finite" in told


def careful(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    out = model(x)
    if torch.isnan(out).any():
        raise FloatingPointError("I know")
    return F.cross_entropy(out, y)


def net() -> TinyNet:
    torch.manual_seed(0)
    model = TinyNet()
    model.drop.p = 0.0
    return model


def under_the_autopilot(model: nn.Module, optimizer: SGD, batches: Any, errors: list[str]) -> tuple[Incident, ...]:
    for batch in batches:
        optimizer.zero_grad()
        try:
            careful(model, batch).backward()
        except FloatingPointError as error:
            errors.append(str(error))
            continue
        optimizer.step()
    return ()


def in_own_loop(model: nn.Module, optimizer: SGD, batches: Any, errors: list[str]) -> tuple[Incident, ...]:
    guard = Guard(model, optimizer, max_norm=None, precision="fp32", snapshots=None)
    for batch in guard.epoch(batches):
        try:
            with guard.autocast():
                loss = careful(model, batch)
            guard.backward(loss)
        except FloatingPointError as error:
            errors.append(str(error))
            continue
        guard.update()
    return guard.incidents


def handed_over(model: nn.Module, optimizer: SGD, batches: Any, errors: list[str]) -> tuple[Incident, ...]:
    guard = Guard(model, optimizer, max_norm=None, precision="fp32", snapshots=None)
    for batch in guard.epoch(batches):
        try:
            guard.step(careful, batch)
        except FloatingPointError as error:
            errors.append(str(error))
    return guard.incidents


@pytest.mark.parametrize("train", [under_the_autopilot, in_own_loop, handed_over])
def test_a_program_that_catches_its_own_error_goes_on(train: Callable[..., tuple[Incident, ...]]) -> None:
    batches, states, incidents = make_batches(6), [], []
    for is_guarded, data in ((False, batches[:2] + batches[3:]), (True, poisoned(batches, 2))):
        errors: list[str] = []
        if is_guarded and train is under_the_autopilot:
            with nanguard.install() as autopilot:
                model = net()
                optimizer = SGD(model.parameters(), lr=0.1)
                train(model, optimizer, data, errors)
            incidents = list(autopilot.incidents)
        else:
            model = net()
            optimizer = SGD(model.parameters(), lr=0.1)
            incidents = list((train if is_guarded else under_the_autopilot)(model, optimizer, data, errors))
        states.append(everything(model, [optimizer]))
        assert errors == ["I know"] * is_guarded
    assert differences(*states) == []
    (incident,) = incidents
    assert incident.reading.step == 2
    assert incident.diagnosis is not None
    assert incident.diagnosis.cause == "input_nonfinite"


def test_an_own_loop_that_ends_with_an_error_is_explained() -> None:
    model = net()
    guard = Guard(model, SGD(model.parameters(), lr=0.1), precision="fp32")
    with pytest.raises(FloatingPointError, match="later"), guard:
        for x, y in guard.epoch(poisoned(make_batches(4), 2)):
            with guard.autocast():
                loss = F.cross_entropy(model(x), y)
            if torch.isnan(loss):
                raise FloatingPointError("later")
            guard.backward(loss)
            guard.update()
    (incident,) = guard.incidents
    assert (incident.reading.step, incident.reading.found) == (2, ("output",))
    assert all(bool(torch.isfinite(buffer).all()) for buffer in model.buffers())


@pytest.mark.parametrize("error", [KeyError, FloatingPointError])
def test_an_error_that_has_nothing_to_do_with_nan_is_no_incident(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def buggy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        calls.append(1)
        F.cross_entropy(model(batch[0]), batch[1])
        raise error("a bug")

    model = net()
    guard = Guard(model, SGD(model.parameters(), lr=0.1), precision="fp32")
    for batch in make_batches(6):
        with pytest.raises(error, match="a bug"):
            guard.step(buggy, batch)
    assert guard.incidents == ()
    assert len(calls) == 6 + 3, "a function that raises for other reasons is not run again for ever"
    assert caplog.text == "", "and its error is not told twice"


def test_a_pass_that_is_thrown_away_without_nan_is_no_incident() -> None:
    """With an Inf, as a mask makes it, and gradients on."""
    with nanguard.install() as autopilot:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        for x, y in make_batches(4):
            masked = model(x).masked_fill(x[:, :1] > 0, -torch.inf)
            assert torch.isinf(masked).any()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not autopilot.incidents
