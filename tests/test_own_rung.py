"""A rung that is defined here, outside the package, is one like ours: it acts, is counted, and is shown everywhere."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch

import nanguard
from helpers import NAN, build, differences, everything, loss_fn, make_batches, own_step, poisoned
from nanguard import Divergence, Guard, Halt, LowerLR, NonFiniteError, Policy, Rollback, Skip, Snapshots, read_run
from nanguard.policy.context import RungContext
from nanguard.policy.rungs import Rung, Span
from nanguard.records.panel import headline, rows
from nanguard.records.steps import Verdict
from nanguard.report.html.kinds import kinds_of
from nanguard.report.page import make_report
from nanguard.report.watch import incident_line, view
from optimizers import ALL

SYNCS = ["eager", "late"]


@dataclass(frozen=True)
class ZeroMomentum:
    """Clears the first moments of Adam, and leaves the rest."""

    times: int | None = 2
    per: Span = "run"
    tell: Callable[[int], None] = field(default=lambda count: None)

    def refuses(self, verdict: Verdict) -> str:
        return "" if verdict.kind == "nonfinite" else "only a non-finite step calls for it"

    def act(self, context: RungContext) -> str | None:
        moments = [state["exp_avg"] for optimizer in context.optimizers for state in optimizer.state.values()]
        if not any(moment.any() for moment in moments):
            return None
        for moment in moments:
            moment.zero_()
        self.tell(context.count)
        return f"{len(moments)} moments set to zero"

    def describe(self) -> str:
        return "zero the <momentum>"


class StepBack:
    """No dataclass: goes back two snapshots' worth, or says that it has no use."""

    times, per, steps_back = 3, 1000, 4

    def refuses(self, verdict: Verdict) -> str:
        return "" if verdict.means.snapshots else "there is no good snapshot"

    def act(self, context: RungContext) -> str | None:
        return context.roll_back(self.steps_back, lr=0.5)

    def describe(self) -> str:
        return "step back"


def train(tmp_path: Path, sync: Any, *, hits: list[int] | None = None, **options: Any) -> Guard:
    model, opt = build(ALL["fused AdamW"])
    tell = (lambda count: None) if hits is None else hits.append
    policy = Policy([Skip(times=1, per="run"), ZeroMomentum(tell=tell), Halt()], divergence=None)
    guard = Guard(model, opt, precision="fp32", sync=sync, policy=policy, run_dir=tmp_path, diagnose="off", **options)
    for batch in poisoned(make_batches(20), 5, 8, 11, 14):
        guard.step(loss_fn, batch)
    guard.close()
    return guard


@pytest.mark.parametrize("sync", SYNCS)
def test_it_acts_and_is_counted(tmp_path: Path, sync: Any) -> None:
    hits: list[int] = []
    guard = train(tmp_path, sync, hits=hits)
    actions = [incident.outcome.action for incident in guard.incidents]
    assert [(action.response, action.words) for action in actions] == [
        ("skip", "skip"),
        ("act", "zero the <momentum>"),
        ("skip", "skip"),  # patience starts afresh
        ("act", "zero the <momentum>"),
    ]
    assert hits == [1, 2]
    assert (guard.counts["skipped"], guard.counts["applied"]) == (4, 16)


@pytest.mark.parametrize("sync", SYNCS)
def test_the_step_it_answers_changes_only_what_it_writes(sync: Any) -> None:
    model, opt = build(ALL["fused AdamW"])
    guard = Guard(model, opt, precision="fp32", sync=sync, policy=Policy([ZeroMomentum()]), diagnose="off")
    for batch in make_batches(5):
        guard.step(loss_fn, batch)
    guard.settle()
    before = everything(model, [opt])
    guard.step(loss_fn, poisoned(make_batches(1), 0)[0])
    guard.settle()
    changed = differences(before, everything(model, [opt]))
    assert changed
    assert all(name.endswith(".exp_avg") for name in changed)
    assert not any(state["exp_avg"].any() for state in opt.state.values())


def test_without_use_the_next_rung_is_taken() -> None:
    model, opt = build(ALL["fused AdamW"])
    guard = Guard(model, opt, precision="fp32", policy=Policy([ZeroMomentum(), LowerLR(0.5)]), diagnose="off")
    guard.step(loss_fn, poisoned(make_batches(1), 0)[0])
    guard.settle()
    action = guard.incidents[0].outcome.action
    assert (action.response, action.passed) == ("lower_lr", ("zero the <momentum>: it did not help just now",))


def test_panel(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "nanguard"):
        guard = train(tmp_path, "eager")
    outcome = guard.incidents[1].outcome
    assert headline(outcome) == ("the loss is NaN: step skipped, rung taken: zero the <momentum>")
    assert headline(outcome) in caplog.text
    told = dict(rows(outcome))
    assert told["done"].endswith("moments set to zero")
    assert told["ladder"] == "zero the <momentum> 1 of 2 this run, then: halt"
    assert "untouched" not in told  # it is not as before the step


def test_run_log_watch_and_report(tmp_path: Path) -> None:
    train(tmp_path, "eager")
    run = read_run(tmp_path)
    assert run.troubles == ()
    ours = run.incidents[1]
    assert (ours.outcome.action.response, ours.outcome.action.words) == ("act", "zero the <momentum>")
    assert "zero the <momentum>" in view(run, time.time(), width=100, height=40).plain
    assert incident_line(ours).startswith("step 8: zero the <momentum>: ")
    assert [kind.name for kind in kinds_of(ours)] == ["act", "skip"]
    report = make_report([tmp_path])
    text = re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", "", report.html)))
    assert report.troubles == ()
    assert "step skipped, rung taken: zero the <momentum>" in text
    assert "Zero the <momentum>" in text
    assert "up to 2 times in a run" in text


def test_a_process_without_the_class_reads_it(tmp_path: Path) -> None:
    train(tmp_path, "eager")
    command = [sys.executable, "-m", "nanguard", "watch", str(tmp_path), "--json"]
    source = str(Path(nanguard.__file__).parents[1])
    told = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": source}, cwd="/")
    did = [incident["did"] for incident in json.loads(told.stdout)["incidents"]]
    assert did == ["skipped", "zero the <momentum>"] * 2


@pytest.mark.parametrize("sync", SYNCS)
def test_one_that_goes_back_is_a_rollback_everywhere(tmp_path: Path, sync: Any) -> None:
    model, opt = build(ALL["fused AdamW"])
    policy = Policy([StepBack(), Halt()])
    ring = Snapshots(every=4, keep=3, confirm=1)
    guard = Guard(model, opt, precision="fp32", sync=sync, policy=policy, snapshots=ring, run_dir=tmp_path)
    for batch in poisoned(make_batches(20), 14):
        own_step(guard, batch)
    guard.settle()
    outcome = guard.incidents[0].outcome
    assert outcome.went_back
    assert outcome.is_rollback
    assert not outcome.applied
    assert (guard.counts["rolled_back"], guard.counts["skipped"]) == (1, 0)
    assert guard.counts["undone"] > 0
    assert headline(outcome) == "the loss is NaN: rolled back, rung taken: step back"
    assert opt.param_groups[0]["lr"] == pytest.approx(
        0.5 * ALL["fused AdamW"](model.parameters()).param_groups[0]["lr"]
    )
    guard.close()
    assert [kind.name for kind in kinds_of(read_run(tmp_path).incidents[0])] == ["roll_back"]


def test_the_policy_knows_what_it_needs() -> None:
    assert Policy([StepBack()]).largest_rollback == 4
    assert Policy([ZeroMomentum()]).largest_rollback == 0
    assert Policy([ZeroMomentum()]).answers_divergence is None
    assert Policy([StepBack()]).answers_divergence == Divergence()
    assert Policy([Skip(), Rollback(when="damage")]).answers_divergence == Divergence()


class Incomplete:
    times, per = 1, "run"

    def refuses(self, verdict: Verdict) -> str:
        return ""


@pytest.mark.parametrize(
    ("rung", "complaint"),
    [
        (Incomplete(), r"which has no act, describe: a rung has the methods refuses\(verdict\), act\(context\)"),
        ("skip", "which has no refuses, act, describe, times, per"),
        (Skip, r"got the class Skip: write Skip\(\)"),
        (ZeroMomentum(times=-1), "times must be a whole number, 0 or more, or None, got -1"),
        (ZeroMomentum(per="day"), "per must be 'epoch', 'run' or a number of steps"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_rung_is_refused_when_the_policy_is_built(rung: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Policy([rung])


def test_what_it_raises_ends_the_run_with_that_error() -> None:
    def fail(count: int) -> None:
        raise KeyError("no such moment")

    model, opt = build(ALL["fused AdamW"])
    guard = Guard(model, opt, precision="fp32", sync="eager", policy=Policy([ZeroMomentum(tell=fail)]), diagnose="off")
    guard.step(loss_fn, make_batches(1)[0])
    with pytest.raises(KeyError, match="no such moment"):
        guard.step(loss_fn, poisoned(make_batches(1), 0)[0])


def test_it_can_run_the_failed_step_again() -> None:
    answers: list[bool | None] = []

    @dataclass(frozen=True)
    class Mend:
        times: int | None = None
        per: Span = "run"

        def refuses(self, verdict: Verdict) -> str:
            return ""

        def act(self, context: RungContext) -> str | None:
            answers.append(context.is_step_finite())
            with torch.no_grad():
                next(context.model.parameters()).nan_to_num_(nan=0.0)
            answers.append(context.is_step_finite())
            return "weights mended"

        def describe(self) -> str:
            return "mend the weights"

    rung: Rung = Mend()
    model, opt = build(ALL["fused AdamW"])
    guard = Guard(model, opt, precision="fp32", policy=Policy([rung]), snapshots=None, diagnose="off")
    batches = make_batches(3)
    guard.step(loss_fn, batches[0])
    guard.settle()
    with torch.no_grad():
        next(model.parameters())[0, 0] = NAN
    for batch in batches[1:]:
        guard.step(loss_fn, batch)
    guard.settle()
    assert answers == [False, True]
    assert guard.counts["applied"] == 2


def test_the_ladder_still_ends_in_a_halt() -> None:
    model, opt = build(ALL["fused AdamW"])
    guard = Guard(model, opt, precision="fp32", policy=Policy([ZeroMomentum(times=0)]), diagnose="off")
    with pytest.raises(NonFiniteError, match="zero the <momentum>: used 0 of 0 this run"):
        guard.step(loss_fn, poisoned(make_batches(1), 0)[0])
        guard.settle()


@pytest.mark.parametrize("words", [None, ""])
def test_a_rung_without_a_name_in_words_is_refused(words: Any) -> None:
    class Nameless:
        times, per = None, "run"

        def refuses(self, verdict: Any) -> str:
            return ""

        def act(self, context: Any) -> str | None:
            return None

        def describe(self) -> Any:
            return words

    with pytest.raises(ValueError, match=r"Nameless.describe\(\) must be a name in words"):
        Policy([Nameless(), Halt()])
