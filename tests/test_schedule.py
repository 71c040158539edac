"""A lowered learning rate is lowered under every scheduler torch has: the whole curve, from then on."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as s
from torch.optim.swa_utils import SWALR

from nanguard.state.schedule import Schedule

SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: s.LambdaLR(o, lambda step: 0.95**step),
    "MultiplicativeLR": lambda o: s.MultiplicativeLR(o, lambda step: 0.95),
    "StepLR": lambda o: s.StepLR(o, 5),
    "MultiStepLR": lambda o: s.MultiStepLR(o, [3, 9]),
    "ConstantLR": lambda o: s.ConstantLR(o, 0.3, 9),
    "LinearLR": lambda o: s.LinearLR(o, 0.1, total_iters=12),
    "ExponentialLR": lambda o: s.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: s.CosineAnnealingLR(o, 20, eta_min=1e-3),
    "CosineAnnealingWarmRestarts": lambda o: s.CosineAnnealingWarmRestarts(o, 7, eta_min=1e-3),
    "PolynomialLR": lambda o: s.PolynomialLR(o, 15, 2.0),
    "OneCycleLR": lambda o: s.OneCycleLR(o, [0.5, 0.05], total_steps=30),
    "CyclicLR": lambda o: s.CyclicLR(o, [0.01, 0.001], [0.1, 0.01], step_size_up=4),
    "CyclicLR exp": lambda o: s.CyclicLR(o, [0.01, 0.001], [0.1, 0.01], step_size_up=4, mode="exp_range", gamma=0.9),
    "SequentialLR": lambda o: s.SequentialLR(
        o, [s.LinearLR(o, 0.1, total_iters=5), s.CosineAnnealingLR(o, 20, eta_min=1e-3)], [5]
    ),
    "ChainedScheduler": lambda o: s.ChainedScheduler([s.ConstantLR(o, 0.1, 4), s.ExponentialLR(o, 0.9)]),
    "SWALR": lambda o: SWALR(o, swa_lr=0.02, anneal_epochs=8),
}


def optimizer_with(make: Any, *, tensor: bool = False) -> tuple[Any, Any]:
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    rate: Any = torch.tensor(0.1, dtype=torch.float64) if tensor else 0.1
    opt = torch.optim.SGD([{"params": [first], "lr": rate}, {"params": [second], "lr": 0.01}], momentum=0.9)
    return opt, make(opt)


@pytest.mark.parametrize("at", [0, 3, 7])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_whole_curve_is_lowered_and_can_be_raised_again(name: str, at: int) -> None:
    plain, plain_schedule = optimizer_with(SCHEDULERS[name])
    opt, scheduler = optimizer_with(SCHEDULERS[name])
    ours = Schedule([opt], [scheduler])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's own words on the order of calls
        for step in range(20):
            if step == at:
                ours.multiply(0.3)
            if step == 14:
                ours.multiply(1 / 0.3)
            factor = 0.3 if at <= step < 14 else 1.0
            want = [factor * group["lr"] for group in plain.param_groups]
            assert [group["lr"] for group in opt.param_groups] == pytest.approx(want, rel=1e-9), step
            for each in (plain, opt):
                each.step()
            plain_schedule.step()
            scheduler.step()


def test_a_tensor_is_lowered_in_place() -> None:
    opt, scheduler = optimizer_with(lambda o: s.ExponentialLR(o, 0.5), tensor=True)
    rate = opt.param_groups[0]["lr"]
    ours = Schedule([opt], [scheduler])
    ours.multiply(0.5)
    assert opt.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.05)
    opt.step()
    ours.tick()
    assert float(opt.param_groups[0]["lr"]) == pytest.approx(0.025)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_going_back_keeps_what_was_lowered_since(name: str) -> None:
    opt, scheduler = optimizer_with(SCHEDULERS[name])
    ours = Schedule([opt], [scheduler])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(4):
            ours.tick()
        note, before = ours.note(everything=True), ours.rates
        ours.tick()
        ours.multiply(0.5)
        ours.tick()
        ours.restore(note)
    assert ours.rates == pytest.approx([rate / 2 for rate in before], rel=1e-9)
    assert ours.factor == 0.5
