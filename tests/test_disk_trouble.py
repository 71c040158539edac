"""The disk fails in the middle of a run: it goes on, with one clear line."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim import SGD

import nanguard
from helpers import TinyNet, make_batches, poisoned
from nanguard.autopilot.summary import sentence
from nanguard.incidents import bundle
from nanguard.runlog.reader import read_run


def train(run_dir: Path, at: int, trouble: Any) -> str:
    """Every fourth step is bad; ``trouble`` comes before step ``at``. Returns the closing line."""
    batches = poisoned(make_batches(8), 3, 7)
    with nanguard.install(run_dir=run_dir) as autopilot:
        torch.manual_seed(0)
        model = TinyNet()
        optimizer = SGD(model.parameters(), lr=0.01)
        for step in range(40):
            if step == at:
                trouble()
            x, y = batches[step % 8]
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert autopilot.counts["applied"] == 30
    assert all(bool(torch.isfinite(tensor).all()) for tensor in model.state_dict().values())
    return sentence(autopilot, unsound=())


def test_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill() -> None:
        monkeypatch.setattr(bundle.BundleDraft, "write", full)
        monkeypatch.setattr("nanguard.runlog.writer._Pages._append", full)

    told = train(tmp_path / "run", 8, fill)
    assert caplog.text.count("No space left on device") == 2, "one line for the log, one for the incidents"
    assert caplog.text.count("the run goes on") == 2
    assert "incidents of one kind are saved" not in caplog.text
    assert "8 of 10 incidents not saved to disk" in told


def test_a_folder_that_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path / "run", 8, lambda: shutil.rmtree(tmp_path / "run"))
    run = read_run(tmp_path / "run")
    assert run.header["optimizers"] == ["SGD"]
    assert [incident.outcome.verdict.reading.step for incident in run.incidents] == list(range(11, 40, 4))
    assert caplog.text.count("was removed during the run") == 1


def test_a_folder_that_becomes_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def replace() -> None:
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").write_text("")

    train(tmp_path / "run", 8, replace)
    assert caplog.text.count("the run goes on without its log") == 1
    assert caplog.text.count("the incident could not be saved") == 1
