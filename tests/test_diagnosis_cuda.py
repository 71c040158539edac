"""Diagnosis on a GPU: backward runs in threads of the autograd engine, and readings arrive late."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanguard

pytestmark = pytest.mark.cuda


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * grad * x**4 / x**2


class Block(nn.Module):
    """``kind`` chooses what goes wrong where a row of the input is zero."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inp, self.out, self.kind = nn.Linear(8, 8, bias=False), nn.Linear(8, 1), kind

    def body(self, h: Tensor) -> Tensor:
        if self.kind == "forward":
            return h * torch.log(h.abs().sum(-1, keepdim=True))
        if self.kind in ("backward", "checkpoint"):
            return h + torch.sqrt(h.pow(2).sum(-1, keepdim=True))
        if self.kind == "custom":
            applied: Tensor = Cube.apply(h)
            return applied
        return h

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        h = checkpoint(self.body, h, use_reentrant=False) if self.kind == "checkpoint" else self.body(h)
        out: Tensor = self.out(h)
        return out


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block = Block(kind)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        return out


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


def penalty_loss(model: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad((model(x) * x.abs().sum(-1, keepdim=True)).sum(), x, create_graph=True)
    flat = slope * (x.abs().sum(-1, keepdim=True) > 0)
    return (flat.pow(2).sum(-1).sqrt() - 1).pow(2).mean()


EXPECTED = {
    "forward": ("forward", "log_of_zero", "log", "block", "torch.log(h.abs()"),
    "backward": ("backward", "sqrt_grad_at_zero", "sqrt", "block", "torch.sqrt(h.pow(2)"),
    "checkpoint": ("backward", "sqrt_grad_at_zero", "sqrt", "block", "torch.sqrt(h.pow(2)"),
    "custom": ("backward", "custom_backward_bug", "div", "block", "3 * grad * x**4 / x**2"),
    "penalty": ("backward", "sqrt_grad_at_zero", "sqrt", "", "flat.pow(2).sum(-1).sqrt()"),
}


def batches() -> list[Tensor]:
    torch.manual_seed(0)
    data = [torch.randn(16, 8, device="cuda") for _ in range(8)]
    data[4][3] = 0.0
    return data


@pytest.mark.parametrize("sync", ["late", "eager"])
@pytest.mark.parametrize("kind", EXPECTED)
def test_the_birth_is_found(kind: str, sync: Any) -> None:
    model = Net(kind).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with nanguard.Guard(model, optimizer, precision="fp32", max_norm=None, sync=sync) as guard:
        for x in guard.epoch(batches()):
            guard.step(penalty_loss if kind == "penalty" else loss_fn, x)
    (incident,) = guard.incidents
    diagnosis = incident.diagnosis
    assert diagnosis is not None
    assert diagnosis.source is not None
    phase, cause, op, module, text = EXPECTED[kind]
    assert (diagnosis.phase, diagnosis.cause, diagnosis.op, diagnosis.module) == (phase, cause, op, module)
    assert text in diagnosis.source.text
    assert (diagnosis.step, diagnosis.batch, diagnosis.samples) == (4, 4, (3,))
    assert guard.counts["applied"] == 7


@pytest.mark.parametrize("sync", ["late", "eager"])
def test_examining_changes_nothing(sync: Any) -> None:
    """The run ends in the same weights, to the bit, whether its bad step was examined or not."""
    ends = []
    for how in ("full", "off"):
        torch.manual_seed(0)
        model = Net("forward").cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        with nanguard.Guard(model, optimizer, precision="bf16", sync=sync, diagnose=how) as guard:
            for x in guard.epoch(batches()):
                guard.step(loss_fn, x)
        ends.append(copy.deepcopy({**model.state_dict(), "rng": torch.cuda.get_rng_state()}))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_in_a_loop_of_the_users_own_the_model_is_replayed(kind: str) -> None:
    model = Net(kind).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with nanguard.Guard(model, optimizer, precision="fp32", max_norm=None) as guard:
        for x in guard.epoch(batches()):
            with guard.autocast():
                loss = loss_fn(guard.model, x)
            guard.backward(loss)
            guard.update()
    diagnosis = guard.incidents[0].diagnosis
    assert diagnosis is not None
    assert diagnosis.capture == "tape"
    assert (diagnosis.phase, diagnosis.cause, diagnosis.op, diagnosis.module) == EXPECTED[kind][:4]


class Loud(nn.Module):
    """Large inside, and small again when it hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        loud: Tensor = self.fc(x) * 400.0
        return loud * loud / 400.0**2


class Speaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quiet, self.loud = nn.Linear(64, 64), Loud()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.loud(self.quiet(x)).float()
        return out


def test_overflow_names_the_modules_to_keep_in_fp32() -> None:
    model = Speaker().cuda()
    x = torch.full((4, 64), 8.0, device="cuda")
    diagnosis = nanguard.diagnose(model, lambda m, b: m(b).mean(), x, precision="fp16")
    assert (diagnosis.cause, diagnosis.module) == ("overflow_fp16", "loud")
    assert diagnosis.modules_to_keep == ("loud",)
    assert diagnosis.fix.worked
