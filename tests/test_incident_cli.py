"""``nanguard explain`` and ``nanguard replay``: what they say, and that nothing they are given brings them down."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import nanguard
from nanguard.cli import app
from nanguard.incidents.bundle import Bundles
from nanguard.incidents.files import INCIDENT, TENSORS
from nanguard.incidents.reader import load
from nanguard.records.run import RUN_LOG
from nanguard.records.steps import Action, Outcome, Reading, Verdict
from nanguard.replay.entry import build
from nanguard.state.rng import RngReader
from nanguard.state.training_modes import TrainingModes
from nanguard.step.pending import Microbatch, PendingStep

PROGRAM = '''
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 8)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        h = self.drop(torch.relu(self.inp(x)))
        energy = torch.log(x.abs().sum(1, keepdim=True))
        return self.out(h) + energy


class Rooted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 3)

    def forward(self, x):
        h = self.inp(x)
        size = (h - h).pow(2).sum(1)
        return size.sqrt()


class Drawing(nn.Module):
    """Fails by the numbers that it draws, and by its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        drawn = torch.rand(()) > 0.999
        return self.weight * x.sum() * torch.log(1 - (drawn | (self.weight > 5)).float())


class Large(nn.Module):
    """Overflows in fp16, and so does the gradient of a large loss."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 4)

    def forward(self, x):
        return self.inp(x * 0 + 3e4) * 3


def large():
    torch.manual_seed(0)
    model = Large()
    nn.init.ones_(model.inp.weight)
    return model, lambda model, batch: model(batch["x"]).float().mean()


def small():
    torch.manual_seed(0)
    model = Large()
    return model, lambda model, batch: model.inp(batch["x"]).mean()


def loss_fn(model, batch):
    y = model(batch["x"])
    return ((y - batch["y"]) ** 2).mean()


def batches():
    g = torch.Generator().manual_seed(1)
    made = [{"x": torch.randn(6, 4, generator=g), "y": torch.zeros(6, 1), "id": ["a", "b"]} for _ in range(3)]
    made[2]["x"][4] = 0
    return made


def build(seed):
    torch.manual_seed(seed)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), batches(), loss_fn


def rooted():
    return Rooted(), loss_fn


def drawing():
    return {"model": Drawing(), "loss_fn": loss_fn}


class Program:
    def __init__(self):
        self.model, self.loss_fn = Net(), loss_fn


def fixed(seed=0):
    """As someone would mend it."""
    model = Net()
    return model, lambda model, batch: model.out(model.inp(batch["x"])).sum()


def elsewhere():
    return Net(), lambda model, batch: (model(batch["x"].abs() + 1) / 0).mean()


def smaller():
    model = Net()
    model.out = nn.Linear(8, 2)
    return model, loss_fn


def needs(a, b):
    return a


def raises():
    raise RuntimeError("no data here")


def leaves():
    raise SystemExit(3)


def wrong_number():
    return 1, 2, 3, 4, 5


def no_model():
    return "model", loss_fn


def module_as_loss():
    return Net(), nn.MSELoss()


def nothing():
    return None


def bad_step():
    return Net(), lambda model, batch: model(batch["z"])


not_a_function = 3
'''

names = (f"program_{os.getpid()}_{number}" for number in itertools.count())


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules and paths of programs do not stay."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "200")
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("program_"):
            del sys.modules[name]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / f"{next(names)}.py"
    path.write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    return path


def run(*arguments: Any, stdin: str | None = None) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def fail(
    program: Path, function: str = "build", run_dir: str = "run", *, capture: Any = "full", **options: Any
) -> Path:
    """A step of the program that is not finite, diagnosed and kept as the guard does it."""
    made = build(f"{program}:{function}", 0)
    if "weight" in options:
        with torch.no_grad():
            made.model.weight.fill_(options["weight"])
    batches = options.get("batches") or [sys.modules[program.stem].batches()[2]]
    rng_reader = RngReader(torch.device("cpu"))
    window = PendingStep(2, 1, 2, True, len(batches))
    if "seed" in options:
        torch.manual_seed(options["seed"])
    window.microbatches = [Microbatch(made.loss_fn, batch, rng_reader.now(), True) for batch in batches]
    window.training = TrainingModes(list(made.model.modules()))
    window.microbatches[0].rng.restore(torch.device("cpu"))  # type: ignore[union-attr]
    precision, scale = options.get("precision", "fp32"), options.get("scale")
    loss_scale = None if scale is None else nanguard.LossScale(initial=scale)
    diagnosis = nanguard.diagnose(
        made.model, made.loss_fn, batches[-1], depth="brief", precision=precision, loss_scale=loss_scale
    )
    diagnosis = replace(diagnosis, **options.get("said", {}))
    reading = Reading(step=2, epoch=1, batch=2, loss=float("-inf"), norms=(float("nan"),), found=("loss",), scale=scale)
    action = Action(response="skip", rung=0, count=1, times=3, per=100)
    outcome = Outcome(
        verdict=Verdict(kind="nonfinite", reading=reading), action=action, applied=False, diagnosis=diagnosis
    )
    if options.get("unexamined"):
        outcome = replace(outcome, diagnosis=None)
    history = [Reading(step=1, epoch=1, batch=1, loss=0.25, norms=(2.0,))]
    kept = Bundles(program.parent / run_dir, capture, precision=precision).keep(
        1, outcome=outcome, pending=window, history=history, model=made.model
    )
    assert kept is not None
    del sys.modules[program.stem]
    return kept


# ---- explain


def test_one_incident_is_told_in_full(program: Path) -> None:
    path = fail(program)
    result = run("explain", path)
    assert result.exit_code == 0, result.output
    told = result.stdout
    assert "step 2  the loss is -Inf: step skipped" in told
    assert "logarithm of zero" in told
    assert "path of the bad value" in told
    assert "step 1: loss 0.25, gradient norm 2" in told
    assert "precision fp32, device cpu" in told
    assert f"nanguard replay {path}" in told
    lines = told.splitlines()
    (marked,) = [place for place, line in enumerate(lines) if line.startswith("  > ")]
    assert lines[marked].endswith("energy = torch.log(x.abs().sum(1, keepdim=True))")
    assert lines[marked - 2].endswith("def forward(self, x):")
    assert "return self.out(h) + energy" in lines[marked + 1]
    assert run("explain", path / INCIDENT).stdout == told


def test_a_line_that_has_changed_is_not_shown(program: Path) -> None:
    path = fail(program)
    program.write_text(PROGRAM.replace("energy = torch.log(", "energy = torch.log1p("))
    told = run("explain", path).stdout
    assert "The file has changed since." in told
    assert "log1p" not in told
    program.unlink()
    assert "The file cannot be shown here." in run("explain", path).stdout


def test_a_run_leads_with_the_incident_of_which_most_is_known(program: Path) -> None:
    fail(program, unexamined=True)
    best = fail(program)
    fail(program, "rooted", unexamined=True)
    run_dir = program.parent / "run"
    result = run("explain", run_dir)
    assert result.exit_code == 0
    told = result.stdout
    assert "path of the bad value" in told
    assert told.index("logarithm of zero") < told.index(f"saved to {best}") < told.index("other faults (3 incidents in")
    assert f"    nanguard explain {run_dir / 'incidents' / '0001'}\n" in told
    assert run("explain", run_dir / "incidents").stdout.count("other faults (3") == 1
    assert run("explain", run_dir / "run.jsonl").exit_code == 2, "this run has no log"
    brief = run("explain", run_dir, "--brief").stdout
    assert "from birth" not in brief
    assert brief.count(" nanguard  step ") == 2, "two that were not examined are one fault"


def test_what_was_done_among_skips_of_the_same_fault_is_told(program: Path) -> None:
    first = fail(program)
    told = json.loads((first / INCIDENT).read_text())
    for number in range(2, 60):
        again = first.parent / f"{number:04}"
        shutil.copytree(first, again)
        told["number"] = number
        told["outcome"]["verdict"]["reading"]["step"] = number + 1
        acted = number == 30
        told["outcome"]["action"]["response"] = "raise_precision" if acted else "skip"
        told["outcome"]["did"] = "attn in fp32 from now on" if acted else ""
        (again / INCIDENT).write_text(json.dumps(told))
    run_dir = first.parent.parent
    for options in ((), ("--brief",)):
        result = run("explain", run_dir, *options)
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout.count("   repeated  59 times, first at step 2, last at step 60\n") == 1
        assert "58x step skipped, nothing changed; 1x step skipped, precision raised\n" in result.stdout
        assert "   at 31     attn in fp32 from now on\n" in result.stdout
    assert len(json.loads(run("explain", run_dir, "--json").stdout)["incidents"]) == 59


def test_without_a_path_the_newest_run_is_taken(tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(program)
    monkeypatch.chdir(tmp_path)
    result = run("explain")
    assert (result.exit_code, "there is no run in runs/ nor in nanguard-runs/" in result.stderr) == (2, True)
    old, new = tmp_path / "runs" / "old", tmp_path / "nanguard-runs" / "new"
    for place in (old, new):
        shutil.copytree(program.parent / "run", place)
    os.utime(old / "incidents", (1, 1))
    told = run("explain").stdout
    assert told.startswith("nanguard-runs/new, the newest run\n nanguard  step 2")
    os.utime(new / "incidents", (0, 0))
    assert run("explain", "--json").exit_code == 0
    assert run("explain").stdout.startswith("runs/old, the newest run\n")
    shutil.rmtree(new / "incidents")
    (new / RUN_LOG).write_text(json.dumps({"event": "run", "time": 1.0, "schema": 2}) + "\n")
    told = run("explain").stdout
    assert told.startswith("nanguard-runs/new, the newest run\nnanguard-runs/new: no incidents in this run\n")
    assert told.endswith("the newest run with incidents:\n  nanguard explain runs/old\n")
    assert "reproduced: logarithm of zero" in run("replay", "--entry", f"{program}:build").stdout, (
        "of the one with incidents"
    )
    assert run("report").stdout.endswith("nanguard-runs/new/report.html\n")
    assert "nanguard-runs/new" in run("watch", "--once").stdout


def test_a_folder_of_runs_is_listed(tmp_path: Path, program: Path) -> None:
    fail(program)
    for name in ("a", "b"):
        shutil.copytree(program.parent / "run", tmp_path / "mine" / name)
    os.utime(tmp_path / "mine" / "b" / "incidents", (1, 1))
    result = run("explain", tmp_path / "mine")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.partition("   ")[0] for line in lines[:2]] == [str(tmp_path / "mine" / name) for name in ("b", "a")]
    assert "1 saved incidents; its log cannot be read" in lines[0]
    assert lines[-1] == f"  nanguard explain {tmp_path / 'mine' / 'a'}"
    shutil.rmtree(tmp_path / "mine" / "a" / "incidents")
    (tmp_path / "mine" / "a" / RUN_LOG).write_text(json.dumps({"event": "run", "time": 1.0, "schema": 2}) + "\n")
    lines = run("explain", tmp_path / "mine").stdout.splitlines()
    assert lines[-1] == f"  nanguard explain {tmp_path / 'mine' / 'b'}", "the newest one that has incidents"
    assert json.loads(run("explain", tmp_path / "mine", "--json").stdout)["runs"][1].endswith("/a")


def test_as_json_it_is_one_object_without_the_data(program: Path) -> None:
    fail(program)
    fail(program)
    result = run("explain", program.parent / "run", "--json")
    report = json.loads(result.stdout)
    assert (report["schema"], report["status"], report["troubles"]) == (1, 0, [])
    assert [incident["number"] for incident in report["incidents"]] == [1, 1]
    assert report["incidents"][0]["diagnosis"]["cause"] == "log_of_zero"
    assert report["incidents"][0]["outcome"]["verdict"]["reading"]["loss"] == "-inf"
    assert "contents" not in report["incidents"][0]
    assert result.exit_code == 0


def test_a_run_without_incidents_says_so(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text('{"event": "run", "time": 0.0, "schema": 2}\n')
    result = run("explain", tmp_path)
    assert (result.exit_code, "no incidents in this run" in result.stdout) == (0, True)


def test_for_incidents_that_were_removed_the_report_is_named(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    model = torch.nn.Linear(2, 1)
    with nanguard.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=run_dir) as guard:
        guard.step(lambda model, batch: model(batch).sum().log(), torch.full((1, 2), float("nan")))
    shutil.rmtree(run_dir / "incidents" / "0001")
    for path in (run_dir, run_dir / "incidents", run_dir / "run.jsonl"):
        result = run("explain", path)
        assert result.exit_code == 0
        assert "capture='none' or they were removed. run.jsonl lists 1" in result.stdout
        assert f"nanguard report {run_dir}" in result.stdout


def test_a_run_without_incidents_whose_log_cannot_be_read_ends_with_status_2(tmp_path: Path) -> None:
    for contents in (b"", b"\x80\x04"):
        (tmp_path / "run.jsonl").write_bytes(contents)
        result = run("explain", tmp_path)
        assert (result.exit_code, "is not a run log that nanguard wrote" in result.stderr) == (2, True)
        assert json.loads(run("explain", tmp_path, "--json").stdout)["status"] == 2


def test_what_cannot_be_read_ends_with_status_2(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "file.json").write_bytes(b"\x80\x04")
    for path, words in (
        (tmp_path / "nowhere", "there is no such file or folder"),
        (tmp_path / "other", "neither a run, as in runs/a, nor an incident"),
        (tmp_path / "file.json", "is incomplete"),
    ):
        result = run("explain", path)
        assert result.exit_code == 2
        assert words in result.stderr
        assert "Traceback" not in result.output
        error = json.loads(run("explain", path, "--json").stdout)
        assert error["status"] == 2
        assert words in error["error"]


def test_one_broken_incident_does_not_hide_the_others(program: Path) -> None:
    first = fail(program)
    fail(program)
    (first / INCIDENT).write_text("{")
    result = run("explain", program.parent / "run")
    assert result.exit_code == 2
    assert "logarithm of zero" in result.stdout
    assert str(first) in result.stderr


def test_nothing_in_a_file_steers_the_terminal(program: Path) -> None:
    path = fail(program, said={"because": "\x1b[31mred\x07\ud800", "notes": ("[bold]x[/bold]",)})
    told = run("explain", path).stdout
    assert "\\x1b[31mred\\x07" in told
    assert not [c for c in told if c != "\n" and not c.isprintable()]
    assert "[bold]x[/bold]" in told


def test_damaged_files_never_bring_it_down(program: Path) -> None:
    path = fail(program)
    rng_reader = random.Random(0)
    for name in (INCIDENT, TENSORS):
        whole = (path / name).read_bytes()
        for _ in range(40):
            raw = bytearray(whole)
            for _ in range(rng_reader.choice([1, 20])):
                raw[rng_reader.randrange(len(raw))] = rng_reader.randrange(256)
            (path / name).write_bytes(raw if rng_reader.random() < 0.7 else whole[: rng_reader.randrange(len(whole))])
            assert run("explain", path).exit_code in (0, 2)
            assert run("explain", path, "--json").exit_code in (0, 2)
            assert run("replay", path, "--entry", f"{program}:build").exit_code in (0, 1, 2)
        (path / name).write_bytes(whole)


# ---- replay


@pytest.mark.parametrize("entry", ["file", "module", "class"])
def test_the_same_is_found_again(program: Path, entry: str) -> None:
    path = fail(program)
    entry = {
        "file": f"{program}:build",
        "module": f"{program.stem}:build",
        "class": f"{program.stem}:Program",
    }[entry]
    result = run("replay", path, "--entry", entry)
    assert result.exit_code == 0, result.output
    assert "reproduced: logarithm of zero, log" in result.stdout
    assert "note" not in result.stdout
    assert "logarithm of zero" in result.stdout


def test_of_a_run_the_incident_that_explain_leads_with_is_run(program: Path) -> None:
    fail(program)
    fail(program, "rooted")
    assert "logarithm of zero" in run("explain", program.parent / "run", "--brief").stdout.partition("\n\n")[0]
    result = run("replay", program.parent / "run", "--entry", f"{program}:build")
    assert result.exit_code == 0
    assert "logarithm of zero" in result.stdout


def test_weights_and_random_states_are_those_of_the_step(program: Path) -> None:
    heavy = fail(program, "drawing", weight=7.0)
    assert run("replay", heavy, "--entry", f"{program}:drawing").exit_code == 0
    light = fail(program, "drawing", "light", weight=7.0, capture="batch")
    result = run("replay", light, "--entry", f"{program}:drawing")
    assert result.exit_code == 1
    assert "NOT reproduced: the step is finite here" in result.stdout
    assert "those of the entry are used" in result.stdout
    assert "capture='full' (nanguard run --capture full)" in result.stdout
    unlucky = next(seed for seed in range(20_000) if _first_draw(seed) > 0.999)
    drawn = fail(program, "drawing", "drawn", seed=unlucky)
    assert run("replay", drawn, "--entry", f"{program}:drawing", "--seed", 5).exit_code == 0


def _first_draw(seed: int) -> float:
    return torch.rand((), generator=torch.Generator().manual_seed(seed)).item()


def test_what_differs_is_said(program: Path) -> None:
    path = fail(program)
    result = run("replay", path, "--entry", f"{program}:fixed")
    assert (result.exit_code, "the step is finite here" in result.stdout) == (1, True)
    result = run("replay", path, "--entry", f"{program}:elsewhere")
    assert result.exit_code == 1
    assert "cause: log_of_zero in the run, div_by_zero here" in result.stdout
    assert "op: log in the run, div here" in result.stdout


def test_damage_is_reproduced_where_the_kept_weights_have_it(program: Path) -> None:
    said = {"cause": "parameter_corrupted", "op": ""}
    path = fail(program, "drawing", weight=float("nan"), said=said)
    assert load(path).diagnosis.phase == "parameter"  # type: ignore[union-attr]
    result = run("replay", path, "--entry", f"{program}:drawing")
    assert result.exit_code == 0, result.output
    assert "the saved weights are damaged" in result.stdout
    path = fail(program, "drawing", "elsewhere", weight=float("nan"), said={**said, "module": "inp"})
    assert run("replay", path, "--entry", f"{program}:drawing").exit_code == 1


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ({"cause": "gradient_explosion", "module": ""}, 0),
        ({"cause": "gradient_explosion", "op": "mm"}, 1),
        ({"cause": "gradient_explosion", "module": "out"}, 1),
        ({"cause": "exp_overflow"}, 1),
    ],
)
def test_what_only_the_steps_before_can_tell_is_no_difference(program: Path, said: dict[str, Any], status: int) -> None:
    path = fail(program, "large", precision="fp16", said=said)
    result = run("replay", path, "--entry", f"{program}:large")
    assert result.exit_code == status, result.output
    assert ("the run called it" in result.stdout) == (status == 0)


def test_the_micro_batch_to_blame_is_found(program: Path) -> None:
    good, bad = build(f"{program}:build", 0).batches[0], build(f"{program}:build", 0).batches[2]
    path = fail(program, batches=[good, bad])
    assert run("replay", path, "--entry", f"{program}:build").exit_code == 0


def test_without_a_batch_the_entry_gives_it_or_it_cannot_be_run(program: Path) -> None:
    path = fail(program, capture="meta")
    result = run("replay", path, "--entry", f"{program}:build")
    assert result.exit_code == 0
    assert "batch 2 of the entry is used" in result.stdout
    result = run("replay", path, "--entry", f"{program}:fixed")
    assert result.exit_code == 2
    assert "holds no batch" in result.stderr
    assert "capture='batch'" in result.stderr


def test_a_step_that_was_not_examined_is_reproduced_by_being_non_finite(program: Path) -> None:
    path = fail(program, unexamined=True)
    result = run("replay", path, "--entry", f"{program}:build")
    assert result.exit_code == 0
    assert "the run did not examine it" in result.stdout


def test_as_json_the_answer_is_one_object(program: Path) -> None:
    path = fail(program)
    program.write_text(PROGRAM + "\nprint('hello from the program')\n")
    result = run("replay", path, "--entry", f"{program}:build", "--json")
    report = json.loads(result.stdout)
    assert (report["status"], report["reproduced"], report["differs"]) == (0, True, [])
    assert report["recorded"]["cause"] == report["diagnosis"]["cause"] == "log_of_zero"
    report = json.loads(run("replay", path, "--entry", f"{program}:fixed", "--json").stdout)
    assert (report["status"], report["diagnosis"]) == (1, None)
    report = json.loads(run("replay", path, "--entry", f"{program}:absent", "--json").stdout)
    assert report["status"] == 2
    assert "no function 'absent'" in report["error"]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{file}", "must be module:function or path/to/file.py:function"),
        ("{file}:", "must be module:function"),
        ("nowhere.py:build", "there is no file nowhere.py"),
        ("nowhere.at.all:build", "there is no module 'nowhere'"),
        ("{file}:bild", "no function 'bild'; there are build"),
        ("{file}:not_a_function", "has no function 'not_a_function'"),
        ("{file}:needs", "it needs a, b, but can only be called as build() or build(seed)"),
        ("{file}:raises", "raises() raised RuntimeError: no data here (program_"),
        ("{file}:leaves", "raised SystemExit: 3"),
        ("{file}:wrong_number", "it returned 5 values"),
        ("{file}:no_model", "a str as the model"),
        ("{file}:module_as_loss", "a MSELoss as loss_fn"),
        ("{file}:nothing", "a NoneType without model"),
        ("{file}:smaller", "out.weight is [2, 8] there and [1, 8] in the bundle"),
        ("{file}:bad_step", "the step raised KeyError: 'z' (program_"),
        ("{file}:drawing", "do not fit the model of the entry: weight is not in the bundle"),
        ("broken.py:build", "broken.py is not a Python file, line 1: "),
        ("missing.py:build", "importing missing.py raised ModuleNotFoundError: No module named 'nowhere_else'"),
        ("missing:build", "importing missing raised ModuleNotFoundError: No module named 'nowhere_else'"),
    ],
)
def test_what_cannot_be_run_is_said(program: Path, entry: str, words: str) -> None:
    path = fail(program)
    (program.parent / "broken.py").write_text("def build(:\n")
    (program.parent / "missing.py").write_text("import nowhere_else\n\ndef build(): ...\n")
    result = run("replay", path, "--entry", entry.format(file=program))
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert "Traceback" not in result.output


def changed(path: Path, **facts: Any) -> Path:
    """An incident with some of its facts changed."""
    document = json.loads((path / INCIDENT).read_text())
    for key, value in facts.items():
        (document["environment"] if key in ("precision", "flags") else document)[key] = value
    (path / INCIDENT).write_text(json.dumps(document))
    return path


def test_precision_autocast_and_modules_in_fp32_are_those_of_the_step(program: Path) -> None:
    def status(path: Path) -> int:
        code: int = run("replay", path, "--entry", f"{program}:large").exit_code
        return code

    path = fail(program, "large", precision="fp16")
    assert load(path).diagnosis.cause == "overflow_fp16"  # type: ignore[union-attr]
    assert status(path) == 0
    assert status(changed(path, kept_fp32=[""])) == 1
    assert status(changed(path, kept_fp32=["absent"])) == 2
    assert status(changed(path, kept_fp32=[], precision="fp32")) == 1
    assert status(changed(path, microbatches=[{"autocast": [True, "float16"]}])) == 0
    assert status(changed(path, precision="fp8")) == 2


def test_the_loss_scale_is_that_of_the_step(program: Path) -> None:
    path = fail(program, "small", precision="fp16", scale=2.0**40)
    assert run("replay", path, "--entry", f"{program}:small").exit_code == 0
    document = json.loads((path / INCIDENT).read_text())
    document["outcome"]["verdict"]["reading"]["scale"] = 2.0
    (path / INCIDENT).write_text(json.dumps(document))
    assert run("replay", path, "--entry", f"{program}:small").exit_code == 1
    document["outcome"]["verdict"]["reading"]["scale"] = "nan"
    (path / INCIDENT).write_text(json.dumps(document))
    assert run("replay", path, "--entry", f"{program}:small").exit_code == 2


def test_the_switches_are_afterwards_as_before(program: Path) -> None:
    path = fail(program)
    document = json.loads((path / INCIDENT).read_text())
    document["environment"]["flags"].update(matmul_precision="medium", deterministic=True)
    (path / INCIDENT).write_text(json.dumps(document))
    before = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    assert run("replay", path, "--entry", f"{program}:build").exit_code == 0
    assert (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()) == before


def test_modes_are_those_of_the_step(program: Path) -> None:
    path = fail(program)
    document = json.loads((path / INCIDENT).read_text())
    document["eval_modules"] = ["drop"]
    (path / INCIDENT).write_text(json.dumps(document))
    from nanguard.replay import rerun

    stage = rerun.prepare(load(path), build(f"{program}:build", 0))
    assert [n for n, m in stage.program.model.named_modules() if not m.training] == ["drop"]


# ---- the debugger


def test_it_stops_in_the_users_frame_at_the_op(program: Path) -> None:
    path = fail(program)
    result = run(
        "replay", path, "--entry", f"{program}:build", "--pdb", stdin="p h.shape\np x[4].tolist()\nn\np energy[4]\nc\n"
    )
    assert result.exit_code == 0, result.output
    told = result.stdout
    assert "log has just returned a non-finite value" in told
    assert f"{program.name}(" in told
    assert "-> energy = torch.log(x.abs().sum(1, keepdim=True))" in told
    assert "torch.Size([6, 8])" in told
    assert "[0.0, 0.0, 0.0, 0.0]" in told
    assert "-> return self.out(h) + energy" in told
    assert "tensor([-inf]" in told


def test_in_backward_it_shows_the_forward_line_as_it_was(program: Path) -> None:
    path = fail(program, "rooted")
    result = run(
        "replay", path, "--entry", f"{program}:rooted", "--pdb", stdin="p size.tolist()\nup\np sorted(batch)\nq\n"
    )
    assert result.exit_code == 0, result.output
    assert "the derivative of sqrt, has just returned a non-finite gradient" in result.stdout
    assert "-> return size.sqrt()" in result.stdout
    assert "[0.0, 0.0, 0.0, 0.0, 0.0, 0.0]" in result.stdout
    assert "['id', 'x', 'y']" in result.stdout


def test_without_an_answer_the_debugger_ends(program: Path) -> None:
    path = fail(program)
    result = run("replay", path, "--entry", f"{program}:build", "--pdb", stdin="")
    assert (result.exit_code, "log has just returned" in result.stdout) == (0, True)
    result = run("replay", path, "--entry", f"{program}:fixed", "--pdb", stdin="")
    assert (result.exit_code, "(Pdb)" in result.stdout) == (1, False)


def test_all_of_it_in_a_process_of_its_own(program: Path) -> None:
    fail(program)
    source = str(Path(nanguard.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": source, "COLUMNS": "100"}
    command = [sys.executable, "-W", "ignore", "-m", "nanguard", "replay", "run", "--entry"]

    def replayed(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *arguments],
            cwd=program.parent,
            env=env,
            input="p x[4]\nq\n",
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    done = replayed(f"{program.stem}:build", "--pdb")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "tensor([0., 0., 0., 0.])" in done.stdout
    done = replayed("nowhere:build")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("--entry nowhere:build: there is no module 'nowhere'")


@pytest.mark.parametrize("command", ["explain", "replay"])
def test_help_has_examples(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"nanguard {command} runs/a" in result.stdout


# ---- a program that nanguard run has run

TRAINS = """
import sys, torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        h = self.first(x)
        return self.last(h / (h - h.detach() + x.abs().sum()))

if __name__ == "__main__":
    torch.manual_seed(int(sys.argv[1]))
    model = Model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        x = torch.zeros(2, 4) if step == 3 else torch.randn(2, 4)
        opt.zero_grad()
        model(x).pow(2).mean().backward()
        opt.step()
"""
BUILDS = """
from pathlib import Path
from train import Model
Path("was-run").touch()
if True:
    def build():
        return Model()
"""


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "nanguard", *arguments]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


def test_what_nanguard_run_saved_is_replayed_without_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    (tmp_path / "builds.py").write_text(BUILDS)
    ran = command(tmp_path, "run", "--capture", "full", "train.py", "7")
    assert "step 3  the loss is NaN" in ran.stderr
    place = "nanguard-runs/train/incidents/0001"
    told = command(tmp_path, "replay", place)
    assert told.returncode == 0, told.stderr
    assert "reproduced: division by zero" in told.stdout or "reproduced: zero divided by zero" in told.stdout
    assert "run again up to step 0" in told.stdout, "its weights were saved"
    monkeypatch.chdir(tmp_path)
    assert f"  nanguard replay {place}\n" in run("explain", place).stdout
    wrong = run("replay", place, "--entry", "builds.py:biuld")
    assert (wrong.exit_code, "builds.py has no function 'biuld'" in wrong.stderr) == (2, True)
    assert not (tmp_path / "was-run").exists(), "the file was only read"
    entry = command(tmp_path, "replay", place, "--entry", "builds.py:build")
    assert (entry.returncode, entry.stdout.partition("\n")[0]) == (0, told.stdout.partition("\n")[0])


def test_without_saved_weights_the_program_runs_up_to_the_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    command(tmp_path, "run", "train.py", "7")
    told = command(tmp_path, "replay", "nanguard-runs/train")
    assert told.returncode == 0, told.stderr
    assert "run again up to step 3" in told.stdout
    assert told.stderr.startswith(f"running {tmp_path / 'train.py'} 7 again, up to step 3\n")
    log = tmp_path / "nanguard-runs" / "train" / "run.jsonl"
    (log.parent / "other.py").write_text("print('it was run')")
    honest = log.read_text()
    log.write_text(honest.replace(str(tmp_path / "train.py"), str(log.parent / "other.py")))
    refused = run("replay", log.parent)
    assert (refused.exit_code, "is in the folder of the run" in refused.stderr) == (2, True)
    assert "it was run" not in refused.stdout + refused.stderr
    log.write_text(honest)
    (tmp_path / "train.py").write_text("print('nothing')")
    gone = command(tmp_path, "replay", "nanguard-runs/train")
    assert (gone.returncode, "train.py ended before step 3 called its model" in gone.stderr) == (2, True)
