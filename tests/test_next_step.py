"""Loops of frameworks without a sync: a step is told as applied, and whether it was is known before the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import nanguard
from helpers import INF, differences, everything, loss_fn, make_batches, poisoned
from nanguard.errors import NonFiniteError
from nanguard.hosted.loop import HostedLoop
from nanguard.recovery.recovery import Recovery
from test_hosted import ACCUMULATE, STEPS, Batch, Net, Trainer, Window, plain, windows


def fused(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, fused=True)


@pytest.fixture(autouse=True)
def always_as_on_a_gpu(as_on_a_gpu: None) -> None:
    pass


class LateTrainer(Trainer):
    """Takes back what it did for steps that were not applied: it keeps a list of losses."""

    def __init__(self, **options: Any) -> None:
        super().__init__(guarded=False, make=fused, measures=options.pop("measures", True))
        self.num_skipped = 0
        self.kept: list[float] = []
        self.loop = HostedLoop(
            self.model, self.optimizer, schedulers=self.schedule, was_skipped=self.was_skipped, **options
        )
        assert self.loop.answers_later

    def was_skipped(self) -> None:
        self.num_skipped += 1

    def micro_step(self, batch: Batch) -> None:
        assert self.loop is not None
        self.loop.before_forward(batch, rerun=lambda given: loss_fn(self.model, given))
        loss = loss_fn(self.model, batch)
        self.loop.after_forward(loss)
        (loss / ACCUMULATE).backward()


def perfect(steps: Sequence[Window], leaving_out: Sequence[int] = ()) -> Trainer:
    return plain([window for place, window in enumerate(steps) if place not in leaving_out], make=fused)


def with_nan(*places: int, value: float = float("nan"), micro: int = 0) -> list[Window]:
    steps = windows()
    for place in places:
        steps[place] = poisoned(steps[place], micro, value=value)
    return steps


@pytest.mark.parametrize("measures", [False, True])
def test_a_healthy_run_is_the_same_to_the_bit(measures: bool) -> None:
    run = LateTrainer(measures=measures)
    run.fit(windows())
    assert differences(perfect(windows()).state(), run.state()) == []
    assert run.loop is not None
    run.loop.settle()
    assert run.loop.counts["applied"] == STEPS
    assert run.num_skipped == 0


@pytest.mark.parametrize("measures", [False, True])
@pytest.mark.parametrize("places", [(0,), (3,), (3, 4), (2, 4), (0, 1, 2), (STEPS - 1,)], ids=str)
@pytest.mark.parametrize("micro", range(ACCUMULATE))
def test_bad_steps_never_happened(places: tuple[int, ...], micro: int, measures: bool) -> None:
    """No good step is lost behind a bad one, and the schedule counts what was applied."""
    run = LateTrainer(measures=measures)
    run.fit(with_nan(*places, micro=micro))
    assert run.loop is not None
    run.loop.settle()
    assert differences(perfect(windows(), places).state(), run.state()) == []
    assert run.schedule.last_epoch == STEPS - len(places)
    assert run.num_skipped == len(places)
    assert run.applied == [True] * STEPS, "as far as was known"
    assert run.loop.counts["applied"] == STEPS - len(places)
    assert [incident.reading.step for incident in run.loop.incidents] == list(places)
    assert run.loop.unsound() == ()


def test_bad_gradients_of_a_finite_loss() -> None:
    run = LateTrainer()

    def spoil(model: nn.Module) -> None:
        model.get_parameter("out.bias").grad[0] = INF  # type: ignore[index]

    run.spoil = spoil
    run.fit(windows())
    assert differences(perfect(windows(), [3]).state(), run.state()) == []
    assert run.loop is not None
    assert run.loop.incidents[0].reading.gradients == ("out.bias",), "as they were before clipping"


def test_the_answer_comes_before_the_next_step_or_when_it_is_asked_for() -> None:
    run = LateTrainer()
    steps = with_nan(1)
    run.fit(steps[:2])
    assert (run.num_skipped, run.schedule.last_epoch) == (0, 2)
    run.fit(steps[2:3])
    assert (run.num_skipped, run.schedule.last_epoch) == (1, 2)
    run.fit(with_nan(3)[3:4])
    assert run.loop is not None
    run.loop.settle()
    assert (run.num_skipped, run.schedule.last_epoch) == (2, 2)


def test_the_incident_says_where_it_came_from() -> None:
    run = LateTrainer()
    run.fit(with_nan(3))
    assert run.loop is not None
    diagnosis = run.loop.incidents[0].outcome.diagnosis
    assert diagnosis is not None
    assert diagnosis.cause == "input_nonfinite"


def test_a_rollback_drops_the_step_that_was_computed_before_it() -> None:
    policy = nanguard.Policy(ladder=(nanguard.Rollback(steps=2, times=1), nanguard.Skip()))
    run = LateTrainer(policy=policy)
    run.fit(with_nan(5))
    assert run.loop is not None
    run.loop.settle()
    (incident,) = run.loop.incidents
    assert incident.outcome.went_back
    assert run.applied == [True] * 6 + [False, True], "step 6 had gradients of the weights before the rollback"
    assert incident.outcome.did.startswith("back to the state before step 1")
    assert differences(perfect(windows(), range(1, 7)).state(), run.state()) == []


def test_a_halt_is_raised_by_the_next_step() -> None:
    run = LateTrainer(policy=nanguard.Policy(ladder=(nanguard.Halt(),)))
    steps = with_nan(3)
    run.fit(steps[:4])
    before = perfect(steps[:3])
    with pytest.raises(NonFiniteError):
        run.fit(steps[4:5])
    assert differences(before.state(), run.state()) == []
    assert run.num_skipped == 1


def test_gradients_of_the_next_step_outlive_what_is_tried_for_the_bad_one(monkeypatch: pytest.MonkeyPatch) -> None:
    run = LateTrainer()
    answer = Recovery.answer

    def trying(recovery: Recovery, *args: Any) -> Any:
        run.optimizer.zero_grad()  # as trials do, to have the memory
        return answer(recovery, *args)

    monkeypatch.setattr(Recovery, "answer", trying)
    run.fit(with_nan(3))
    assert differences(perfect(windows(), [3]).state(), run.state()) == []


def test_a_scaler_makes_it_ask_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = LateTrainer()
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    micro_step: Callable[[Batch], None] = lambda batch: Trainer.micro_step(run, batch)  # noqa: E731
    monkeypatch.setattr(run, "micro_step", micro_step)
    run.fit(with_nan(3))
    assert run.loop is not None
    assert not run.loop.answers_later
    assert run.applied.count(False) == 1
    assert run.num_skipped == 0


def test_what_is_no_function_is_refused_at_once() -> None:
    model = Net()
    with pytest.raises(ValueError, match="was_skipped must be a function without arguments, or None, got 5"):
        HostedLoop(model, fused(model.parameters(), 0.01), was_skipped=5)  # type: ignore[arg-type]


def test_several_optimizers_are_asked_at_once() -> None:
    model = Net()
    halves = list(model.parameters())[:2], list(model.parameters())[2:]
    loop = HostedLoop(model, [fused(half, 0.01) for half in halves], was_skipped=lambda: None)
    assert not loop.answers_later
    loop.close()


@pytest.mark.cuda
def test_on_a_gpu_no_step_waits_and_bad_ones_never_happened() -> None:
    batches = make_batches(24, device="cuda")

    def train(given: Sequence[Batch], *, is_guarded: bool) -> tuple[dict[str, Any], HostedLoop | None]:
        torch.manual_seed(0)
        model = Net().cuda()
        optimizer = fused(model.parameters(), 0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        loop = HostedLoop(model, optimizer, schedulers=schedule, was_skipped=lambda: None) if is_guarded else None
        for number, batch in enumerate(given):
            is_checked = is_guarded and 12 <= number < 20  # the others are bad, or wait for a bad one
            torch.cuda.set_sync_debug_mode("error" if is_checked else "default")
            if loop is not None:
                loop.before_forward(batch, rerun=lambda given: loss_fn(model, given))
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = loss_fn(model, batch)
            if loop is not None:
                loop.after_forward(loss)
            loss.backward()
            if loop is None:
                optimizer.step()
            else:
                assert loop.answers_later
                loop.measure(optimizer)
                loop.step(optimizer)
            schedule.step()
            optimizer.zero_grad()
        torch.cuda.set_sync_debug_mode("default")
        if loop is not None:
            loop.settle()
        return everything(model, [optimizer], schedule), loop

    bad = (0, 4, 5, 9, 23)
    never, _ = train([batch for place, batch in enumerate(batches) if place not in bad], is_guarded=False)
    state, loop = train(poisoned(batches, *bad), is_guarded=True)
    assert differences(never, state) == []
    assert loop is not None
    assert [incident.reading.step for incident in loop.incidents] == list(bad)
    causes = {incident.outcome.diagnosis.cause for incident in loop.incidents if incident.outcome.diagnosis}
    assert causes == {"input_nonfinite"}
