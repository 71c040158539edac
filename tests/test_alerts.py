"""Warnings that the policy answers before anything goes wrong, in both modes and in any loop; by default none."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanguard
from helpers import build, differences, everything, loss_fn, make_batches, own_step, poisoned
from nanguard import CallFunction, Guard, Halt, LowerLR, Monitor, Policy, RaisePrecision, Skip, TakeSnapshot
from nanguard.hosted.loop import HostedLoop
from nanguard.policy.context import RungContext
from nanguard.policy.rungs import Rung
from nanguard.records.alert import Alert
from nanguard.records.steps import Action, Outcome, Reading, Verdict
from nanguard.recovery.alerts import StandingAlerts
from nanguard.report import glance, watch
from nanguard.report.page import make_report

STEPS = 150
WORKS: tuple[Rung, ...] = (Skip(), Halt())


class Block(nn.Module):
    """``gain`` grows; what it makes is brought back to a normal size before it leaves the block."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.gain(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.block, self.out = nn.Linear(6, 8), Block(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(self.inp(x)))


def alert(**fields: Any) -> Alert:
    told: dict[str, Any] = {
        "number": 1,
        "state": "raised",
        "step": 100,
        "module": "block.gain",
        "op": "mm",
        "quantity": "largest output",
        "now": 100.0,
        "limit": 65504.0,
        "room": 9.0,
        "trend": -0.1,
        "crossing": 200,
        "earliest": 190,
        "latest": 250,
        "reason": "it grows",
        "cause": "overflow_fp16",
        "advice": "use bf16",
        "severity": "warning",
        "kind": "overflow",
        "form": "fp16",
    }
    return Alert(**{**told, **fields})


def grow(model: Any) -> None:
    with torch.no_grad():
        model.block.gain.weight.mul_(1.05)


class Trained:
    """A run whose ``block.gain`` grows by a twentieth in each step, in one of the three kinds of loops."""

    def __init__(self, ladder: Sequence[Rung] = WORKS, *, loop: str = "step", steps: int = STEPS, **options: Any):
        make = lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, fused=loop != "hosted")  # noqa: E731
        self.model, self.optimizer = build(make, model=Net())
        self.monitor = Monitor(probe_every=4)
        policy = Policy(ladder, divergence=None)
        self.guard: Any = None
        self.hosted: Any = None
        if loop == "hosted":
            self.hosted = HostedLoop(
                self.model, self.optimizer, policy=policy, observers=[self.monitor], diagnose="off", **options
            )
        else:
            options = {"loss_scale": None, "precision": "fp16", "diagnose": "off", **options}
            self.guard = Guard(self.model, self.optimizer, policy=policy, observers=[self.monitor], **options)
        for batch in make_batches(steps):
            grow(self.model)
            if loop == "step":
                self.guard.step(loss_fn, batch)
            elif loop == "own":
                own_step(self.guard, batch)
            else:
                self._hosted_step(batch)
        (self.guard or self.hosted).close()

    def _hosted_step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.hosted.before_forward(batch)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_fn(self.model, batch)
        self.hosted.after_forward(loss)
        loss.backward()
        self.hosted.step(self.optimizer, self.optimizer.step)

    @property
    def state(self) -> dict[str, Any]:
        return everything(self.model, [self.optimizer])


def answers(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "answered"]


# ---- nothing by default ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["step", "own", "hosted"])
def test_by_default_warnings_change_nothing(tmp_path: Path, loop: str) -> None:
    """Not the default ladder, nor one whose rungs for warnings are used up, nor one that only tells of them."""
    run_dir = {"run_dir": tmp_path}
    default = Trained(Policy().ladder, loop=loop, **run_dir)
    assert [each.state for each in default.monitor.alerts][:1] == ["raised"]
    assert answers(tmp_path) == []
    told: list[str] = []

    def tell(context: RungContext) -> None:
        assert context.verdict.alert is not None
        told.append(context.verdict.alert.module)

    others = (LowerLR(when="alert", times=0), CallFunction(tell), *Policy().ladder)
    assert differences(Trained(others, loop=loop).state, default.state) == []
    assert told
    assert set(told) == {"block.gain"}


# ---- acting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["eager", "late"])
@pytest.mark.parametrize("loop", ["step", "own"])
def test_the_learning_rate_is_lowered_before_it_overflows(tmp_path: Path, loop: str, sync: Any) -> None:
    run = Trained([LowerLR(0.5, when="alert", times=1), *WORKS], loop=loop, sync=sync, run_dir=tmp_path)
    (answer,) = answers(tmp_path)
    first = run.monitor.alerts[0]
    assert answer["step"] == first.step + 2, "at a fixed moment, the same in both modes"
    assert (answer["alert"], answer["module"], answer["response"]) == (first.number, "block.gain", "lower_lr")
    assert answer["did"] == "learning rate multiplied by 0.5, now 5e-05"
    assert run.optimizer.param_groups[0]["lr"] == 5e-5
    assert run.guard.incidents == (), "a warning is no incident"
    assert run.guard.counts["applied"] == STEPS


def test_both_modes_act_alike_to_the_bit() -> None:
    ladder = [TakeSnapshot(times=1), LowerLR(0.1, when="alert", times=1), RaisePrecision(when="alert"), *WORKS]
    eager, late = (Trained(ladder, sync=sync, steps=196) for sync in ("eager", "late"))
    assert differences(eager.state, late.state) == []
    assert eager.guard.kept_fp32 == late.guard.kept_fp32 == ("block",)
    assert eager.optimizer.param_groups[0]["lr"] < 1e-4
    assert eager.monitor.alerts == late.monitor.alerts


@pytest.mark.parametrize("loop", ["step", "hosted"])
def test_raising_the_precision_of_a_module_prevents_the_overflow(tmp_path: Path, loop: str) -> None:
    """``gain`` gives its result to ``norm``, so the block around both is raised. The warning is withdrawn then."""
    plain = Trained(loop=loop, steps=220)
    assert (plain.guard or plain.hosted).counts["skipped"] > 0
    run = Trained([RaisePrecision(when="alert"), *WORKS], loop=loop, steps=220, run_dir=tmp_path)
    (answer,) = answers(tmp_path)
    assert answer["did"] == "block in fp32 from now on"
    assert answer["step"] < 160
    assert (run.guard or run.hosted).counts["skipped"] == 0
    assert [each.state for each in run.monitor.alerts] == ["raised", "withdrawn"]


def test_rungs_are_taken_in_turn_and_shown_everywhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A warning that stands is put to the policy again. A rung that is used up is passed, and one that does nothing."""
    ladder = [TakeSnapshot(times=1), CallFunction(lambda context: None), LowerLR(0.5, when="alert", times=1), *WORKS]
    with caplog.at_level(logging.WARNING, logger="nanguard"):
        run = Trained(ladder, run_dir=tmp_path, steps=190)
    snapshot, lowered = answers(tmp_path)
    assert [snapshot["what"], lowered["what"]] == ["take a snapshot", "lower the learning rate"]
    assert snapshot["did"] == "a snapshot is taken before the next step"
    assert snapshot["step"] in run.guard.snapshots or snapshot["step"] + 1 in run.guard.snapshots
    assert lowered["step"] > snapshot["step"]
    lines = [record.message for record in caplog.records if "because of the warning about block.gain" in record.message]
    assert len(lines) == 2
    assert lines[1].startswith(f"step {lowered['step']}: learning rate multiplied by 0.5")
    assert "\n" not in "".join(lines)
    read = nanguard.read_run(tmp_path)
    shown = watch.view(read, read.header["time"], width=200, height=40).plain
    assert "lower the learning rate  learning rate multiplied by 0.5, now 5e-05, because of the warning" in shown
    assert [each["step"] for each in glance.as_dict(read, 0.0)["answers"]] == [snapshot["step"], lowered["step"]]
    page = make_report([tmp_path]).html
    assert "lower the learning rate; learning rate multiplied by 0.5" in page
    assert f"for a warning, before step {lowered['step']}" in page
    assert page.count("only for warnings") >= 2


@dataclass(frozen=True)
class Freeze:
    """A rung that is defined outside of the package: the module of the warning is not trained any more."""

    times: int | None = None
    per: Any = "run"
    when: str = "alert"

    def refuses(self, verdict: Verdict) -> str:
        assert verdict.alert is not None, "it is asked about warnings only"
        return "" if verdict.alert.steps_left < 100 else "there is time"

    def act(self, context: RungContext) -> str | None:
        assert context.verdict.alert is not None
        name = context.verdict.alert.module
        context.model.get_submodule(name).requires_grad_(False)
        return f"{name} is frozen"

    def describe(self) -> str:
        return "freeze"


@pytest.mark.parametrize("sync", ["eager", "late"])
def test_a_rung_of_ones_own_answers_warnings_and_nothing_else(tmp_path: Path, sync: Any) -> None:
    run = Trained([Freeze(), *WORKS], sync=sync, run_dir=tmp_path)
    first = answers(tmp_path)[0]
    assert (first["response"], first["what"], first["did"]) == ("act", "freeze", "block.gain is frozen")
    assert not run.model.block.gain.weight.requires_grad
    assert run.model.inp.weight.requires_grad
    guard = Guard(*build(lambda p: torch.optim.SGD(p, lr=0.1)), policy=Policy([Freeze(), *WORKS]), diagnose="off")
    for batch in poisoned(make_batches(3), 1):
        guard.step(loss_fn, batch)
    assert [incident.outcome.action.response for incident in guard.incidents] == ["skip"]
    assert guard.incidents[0].outcome.action.passed == ("freeze: it answers warnings only",)


def test_a_resumed_run_warns_and_acts_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    ladder = [LowerLR(0.5, when="alert", times=1), *WORKS]
    whole = Trained(ladder, run_dir=tmp_path / "whole")
    half = Trained(ladder, steps=99)
    saved = json.loads(json.dumps(half.guard.state_dict()))
    rest = Trained(ladder, steps=0, run_dir=tmp_path / "rest")
    rest.model.load_state_dict(half.model.state_dict())
    rest.optimizer.load_state_dict(half.optimizer.state_dict())
    rest.guard.load_state_dict(saved)
    for batch in make_batches(STEPS)[99:]:
        grow(rest.model)
        rest.guard.step(loss_fn, batch)
    rest.guard.close()
    assert differences(rest.state, whole.state) == []
    assert rest.monitor.alerts == whole.monitor.alerts
    answered = [{**each, "time": 0} for folder in ("whole", "rest") for each in answers(tmp_path / folder)]
    assert len(answered) == 2
    assert answered[0] == answered[1]


# ---- when the policy is asked ----------------------------------------------------------------------------------------


def test_a_warning_is_put_to_the_policy_again_when_half_of_its_time_has_passed() -> None:
    standing = StandingAlerts(Policy([LowerLR(when="alert")]))
    standing.hear(alert())
    asked = [step for step in range(90, 260) if standing.take_due(step)]
    assert asked == [102, 151, 175, 187, 193, 196, 198]
    standing.hear(alert(state="updated", step=300, crossing=190))
    assert standing.are_due(302)
    assert not standing.are_due(301)
    saved = json.loads(json.dumps(standing.state_dict()))
    other = StandingAlerts(Policy([LowerLR(when="alert")]))
    other.load_state_dict(saved)
    assert other.state_dict() == standing.state_dict()
    standing.hear(alert(state="withdrawn", step=310))
    assert not standing.are_due(10_000)
    unwanted = StandingAlerts(Policy())
    unwanted.hear(alert())
    assert not unwanted.are_due(10_000)


def test_a_ladder_never_halts_for_a_warning_and_counts_its_own_answers() -> None:
    policy = Policy([LowerLR(when="alert", times=1), LowerLR(times=1), Halt()])
    reading = Reading(step=100, epoch=1, batch=3, loss=1.0, mean_loss=1.0)
    verdict = Verdict(kind="alert", reading=reading, alert=alert())
    action = policy.decide([], verdict)
    assert (action.rung, action.response) == (0, "lower_lr")
    answered = Outcome(verdict=verdict, action=action, applied=True, did="done")
    again = policy.decide([answered], verdict)
    assert (again.response, again.rung) == ("warn", None)
    bad = Verdict(kind="nonfinite", reading=reading)
    assert policy.decide([], bad).rung == 1
    assert Outcome.from_dict(json.loads(json.dumps(answered.as_dict()))) == answered


@pytest.mark.parametrize(
    ("fields", "helps"),
    [
        ({}, True),
        ({"form": "bf16"}, False),
        ({"form": "fp32"}, False),
        ({"kind": "zero", "form": "bf16"}, True),
        ({"kind": "update", "form": ""}, False),
        ({"kind": "gradient"}, True),
    ],
)
def test_precision_is_raised_only_against_limits_that_fp32_moves(fields: dict[str, Any], helps: bool) -> None:
    means = nanguard.records.Means(lower_precision=True)
    reading = Reading(step=100, epoch=1, batch=3, loss=1.0)
    verdict = Verdict(kind="alert", reading=reading, alert=alert(**fields), means=means)
    assert (RaisePrecision("model", when="alert").refuses(verdict) == "") == helps


def test_a_policy_that_answers_warnings_wants_a_monitor(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = build(lambda p: torch.optim.SGD(p, lr=0.1))
    with caplog.at_level(logging.WARNING, logger="nanguard"):
        Guard(model, optimizer, policy=Policy([LowerLR(when="alert"), Halt()]))
    assert "nothing raises warnings: pass observers=[nanguard.Monitor()]" in caplog.text
    for wrong in ({"when": "often"}, {"factor": 2.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LowerLR(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="function"):
        CallFunction("print")  # type: ignore[arg-type]
    assert Action(response="warn").rung is None
