"""Bad input gets a clear error before training starts, and nothing is touched."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import nanguard
from helpers import TinyNet, build, differences, everything
from optimizers import ALL


class Sharded(nn.Linear):
    """Looks to the guard as FSDP's parameters do: the tensor is only this rank's piece."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.weight._local_tensor = torch.zeros(1)  # type: ignore[attr-defined]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


MODEL, OTHER = TinyNet(), TinyNet()
OPT = adamw(MODEL)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "optimizer of another model": ({"optimizer": adamw(OTHER)}, "6 of 6 parameters of AdamW are not the model's"),
    "no optimizer": ({"optimizer": []}, "optimizer is an empty list"),
    "not an optimizer": ({"optimizer": "adam"}, "must be a torch.optim.Optimizer or several of them, got 'adam'"),
    "two optimizers with one parameter": (
        {"optimizer": [OPT, torch.optim.SGD(MODEL.out.parameters(), lr=1)]},
        "is in two optimizers, AdamW and SGD",
    ),
    "LBFGS": ({"optimizer": torch.optim.LBFGS(MODEL.parameters())}, "LBFGS calls its closure several times"),
    "not a module": ({"model": [MODEL]}, "model must be a torch.nn.Module, got list"),
    "unknown precision": ({"precision": "fp8"}, "precision must be one of 'auto', 'fp32', 'bf16', 'fp16', got 'fp8'"),
    "unknown clip": ({"clip": "all"}, "clip must be 'group', 'global', 'agc', 'zscore'"),
    "unknown sync": ({"sync": "never"}, "sync must be one of 'auto', 'eager', 'late', got 'never'"),
    "unknown schedule_per": ({"schedule_per": "day"}, "schedule_per must be one of 'step', 'epoch', got 'day'"),
    "scheduler of another optimizer": (
        {"scheduler": torch.optim.lr_scheduler.StepLR(adamw(OTHER), 1)},
        "StepLR was made for another AdamW than the one to guard",
    ),
    "scheduler that needs a metric": (
        {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(OPT)},
        "ReduceLROnPlateau needs a metric",
    ),
    "not a scheduler": ({"scheduler": 3}, "scheduler must be a torch LRScheduler or several of them, got 3"),
    "accumulate": ({"accumulate": 0}, "accumulate must be a whole number, 1 or more, got 0"),
    "ema without update": ({"ema": OTHER}, "ema must be a torch.optim.swa_utils.AveragedModel"),
    "late without fused": (
        {"optimizer": torch.optim.RMSprop(MODEL.parameters()), "sync": "late"},
        "RMSprop cannot skip a step on the device; pass fused=True",
    ),
    "late with dropping": (
        {"policy": nanguard.Policy([nanguard.DropBadGradients(), nanguard.Skip()]), "sync": "late"},
        "needs the host to decide",
    ),
    "policy by its name": ({"policy": "default"}, "policy must be a Policy or None, got 'default': Policy.recipe"),
    "snapshots": ({"snapshots": 5}, "snapshots must be a Snapshots object, 'auto' or None, got 5"),
    "nowhere to write": ({"snapshots": nanguard.Snapshots(where="disk")}, "give the guard a run_dir"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_a_reason(name: str) -> None:
    options, message = REFUSED[name]
    before = everything(MODEL, [OPT])
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        nanguard.Guard(**{"model": MODEL, "optimizer": OPT, **options})
    assert message in str(caught.value)
    assert differences(before, everything(MODEL, [OPT])) == []


def test_sharded_parameters_are_refused() -> None:
    model = Sharded()
    with pytest.raises(ValueError, match="sharded over ranks"):
        nanguard.Guard(model, adamw(model))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nanguard.AGC(factor=0), "AGC factor must be a finite number above zero, got 0"),
        (lambda: nanguard.AGC(eps=-1), "AGC eps"),
        (lambda: nanguard.ZScore(threshold=float("nan")), "ZScore threshold"),
        (lambda: nanguard.ZScore(warmup=200), "2 <= warmup <= window"),
    ],
)
def test_options_are_checked_when_built(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_what_is_fine_is_accepted() -> None:
    model, opt = build(ALL["fused AdamW"])
    chained = torch.optim.lr_scheduler.SequentialLR(
        opt,
        [torch.optim.lr_scheduler.LinearLR(opt), torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)],
        milestones=[3],
    )
    guard = nanguard.Guard(
        model, [opt], scheduler=[chained], max_norm=1, clip="agc", ema=AveragedModel(model), sync="late", accumulate=2
    )
    assert guard.syncs_per_step == 0


def test_scripted_modules_are_refused_by_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has words of its own on scripting
        model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"scripted modules \(torch\.jit\)"):
        nanguard.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m: nanguard.diagnose(m, "loss", torch.ones(2, 3)), "needs a torch.nn.Module and a function"),
        (lambda m: nanguard.diagnose(lambda model, batch: model, m, torch.ones(2, 3)), "needs a torch.nn.Module"),
        (lambda m: nanguard.diagnose(m, lambda m, b: m(b).mean(), torch.ones(2, 3), depth="deep"), "'full' or 'brief'"),
        (lambda m: nanguard.diagnose(m, lambda m, b: m(b), torch.ones(2, 3)), "a tensor with one element"),
        (lambda m: nanguard.diagnose(m, lambda m, b: 3.0, torch.ones(2, 3)), "a tensor with one element, got float"),
        (
            lambda m: nanguard.diagnose(m, lambda m, b: m(b).mean(), torch.ones(2, 3), precision="int8"),
            "precision must",
        ),
    ],
)
def test_what_cannot_be_examined_is_refused(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call(nn.Linear(3, 1))


@pytest.mark.parametrize(("name", "value"), [("diagnose", "yes"), ("capture", "all"), ("loss_scale", 1024)])
def test_wrong_choices_about_examining_are_refused(name: str, value: Any) -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(ValueError, match=f"{name} must be"):
        nanguard.Guard(model, torch.optim.AdamW(model.parameters()), **{name: value})
