"""The one list of what a run consists of: it finds everything, and puts everything back where it was."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from helpers import TinyNet, differences, everything, make_batches, same
from nanguard.state import sharding
from nanguard.state.schedule import Schedule
from nanguard.state.training_state import TrainingState
from nanguard.state.undo import Undo


def state_of(model: nn.Module, *optimizers: Optimizer, ema: nn.Module | None = None) -> TrainingState:
    schedule = Schedule(optimizers, (), "step")
    return TrainingState(model, optimizers, device=torch.device("cpu"), schedule=schedule, ema=ema)


def backward(model: nn.Module, seed: int = 0) -> None:
    x, y = make_batches(1, seed=seed)[0]
    F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]


# ---- an update that can be undone ------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.NAdam, torch.optim.ASGD])
def test_an_update_is_put_back_into_the_same_tensors(kind: Any, steps_before: int) -> None:
    model = TinyNet()
    optimizer = kind(model.parameters(), lr=0.1)
    for _ in range(steps_before):
        backward(model)
        optimizer.step()
    backward(model)
    before = everything(model, [optimizer])
    held = {(id(p), key): value for p, state in optimizer.state.items() for key, value in state.items()}
    entries = {id(p): state for p, state in optimizer.state.items()}
    update = state_of(model, optimizer).capture_update()
    optimizer.step()
    optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["new"] = 7.0, 1
    assert not update.is_spoiled()
    for _ in range(2):  # a put_back that was interrupted may be called again
        update.put_back()
        assert differences(before, everything(model, [optimizer])) == []
        for p, state in optimizer.state.items():
            assert state is entries[id(p)]
            assert all(value is held[id(p), key] for key, value in state.items() if isinstance(value, Tensor))


class Pair(NamedTuple):
    first: Tensor
    second: list[float]


class Strange(torch.optim.SGD):
    """State in containers of every kind, under keys that are not parameters, and replaced at each step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if "shared" in self.state:
            del self.state["shared"]  # type: ignore[index]
        else:
            self.state["shared"] = torch.ones(2)  # type: ignore[index, assignment]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                history = state.setdefault("history", [])
                history.append(p.detach().clone())
                del history[:-2]
                state["pair"] = Pair(p.detach() * 2, [1.0, float(len(history))])
                state["ordered"] = OrderedDict(b=p.detach().clone(), a=len(history))
                p.data.add_(1)


def contents(optimizer: Optimizer) -> dict[Any, Any]:
    return {id(key) if isinstance(key, Tensor) else key: value for key, value in optimizer.state.items()}


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_state_of_any_form_is_put_back(steps: int) -> None:
    model = nn.Linear(2, 2)
    outside = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))]  # of one shape: nothing tells them apart
    here = Strange([*model.parameters(), *outside], lr=0.1)
    for _ in range(steps):
        here.step()
    copies = [p.detach().clone() for p in (*model.parameters(), *outside)]
    expected = copy.deepcopy(contents(here))
    update = state_of(model, here).capture_update()
    here.step()
    update.put_back()
    assert all(torch.equal(p, c) for p, c in zip((*model.parameters(), *outside), copies, strict=True))
    assert same(contents(here), expected)
    assert isinstance(here.state[outside[0]]["pair"], Pair)
    assert isinstance(here.state[outside[0]]["ordered"], OrderedDict)


def test_only_what_has_become_nonfinite_spoils_an_update() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["best"] = torch.tensor(torch.inf)
    update = state_of(model, optimizer).capture_update()
    assert not update.is_spoiled(), "it was infinite before"
    optimizer.state[model.bias]["best"] = torch.tensor(torch.inf)
    assert not update.is_spoiled(), "it is new, and may start with Inf"
    optimizer.state[model.bias]["best"] = torch.tensor(torch.nan)
    assert update.is_spoiled(), "nothing starts with NaN"
    update.put_back()
    assert not update.is_spoiled()
    assert model.bias not in optimizer.state
    model.bias.data[0] = torch.inf
    assert update.is_spoiled()


# ---- everything is found ---------------------------------------------------------------------------------------------


def test_nonfinite_values_are_found_wherever_they_are() -> None:
    model, average = TinyNet(), TinyNet()
    outside = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.AdamW([*model.parameters(), *outside])
    for p in outside:
        p.grad = torch.ones(3)
    backward(model)
    optimizer.step()
    state = state_of(model, optimizer, ema=average)
    assert state.nonfinite() == ()
    names = set()
    for name, tensor in state.tensors().items():
        if tensor.is_floating_point():
            saved = tensor.detach().clone()
            tensor.detach().fill_(torch.nan)
            assert state.nonfinite() == state.unsound() == (name,)
            tensor.detach().copy_(saved)
            names.add(name)
    assert {"model.norm.running_var", "ema.inp.weight", "outside.0.6", "outside.0.7"} <= names
    assert {"optimizer.0.inp.weight.exp_avg", "optimizer.0.outside.0.7.exp_avg"} <= names


def test_an_infinite_buffer_may_be_a_mask() -> None:
    model = TinyNet()
    model.norm.running_mean[0] = -torch.inf  # type: ignore[index]
    state = state_of(model, torch.optim.SGD(model.parameters()))
    assert state.nonfinite() == ("model.norm.running_mean",)
    assert state.unsound() == ()


def test_lookups_by_the_names_that_users_know() -> None:
    model = TinyNet()
    first = torch.optim.SGD(model.inp.parameters(), lr=0.1)
    second = torch.optim.AdamW([*model.norm.parameters(), *model.out.parameters()])
    backward(model)
    second.step()
    state = state_of(nn.DataParallel(model), first, second)
    assert state.own_model is model
    assert state.parameters().keys() == dict(model.named_parameters()).keys()
    assert state.buffers().keys() == dict(model.named_buffers()).keys()
    assert state.module("norm") is model.norm
    assert state.module("nothing") is None
    assert state.optimizer_of("inp.weight") is first
    assert state.optimizer_of("out.bias") is second
    assert ("exp_avg of out.bias", "out.bias") in {(name, owner) for name, owner, _ in state.optimizer_states()}


# ---- nothing changes -------------------------------------------------------------------------------------------------


class Drawing(TinyNet):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.spare = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.generator)
        return super().forward(x + noise) * self.spare


def test_untouched_leaves_nothing_behind() -> None:
    model = Drawing()
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if name != "spare"])
    backward(model)
    leaf, more = torch.ones(3, requires_grad=True), torch.Generator().manual_seed(5)
    leaf.grad = torch.full((3,), 2.0)
    grads = [p.grad for p in (*model.parameters(), leaf)]
    assert all(grad is not None for grad in grads)
    values = [grad.clone() for grad in grads if grad is not None]
    before, rng = everything(model, [optimizer]), torch.get_rng_state()
    own, others = model.generator.get_state(), more.get_state()
    buffers = Undo(torch.device("cpu"))
    buffers.watch_buffers(model)
    with pytest.raises(KeyError), state_of(model, optimizer).untouched(buffers, [leaf], [more]):
        assert all(p.grad is None for p in (*model.parameters(), leaf))
        backward(model)
        (leaf * torch.rand(3, generator=more)).sum().backward()  # type: ignore[no-untyped-call]
        model.eval()
        raise KeyError
    assert differences(before, everything(model, [optimizer])) == []
    assert all(m.training for m in model.modules())
    after = [p.grad for p in (*model.parameters(), leaf)]
    assert all(a is b for a, b in zip(grads, after, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(values, after, strict=True) if b is not None)
    assert torch.equal(rng, torch.get_rng_state())
    assert torch.equal(own, model.generator.get_state())
    assert torch.equal(others, more.get_state())


# ---- shards ----------------------------------------------------------------------------------------------------------


def test_without_shards_nothing_is_computed() -> None:
    tensors, values = [torch.ones(2)], torch.ones(2)
    assert sharding.local(tensors) is tensors
    sharding.global_sum_(values, power=2)
    sharding.global_max_(values)
    assert values._version == 0
