"""The run log has the numbers as the user would call them: norms before clipping, the loss of a whole step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import SGD, Adam, AdamW

import nanguard
from helpers import TinyNet, differences, everything, make_batches
from nanguard.records.run import StepRecord
from nanguard.runlog.reader import read_run


def net() -> TinyNet:
    torch.manual_seed(0)
    model = TinyNet()
    model.drop.p = 0.0
    return model


def norm_of(params: Any) -> float:
    return torch.stack([p.grad.double().norm() for p in params]).norm().item()


def by_norm(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def by_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.001)


def twice(model: nn.Module) -> None:
    clip_grad.clip_grad_norm_(list(model.parameters()), 0.1)
    clip_grad.clip_grad_norm_(list(model.parameters()), 0.01, foreach=False)


def by_group(model: Any) -> None:
    nn.utils.clip_grad_norm_(model.inp.parameters(), 0.01)
    nn.utils.clip_grad_norm_(model.norm.parameters(), 100.0)
    nn.utils.clip_grad_norm_(model.out.parameters(), 0.02)


def trained(clip: Callable[[nn.Module], None], sync: str) -> tuple[dict[str, Any], list[list[float]]]:
    model = net()
    groups = [list(each.parameters()) for each in (model.inp, model.norm, model.out)]
    optimizer = AdamW([{"params": params} for params in groups], lr=0.01, fused=sync == "late")
    norms = []
    for x, y in make_batches(5):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        norms.append([norm_of(params) for params in groups])
        clip(model)
        optimizer.step()
    return everything(model, [optimizer]), norms


@pytest.mark.parametrize("sync", ["eager", "late"])
@pytest.mark.parametrize("clip", [by_norm, by_value, twice, by_group])
def test_norms_are_those_before_the_programs_own_clipping(clip: Any, sync: Any, tmp_path: Path) -> None:
    plain, norms = trained(clip, sync)
    with nanguard.install(run_dir=tmp_path, sync=sync):
        guarded, _ = trained(clip, sync)
    assert differences(plain, guarded) == []
    logged = [list(step.norms) for step in steps(tmp_path)]
    if clip is by_value:  # of all together: it cuts each element on its own
        norms, logged = ([[torch.tensor(each).norm().item()] for each in every] for every in (norms, logged))
    assert logged == [pytest.approx(each, rel=1e-4) for each in norms]


def test_a_norm_that_overflows_is_logged_as_such(tmp_path: Path) -> None:
    """``clip_grad_norm_`` then divides finite gradients by Inf: they are all zero."""
    with nanguard.install(run_dir=tmp_path) as autopilot:
        model = nn.Linear(4, 1)
        optimizer = SGD(model.parameters(), lr=0.1)
        (model(torch.ones(2, 4)).sum() * 1e30).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert not model.weight.grad.any()
        optimizer.step()
    (step,) = steps(tmp_path)
    assert step.norms == (float("inf"),)
    assert not autopilot.incidents


@pytest.mark.parametrize("sync", ["eager", "late"])
def test_a_gradient_that_is_spoiled_after_clipping_is_seen(sync: Any) -> None:
    """The norms that clipping computes are used only for gradients that nothing has touched since."""
    model, optimizer = net(), None
    with nanguard.install(sync=sync) as autopilot:
        optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
        for number, (x, y) in enumerate(make_batches(8)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if number == 4:
                model.out.weight.grad[0, 0] = float("nan")
            elif number == 6:
                model.out.weight.grad = torch.full_like(model.out.weight, float("inf"))
            optimizer.step()
    assert [incident.reading.step for incident in autopilot.incidents] == [4, 6]
    assert autopilot.unsound() == ()


@pytest.mark.parametrize("sync", ["eager", "late"])
def test_gradients_are_named_as_they_were_before_clipping(sync: Any) -> None:
    """One NaN makes the norm NaN, and clipping by it makes every gradient NaN."""
    model = net()
    with nanguard.install(sync=sync) as autopilot:
        optimizer = AdamW(reversed(list(model.parameters())), lr=0.01, fused=True)
        for number, (x, y) in enumerate(make_batches(8)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if number == 5:
                model.out.bias.grad[0] = float("nan")
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    (incident,) = autopilot.incidents
    assert incident.reading.gradients == ("out.bias",)


def divided(loss: Tensor) -> Tensor:
    return loss / 4


def multiplied(loss: Tensor) -> Tensor:
    return loss * 0.25


def scaled(loss: Tensor) -> Tensor:
    return torch.amp.GradScaler("cpu", init_scale=8.0).scale(loss / 4)


def summed(loss: Tensor) -> Tensor:
    return loss


@pytest.mark.parametrize("sync", ["eager", "late"])
@pytest.mark.parametrize("share", [divided, multiplied, scaled, summed])
def test_the_loss_of_a_step_is_that_of_its_micro_batches(share: Any, sync: Any, tmp_path: Path) -> None:
    losses: list[float] = []
    with nanguard.install(run_dir=tmp_path, sync=sync):
        model = net()
        optimizer = SGD(model.parameters(), lr=0.0, fused=sync == "late")
        for number, (x, y) in enumerate(make_batches(10)):
            loss = F.cross_entropy(model(x), y)
            losses.append(loss.item())
            share(loss).backward()
            if number % 4 == 3 or number == 9:
                optimizer.step()
                optimizer.zero_grad()
    means = [sum(part) / len(part) for part in (losses[:4], losses[4:8], losses[8:])]
    assert [step.loss for step in steps(tmp_path)] == [pytest.approx(mean, rel=1e-5) for mean in means]


def test_a_loss_that_is_divided_without_accumulation_is_what_it_is(tmp_path: Path) -> None:
    with nanguard.install(run_dir=tmp_path):
        weight = torch.tensor([3.0], requires_grad=True)
        optimizer = SGD([weight], lr=0.1)
        (weight.sum() / 4).backward()
        optimizer.step()
    assert [step.loss for step in steps(tmp_path)] == [0.75]


def test_steps_go_on_after_a_resume(tmp_path: Path) -> None:
    def train(first: int, last: int, saved: Any) -> Any:
        model = net()
        optimizer = Adam(model.parameters())
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        for x, y in make_batches(9)[first:last]:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return model.state_dict(), optimizer.state_dict()

    with nanguard.install(run_dir=tmp_path):
        saved = train(0, 4, None)
    with nanguard.install(run_dir=tmp_path):
        train(4, 9, saved)
    assert [step.step for step in steps(tmp_path)] == list(range(9))


def steps(folder: Path) -> tuple[StepRecord, ...]:
    return read_run(folder).steps
