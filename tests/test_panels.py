"""What a panel says, in which order, and that it fits the terminal."""

from __future__ import annotations

import math
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest

from nanguard.hosted.settings import patient_policy
from nanguard.policy.policy import Policy
from nanguard.policy.rungs import Halt, Skip
from nanguard.records.diagnosis import Diagnosis, Fix, Source
from nanguard.records.diagnosis_text import place_in_words
from nanguard.records.layout import fitted
from nanguard.records.panel import panel, repeated, rows
from nanguard.records.steps import Action, Incident, Incidents, Means, Outcome, Reading, Verdict
from nanguard.step.repeats import likeness

READING = Reading(step=66, epoch=0, batch=None, loss=math.nan, found=("loss",))
SOURCE = Source(file="/a/train.py", line=24, text="scores = self.query(x) @ self.key(x).mT  # a long line of a program")


def incident(diagnosis: Diagnosis | None = None, **given: Any) -> Incident:
    action = Action(response="skip", words="skip")
    bundle = "nanguard-runs/a-run-with-a-long-name/in-a-folder-with-a-long-name/incidents/0001"
    made = Outcome(verdict=Verdict(kind="nonfinite", reading=READING), action=action, applied=False, bundle=bundle)
    return Incident(number=1, outcome=Outcome(**{**fields_of(made), "diagnosis": diagnosis, **given}))


def fields_of(outcome: Outcome) -> dict[str, Any]:
    return {name: getattr(outcome, name) for name in Outcome.__slots__}


def diagnosis(**given: Any) -> Diagnosis:
    told = {
        "cause": "overflow_fp16",
        "title": "overflow of fp16",
        "phase": "forward",
        "op": "bmm",
        "module": "attention",
        "source": SOURCE,
        "because": "operands reach 1.33e+03 and the result exceeds 65504, where fp16 ends; in fp32 this op is finite",
        "samples": (31,),
        "fix": Fix(words="scale down before this op, normalise, or run it in bf16 or fp32"),
    }
    return Diagnosis(**{**told, **given})


def test_incidents_are_printed_as_one_line_for_each() -> None:
    happened = "step 66: the loss is NaN: step skipped, nothing changed"
    assert str(Incidents([incident(diagnosis()), incident()])) == f"{happened} (overflow of fp16)\n{happened}"
    assert str(Incidents()) == repr(Incidents()) == "no incidents"


def test_first_what_and_what_was_done_then_where_why_sample_fix_and_what_was_saved() -> None:
    text = panel(incident(diagnosis()))
    assert text.startswith(" nanguard  step 66  the loss is NaN: step skipped, nothing changed\n")
    names = [line[3:12].strip() for line in text.splitlines()[1:] if line[3:4] != " "]
    assert names == ["where", "why", "sample", "fix", "found", "untouched", "saved to", "docs"]
    assert text.endswith("docs/causes/overflow_fp16.md")
    assert (Path(__file__).parents[1] / "docs" / "causes" / "overflow_fp16.md").is_file()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_it_fits_and_commands_and_code_are_never_broken(width: int) -> None:
    text = panel(incident(diagnosis()))
    lines = fitted(text, width).splitlines()
    whole = [line for line in lines if "scores =" in line or "nanguard-runs/" in line]
    assert [line.strip() for line in whole[:1]] == [SOURCE.text]
    assert whole[-1].strip() == f"nanguard explain {incident().outcome.bundle}"
    assert all(len(line) <= width for line in lines if line not in whole)
    assert " ".join(fitted(text, width).split()) == " ".join(text.split()), "nothing is lost"
    assert fitted(fitted(text, width), width) == fitted(text, width)


def test_only_what_was_tried_is_called_tried() -> None:
    advice = dict(rows(incident(diagnosis()).outcome))
    assert "tried" not in advice
    worked = Fix(words="normalise", code="guard.keep_fp32('attention')", worked=True)
    told = dict(rows(incident(diagnosis(fix=worked, modules_to_keep=("attention",))).outcome))
    assert told["fix"] == "normalise"
    assert told["tried"] == "attention in fp32 makes this step finite:\n  guard.keep_fp32('attention')"
    told = dict(rows(incident(diagnosis(fix=worked, modules_to_keep=("query", "key"))).outcome))
    assert told["tried"].startswith("query and key in fp32 make this step finite")


def test_a_count_is_shown_only_if_something_happens_at_its_end() -> None:
    verdict = Verdict(kind="nonfinite", reading=READING)
    low = Verdict(kind="nonfinite", reading=READING, means=Means(lower_precision=True, can_run_again=True))
    assert patient_policy().decide([], verdict).then == "", "it is skipped in any case"
    assert patient_policy().decide([], low).then == "raise precision of one module"
    assert Policy([Skip(times=2, per="epoch"), Halt()]).decide([], verdict).then == "halt"
    counted = incident(action=Policy([Skip(times=2, per="epoch"), Halt()]).decide([], verdict))
    assert dict(rows(counted.outcome))["ladder"] == "skip 1 of 2 this epoch, then: halt"
    uncounted = incident(action=patient_policy().decide([], verdict))
    assert "of 3" not in panel(uncounted)


def test_a_repeat_is_one_line() -> None:
    told = repeated(incident(diagnosis()), same_as=incident().reading.step - 9, count=10)
    assert told == " nanguard  step 66  same as step 57: step skipped (10 times now)"


def test_a_repeat_in_another_network_names_both() -> None:
    critic = incident(diagnosis(network="critic"))
    told = repeated(critic, same_as=57, count=2, of="actor")
    assert told == " nanguard  step 66 (critic)  same as step 57 (actor): step skipped (2 times now)"
    told = repeated(critic, same_as=57, count=2, of="critic")
    assert told == " nanguard  step 66  same as step 57 (critic): step skipped (2 times now)"


def test_faults_without_a_line_are_the_same_only_in_one_network() -> None:
    """A program may make an optimizer for each batch. They are numbered, but their network is not."""

    def alike(**given: Any) -> Any:
        return likeness(incident(diagnosis(**given)).outcome)

    first = alike(source=None, network="trained by SGD")
    assert alike(source=None, network="trained by SGD 2") == first
    assert alike(source=None, network="critic, trained by SGD 2") != first
    assert alike(network="critic, trained by SGD 2") == alike(network="actor, trained by SGD")


def test_a_gradient_that_reached_no_parameter_has_no_name() -> None:
    """Anomaly mode has raised before."""
    reading = Reading(step=66, epoch=0, batch=None, loss=1.0, found=("gradients",))
    verdict = Verdict(kind="nonfinite", reading=reading)
    assert "a gradient inside the backward pass" in panel(incident(verdict=verdict))


@pytest.mark.parametrize(
    ("module", "source", "words"),
    [
        ("0", SOURCE, "module 0, train.py:24"),
        ("0.3", None, "module 0.3"),
        ("layers.0", SOURCE, "layers.0"),
        ("", SOURCE, "train.py:24"),
        ("", None, ""),
    ],
)
def test_a_module_with_only_a_number_is_named_with_its_line(module: str, source: Any, words: str) -> None:
    assert place_in_words(module, source) == words


OVERFLOWS = """
import torch
from torch import nn

class Scores(nn.Module):
    def forward(self, x):
        return (x @ x.mT).mean(-1, keepdim=True)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.scores = nn.Linear(4, 64), Scores()

    def forward(self, x):
        return self.scores(self.first(x))

torch.manual_seed(0)
model = Model()
opt = torch.optim.SGD(model.parameters(), lr=1e-9)
for step in range(4):
    x = torch.randn(8, 4) * (500 if step == 2 else 1)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(x).float().mean()
    loss.backward()
    opt.step()
"""


def in_terminal(tmp_path: Path, *arguments: str, columns: int = 80) -> str:
    command = shlex.join([sys.executable, "-m", "nanguard", *arguments])
    env = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    env.pop("COLUMNS", None)
    told, status = pexpect.run(
        command, cwd=str(tmp_path), env=env, dimensions=(50, columns), timeout=120, withexitstatus=True
    )
    assert status == 0, told
    return str(told.decode()).replace("\r\n", "\n")


def test_under_run_the_fix_that_was_tried_can_be_applied_there(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OVERFLOWS)
    told = in_terminal(tmp_path, "run", "train.py")
    assert "step 2  the loss is " in told
    assert "guard.keep_fp32" not in told
    lines = told.splitlines()
    (fix,) = [line.strip() for line in lines if "--keep-fp32" in line]
    assert fix.startswith("nanguard run --keep-fp32 ")
    assert "scores" in fix
    assert all(len(line) <= 80 for line in lines), "the closing line too"
    fixed = shlex.split(fix)[1:-1]
    assert "none of them non-finite" in " ".join(in_terminal(tmp_path, *fixed, "train.py").split())
    explained = in_terminal(tmp_path, "explain", "nanguard-runs/train")
    code = [line for line in explained.splitlines() if line[4:8].strip().isdigit()]
    paths = [line for line in explained.splitlines() if str(tmp_path) in line]  # never broken
    assert all(len(line) <= 80 for line in explained.splitlines() if line not in [*code, *paths])
    assert fix in explained


def test_under_run_a_model_in_fp32_leaves_the_autocast_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OVERFLOWS.replace("step == 2", "step >= 2"))
    told = " ".join(in_terminal(tmp_path, "run", "--policy", "llava", "train.py").split())
    assert "done the model in fp32 from now on; learning rate multiplied by 0.5" in told
    assert ", 1 not applied" in told
