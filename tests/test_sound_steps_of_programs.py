"""Programs that change in the middle of a run: steps that are made in few calls leave what the usual steps leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import nanguard
from helpers import NAN, differences, everything, make_batches, poisoned

BAD, STEPS, LATER = 9, 12, 6
BATCHES = make_batches(STEPS)


class Net(nn.Module):
    """With a buffer that is written to from some step on. Torch does not count what is written through ``.data``."""

    mean: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("mask", torch.ones(8))
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inp(x))
        if self.writes:
            self.mean.data.lerp_(hidden.detach().mean(0), 0.1)
        return self.out((hidden - self.mean) * self.mask)


def optimizer_of(model: nn.Module, sync: str = "eager") -> Optimizer:
    return AdamW(model.parameters(), lr=0.01, fused=True if sync == "late" else None)


@pytest.mark.parametrize(("sync", "when", "max_norm"), [("eager", LATER, None), ("eager", BAD, 1), ("late", BAD, None)])
def test_what_is_written_to_a_buffer_through_data_between_two_steps_outlives_a_bad_step(
    sync: Any, when: int, max_norm: float | None
) -> None:
    """With ``max_norm`` all steps are made the usual way."""
    torch.manual_seed(0)
    model = Net()
    with nanguard.install(sync=sync, max_norm=max_norm) as autopilot:
        optimizer = optimizer_of(model, sync)
        for number, (x, y) in enumerate(poisoned(BATCHES, BAD)):
            if number == when:
                model.mask.data.mul_(0.5)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert len(autopilot.incidents) == 1
    assert torch.equal(model.mask, torch.full((8,), 0.5))


@pytest.mark.parametrize("bad", ["data", "loss"])
def test_of_a_buffer_that_is_written_to_through_data_from_the_middle_on_a_bad_step_leaves_nothing(bad: str) -> None:
    torch.manual_seed(0)
    model = Net()
    means = []
    with nanguard.install() as autopilot:
        optimizer = optimizer_of(model)
        for number, (x, y) in enumerate(poisoned(BATCHES, BAD) if bad == "data" else BATCHES):
            model.writes = number >= LATER
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            (loss * NAN if bad == "loss" and number == BAD else loss).backward()
            optimizer.step()
            means.append(model.mean.clone())
    assert [incident.reading.step for incident in autopilot.incidents] == [BAD]
    assert torch.equal(means[BAD], means[BAD - 1])
    assert means[LATER - 1].count_nonzero() == 0
    assert not torch.equal(means[BAD - 1], means[BAD - 2])


@pytest.mark.parametrize("bad", ["data", "loss"])
def test_a_step_that_is_lost_after_a_bad_one_leaves_nothing_in_buffers_that_torch_does_not_count(bad: str) -> None:
    """When the host learns of a bad step, the device has put buffers back: they only look as if steps did not write."""
    torch.manual_seed(0)
    model = Net()
    model.writes = True
    means = []
    with nanguard.install(sync="late") as autopilot:
        optimizer = optimizer_of(model, "late")
        for number, (x, y) in enumerate(poisoned(BATCHES, BAD) if bad == "data" else BATCHES):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            (loss * NAN if bad == "loss" and number == BAD else loss).backward()
            optimizer.step()
            means.append(model.mean.clone())
    assert autopilot.counts["lost"] == 1
    assert torch.equal(means[BAD], means[BAD - 1])
    assert torch.equal(means[BAD + 1], means[BAD - 1])
    assert not torch.equal(means[BAD + 2], means[BAD - 1])


def test_in_late_mode_it_is_noticed_some_time_that_a_buffer_is_written_to_after_all() -> None:
    torch.manual_seed(0)
    model = Net()
    batches = make_batches(60)
    with nanguard.install(sync="late") as autopilot:
        optimizer = optimizer_of(model, "late")
        for number, (x, y) in enumerate(poisoned(batches, 50)):
            model.writes = number >= LATER
            before = model.mean.clone()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if number == 50:
                assert torch.equal(model.mean, before)
    (incident,) = autopilot.incidents
    assert incident.outcome.action.response == "skip"


class Bare(nn.Module):
    """Computes its loss itself. It is called to evaluate, never to train."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6) * 0.1)
        self.register_buffer("running_mean", torch.zeros(6))
        self.register_buffer("running_var", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.batch_norm(x, self.running_mean, self.running_var, training=True) @ self.weight.T, y)


@pytest.mark.parametrize("evaluates", [False, True])
def test_buffers_of_a_module_whose_methods_are_called_are_put_back_as_well(evaluates: bool) -> None:
    torch.manual_seed(0)
    model = Bare()
    with nanguard.install() as autopilot:
        optimizer = optimizer_of(model)
        for number, (x, y) in enumerate(poisoned(BATCHES, BAD)):
            if evaluates:
                with torch.no_grad():
                    model(x)
            before = everything(model, [optimizer])
            optimizer.zero_grad()
            model.loss(x, y).backward()
            optimizer.step()
            if number == BAD:
                assert differences(before, everything(model, [optimizer])) == []
    assert [incident.reading.step for incident in autopilot.incidents] == [BAD]


@pytest.mark.parametrize("bad", [LATER, BAD])
def test_of_a_module_that_is_called_in_some_steps_only_no_buffer_becomes_nan(bad: int) -> None:
    """``forward()`` itself is called in each third step. In the first of them, ``LATER``, buffers are not noted yet."""
    torch.manual_seed(0)
    model = nn.BatchNorm1d(6)
    with nanguard.install() as autopilot:
        optimizer = SGD(model.parameters(), lr=0.1)
        for number, (x, _) in enumerate(poisoned(BATCHES, bad)):
            optimizer.zero_grad()
            out = model.forward(x) if number >= LATER and number % 3 == 0 else model(x)
            out.square().mean().backward()
            optimizer.step()
    (incident,) = autopilot.incidents
    assert (incident.reading.step, incident.outcome.action.response) == (bad, "skip"), "nothing has to be rolled back"
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


class Failing:
    """Makes ``step()`` of an optimizer raise, once it has changed the weights. Ctrl-C does the same."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.is_on = False
        optimizer.register_step_post_hook(self)

    def __call__(self, *_: Any) -> None:
        if self.is_on:
            raise OSError("a disk of the program")


@pytest.mark.parametrize("clips", [False, True])
def test_if_a_program_catches_an_error_of_its_own_step_buffers_stay_as_it_has_written_them(clips: bool) -> None:
    """``clips``: on a CPU such steps are made the usual way."""

    def train() -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        optimizer = SGD(model.parameters(), lr=0.1)
        failing = Failing(optimizer)
        for number, (x, y) in enumerate(BATCHES):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            failing.is_on = number in (5, 8)
            try:
                optimizer.step()
            except OSError:
                continue
        return everything(model, [optimizer])

    plain = train()
    with nanguard.install():
        assert differences(plain, train()) == []


def test_the_loss_of_a_step_that_has_raised_is_no_part_of_the_next() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    losses = []
    with nanguard.install() as autopilot:
        optimizer = SGD(model.parameters(), lr=0.1)
        failing = Failing(optimizer)
        for number, (x, y) in enumerate(BATCHES):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            failing.is_on = number == 5
            try:
                optimizer.step()
            except OSError:
                continue
            losses.append((number, loss.item()))
            (hosted,) = autopilot._monitor.registry.hosted_steps
            reading = hosted.parts.journal.last.verdict.reading
            assert (reading.step, reading.loss) == losses[-1]


def test_a_bad_step_that_raises_does_not_keep_all_later_ones_from_having_an_effect() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    with nanguard.install(sync="late") as autopilot:
        optimizer = optimizer_of(model, "late")
        failing = Failing(optimizer)
        for number, (x, y) in enumerate(poisoned(BATCHES, BAD - 2)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            failing.is_on = number == BAD - 2
            before = model.weight.detach().clone()
            try:
                optimizer.step()
            except OSError:
                continue
            assert not torch.equal(before, model.weight)
    assert autopilot.counts["lost"] == 0


def test_a_statistic_that_the_program_makes_nan_between_two_steps_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with nanguard.install() as autopilot:
        optimizer = optimizer_of(model)
        for number, (x, y) in enumerate(BATCHES):
            if number == LATER:
                model[1].running_var[0] = NAN
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert not autopilot.incidents, "training does not use it"
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"step {LATER}: before this step, the program has made 1.running_var non-finite.")


@pytest.mark.parametrize("sync", ["eager", "late"])
@pytest.mark.parametrize("is_last", [False, True])
def test_an_evaluation_in_training_mode_leaves_no_nan_in_the_statistics(sync: Any, is_last: bool) -> None:
    """The program has forgotten ``model.eval()``, and the batch is bad."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with nanguard.install(sync=sync) as autopilot:
        optimizer = optimizer_of(model, sync)
        for number, (x, y) in enumerate(BATCHES):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if number == (STEPS - 1 if is_last else LATER):
                seen = {name: value.clone() for name, value in model.state_dict().items() if "running" in name}
                with torch.no_grad():
                    assert model(x * NAN).isnan().all()
                    if not is_last:
                        model(BATCHES[0][0])
                        assert not torch.equal(seen["1.running_mean"], model[1].running_mean), (
                            "of a sound batch they stay"
                        )
    assert not autopilot.incidents
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
