"""Fault injection hits what it says, when it says, and nothing else."""

from __future__ import annotations

import ast
import collections
import copy
import dataclasses
import doctest
import inspect
import io
import math
import os
import random
import struct
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanguard.testing
from nanguard.testing import Fault, Fired, inject

PLACES = {
    "input": None,
    "activation": "fc1",
    "gradient": "fc1.weight",
    "weight": "fc1.weight",
    "buffer": "scale",
    "optimizer_state": "fc1.weight.exp_avg",
    "loss": None,
}
IN_PLACE = ("weight", "buffer", "optimizer_state")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3, 4)
        self.register_buffer("scale", torch.linspace(0.5, 2.0, 4))
        self.register_buffer("num_calls", torch.tensor(0))
        self.fc2 = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.fc1(x) * self.scale))


class StepEngine:
    """What a guard looks like from outside."""

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        self.model, self.optimizers, self.current_step = model, optimizers, 0


def make(dtype: torch.dtype = torch.float32) -> tuple[Net, torch.optim.Optimizer, Tensor]:
    """A model whose optimizer state exists, so that all places can be hit at step 0."""
    generator = torch.Generator().manual_seed(0)
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.1)
    model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = (torch.rand(5, 3, generator=generator) + 0.1).to(dtype)
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, batch


def observe(into: str, *faults: Fault, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Fired]]:
    """What stands at the place `into` during one training step, as the model or its optimizer meets it."""
    model, optimizer, batch = make(dtype)
    seen: dict[str, Tensor] = {}
    model.register_forward_pre_hook(lambda _, args: seen.update(input=args[0].detach().clone()))
    model.fc1.register_forward_hook(lambda _, __, output: seen.update(activation=output.detach().clone()))
    with inject(model, *faults, optimizer=optimizer) as injector:
        loss = injector.loss(model(batch).sum())
        loss.backward()
    seen["gradient"] = model.fc1.weight.grad
    seen["weight"], seen["buffer"] = model.fc1.weight.detach(), model.scale
    seen["optimizer_state"], seen["loss"] = optimizer.state[model.fc1.weight]["exp_avg"], loss.detach()
    return seen[into], injector.fired


def flipped(number: float, dtype: torch.dtype) -> float:
    """`number` with its top exponent bit flipped, by way of the bytes of Python's own floats."""
    codes = {torch.float16: "eH", torch.bfloat16: "fI", torch.float32: "fI", torch.float64: "dQ"}
    as_float, as_int = codes[dtype]  # a bfloat16 is the upper half of a float32
    (bits,) = struct.unpack(as_int, struct.pack(as_float, number))
    (result,) = struct.unpack(as_float, struct.pack(as_int, bits ^ 1 << (8 * struct.calcsize(as_float) - 2)))
    return float(result)


def same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def run(model: nn.Module, batch: Any, num_steps: int) -> list[bool]:
    """Train without an optimizer; was the gradient of each step finite?"""
    finite = []
    for _ in range(num_steps):
        model.zero_grad()
        model(batch).sum().backward()
        finite.append(all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None))
    return finite


# What is written


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "huge", "bitflip", 7.5])
@pytest.mark.parametrize("into", PLACES)
def test_exactly_one_element_becomes_exactly_the_value(into: str, value: str | float, dtype: torch.dtype) -> None:
    clean, nothing = observe(into, dtype=dtype)
    element = 0 if into == "loss" else 2
    fault = Fault(into=into, name=PLACES[into], value=value, steps=(0,), element=element)
    hit, fired = observe(into, fault, dtype=dtype)

    before, after = clean.flatten()[element].item(), hit.flatten()[element].item()
    if value == "huge":
        assert after == pytest.approx(0.1 * torch.finfo(dtype).max, rel=1e-2)
    else:
        expected = flipped(before, dtype) if value == "bitflip" else float(value)
        assert after == pytest.approx(expected, rel=0, abs=0, nan_ok=True)
    assert hit.dtype == dtype
    assert (~same(clean, hit)).flatten().nonzero().flatten().tolist() == [element]
    assert nothing == []
    assert fired == [Fired(fault=fault, step=0, rank=0, name=PLACES[into] or {"input": "0"}.get(into, into))]


@pytest.mark.parametrize("into", PLACES)
def test_all_hits_every_element(into: str) -> None:
    hit, _ = observe(into, Fault(into=into, name=PLACES[into], steps=(0,), element="all"))
    assert hit.isnan().all()


@pytest.mark.parametrize("into", [place for place in PLACES if place != "loss"])
def test_the_element_drawn_depends_on_the_seed_alone(into: str) -> None:
    def place_of(seed: int) -> list[int]:
        hit, _ = observe(into, Fault(into=into, name=PLACES[into], steps=(0,), seed=seed))
        return hit.flatten().isnan().nonzero().flatten().tolist()

    first = [place_of(seed) for seed in range(8)]
    assert first == [place_of(seed) for seed in range(8)]
    assert all(len(place) == 1 for place in first)
    assert len({place[0] for place in first}) > 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_chosen_bit_is_flipped(dtype: torch.dtype) -> None:
    model, batch = nn.Linear(1, 1).to(dtype), torch.ones(1, 1, dtype=dtype)
    nn.init.constant_(model.weight, 1.0)
    sign = 8 * dtype.itemsize - 1
    faults = [
        Fault(into="weight", name="weight", value=f"bitflip:{bit}", steps=(i,)) for i, bit in enumerate((sign, 0))
    ]
    with inject(model, *faults):
        model(batch)
        assert model.weight.item() == -1.0
        model(batch)
        assert model.weight.item() == -(1.0 + torch.finfo(dtype).eps)


def test_a_bit_the_dtype_does_not_have_is_refused() -> None:
    model = nn.Linear(1, 1).half()
    with (
        inject(model, Fault(into="weight", name="weight", value="bitflip:16", steps=(0,))),
        pytest.raises(ValueError, match=r"value='bitflip:16'.*bitflip:15 for torch.float16"),
    ):
        model(torch.ones(1, 1).half())


def test_a_number_beyond_the_dtype_becomes_inf() -> None:
    for value in (1e6, -1e6):
        fault = Fault(into="gradient", name="fc1.weight", value=value, steps=(0,), element=0)
        assert observe("gradient", fault, dtype=torch.float16)[0].flatten()[0].item() == math.copysign(math.inf, value)


def test_any_memory_layout_can_be_hit() -> None:
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    batch = torch.rand(2, 3, 5, 5).to(memory_format=torch.channels_last)
    model.weight.data = model.weight.data.transpose(0, 1).clone().transpose(0, 1)
    with inject(model, Fault(into="weight", name="weight", steps=(0,), element=17)):
        model(batch)
    assert model.weight.isnan().reshape(-1).nonzero().flatten().tolist() == [17]


# The loss


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_non_finite_loss_has_non_finite_gradients_everywhere(value: str) -> None:
    model, _, batch = make()
    with inject(model, Fault(into="loss", value=value, steps=(0,))) as injector:
        loss = injector.loss(model(batch).square().mean())
    assert loss.requires_grad
    assert loss.item() == pytest.approx(float(value), nan_ok=True)
    loss.backward()
    assert all(not p.grad.isfinite().any() for p in model.parameters())


def test_a_finite_loss_scales_its_gradients_with_it() -> None:
    model, _, batch = make()
    plain = model(batch).square().mean()
    clean = torch.autograd.grad(plain, list(model.parameters()), retain_graph=True)
    with inject(model, Fault(into="loss", value=3 * plain.item(), steps=(0,)), clock=lambda: 0) as injector:
        scaled = torch.autograd.grad(injector.loss(plain), list(model.parameters()))
    for a, b in zip(clean, scaled, strict=True):
        torch.testing.assert_close(3 * a, b)


@pytest.mark.parametrize("value", [math.inf, 3.0])
def test_only_the_element_hit_of_a_loss_for_each_sample_has_other_gradients(value: float) -> None:
    weight = torch.zeros(3, requires_grad=True)
    fault = Fault(into="loss", value=value, steps=(0,), element=1)
    with inject(nn.Linear(1, 1), fault, clock=lambda: 0) as injector:
        loss = injector.loss(2 * weight)  # zeros: no ratio to scale by
        loss.sum().backward()
    assert loss.tolist() == [0.0, value, 0.0]
    assert weight.grad.tolist() == [2.0, 2 * value, 2.0]


def test_a_loss_that_is_not_trained_on_is_returned_as_it_is() -> None:
    model, _, batch = make()
    with inject(model, Fault(into="loss", probability=1.0), clock=lambda: 0) as injector:
        detached, trained = model(batch).sum().detach(), model(batch).sum()
        assert injector.loss(detached) is detached
        with torch.no_grad():
            assert injector.loss(trained) is trained
        assert injector.loss(trained) is not trained
    assert injector.loss(trained) is trained
    assert len(injector.fired) == 1


# Gradients


def test_a_gradient_is_hit_before_it_is_accumulated() -> None:
    model, _, batch = make()
    model.fc1.weight.grad = torch.ones_like(model.fc1.weight)
    with inject(model, Fault(into="gradient", name="fc1.weight", value=5.0, steps=(0,), element="all")):
        model(batch).sum().backward()
    assert (model.fc1.weight.grad == 6.0).all()


def test_the_gradient_passed_to_others_is_not_altered_in_place() -> None:
    model = nn.Linear(2, 2)
    sparse = torch.ones(2, 2).to_sparse()
    for given in (torch.ones(2, 2), sparse.coalesce()):
        model.zero_grad()
        with inject(model, Fault(into="gradient", name="weight", steps=(0,)), clock=lambda: 0):
            model.weight.backward(given)
        assert model.weight.grad.to_dense().isnan().sum() == 1
        assert (given.to_dense() == 1).all()


@pytest.mark.parametrize("value", ["nan", "huge", "bitflip"])
def test_a_sparse_gradient_is_hit_and_stays_sparse(value: str) -> None:
    model = nn.Embedding(10, 3, sparse=True)
    tokens = torch.tensor([1, 7, 7])
    with inject(model, Fault(into="gradient", name="weight", value=value, steps=(0,), element=4)) as injector:
        model(tokens).sum().backward()
    gradient = model.weight.grad
    assert gradient.is_sparse
    clean = torch.zeros(10, 3).index_add(0, tokens, torch.ones(3, 3))
    assert (~same(gradient.to_dense(), clean)).nonzero().tolist() == [[7, 1]]
    assert [fired.name for fired in injector.fired] == ["weight"]


def test_what_has_no_elements_is_not_said_to_have_fired() -> None:
    model = nn.Embedding(10, 3, sparse=True)
    with inject(model, Fault(into="gradient", name="weight", steps=(0,))) as injector:
        model(torch.tensor([], dtype=torch.long)).sum().backward()
    assert injector.fired == []


def test_a_gradient_fault_reaches_both_uses_of_a_tied_parameter() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    with inject(model, Fault(into="gradient", name="1.weight", steps=(0,))) as injector:
        model(torch.ones(1, 3)).sum().backward()
    assert model[0].weight.grad.isnan().sum() == 1
    assert len(injector.fired) == 1


# Inputs and activations


class Pair(NamedTuple):
    ids: Tensor
    image: Tensor


class First(nn.Module):
    """Passes its input through a layer, wherever it is."""

    def __init__(self, get: Any) -> None:
        super().__init__()
        self.fc, self.get, self.met = nn.Linear(3, 1), get, None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.met = (args, kwargs)
        return self.fc(self.get(*args, **kwargs))


IDS, IMAGE = torch.arange(4), torch.ones(2, 3)
PACKED = nn.utils.rnn.pack_sequence([torch.ones(2, 3), torch.ones(1, 3)])


@pytest.mark.parametrize(
    ("args", "kwargs", "get", "name", "path"),
    [
        ((IMAGE,), {}, lambda x: x, None, "0"),
        ((IDS, IMAGE), {}, lambda _, x: x, None, "1"),
        ((IDS,), {"image": IMAGE}, lambda _, image: image, "image", "image"),
        (({"ids": IDS, "image": IMAGE},), {}, lambda batch: batch["image"], None, "0.image"),
        (({"mask": torch.ones(2), "image": IMAGE},), {}, lambda batch: batch["image"], "image", "0.image"),
        (([IDS, (torch.ones(2), IMAGE)],), {}, lambda batch: batch[1][1], "0.1.1", "0.1.1"),
        ((Pair(IDS, IMAGE),), {}, lambda pair: pair.image, None, "0.1"),
        ((collections.UserDict(image=IMAGE),), {}, lambda batch: batch["image"], None, "0.image"),
        ((PACKED,), {}, lambda packed: packed.data, None, "0.0"),
    ],
    ids=["tensor", "second", "keyword", "dict", "by key", "by path", "namedtuple", "mapping", "packed sequence"],
)
def test_an_input_is_hit_where_it_is_nested_and_the_callers_batch_is_not_altered(
    args: Any, kwargs: Any, get: Any, name: str | None, path: str
) -> None:
    model = First(get)
    given = get(*args, **kwargs)
    with inject(model, Fault(into="input", name=name, steps=(0,), element=0)) as injector:
        model(*args, **kwargs)
    met_args, met_kwargs = model.met
    met = get(*met_args, **met_kwargs)
    assert met.flatten()[0].isnan()
    assert met.isnan().sum() == 1
    assert [type(arg) for arg in met_args] == [type(arg) for arg in args]
    assert get(*args, **kwargs) is given or isinstance(args[0], nn.utils.rnn.PackedSequence)
    assert (given == 1).all()
    assert [fired.name for fired in injector.fired] == [path]


def test_an_input_that_is_not_there_is_an_error_that_lists_those_that_are() -> None:
    model = First(lambda batch: batch["image"])
    with (
        inject(model, Fault(into="input", name="imag", steps=(0,))) as injector,
        pytest.raises(RuntimeError, match=r"'imag' at step 0, rank 0: there are \['0.image', '0.mask'\]"),
    ):
        model({"image": IMAGE, "mask": torch.ones(2), "ids": IDS})
    assert injector.fired == []


def test_integers_cannot_be_hit_and_the_error_says_what_to_do() -> None:
    with (
        inject(nn.Embedding(9, 2), Fault(into="input", steps=(0,))) as injector,
        pytest.raises(RuntimeError, match="faults cannot go into integers, so choose a later activation"),
    ):
        injector._model(IDS)


def test_an_activation_in_a_tuple_is_hit_and_the_rest_is_passed_on() -> None:
    model = nn.Sequential(collections.OrderedDict(rnn=nn.LSTM(3, 2)))
    with inject(model, Fault(into="activation", name="rnn", steps=(0,))) as injector:
        output, (h, c) = model(torch.ones(4, 1, 3))
    assert output.isnan().sum() == 1
    assert h.isfinite().all()
    assert c.isfinite().all()
    assert injector.fired[0].name == "rnn"


def test_the_output_of_the_outermost_module_can_be_hit() -> None:
    model, _, batch = make()
    with inject(model, Fault(into="activation", name="", steps=(0,))):
        assert model(batch).isnan().sum() == 1


def test_gradients_flow_through_an_activation_that_was_hit() -> None:
    model, _, batch = make()
    with inject(model, Fault(into="activation", name="fc1", value=100.0, steps=(0,), element="all")):
        model(batch).sum().backward()
    assert model.fc1.weight.grad is not None
    assert (model.fc1.weight.grad == 0).all()  # tanh is flat at 100: the backward pass met the fault


def test_a_frozen_part_in_eval_mode_is_hit_in_training() -> None:
    model, _, batch = make()
    model.fc1.eval().requires_grad_(False)
    with inject(model, Fault(into="activation", name="fc1", steps=(0,))):
        assert model(batch).isnan().any()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_part_is_hit_each_time_it_is_computed(use_reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=use_reentrant)

    model, batch = Checkpointed(), torch.ones(2, 3, requires_grad=True)
    with inject(model, Fault(into="activation", name="fc1", steps=(0,))) as injector:
        output = model(batch)
        assert output.isnan().any()
        output.sum().backward()
    assert batch.grad.isnan().any()
    assert [fired.step for fired in injector.fired] == [0, 0]


# When it fires


@pytest.mark.parametrize("into", ["input", "activation", "gradient"])
def test_a_fault_fires_at_its_steps_only(into: str) -> None:
    model, _, batch = make()
    with inject(model, Fault(into=into, name=PLACES[into], steps=(1, 3))) as injector:
        assert run(model, batch, 5) == [True, False, True, False, True]
    assert [fired.step for fired in injector.fired] == [1, 3]


@pytest.mark.parametrize("clock", [None, lambda: 0], ids=["passes", "clock"])
@pytest.mark.parametrize("into", PLACES)
def test_evaluation_is_neither_counted_nor_hit(into: str, clock: Any) -> None:
    model, optimizer, batch = make()
    fault = Fault(into=into, name=PLACES[into], steps=(0, 1))
    with inject(model, fault, optimizer=optimizer, clock=clock) as injector:
        with torch.no_grad():
            assert injector.loss(model(batch)).isfinite().all()
        model.eval()
        assert model(batch).isfinite().all()
        model.train()
        assert injector.fired == []
        injector.loss(model(batch).sum()).backward()
        assert [fired.step for fired in injector.fired] == [0]


def test_nothing_is_hit_before_the_first_step() -> None:
    model, _, batch = make()
    faults = [Fault(into=into, name=PLACES[into], probability=1.0) for into in ("activation", "gradient", "loss")]
    with inject(model, *faults) as injector:
        injector.loss(model.fc1(batch).sum()).backward()
        assert injector.fired == []
        injector.loss(model(batch).sum()).backward()
        assert len(injector.fired) == 3


def test_a_part_called_by_itself_is_hit_in_training_only() -> None:
    model, _, batch = make()
    with inject(model, Fault(into="activation", name="fc1", probability=1.0), clock=lambda: 0):
        assert model.fc1(batch).isnan().any()
        model.eval()
        assert not model.fc1(batch).isnan().any()


def test_a_clock_gives_the_number_of_the_step() -> None:
    model, _, batch = make()
    now = 7
    fault = Fault(into="gradient", name="fc1.weight", steps=(8,))
    with inject(model, fault, clock=lambda: now) as injector:
        assert run(model, batch, 3) == [True, True, True]
        now = 8
        assert run(model, batch, 2) == [False, False]
    assert [fired.step for fired in injector.fired] == [8, 8]


@pytest.mark.parametrize(
    ("into", "times", "expected"),
    [
        *[(into, None, 3) for into in ("input", "activation", "gradient", "loss")],
        *[(into, None, 1) for into in IN_PLACE],
        *[(into, 1, 1) for into in PLACES],
        *[(into, 2, 2) for into in PLACES],
    ],
)
def test_times_says_how_often_a_step_that_is_run_again_is_hit(into: str, times: int | None, expected: int) -> None:
    model, optimizer, batch = make()
    steps = StepEngine(model, optimizer)
    with inject(steps, Fault(into=into, name=PLACES[into], steps=(2,), times=times)) as injector:
        for step in (0, 1, 2, 3, 2, 3, 2):
            steps.current_step = step
            injector.loss(model(batch).sum()).backward()
    assert [fired.step for fired in injector.fired] == [2] * expected


def test_a_fault_in_place_fires_once_for_each_of_its_steps() -> None:
    model, optimizer, batch = make()
    steps = StepEngine(model, optimizer)
    with inject(steps, Fault(into="weight", name="fc1.weight", steps=(1, 2))) as injector:
        for step in (1, 1, 2, 1, 2, 3):
            steps.current_step = step
            model(batch)
    assert [fired.step for fired in injector.fired] == [1, 2]


def test_two_equal_faults_are_two() -> None:
    def fault() -> Fault:
        return Fault(into="activation", name="fc1", steps=(0,), times=1)

    model, _, batch = make()
    with inject(model, fault(), fault()) as injector:
        model(batch)
    assert len(injector.fired) == 2


def fired_steps(seed: int, probability: float = 0.3, steps: Any = range(200), **options: Any) -> list[int]:
    model = nn.Linear(1, 1)
    now = StepEngine(model)
    fault = Fault(into="activation", name="", probability=probability, seed=seed, **options)
    with inject(now, fault) as injector:
        for step in steps:
            now.current_step = step
            model(torch.ones(1, 1))
    return [fired.step for fired in injector.fired]


def test_chance_is_decided_by_seed_and_step_alone() -> None:
    steps = fired_steps(seed=1)
    assert steps == fired_steps(seed=1)
    assert steps == sorted(fired_steps(seed=1, steps=reversed(range(200))))
    assert steps != fired_steps(seed=2)
    assert fired_steps(seed=1, steps=[*steps[:3], *steps[:3]]) == [*steps[:3], *steps[:3]]


def test_chance_has_the_probability_given() -> None:
    assert 400 < sum(len(fired_steps(seed=seed)) for seed in range(8)) < 560  # 480 expected, 18 is one sigma
    assert fired_steps(seed=3, probability=1.0) == list(range(200))
    assert len(fired_steps(seed=3, probability=1.0, times=5)) == 5


def test_other_ranks_are_not_hit() -> None:
    assert fired_steps(seed=0, probability=1.0, ranks=(1, 2)) == []
    assert len(fired_steps(seed=0, probability=1.0, ranks=(0, 2))) == 200


def test_no_random_number_generator_is_touched() -> None:
    model, optimizer, batch = make()
    faults = [Fault(into=into, name=name, probability=0.5, seed=3) for into, name in PLACES.items()]
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    with inject(model, *faults, optimizer=optimizer) as injector:
        for _ in range(20):
            injector.loss(model(batch).sum()).backward()
    assert {fired.fault.into for fired in injector.fired} == set(PLACES)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert all(np.array_equal(a, b) for a, b in zip(before[2], np.random.get_state(), strict=True))


# In place


def test_a_weight_can_go_bad_while_a_graph_still_needs_it() -> None:
    model, _, batch = make()
    with inject(model, Fault(into="weight", name="fc2.weight", value=9.0, steps=(1,), element="all")):
        first = model(batch).sum()
        model(batch)
        first.backward()
    assert (model.fc2.weight == 9.0).all()


def test_the_buffer_that_is_there_now_is_hit() -> None:
    model, _, batch = make()
    with inject(model, Fault(into="buffer", name="scale", steps=(0,))):
        model.scale = torch.ones(4)
        model(batch)
    assert model.scale.isnan().sum() == 1


def test_state_that_is_not_there_yet_is_an_error_that_says_so() -> None:
    model, _, batch = make()
    optimizer = torch.optim.AdamW(model.parameters())
    fault = Fault(into="optimizer_state", name="fc1.weight.exp_avg", steps=(0,))
    with (
        inject(model, fault, optimizer=optimizer) as injector,
        pytest.raises(
            RuntimeError,
            match=r"of .fc1.weight. at step 0, rank 0: optimizer.step\(\) creates it.*later step",
        ),
    ):
        model(batch)
    assert injector.fired == []
    assert not optimizer.state


def test_state_the_optimizer_does_not_have_is_an_error_that_lists_what_it_has() -> None:
    model, optimizer, batch = make()
    fault = Fault(into="optimizer_state", name="fc1.weight.momentum", steps=(0,))
    with (
        inject(model, fault, optimizer=optimizer),
        pytest.raises(RuntimeError, match=r"'momentum' of 'fc1.weight'.*there are .*'exp_avg'"),
    ):
        model(batch)


def test_the_optimizer_that_holds_the_parameter_is_found_among_several() -> None:
    model, _, batch = make()
    halves = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (model.fc1, model.fc2)]
    fault = Fault(into="optimizer_state", name="fc2.bias.momentum_buffer", steps=(1,))
    with inject(model, fault, optimizer=halves):
        for _ in range(2):
            model(batch).sum().backward()
            for half in halves:
                half.step()
    assert halves[1].state[model.fc2.bias]["momentum_buffer"].isnan().sum() == 1


def test_an_element_that_is_not_there_is_an_error() -> None:
    model, _, batch = make()
    with (
        inject(model, Fault(into="weight", name="fc1.bias", steps=(0,), element=4)),
        pytest.raises(RuntimeError, match=r"no element 4 of 'fc1.bias' at step 0, rank 0: it has 4 elements"),
    ):
        model(batch)


# Names


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


@pytest.mark.parametrize("into", ["activation", "gradient", "weight", "buffer", "optimizer_state"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_names_are_taken_with_and_without_the_prefixes_of_wrappers(into: str, prefix: str, depth: int) -> None:
    model, optimizer, batch = make()
    outermost: nn.Module = model
    for _ in range(depth):
        outermost = Wrapper(outermost)
    fault = Fault(into=into, name=prefix + str(PLACES[into]), steps=(0,))
    with inject(outermost, fault, optimizer=optimizer) as injector:
        outermost(batch).sum().backward()
    assert [fired.name for fired in injector.fired] == ["module." * depth + str(PLACES[into])]


def test_wrapped_parts_are_found_by_their_plain_names() -> None:
    model, _, batch = make()
    model.fc1 = Wrapper(model.fc1)
    faults = [
        Fault(into="gradient", name="fc1.weight", steps=(0,)),
        Fault(into="activation", name="module.fc1", steps=(0,)),
        Fault(into="activation", name="fc2._orig_mod", steps=(0,)),
    ]
    with inject(Wrapper(model), *faults) as injector:
        injector._model(batch).sum().backward()
    assert [fired.name for fired in injector.fired] == ["module.fc1", "module.fc2", "module.fc1.module.weight"]


@pytest.mark.parametrize(
    ("into", "name", "close"),
    [
        ("activation", "fc", "fc1"),
        ("gradient", "fc1.wieght", "fc1.weight"),
        ("weight", "module.fc2.wight", "fc2.weight"),
        ("buffer", "scales", "scale"),
        ("optimizer_state", "f1.weight.exp_avg", "fc1.weight"),
        ("weight", "zzz", "module.fc1.weight"),
    ],
)
def test_an_unknown_name_is_refused_at_once_with_close_ones(into: str, name: str, close: str) -> None:
    model, optimizer, _ = make()
    with pytest.raises(ValueError, match=rf"name='.*'.*one like .*'{close}'"):
        inject(Wrapper(model), Fault(into=into, name=name, steps=(0,)), optimizer=optimizer)


def test_places_that_cannot_be_hit_are_refused_at_once() -> None:
    model, optimizer, _ = make()
    state = Fault(into="optimizer_state", name="fc1.weight.exp_avg", steps=(0,))
    with pytest.raises(ValueError, match=r"name='num_calls', which is torch.int64: accepted is a floating buffer"):
        inject(model, Fault(into="buffer", name="num_calls", steps=(0,)))
    with pytest.raises(ValueError, match=r"'fc1.weight.exp_avg': accepted is a parameter of the optimizer"):
        inject(model, state)
    with pytest.raises(ValueError, match=r"'fc1.weight.exp_avg': accepted is a parameter of the optimizer"):
        inject(model, state, optimizer=torch.optim.SGD(model.fc2.parameters()))
    inject(model, state, optimizer=optimizer)
    model.fc1.requires_grad_(False)
    with pytest.raises(ValueError, match=r"'fc1.weight': accepted is a parameter that requires a gradient"):
        inject(model, Fault(into="gradient", name="fc1.weight", steps=(0,)))


def test_a_target_is_a_module_or_has_what_a_guard_has() -> None:
    model, optimizer, _ = make()
    fault = Fault(into="weight", name="fc1.weight", steps=(0,))
    with pytest.raises(ValueError, match=r"target=3: accepted is a torch.nn.Module, or .*current_step"):
        inject(3, fault)
    with pytest.raises(ValueError, match="optimizer or clock: accepted is neither, because this target has"):
        inject(StepEngine(model, optimizer), fault, optimizer=optimizer)
    with pytest.raises(ValueError, match="optimizer or clock: accepted is neither, because this target has"):
        inject(StepEngine(model, optimizer), fault, clock=lambda: 0)


# What is left behind


def num_hooks(model: nn.Module) -> int:
    modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return modules + sum(len(p._backward_hooks or ()) for p in model.parameters())


@pytest.mark.parametrize("fails", [False, True])
def test_no_hook_is_left_behind(fails: bool) -> None:
    model, optimizer, batch = make()
    faults = [Fault(into=into, name=name, probability=1.0) for into, name in PLACES.items() if into not in IN_PLACE]
    injector = inject(model, *faults, optimizer=optimizer)
    assert num_hooks(model) == 0
    try:
        with injector:
            assert num_hooks(model) > 0
            injector.loss(model(batch).sum()).backward()
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert num_hooks(model) == 0
    assert run(model, batch, 1) == [True]
    assert {fired.fault for fired in injector.fired} == set(faults)


def test_copies_of_the_model_carry_no_faults() -> None:
    model, _, batch = make()
    faults = [Fault(into=into, name=PLACES[into], probability=1.0) for into in ("input", "activation", "gradient")]
    with inject(model, *faults) as injector:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert run(other, batch, 1) == [True]
        assert injector.fired == []
        assert run(model, batch, 1) == [False]


# What wraps the model


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, at any graph break
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, as it imports its compiler
@pytest.mark.parametrize("late", [False, True])
def test_a_compiled_model_is_hit_and_is_clean_afterwards(late: bool) -> None:
    model, _, batch = make()
    compiled = torch.compile(model, backend="eager")
    faults = [Fault(into=into, name=PLACES[into], steps=(1,)) for into in ("activation", "gradient")]
    try:
        if late:
            assert run(compiled, batch, 1) == [True]
        with inject(compiled, *faults) as injector:
            assert run(compiled, batch, 2) == [True, False]
        assert run(compiled, batch, 2) == [True, True]
    finally:
        torch.compiler.reset()
    assert sorted(fired.name for fired in injector.fired) == ["_orig_mod.fc1", "_orig_mod.fc1.weight"]


def train_on_one_of_two_ranks(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    here = Fault(into="gradient", name="weight", steps=(1,), ranks=(1,))
    chance = Fault(into="activation", name="", value=0.5, probability=0.5, seed=5)
    with inject(model, here, chance) as injector:
        for step in range(16):
            model.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            is_finite = bool(model.module.weight.grad.isfinite().all())
            assert is_finite == (step != 1), f"step {step}, rank {rank}"
    fired = [fired for fired in injector.fired if fired.fault is here]
    assert [(each.step, each.rank, each.name) for each in fired] == [(1, 1, "module.weight")] * rank
    steps = [fired.step for fired in injector.fired if fired.fault is chance]
    Path(folder, f"rank{rank}").write_text(repr(steps))
    while not Path(folder, f"rank{1 - rank}").exists():  # one that leaves first may break the other's connection
        time.sleep(0.01)
    os._exit(0)  # gloo's threads now and then abort a process that takes them down in order


@pytest.mark.skipif(sys.platform == "win32", reason="starts processes over gloo")
def test_a_gradient_on_one_rank_is_hit_before_ddp_reduces_it(tmp_path: Path) -> None:
    mp.spawn(train_on_one_of_two_ranks, args=(str(tmp_path),), nprocs=2)
    first, second = (ast.literal_eval((tmp_path / f"rank{rank}").read_text()) for rank in range(2))
    assert first != second  # each rank draws for itself
    assert first
    assert second


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("value", ["nan", "huge", "bitflip", 7.5])
def test_injecting_does_not_sync(value: str | float) -> None:
    model, _, batch = make()
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = batch.cuda()
    for _ in range(2):
        model(batch).sum().backward()
        optimizer.step()
    faults = [Fault(into=into, name=name, value=value, steps=(0, 1)) for into, name in PLACES.items()]
    torch.cuda.synchronize()
    with inject(model, *faults, optimizer=optimizer) as injector:
        try:
            torch.cuda.set_sync_debug_mode("error")
            for _ in range(2):
                injector.loss(model(batch).sum()).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(injector.fired) == 2 * len(PLACES)


# The options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"into": "grad"}, r"into='grad': accepted is one of input, .*gradient"),
        ({"name": None}, r"name=None: accepted is a name"),
        ({"name": 3}, r"name=3: accepted is a name"),
        ({"into": "loss"}, r"name='fc.weight': .*for loss None"),
        ({"into": "optimizer_state", "name": "weight"}, r"name='weight': .*'fc.weight.exp_avg'"),
        ({"value": "NaN"}, r"value='NaN': accepted is a number, nan, inf"),
        ({"value": None}, r"value=None: accepted is a number"),
        ({"value": "bitflip:-1"}, r"value='bitflip:-1'"),
        ({"steps": 3}, r"steps=3: accepted is a tuple of step numbers, as in \(3,\)"),
        ({"steps": (-1,)}, r"steps=\(-1,\): accepted"),
        ({"steps": (1.0,)}, r"steps=\(1.0,\): accepted"),
        ({"steps": ()}, r"steps=\(\): accepted is .*only one"),
        ({"probability": 0.5}, r"steps=\(3,\): accepted is .*or a probability: only one"),
        ({"ranks": ()}, r"ranks=\(\): accepted is None, or as in \(0,\)"),
        ({"ranks": (-1,)}, r"ranks=\(-1,\): accepted"),
        ({"steps": (), "probability": 1.5}, r"probability=1.5: accepted is a number from 0 to 1"),
        ({"steps": (), "probability": math.nan}, r"probability=nan: accepted"),
        ({"seed": "a"}, r"seed='a': accepted is an integer"),
        ({"times": 0}, r"times=0: accepted is None, or an integer from 1"),
        ({"element": -1}, r"element=-1: accepted is None, 'all' or from 0"),
        ({"element": "some"}, r"element='some': accepted"),
    ],
)
def test_a_bad_option_is_refused_when_the_fault_is_built(options: dict[str, Any], message: str) -> None:
    Fault(into="gradient", name="fc.weight", steps=(3,))
    with pytest.raises(ValueError, match=message):
        Fault(**{"into": "gradient", "name": "fc.weight", "steps": (3,), **options})


def test_records_and_options_are_frozen_and_keyword_only() -> None:
    fault = Fault(into="loss", steps=(0,))
    fired = Fired(fault=fault, step=0, rank=0, name="loss")
    for record, key in ((fault, "value"), (fired, "step")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, key, 1)
    with pytest.raises(TypeError):
        Fault("loss")  # type: ignore[misc]
    with pytest.raises(TypeError):
        Fired(fault, 0, 0, "loss")  # type: ignore[misc]


def test_only_torch_and_the_standard_library_are_imported() -> None:
    tree = ast.parse(inspect.getsource(nanguard.testing))
    roots = {a.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    roots |= {str(node.module).split(".")[0] for node in froms}
    assert roots - {"torch", "nanguard"} <= sys.stdlib_module_names
    ours = [alias.name for node in froms if str(node.module).startswith("nanguard") for alias in node.names]
    assert ours == ["_compat"]  # which needs torch alone, too


def test_the_example_runs() -> None:
    result = doctest.testmod(nanguard.testing)
    assert result.attempted > 0
    assert result.failed == 0
