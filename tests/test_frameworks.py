"""``nanguard run`` on programs that use a trainer of a framework: the adapters guard it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

import nanguard
from helpers import NAN, differences
from nanguard.autopilot.launch import WhenImported

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from nanguard.integrations.transformers import GuardCallback, attach
from test_integration_transformers import BAD, BATCH, WINDOWS, history_of, make, samples, state_of, without_window


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    bad = samples()
    bad[BAD * BATCH]["x"] = bad[BAD * BATCH]["x"] * NAN
    plain, never = make(samples(), tmp_path), make(without_window(samples()), tmp_path)
    plain.train()
    never.train()
    with nanguard.install() as autopilot:
        healthy, run = make(samples(), tmp_path), make(bad, tmp_path)
        healthy.train()
        assert "training_step" not in vars(healthy)
        run.train()
        assert (autopilot.counts["applied"], autopilot.counts["skipped"]) == (2 * WINDOWS - 1, 1)
        assert autopilot.unsound() == ()
        (incident,) = autopilot.incidents
    assert incident.outcome.diagnosis is not None
    assert incident.outcome.diagnosis.capture == "step"
    assert differences(state_of(plain), state_of(healthy)) == []
    assert history_of(plain) == history_of(healthy)
    assert differences(state_of(never), state_of(run)) == []
    assert run.lr_scheduler.last_epoch == WINDOWS - 1


def test_a_callback_of_the_program_is_the_only_guard(tmp_path: Path) -> None:
    bad = samples()
    bad[BAD * BATCH]["x"] = bad[BAD * BATCH]["x"] * NAN
    callback = GuardCallback()
    with nanguard.install() as autopilot:
        run = make(bad, tmp_path, callbacks=[callback])
        run.train()
        assert autopilot.counts.get("applied", 0) == 0
    assert (callback.guard.counts["applied"], callback.guard.counts["skipped"]) == (WINDOWS - 1, 1)
    with pytest.raises(ValueError, match="has a GuardCallback, which guards it too"):
        attach(run)


def test_what_the_adapter_refuses_is_guarded_by_the_patches(tmp_path: Path) -> None:
    """A parameter outside the model, which a hosted loop does not accept."""
    bad = samples()
    bad[BAD * BATCH]["x"] = bad[BAD * BATCH]["x"] * NAN
    with nanguard.install() as autopilot:
        run = make(bad, tmp_path)
        run.optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.zeros(2)))
        run.train()
        assert (autopilot.counts["applied"], autopilot.counts["skipped"]) == (WINDOWS - 1, 1)
    assert all(torch.isfinite(value).all() for value in run.model.state_dict().values())
    assert "training_step" not in vars(run)


def test_a_module_that_is_being_imported_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch is, in the middle of a framework: ``nanguard run`` begins there."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "waited_for.py").write_text("import begins_here\nclass Trainer: pass\n")
    begun: list[str] = []

    def begin() -> None:
        WhenImported("waited_for", lambda: begun.append(sys.modules["waited_for"].Trainer.__name__))

    (tmp_path / "begins_here.py").write_text("")
    WhenImported("begins_here", begin)
    before = list(sys.meta_path)
    importlib.util.find_spec("begins_here")  # to ask for a module is not to import it
    assert begun == []
    waited_for = importlib.import_module("waited_for")
    assert begun == ["Trainer"]
    assert type(waited_for.__spec__) is ModuleSpec
    for waits in [each for each in sys.meta_path if isinstance(each, WhenImported) and each not in before]:
        waits.forget()
