"""A fault that comes again and again: few lines, little on disk, little time."""

from __future__ import annotations

import logging
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim import SGD

import nanguard
from helpers import TinyNet, make_batches, poisoned
from nanguard.diagnosis.examiner import Examiner
from nanguard.incidents.reader import load
from nanguard.replay.explain import about, find
from nanguard.runlog.reader import read_run

STEPS, EVERY = 400, 4


@pytest.mark.parametrize("catches", [False, True], ids=["refused", "left out by the program"])
def test_a_frequent_fault_is_told_in_few_lines(
    catches: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    examined: list[int] = []
    examine = Examiner.examine
    monkeypatch.setattr(Examiner, "examine", lambda *args, **kw: (examined.append(1), examine(*args, **kw))[1])
    batches = make_batches(8)
    batches = poisoned(batches, 3, 7)
    with caplog.at_level(logging.WARNING), nanguard.install(run_dir=tmp_path) as autopilot:
        torch.manual_seed(0)
        model = TinyNet()
        optimizer = SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            x, y = batches[step % 8]
            loss = F.cross_entropy(model(x), y)
            if catches and not torch.isfinite(loss):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert len(autopilot.incidents) == STEPS // EVERY
    assert len(caplog.text.splitlines()) < 60
    assert f"same as step 3: {'not used for training' if catches else 'step skipped'}" in caplog.text
    assert "(30 times now)" in caplog.text
    assert "(31 times now)" not in caplog.text
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 5 << 20
    assert len(examined) < STEPS // EVERY / 2
    incidents = read_run(tmp_path).incidents
    every = EVERY - catches  # what the program leaves out is no step, and is not counted
    expected = [3 + every * number for number in range(STEPS // EVERY)]
    assert [incident.outcome.verdict.reading.step for incident in incidents] == expected
    causes = {incident.outcome.diagnosis and incident.outcome.diagnosis.cause for incident in incidents}
    assert causes == {"input_nonfinite"}
    saved = [load(folder) for folder in find(tmp_path)[0]]
    assert len(saved) < len(incidents)
    words = f"repeated  {len(incidents)} times, first at step 3, last at step {expected[-1]}"
    assert words in "\n".join(about(saved, tmp_path, brief=True)), "also those that were not saved are counted"


PROGRAM = """
import warnings
import torch
from torch import nn
from torch.optim import SGD

class Net(nn.Linear):
    def forward(self, x):
        warnings.warn("an old option")
        if torch.isnan(x).any():
            warnings.warn("this batch looks odd")
        return super().forward(x)

def train(bad):
    torch.manual_seed(0)
    model = Net(4, 1)
    optimizer = SGD(model.parameters(), lr=0.01)
    for step in range(8):
        x = torch.randn(8, 4)
        if step in bad:
            x[0, 0] = float("nan")
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_warnings_that_are_shown_once_are_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(*args: Any, **kwargs: Any) -> Any:
        """As torch and the standard library do."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return examine(*args, **kwargs)

    examine = Examiner.examine
    monkeypatch.setattr(Examiner, "examine", forgetful)
    program = types.ModuleType("program")
    monkeypatch.setitem(sys.modules, "program", program)
    exec(compile(PROGRAM, str(tmp_path / "program.py"), "exec"), vars(program))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        with nanguard.install(run_dir=tmp_path / "run") as autopilot:
            program.train(bad=(2, 5))
    assert len(autopilot.incidents) == 2
    assert [str(each.message) for each in shown] == ["an old option", "this batch looks odd"]


@pytest.mark.parametrize("sync", ["eager", "late"])
def test_a_repeat_is_one_line_whenever_the_host_learns_of_it(sync: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(3, 1)
    guard = nanguard.Guard(model, torch.optim.AdamW(model.parameters(), fused=True), precision="fp32", sync=sync)
    for step in range(9):
        guard.step(lambda model, x: model(x).mean(), torch.full((2, 3), float("nan") if step in (2, 6) else 1.0))
    guard.settle()
    told = [record.getMessage() for record in caplog.records if "  step " in record.getMessage()]
    assert [len(text.splitlines()) > 1 for text in told] == [True, False]
    assert "same as step 2" in told[1]
