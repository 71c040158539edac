"""Optimizers that step inside the backward pass, as soon as the gradients of their parameters are there."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import nanguard
from helpers import differences, everything, same
from nanguard import Halt, LowerLR, NonFiniteError, Policy, Skip, _compat_modes
from nanguard.autopilot.entry import Autopilot

Make = Callable[[Sequence[Tensor]], Optimizer]

MAKES: dict[str, Make] = {
    "Adam": lambda params: Adam(params, lr=0.01, foreach=False),
    "AdamW fused": lambda params: AdamW(params, lr=0.01, fused=True),
    "SGD momentum": lambda params: SGD(params, lr=0.01, momentum=0.9),
}


class Siamese(nn.Module):
    """Has dropout and BatchNorm: random states and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.dropout(self.norm(self.first(x)).tanh()))
        return y


class Program:
    """One optimizer for each group of parameters, which steps when the last of its gradients has come.

    ``clear`` is how the hook drops gradients.
    """

    def __init__(self, make: Make, groups: Callable[[nn.Module], Sequence[Sequence[Tensor]]], clear: str) -> None:
        torch.manual_seed(0)
        self.model = Siamese()
        self.handles: list[Any] = []
        self.optimizers: list[Optimizer] = []
        self.num_hooked = 0
        for params in groups(self.model):
            optimizer = make(params)
            self.optimizers.append(optimizer)
            waiting = {id(p) for p in params}

            def hook(
                param: Tensor, optimizer: Optimizer = optimizer, waiting: set[int] = waiting, params: Any = params
            ) -> None:
                self.num_hooked += 1
                waiting.discard(id(param))
                if waiting:
                    return
                waiting.update(map(id, params))
                optimizer.step()
                if clear == "zero_grad":
                    optimizer.zero_grad()
                else:
                    for each in params:
                        each.grad = None

            self.handles += [p.register_post_accumulate_grad_hook(hook) for p in params]

    def loss(self, first: Tensor, second: Tensor) -> Tensor:
        return (self.model(first) - self.model(second)).pow(2).sum(1).sqrt().mean()  # guilty

    @property
    def state(self) -> dict[str, Any]:
        return {**everything(self.model, self.optimizers), "rng": torch.get_rng_state()}


def each_alone(model: nn.Module) -> list[list[Tensor]]:
    return [[p] for p in model.parameters()]


def by_layer(model: nn.Module) -> list[list[Tensor]]:
    return [list(child.parameters()) for child in model.children() if list(child.parameters())]


def all_together(model: nn.Module) -> list[list[Tensor]]:
    return [list(model.parameters())]


GROUPS = {"each parameter": each_alone, "each layer": by_layer, "one optimizer": all_together}


def pairs(number: int, *, bad: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """In the bad batch a sample is paired with itself; dropout is off then, or the two results would differ."""
    generator = torch.Generator().manual_seed(1)
    found = [(torch.randn(6, 4, generator=generator), torch.randn(6, 4, generator=generator)) for _ in range(number)]
    if bad is not None:
        found[bad] = (found[bad][0], found[bad][0].clone())
    return found


def train(program: Program, batches: Sequence[tuple[Tensor, Tensor]], *, seen: list[Any] | None = None) -> None:
    for first, second in batches:
        program.model.dropout.p = 0.0 if torch.equal(first, second) else 0.1
        before = program.state if seen is not None else None
        program.loss(first, second).backward()
        if seen is not None:
            seen.append((before, program.state))


def guilty() -> int:
    return next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith("# guilty"))


def check_diagnosis(autopilot: Autopilot, step: int) -> None:
    (incident,) = autopilot.incidents
    diagnosis = incident.diagnosis
    assert incident.reading.step == step
    assert diagnosis is not None
    assert (diagnosis.cause, diagnosis.op, diagnosis.phase) == ("sqrt_grad_at_zero", "sqrt", "backward")
    assert diagnosis.source is not None
    assert (Path(diagnosis.source.file).name, diagnosis.source.line) == (Path(__file__).name, guilty())


ways = pytest.mark.parametrize("clear", ["zero_grad", "set to None"])
optimizers = pytest.mark.parametrize("make", MAKES.values(), ids=list(MAKES))
groupings = pytest.mark.parametrize("groups", GROUPS.values(), ids=list(GROUPS))


@groupings
@optimizers
def test_a_healthy_program_is_the_plain_program(make: Make, groups: Any) -> None:
    plain = Program(make, groups, "zero_grad")
    train(plain, pairs(5))
    expected = plain.state
    with nanguard.install() as autopilot:
        guarded = Program(make, groups, "zero_grad")
        train(guarded, pairs(5))
        assert differences(expected, guarded.state) == []
    assert not autopilot.incidents
    assert guarded.num_hooked == plain.num_hooked


@ways
@groupings
@optimizers
def test_the_first_bad_step_has_one_incident_with_op_line_and_cause(make: Make, groups: Any, clear: str) -> None:
    with nanguard.install() as autopilot:
        program = Program(make, groups, clear)
        train(program, pairs(5, bad=2))
    check_diagnosis(autopilot, 2)


@ways
@groupings
@optimizers
def test_the_examination_touches_nothing(make: Make, groups: Any, clear: str) -> None:
    """Weights, optimizer state and buffers are those before the bad pass; no hook has run once more."""
    seen: list[Any] = []
    with nanguard.install() as autopilot:
        program = Program(make, groups, clear)
        train(program, pairs(5, bad=2), seen=seen)
    before, after = seen[2]
    rng = [each.pop("rng") for each in (before, after)]
    assert differences(before, after) == []
    assert torch.equal(*rng)  # dropout was off
    assert [p.grad for p in program.model.parameters()] == [None] * 6
    assert program.num_hooked == 5 * 6
    assert autopilot.counts["applied"] == 4 * len(program.optimizers)
    assert autopilot.counts["skipped"] == len(program.optimizers)


@groupings
@optimizers
def test_afterwards_the_run_is_one_without_the_bad_batch(make: Make, groups: Any) -> None:
    batches = pairs(6, bad=2)
    plain = Program(make, groups, "zero_grad")
    train(plain, batches[:2] + batches[3:])
    expected = plain.state
    with nanguard.install():
        program = Program(make, groups, "zero_grad")
        train(program, batches)
        assert differences(expected, program.state) == []


@pytest.mark.usefixtures("as_on_a_gpu")
@ways
def test_so_it_is_if_the_host_learns_late(clear: str) -> None:
    """One fused optimizer: the device skips the step, and the host examines it a step or two later."""
    seen: list[Any] = []
    with nanguard.install() as autopilot:
        program = Program(MAKES["AdamW fused"], all_together, clear)
        train(program, pairs(7, bad=2), seen=seen)
        assert differences(seen[2][0], seen[3][1]) == ["rng"]  # the step behind it has no effect
    check_diagnosis(autopilot, 2)
    assert program.num_hooked == 7 * 6
    assert all(p.isfinite().all() for p in program.model.parameters())
    assert autopilot.counts["applied"] + autopilot.counts["lost"] == 6


def test_late_mode_by_name() -> None:
    with nanguard.install(sync="late") as autopilot:
        program = Program(MAKES["AdamW fused"], all_together, "zero_grad")
        train(program, pairs(7, bad=2))
    check_diagnosis(autopilot, 2)


def test_if_the_loss_is_nan_no_optimizer_steps(caplog: pytest.LogCaptureFixture) -> None:
    batches = pairs(4)
    batches[1][0][0, 0] = float("nan")
    seen: list[Any] = []
    with nanguard.install() as autopilot:
        program = Program(MAKES["Adam"], each_alone, "zero_grad")
        train(program, batches, seen=seen)
    assert differences(*seen[1]) == ["rng"]
    (incident,) = autopilot.incidents
    assert incident.diagnosis is not None
    assert incident.diagnosis.cause == "input_nonfinite"
    assert incident.reading.num_stepped_before == 0
    assert caplog.text.count("the loss is NaN: step skipped, nothing changed") == 1


class Root(nn.Module):
    """Its own backward pass is finite up to the last layer, and NaN before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor, *, is_bad: bool) -> Tensor:
        hidden = self.first(x)
        y: Tensor = self.last((hidden * (0.0 if is_bad else 1.0)).abs().sqrt())  # rooted
        return y


def rooted(make: Make, *, others_after: bool = False) -> tuple[Root, dict[str, Optimizer], Callable[[bool], Tensor]]:
    """``last`` steps inside the backward pass; so does ``first``, unless it steps after it."""
    torch.manual_seed(0)
    model = Root()
    optimizers = {name: make(list(child.parameters())) for name, child in model.named_children()}
    for name, child in model.named_children():
        if name == "first" and others_after:
            continue

        def hook(param: Tensor, optimizer: Optimizer = optimizers[name], bias: Any = child.bias) -> None:
            if param is not bias or others_after:
                optimizer.step()
                optimizer.zero_grad()

        child.weight.register_post_accumulate_grad_hook(hook)

    def loss_of(is_bad: bool) -> Tensor:
        loss: Tensor = model(torch.ones(2, 3), is_bad=is_bad).pow(2).mean()
        return loss

    return model, optimizers, loss_of


@pytest.mark.parametrize("others_after", [False, True], ids=["inside", "after it"])
def test_an_optimizer_that_had_stepped_before_the_fault_showed_is_told_of(
    others_after: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with nanguard.install() as autopilot:
        model, optimizers, loss_of = rooted(lambda params: SGD(params, lr=0.1), others_after=others_after)
        for number in range(3):
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            loss_of(number == 1).backward()
            if others_after:
                optimizers["first"].step()
                optimizers["first"].zero_grad()
            if number == 1:
                assert torch.equal(before["first.weight"], model.first.weight)
                assert not torch.equal(before["last.bias"], model.last.bias)
    (incident,) = autopilot.incidents
    assert incident.reading.num_stepped_before == 1
    assert incident.diagnosis is not None
    assert (incident.diagnosis.cause, incident.diagnosis.op) == ("sqrt_grad_at_zero", "sqrt")
    assert "nothing changed" not in caplog.text
    assert "before the fault showed, 1 other optimizer had stepped inside this backward pass" in caplog.text


def test_one_panel_if_the_rest_of_the_parameters_steps_after_the_pass() -> None:
    """Some parameters have an optimizer that steps inside, the others one that steps as usual: both are bad."""
    torch.manual_seed(0)
    with nanguard.install() as autopilot:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        inside, after = (Adam(child.parameters(), lr=0.01) for child in (model[1], model[0]))

        def hook(param: Tensor) -> None:
            inside.step()
            inside.zero_grad()

        model[1].weight.register_post_accumulate_grad_hook(hook)
        for number in range(4):
            x = torch.randn(3, 4)
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            loss = (model(x) * (0.0 if number == 2 else 1.0)).norm(dim=1).sqrt().sum()
            loss.backward()
            after.step()
            after.zero_grad()
            same = all(torch.equal(p, before[name]) for name, p in model.named_parameters())
            assert same == (number == 2)
    (incident,) = autopilot.incidents
    assert incident.diagnosis is not None
    assert incident.diagnosis.source is not None
    assert incident.diagnosis.cause != "unknown"


def test_gradients_of_a_second_network_are_those_of_the_program() -> None:
    """Two networks behind one loss: the examination of one leaves no gradient in the other."""
    torch.manual_seed(0)
    with nanguard.install() as autopilot:
        encoder, decoder = nn.Linear(4, 3), nn.Linear(3, 2)
        kept = torch.full_like(encoder.weight, 7.0)
        optimizer = Adam(decoder.parameters(), lr=0.01)
        other = Adam([encoder.bias], lr=0.01)

        def hook(param: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        decoder.weight.register_post_accumulate_grad_hook(hook)
        for number in range(3):
            encoder.weight.grad, encoder.bias.grad = None, None
            loss = (decoder(encoder(torch.randn(3, 4))) * (0.0 if number == 1 else 1.0)).norm(dim=1).sqrt().sum()
            encoder.weight.register_hook(lambda grad: kept)
            loss.backward()
            assert torch.equal(encoder.weight.grad, kept)
            other.step()
    assert len(autopilot.incidents) == 1


@contextlib.contextmanager
def node_hook(param: Tensor, hook: Callable[..., None]) -> Iterator[None]:
    """On the node that writes to ``grad``, as programs did before torch had hooks for that."""
    node = param.expand_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    handle = node.register_hook(hook)
    yield
    handle.remove()


def test_steps_and_clearing_by_hooks_on_nodes_have_no_effect_while_the_step_runs_again() -> None:
    torch.manual_seed(0)
    calls = []
    with nanguard.install() as autopilot:
        weight = nn.Parameter(torch.ones(3))
        optimizer = Adam([weight], lr=0.1)

        def hook(*args: Any) -> None:
            calls.append(weight.grad is not None)
            optimizer.step()
            optimizer.zero_grad()

        with node_hook(weight, hook):
            for number in range(4):
                before, state = weight.detach().clone(), copy.deepcopy(optimizer.state_dict())
                ((weight * (0.0 if number == 2 else 1.0)).abs().sqrt()).sum().backward()
                assert torch.equal(before, weight.detach()) == (number == 2)
                assert same(state, optimizer.state_dict()) == (number == 2)
                assert weight.grad is None
    assert len(calls) > 4  # it ran again, without effect
    (incident,) = autopilot.incidents
    assert incident.diagnosis is not None
    assert incident.diagnosis.cause == "sqrt_grad_at_zero"


def test_with_checkpointing_buffers_are_those_before_the_bad_batch() -> None:
    """Checkpointing runs the forward pass once more inside the backward pass, after the step was refused."""

    class Checkpointed(Siamese):
        def forward(self, x: Tensor) -> Tensor:
            hidden = checkpoint(lambda y: self.norm(self.first(y)).tanh(), x, use_reentrant=False)
            y: Tensor = self.second(hidden)
            return y

    with nanguard.install() as autopilot:
        program = Program(MAKES["Adam"], lambda model: [], "zero_grad")
        program.model = Checkpointed()
        for param in program.model.parameters():
            optimizer = Adam([param], lr=0.01)
            program.optimizers.append(optimizer)
            param.register_post_accumulate_grad_hook(lambda p, optimizer=optimizer: optimizer.step())
        seen: list[Any] = []
        train(program, pairs(4, bad=2), seen=seen)
    assert differences(seen[2][0], seen[2][1]) == []
    assert len(autopilot.incidents) >= 1
    assert autopilot.incidents[0].diagnosis is not None
    assert autopilot.incidents[0].diagnosis.cause == "sqrt_grad_at_zero"


def test_a_halt_is_raised_by_backward_and_nothing_has_changed() -> None:
    seen: list[Any] = []
    with nanguard.install(policy=Policy([Halt()])):
        program = Program(MAKES["Adam"], each_alone, "zero_grad")
        train(program, pairs(2), seen=seen)
        with pytest.raises(NonFiniteError, match="derivative of a root at zero"):
            train(program, pairs(3, bad=2)[2:])
        assert differences(seen[-1][1], program.state) == []
        train(program, pairs(2))  # it can go on
    assert all(p.isfinite().all() for p in program.model.parameters())


def test_a_learning_rate_is_lowered_for_all_optimizers_of_the_pass() -> None:
    ladder = [LowerLR(0.5, times=3, per=100), Skip(times=None), Halt()]
    with nanguard.install(policy=Policy(ladder, divergence=None)) as autopilot:
        program = Program(MAKES["Adam"], each_alone, "zero_grad")
        train(program, pairs(4, bad=2))
    assert len(autopilot.incidents) == 1
    assert {group["lr"] for optimizer in program.optimizers for group in optimizer.param_groups} == {0.005}


def test_an_error_of_the_program_inside_the_pass_is_raised_and_the_next_pass_is_guarded() -> None:
    with nanguard.install() as autopilot:
        weight = nn.Parameter(torch.ones(3))
        optimizer = Adam([weight], lr=0.1)
        is_failing = [True]

        def hook(param: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()
            if is_failing[0]:
                raise KeyError("of the program")

        weight.register_post_accumulate_grad_hook(hook)
        with pytest.raises(KeyError, match="of the program"):
            (weight * 0.0).abs().sqrt().sum().backward()
        is_failing[0] = False
        weight.sqrt().sum().backward()
        (weight * 0.0).abs().sqrt().sum().backward()
    assert len(autopilot.incidents) == 2
    assert torch.isfinite(weight).all()


def test_a_step_that_is_checked_afterwards_is_explained_too() -> None:
    """Hooks of the optimizer may change gradients, so its step is let through and taken back."""
    seen: list[Any] = []
    with nanguard.install() as autopilot:
        program = Program(MAKES["SGD momentum"], each_alone, "zero_grad")
        for optimizer in program.optimizers:
            optimizer.register_step_pre_hook(lambda *args: None)
        train(program, pairs(4, bad=2), seen=seen)
    assert differences(*seen[2]) == []
    check_diagnosis(autopilot, 2)


class Spoils(SGD):
    """Its update of small weights is infinite, although the gradient is finite."""

    def step(self, closure: Any = None) -> Any:
        weight = self.param_groups[0]["params"][0].data
        if weight.max() < 0.6:
            weight.mul_(float("inf"))  # spoiled
        return super().step(closure)


def test_a_bad_update_inside_the_pass_is_taken_back_and_explained() -> None:
    with nanguard.install() as autopilot:
        weight = nn.Parameter(torch.ones(3))
        optimizer = Spoils([weight], lr=0.1)

        def hook(param: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        weight.register_post_accumulate_grad_hook(hook)
        for _ in range(4):
            weight.pow(2).sum().backward()
    (incident,) = autopilot.incidents
    assert incident.reading.found == ("update",)
    assert incident.diagnosis is not None
    assert incident.diagnosis.source is not None
    assert incident.diagnosis.source.text.endswith("# spoiled")
    assert torch.isfinite(weight).all()


def test_without_a_cause_no_trace_is_advised(caplog: pytest.LogCaptureFixture) -> None:
    """Such steps cannot be traced as they run."""
    caplog.set_level(logging.INFO)
    with nanguard.install() as autopilot:
        weight = nn.Parameter(torch.ones(3))
        optimizer = Adam([weight], lr=0.1)

        def hook(param: Tensor) -> None:
            if len(autopilot.incidents) == 0:
                assert param.grad is not None
                param.grad.mul_(float("nan"))  # not a part of the pass that is run again
            optimizer.step()
            optimizer.zero_grad()

        weight.register_post_accumulate_grad_hook(hook)
        for _ in range(3):
            weight.pow(2).sum().backward()
    assert len(autopilot.incidents) == 1
    assert "--trace" not in caplog.text
    assert torch.isfinite(weight).all()


def in_a_thread_of_autograd(call: Callable[[], Any]) -> None:
    thread = threading.Thread(target=call, name="autograd")
    thread.start()
    thread.join()


@pytest.mark.parametrize("make", [MAKES["Adam"], MAKES["AdamW fused"]], ids=["eager", "late"])
def test_so_it_is_if_hooks_run_in_a_thread_of_autograd(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU. Torch knows in which threads a backward pass runs; here one with a name stands for such a thread."""
    say_they_are_in_backward(monkeypatch)
    torch.manual_seed(0)
    with nanguard.install(sync="late" if make is MAKES["AdamW fused"] else "auto") as autopilot:
        program = Program(make, lambda model: [], "zero_grad")
        params = list(program.model.parameters())
        groups = [params] if make is MAKES["AdamW fused"] else [[p] for p in params]
        num_hooked = [0]
        for group in groups:
            optimizer = make(group)
            program.optimizers.append(optimizer)

            def update(optimizer: Optimizer = optimizer) -> None:
                num_hooked[0] += 1
                optimizer.step()
                optimizer.zero_grad()

            last = group[0]  # the backward pass reaches it last
            last.register_post_accumulate_grad_hook(lambda p, update=update: in_a_thread_of_autograd(update))
        seen: list[Any] = []
        train(program, pairs(6, bad=2), seen=seen)
    check_diagnosis(autopilot, 2)
    assert differences(*seen[2]) == []
    assert num_hooked == [6 * len(groups)]
    assert all(p.isfinite().all() for p in params)


def say_they_are_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads called "autograd" run a backward pass, as those of a GPU do."""
    current_pass = _compat_modes.current_pass
    monkeypatch.setattr(
        _compat_modes, "current_pass", lambda: 0 if threading.current_thread().name == "autograd" else current_pass()
    )


def test_steps_of_other_threads_of_autograd_have_no_effect_while_the_step_runs_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    say_they_are_in_backward(monkeypatch)
    with nanguard.install() as autopilot:
        weight = nn.Parameter(torch.ones(3))
        optimizer = Adam([weight], lr=0.1)
        num_calls = [0]

        def update() -> None:
            num_calls[0] += 1
            optimizer.step()
            optimizer.zero_grad()

        with node_hook(weight, lambda *args: in_a_thread_of_autograd(update)):
            for number in range(3):
                before = weight.detach().clone()
                ((weight * (0.0 if number == 1 else 1.0)).abs().sqrt()).sum().backward()
                assert torch.equal(before, weight.detach()) == (number == 1)
    assert num_calls[0] > 3
    assert len(autopilot.incidents) == 1
