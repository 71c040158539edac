"""Accelerate, guarded: the loop is the user's own, and it uses what ``accelerator.prepare`` returned."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import nanguard
from helpers import INF, TinyNet, differences, everything, loss_fn, make_batches, poisoned
from launching import needs_gloo
from nanguard.policy.rungs import Halt

accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

from nanguard.integrations import accelerate as integration  # noqa: E402

STEPS, BAD, MAX_NORM = 8, 3, 0.5
Batch = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Accelerators of a process share their state."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Loop:
    """The loop of Accelerate's documentation."""

    def __init__(
        self,
        *,
        guarded: bool,
        accumulate: int = 1,
        scales: bool = False,
        precision: str = "no",
        prepares_scheduler: bool = True,
        **options: Any,
    ) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        model = TinyNet()
        model.drop = nn.Identity()  # type: ignore[assignment]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=precision
        )
        if scales:  # as on a GPU: Accelerate makes no scaler on a CPU
            self.accelerator.scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
            self.accelerator.native_amp, self.accelerator.state._mixed_precision = True, "fp16"
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.scheduler = self.accelerator.prepare(scheduler) if prepares_scheduler else scheduler
        self.before = facts(self)
        self.guard = (
            integration.attach(self.accelerator, self.model, self.optimizer, self.scheduler, **options)
            if guarded
            else None
        )
        self.skipped: list[bool] = []
        self.norms: list[float] = []

    def fit(self, batches: list[Batch]) -> Loop:
        for number, batch in enumerate(batches):
            with self.accelerator.accumulate(self.model):
                loss = loss_fn(self.model, batch)
                self.accelerator.backward(loss)
                self.spoil(number)
                if self.accelerator.sync_gradients:
                    self.norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)))
                self.optimizer.step()
                if self.accelerator.sync_gradients:
                    self.skipped.append(self.accelerator.optimizer_step_was_skipped)
                self.scheduler.step()
                self.optimizer.zero_grad()
        return self

    def spoil(self, number: int) -> None:
        """After backward."""

    def state(self) -> dict[str, Any]:
        return everything(self.accelerator.unwrap_model(self.model), [self.optimizer.optimizer], self.scheduler)


def facts(loop: Loop) -> list[Any]:
    return [
        sorted(vars(loop.accelerator)),
        sorted(vars(loop.optimizer)),
        sorted(vars(loop.model)),
        [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in loop.model.modules()],
    ]


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"precision": "bf16"},
    "accumulated": {"accumulate": 2},
    "scaled": {"scales": True},
    "scaled and accumulated": {"scales": True, "accumulate": 2},
}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


@modes
def test_a_healthy_run_is_the_same_to_the_bit(mode: dict[str, Any]) -> None:
    accumulate = mode.get("accumulate", 1)
    batches = make_batches(STEPS * accumulate)
    plain = Loop(guarded=False, **mode).fit(batches)
    run = Loop(guarded=True, **mode).fit(batches)
    assert differences(plain.state(), run.state()) == []
    assert plain.norms == run.norms
    assert run.skipped == [False] * STEPS
    assert run.guard is not None
    assert run.guard.counts["applied"] == STEPS
    assert run.guard.incidents == ()


@modes
def test_a_bad_step_never_happened(mode: dict[str, Any]) -> None:
    accumulate = mode.get("accumulate", 1)
    batches = make_batches(STEPS * accumulate)
    first, last = BAD * accumulate, (BAD + 1) * accumulate
    never = Loop(guarded=False, **mode).fit(batches[:first] + batches[last:])
    run = Loop(guarded=True, **mode).fit(poisoned(batches, last - 1))  # in the last micro-batch
    assert differences(never.state(), run.state()) == []
    assert run.skipped == [False] * BAD + [True] + [False] * (STEPS - BAD - 1)
    assert run.scheduler.scheduler.last_epoch == STEPS - 1, "the schedule counts applied steps"
    assert run.guard is not None
    (incident,) = run.guard.incidents
    assert incident.outcome.diagnosis is not None
    assert incident.outcome.diagnosis.cause == "input_nonfinite"
    assert run.guard.unsound() == ()


def test_an_inf_gradient_is_found_before_clipping_hides_it() -> None:
    run = Loop(guarded=True)

    def spoil(number: int) -> None:
        if number == BAD:
            run.model.out.bias.grad[0] = INF

    run.spoil = spoil  # type: ignore[method-assign]
    run.fit(make_batches(STEPS))
    assert run.skipped.count(True) == 1
    assert run.guard is not None
    assert run.guard.incidents[0].outcome.verdict.reading.gradients == ("out.bias",)


def test_norms_and_losses_are_those_before_clipping_and_scaling() -> None:
    heard: list[Any] = []

    class Watch(nanguard.Observer):
        def on_heard(self, outcome: Any) -> None:
            heard.append(outcome.verdict.reading)

    batches = make_batches(STEPS * 2)
    run = Loop(guarded=True, scales=True, accumulate=2, observers=[Watch()]).fit(batches)
    assert [reading.norms[0] for reading in heard] == pytest.approx(run.norms, rel=1e-5)
    first = Loop(guarded=False)
    losses = [loss_fn(first.model, batch).item() for batch in batches[:2]]
    assert heard[0].loss == pytest.approx(sum(losses) / 2, rel=1e-3), "in fp16"


def test_an_overflow_that_the_scaler_finds_is_routine() -> None:
    runs = []
    for is_guarded in (False, True):
        run = Loop(guarded=is_guarded, scales=True)
        run.accelerator.scaler.load_state_dict({**run.accelerator.scaler.state_dict(), "scale": 2.0**127})
        runs.append(run.fit(make_batches(40)))
    plain, guarded = runs
    assert differences(plain.state(), guarded.state()) == []
    assert plain.skipped == guarded.skipped
    assert plain.skipped[0] is True, "the scale is far too large"
    assert plain.accelerator.scaler.get_scale() == guarded.accelerator.scaler.get_scale()
    assert guarded.guard is not None
    assert guarded.guard.incidents == ()
    assert guarded.guard.counts["backed_off"] == plain.skipped.count(True)


def test_a_state_is_saved_and_loaded_with_and_without_a_guard(tmp_path: Path) -> None:
    batches = make_batches(STEPS)
    whole = Loop(guarded=False).fit(batches)
    for saves_guarded in (False, True):
        first = Loop(guarded=saves_guarded).fit(batches[:4])
        first.accelerator.save_state(str(tmp_path / "state"))
        second = Loop(guarded=True).fit(poisoned(make_batches(3, seed=7), 1))
        second.accelerator.load_state(str(tmp_path / "state"))
        second.fit(batches[4:])
        assert differences(whole.state(), second.state()) == []
        assert second.guard is not None
        assert second.guard.counts["applied"] == 2 + 4
        second.fit(poisoned(make_batches(1), 0))
        assert second.guard.incidents[-1].outcome.verdict.reading.step == STEPS, "counted on from the checkpoint"


def test_a_policy_that_halts_raises_from_the_step() -> None:
    run = Loop(guarded=True, policy=nanguard.Policy([Halt()]), scales=True)
    before = run.state()
    with pytest.raises(nanguard.NonFiniteError):
        run.fit(poisoned(make_batches(1), 0))
    assert differences(before, run.state()) == []
    assert run.accelerator.optimizer_step_was_skipped


def test_an_error_in_the_middle_of_a_bad_step_is_examined() -> None:
    run = Loop(guarded=True)
    assert run.guard is not None
    run.fit(make_batches(2))
    with pytest.raises(RuntimeError, match="not finite"), run.guard:
        loss = loss_fn(run.model, poisoned(make_batches(1), 0)[0])
        run.accelerator.backward(loss)
        raise RuntimeError("not finite")
    assert len(run.guard.incidents) == 1
    assert run.guard.unsound() == ()


def test_detach_restores_everything() -> None:
    run = Loop(guarded=True).fit(poisoned(make_batches(STEPS), BAD))
    assert run.guard is not None
    run.guard.detach()
    assert facts(run) == run.before
    run.fit(make_batches(2))
    assert run.guard.counts["applied"] == STEPS - 1


def test_it_says_what_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(guarded=False)
    with pytest.raises(ValueError, match="got a AdamW that was not prepared"):
        integration.attach(loop.accelerator, loop.model, loop.optimizer.optimizer)
    with caplog.at_level(logging.WARNING, logger="nanguard"):
        Loop(guarded=True, prepares_scheduler=False)
    assert "LambdaLR was not prepared" in caplog.text
    loop = Loop(guarded=False)
    for kind in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        loop.accelerator.state.distributed_type = kind
        with pytest.raises(ValueError, match=f"does not support {kind.value}"):
            integration.attach(loop.accelerator, loop.model, loop.optimizer)


def test_a_loss_of_the_loop_is_named_with_its_line() -> None:
    run = Loop(guarded=True)
    assert run.guard is not None
    for number, (x, y) in enumerate(make_batches(3)):
        labels = torch.full_like(y, -100) if number == 1 else y
        loss = nn.functional.cross_entropy(run.model(x), labels)  # guilty
        run.accelerator.backward(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
    (incident,) = run.guard.incidents
    diagnosis = incident.outcome.diagnosis
    assert diagnosis is not None
    assert diagnosis.cause == "all_labels_ignored"
    assert diagnosis.source is not None
    assert diagnosis.source.text.endswith("# guilty")
    assert diagnosis.samples == tuple(range(8))


@pytest.mark.campaign
@needs_gloo
def test_ranks_of_accelerate_launch_skip_together() -> None:
    script = Path(__file__).parent / "ranks" / "accelerate_ranks.py"
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    done = subprocess.run(
        [sys.executable, *launch, str(script)], capture_output=True, text=True, check=False, timeout=280
    )
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    results = sorted((json.loads(line) for line in lines), key=lambda result: result["rank"])
    assert [result["rank"] for result in results] == [0, 1], done.stdout + done.stderr
    for result in results:
        assert result["skipped"] == [False] * 3 + [True] + [False] * 2
        assert result["same"]
        assert result["same_rate"]
        assert result["unsound"] == []
        assert result["cause"] == "input_nonfinite"
        assert result["culprit"] == 1


@pytest.mark.parametrize("scales", [False, True], ids=["plain", "scaled"])
def test_under_nanguard_run_prepared_schedulers_hold(scales: bool) -> None:
    batches = make_batches(STEPS)
    never = Loop(guarded=False, scales=scales).fit(batches[:BAD] + batches[BAD + 1 :])
    step = type(never.optimizer).step
    with nanguard.install() as autopilot:
        run = Loop(guarded=False, scales=scales).fit(poisoned(batches, BAD))
        assert autopilot.unsound() == ()
        attached = Loop(guarded=True, scales=scales).fit(poisoned(batches, BAD))
    assert type(never.optimizer).step is step, "restored"
    for each in (run, attached):
        assert differences(never.state(), each.state()) == []
        assert each.skipped == [False] * BAD + [True] + [False] * (STEPS - BAD - 1)
