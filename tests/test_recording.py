"""What torch records of a guarded model is what it records of a plain one: tracing, scripting, exporting."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import nanguard
from helpers import NAN

X = torch.ones(3, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.lin(x))


RECORDERS: dict[str, Callable[[nn.Module], Any]] = {
    "jit.trace": lambda net: torch.jit.trace(net, X).graph,
    "jit.trace without a check": lambda net: torch.jit.trace(net, X, check_trace=False).graph,
    "onnx": lambda net: torch.jit._get_trace_graph(net, X)[0],
    "jit.script": lambda net: torch.jit.script(net).graph,
    "fx": lambda net: torch.fx.symbolic_trace(net).graph,
    "export": lambda net: torch.export.export(net, (X,)).graph,
    "strict export": lambda net: torch.export.export(net, (X,), strict=True).graph,
    "make_fx": lambda net: make_fx(lambda x: net(x))(X).graph,
    "make_fx before dispatch": lambda net: make_fx(lambda x: net(x), pre_dispatch=True)(X).graph,
}


def step(net: nn.Module, optimizer: torch.optim.Optimizer, guard: nanguard.Guard | None, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    if guard is None:
        (net(X).square().sum() * factor).backward()
        optimizer.step()
    else:
        with guard.autocast():
            loss = net(X).square().sum() * factor
        guard.backward(loss)
        guard.update()


def recorded(record: Callable[[nn.Module], Any], *, by: str = "") -> tuple[str, dict[str, Tensor], Any]:
    """The record that is made between two steps, and the weights after them."""
    torch.manual_seed(0)
    context: Any = contextlib.nullcontext()
    if by in ("install", "trace"):
        context = nanguard.install(trace=by == "trace")
    with context as autopilot:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        guard = nanguard.Guard(net, optimizer, precision="fp32", max_norm=None) if by.startswith("Guard") else None
        step(net, optimizer, guard)
        if guard is not None and by.endswith("fp32"):
            guard.keep_fp32("lin")
        text = re.sub(r"___torch_mangle_\d+\.", "", str(record(net)))  # torch numbers its classes
        step(net, optimizer, guard)
        if guard is not None and by.endswith("fp32"):
            assert guard.kept_fp32 == ("lin",)
            assert "forward" in vars(net.lin), "what scripting had to do without is back"
        weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        if by:
            step(net, optimizer, guard, NAN)
            assert all(torch.isfinite(tensor).all() for tensor in net.state_dict().values())
    torch.compiler.reset()
    return text, weights, autopilot


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("by", ["install", "trace", "Guard", "Guard with fp32"])
@pytest.mark.parametrize("how", RECORDERS)
def test_a_record_is_that_of_the_plain_program(how: str, by: str) -> None:
    plain, before, _ = recorded(RECORDERS[how])
    guarded, after, autopilot = recorded(RECORDERS[how], by=by)
    assert guarded == plain
    assert all(torch.equal(before[name], after[name]) for name in before)
    if autopilot is not None:
        assert autopilot.counts["applied"] == 2
        assert len(autopilot.incidents) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["jit.trace", "jit.script"])
def test_a_record_made_before_the_first_step_does_not_take_the_guard_away(how: str) -> None:
    with nanguard.install() as autopilot:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        copy = torch.jit.trace(net, X) if how == "jit.trace" else torch.jit.script(net)
        step(net, optimizer, None, NAN)
        assert all(torch.isfinite(tensor).all() for tensor in net.state_dict().values())
        assert copy(X).shape == (3, 4)
    assert autopilot.unguarded == ()
    assert len(autopilot.incidents) == 1
