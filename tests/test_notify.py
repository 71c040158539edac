"""Notify runs a real command, or calls a function, once for each kind of incident and when the run is halted."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import nanguard
from helpers import build, differences, everything, loss_fn, make_batches, poisoned
from nanguard.integrations.notify import Notify
from test_docs import ROOT, run_snippets

NOTE = """
import json, os, sys
facts = json.loads(sys.stdin.readline())
facts["environment"] = {k: v for k, v in os.environ.items() if k.startswith("NANGUARD_")}
with open(sys.argv[1], "a") as file:
    file.write(json.dumps(facts) + chr(10))
"""


def train(notify: Notify | None, *bad: int, policy: nanguard.Policy | None = None, run_dir: Path | None = None) -> Any:
    model, opt = build(torch.optim.AdamW)
    observers = [] if notify is None else [notify]
    with nanguard.Guard(model, opt, policy=policy, run_dir=run_dir, observers=observers) as guard:
        for batch in guard.epoch(poisoned(make_batches(8), *bad)):
            guard.step(loss_fn, batch)
    return everything(model, [opt], torch.get_rng_state())


def told(file: Path, number: int) -> list[dict[str, Any]]:
    """What the command has written, as soon as ``number`` lines are there."""
    while not file.exists() or file.read_text().count("\n") < number:
        time.sleep(0.02)
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_command_gets_the_facts_once_for_each_kind(tmp_path: Path) -> None:
    file = tmp_path / "told.jsonl"
    command = [sys.executable, "-c", NOTE, str(file)]
    torch.manual_seed(0)
    guarded = train(Notify(command), 2, 5, run_dir=tmp_path / "run")
    torch.manual_seed(0)
    assert differences(guarded, train(None, 2, 5)) == []
    with pytest.raises(nanguard.NonFiniteError):
        train(Notify(command), 3, policy=nanguard.Policy(ladder=(nanguard.Halt(),)))
    first, halt = sorted(told(file, 2), key=lambda facts: facts["event"], reverse=True)
    assert (first["event"], first["step"], first["loss"], first["found"][0]) == ("incident", 2, "nan", "loss")
    assert (first["cause"], first["module"], first["response"]) == ("input_nonfinite", "inp", "skip")
    assert Path(first["bundle"]).is_dir()
    assert "helpers.py" in first["source"]
    assert "step skipped, nothing changed" in first["text"]
    for name in ("event", "step", "headline", "cause", "module", "source", "bundle"):
        assert first["environment"][f"NANGUARD_{name.upper()}"] == str(first[name])
    assert (halt["event"], halt["step"]) == ("halt", 3)


@pytest.mark.campaign
def test_a_line_for_the_shell_outlives_a_run_that_ends(tmp_path: Path) -> None:
    file = tmp_path / "told.txt"
    code = (
        "import torch, nanguard\n"
        "from nanguard.integrations.notify import Notify\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "policy = nanguard.Policy(ladder=(nanguard.Halt(),))\n"
        f"wait, tell = 'until [ -e {file}.go ]; do sleep 0.02; done', 'echo $NANGUARD_EVENT $NANGUARD_STEP > {file}'\n"
        "notify = Notify(f'{wait}; {tell}')\n"
        "guard = nanguard.Guard(model, optimizer, policy=policy, observers=[notify])\n"
        "guard.step(lambda model, x: model(x).mean(), torch.tensor([[float('nan'), 1.0]]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert "NonFiniteError" in done.stderr
    Path(f"{file}.go").touch()  # the run has ended, and the command has not
    while not file.exists() or not file.read_text():
        time.sleep(0.02)
    assert file.read_text() == "halt 0\n"


def test_a_function_runs_in_a_thread_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[int, bool]] = []
    may_go_on, is_done = threading.Event(), threading.Event()

    def tell(facts: dict[str, Any]) -> None:
        may_go_on.wait()  # the run goes on meanwhile
        seen.append((facts["step"], threading.current_thread() is threading.main_thread()))
        is_done.set()
        raise ConnectionError("no network")

    train(Notify(tell), 2, 5)
    assert seen == []
    with caplog.at_level(logging.WARNING, "nanguard"):
        may_go_on.set()
        is_done.wait()
        while "failed" not in caplog.text:
            time.sleep(0.02)
    assert seen == [(2, False)]
    assert "failed" in caplog.text
    assert "no network" in caplog.text


def test_a_command_that_cannot_be_started_or_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "nanguard"):
        train(Notify(["/no/such/program"]), 2)
        assert "Notify(['/no/such/program']) could not be started: " in caplog.text
        train(Notify("echo no such address; exit 3"), 2)
        while "ended with status 3: no such address" not in caplog.text:
            time.sleep(0.02)


@pytest.mark.parametrize("target", [None, "", [], 3, ["mail", 3]])
def test_what_is_neither_a_command_nor_a_function_is_refused(target: Any) -> None:
    with pytest.raises(ValueError, match=r"target must be a command, .*, or a function, got "):
        Notify(target)


def test_the_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_snippets(ROOT / "docs" / "integrations" / "notify.md")
    while not (tmp_path / "incidents.txt").exists() or not (tmp_path / "incidents.txt").read_text():
        time.sleep(0.02)
    assert (tmp_path / "incidents.txt").read_text() == "step 5: the loss is NaN: step skipped, nothing changed\n"


def test_nanguard_run_notifies_of_an_unchanged_program_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for value in (1.0, float('nan'), 2.0, float('nan'), 3.0):\n"
        "    loss = model(torch.tensor([[value, 1.0]])).mean()\n"
        "    optimizer.zero_grad()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
    )
    tell = "echo $NANGUARD_EVENT $NANGUARD_STEP $NANGUARD_CAUSE >> told.txt"
    command = [sys.executable, "-m", "nanguard", "run", "--notify", tell, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    while not (tmp_path / "told.txt").exists() or not (tmp_path / "told.txt").read_text():
        time.sleep(0.02)
    assert (tmp_path / "told.txt").read_text() == "incident 1 input_nonfinite\n"
