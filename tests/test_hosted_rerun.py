"""A bad step of a host is examined by running the host's own step function again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from helpers import INF, TinyNet, differences, everything, make_batches
from nanguard.hosted.loop import HostedLoop
from nanguard.records.diagnosis import Diagnosis

Batch = tuple[Tensor, Tensor]
STEPS, MICRO = 5, 2


class Framework:
    """Computes the loss outside the model, under its own autocast, and counts what it has logged."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        torch.manual_seed(0)
        self.model = TinyNet()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.dtype, self.num_calls = dtype, 0

    def training_step(self, batch: Batch) -> Tensor:
        self.num_calls += 1
        with torch.autocast("cpu", dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            outputs = self.model(batch[0])
        chances = torch.cat([outputs.float().softmax(1), torch.zeros(len(outputs), 1)], dim=1)  # a class that never is
        return -chances.gather(1, batch[1][:, None]).log().mean()

    def fit(self, batches: list[Batch], *, guarded: bool = True) -> HostedLoop:
        loop = HostedLoop(self.model, self.optimizer)
        for place, batch in enumerate(batches, start=1):
            if guarded:
                loop.before_forward(batch, rerun=self.training_step)
            loss = self.training_step(batch)
            if guarded:
                loop.after_forward(loss)
            (loss / MICRO).backward()
            if place % MICRO == 0:
                self.spoil(place)
                if guarded:
                    loop.step(self.optimizer)
                else:
                    self.optimizer.step()
                self.optimizer.zero_grad()
        return loop

    def spoil(self, place: int) -> None:
        """Between backward and the step."""


def diagnosis_of(loop: HostedLoop) -> Diagnosis:
    (incident,) = loop.incidents
    assert incident.outcome.diagnosis is not None
    return incident.outcome.diagnosis


def test_the_line_of_the_hosts_loss_and_the_micro_batch_are_named() -> None:
    framework = Framework()
    batches = make_batches(STEPS * MICRO)
    batches[5][1][3] = 3
    loop = framework.fit(batches)
    diagnosis = diagnosis_of(loop)
    assert diagnosis.cause == "log_of_zero"
    assert diagnosis.capture == "step"
    assert diagnosis.microbatch == 1
    assert diagnosis.source is not None
    assert diagnosis.source.function == "training_step"
    assert "log().mean()" in diagnosis.source.text
    assert diagnosis.samples == (3,)
    assert not loop.is_rerunning


def test_a_healthy_run_is_the_same_and_reruns_nothing() -> None:
    runs = []
    for is_guarded in (False, True):
        framework = Framework()
        framework.fit(make_batches(STEPS * MICRO), guarded=is_guarded)
        assert framework.num_calls == STEPS * MICRO
        runs.append(everything(framework.model, [framework.optimizer], torch.get_rng_state()))
    assert differences(*runs) == []


def test_a_step_that_is_examined_leaves_everything_as_it_was() -> None:
    batches = make_batches(STEPS * MICRO)
    framework, never = Framework(), Framework()
    for each in (framework, never):
        each.model.drop = nn.Identity()  # type: ignore[assignment]
    bad = list(batches)
    bad[4] = (torch.full_like(bad[4][0], float("nan")), bad[4][1])
    loop = framework.fit(bad)
    assert diagnosis_of(loop).cause == "input_nonfinite"
    assert framework.num_calls > len(batches)
    never.fit(batches[:4] + batches[6:], guarded=False)
    states = [everything(each.model, [each.optimizer]) for each in (never, framework)]
    assert differences(*states) == []


def test_autocast_inside_the_hosts_step_is_off_in_an_experiment_in_fp32() -> None:
    framework = Framework(torch.float16)
    with torch.no_grad():
        framework.model.inp.weight.mul_(1e6)
    loop = framework.fit(make_batches(2))
    diagnosis = diagnosis_of(loop)
    assert diagnosis.cause == "overflow_fp16"
    assert ("the whole step in fp32", "finite") in [(trial.what, trial.result) for trial in diagnosis.tried]
    assert diagnosis.modules_to_keep
    assert torch.autocast.__enter__.__qualname__ == "autocast.__enter__"


def test_gradients_that_the_host_has_spoiled_are_not_called_a_hardware_fault() -> None:
    framework = Framework()

    def spoil(place: int) -> None:
        if place == 4:
            framework.model.out.bias.grad[0] = INF  # type: ignore[index]

    framework.spoil = spoil  # type: ignore[method-assign]
    diagnosis = diagnosis_of(framework.fit(make_batches(STEPS * MICRO)))
    assert diagnosis.cause == "unknown"
    assert "after backward()" in diagnosis.because


def test_a_step_that_raises_when_it_runs_again_is_examined_in_another_way() -> None:
    framework = Framework()
    batches = make_batches(STEPS * MICRO)
    batches[4][1][3] = 3
    done: list[Any] = []

    def once(batch: Batch) -> Tensor:
        raise RuntimeError("the loader is closed")

    loop = HostedLoop(framework.model, framework.optimizer)
    for batch in batches:
        loop.before_forward(batch, rerun=once)
        loss = framework.training_step(batch)
        loop.after_forward(loss)
        loss.backward()
        done.append(loop.step(framework.optimizer).applied)
        framework.optimizer.zero_grad()
    assert done.count(False) == 1
    diagnosis = diagnosis_of(loop)
    assert diagnosis.capture == "graph"
    assert any("the loader is closed" in note for note in diagnosis.notes)


def test_a_bad_loss_with_finite_gradients_skips_the_step() -> None:
    framework = Framework()

    class Silent(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: Tensor) -> Tensor:
            return loss * float("nan")

        @staticmethod
        def backward(ctx: Any, *above: Any) -> Any:
            return above[0] * 0

    inner = framework.training_step
    batches = make_batches(6)
    bad = batches[2][0]

    def step(batch: Batch) -> Tensor:
        loss = inner(batch)
        return Silent.apply(loss) if batch[0] is bad else loss  # type: ignore[no-any-return, no-untyped-call]

    framework.training_step = step  # type: ignore[method-assign]
    loop = framework.fit(batches)  # such a host calls backward() on every loss, so none of them was discarded
    assert loop.counts["skipped"] == 1
    assert loop.counts["applied"] == 2
