"""What is traced of a program after an incident that was not located: few steps, and nothing that is not one."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import nanguard
from helpers import TinyNet, differences, everything
from nanguard.diagnosis import search
from nanguard.step import module_rows

SWITCHES = (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.set_grad_enabled)


@pytest.fixture(autouse=True)
def without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """All data are too large to keep copies of them: what a program has changed in place cannot be used again."""
    monkeypatch.setattr(module_rows, "_LARGEST_COPY", 0)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = [dict(vars(switch)) for switch in SWITCHES]
    yield
    assert before == [dict(vars(switch)) for switch in SWITCHES]
    assert _get_current_dispatch_mode_stack() == []


def good(out: Tensor) -> Tensor:
    return out.square().mean()


COUNT = torch.ones(())


def bad_slope(out: Tensor) -> Tensor:
    """A fault of the loss, which the model knows nothing of, and which cannot be computed again: it counts in place."""
    loss = ((out + COUNT) * 0).sqrt().sum()
    COUNT.add_(1)
    return loss


class Trained:
    """A small program that trains by steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = TinyNet()
        self.optimizer: Optimizer = SGD(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(4, 6)

    def step(self, loss_of: Callable[[Tensor], Tensor] = good) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model(self.x)).backward()
        self.optimizer.step()


class Bare(Trained):
    """Of bare tensors: no module is called."""

    def __init__(self) -> None:
        self.weight = torch.full((6,), 0.5, requires_grad=True)
        self.optimizer = SGD([self.weight], lr=1e-3)
        self.x = torch.ones(4, 6)

    def model(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * self.weight


@contextlib.contextmanager
def set_by_a_call() -> Iterator[None]:
    torch.set_grad_enabled(False)
    yield
    torch.set_grad_enabled(True)


WITHOUT: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "set by a call": set_by_a_call,
}


@pytest.mark.parametrize("without", WITHOUT)
@pytest.mark.parametrize("make", [Trained, Bare])
def test_an_evaluation_between_two_steps_is_not_traced(make: Any, without: str, traced_ops: Counter[bool]) -> None:
    with nanguard.install() as autopilot:
        program = make()

        def evaluate() -> None:
            before = traced_ops.total()
            with WITHOUT[without]():
                for _ in range(3):
                    good(program.model(program.x))
                    with torch.no_grad():
                        good(program.model(program.x))
            assert traced_ops.total() == before

        program.step()
        program.step(bad_slope)
        for _ in range(search.BURST - 1):
            before = traced_ops.total()
            evaluate()
            program.step()
            assert traced_ops.total() > before, "the step is"
            evaluate()
        program.step(bad_slope)
        evaluate()
    diagnosis = autopilot.incidents[-1].diagnosis
    assert diagnosis is not None
    assert (diagnosis.capture, diagnosis.cause) == ("live", "sqrt_grad_at_zero")


def test_an_evaluation_by_a_decorated_function_is_not_traced(traced_ops: Counter[bool]) -> None:
    with nanguard.install():
        program = Trained()

        @torch.no_grad()
        def evaluate() -> Tensor:
            return good(program.model(program.x))

        program.step(bad_slope)
        program.step()
        before = traced_ops.total()
        assert before
        evaluate()
        assert traced_ops.total() == before


def test_what_a_step_computes_without_gradients_is_traced(traced_ops: Counter[bool]) -> None:
    """A fault in the targets, say."""

    def with_target(out: Tensor) -> Tensor:
        with torch.no_grad():
            target = (out - out).sqrt() / (out - out)  # zero by zero
        return (out - target).square().sum() * 0

    with nanguard.install() as autopilot:
        program = Trained()
        program.step(bad_slope)
        program.step(with_target)
    diagnosis = autopilot.incidents[-1].diagnosis
    assert diagnosis is not None
    assert (diagnosis.capture, diagnosis.cause, diagnosis.op) == ("live", "zero_over_zero", "div")


class Switching(torch.autograd.Function):
    """Autograd switches gradients off in both passes, and this one switches them back and forth in them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x * 1
        with torch.no_grad():
            return y * 1

    @staticmethod
    def backward(ctx: Any, *above: Any) -> Any:
        with torch.no_grad():
            return above[0] * 1


@pytest.mark.parametrize("make", [Trained, Bare])
def test_a_function_that_switches_gradients_itself_does_not_end_the_trace(make: Any) -> None:
    with nanguard.install() as autopilot:
        program = make()
        program.step(bad_slope)
        program.step(lambda out: bad_slope(Switching.apply(out)))
    diagnosis = autopilot.incidents[-1].diagnosis
    assert diagnosis is not None
    assert (diagnosis.capture, diagnosis.cause) == ("live", "sqrt_grad_at_zero")


def test_a_traced_run_with_evaluations_is_the_plain_run(traced_ops: Counter[bool]) -> None:
    def train(*, bad: bool) -> dict[str, Any]:
        program = Trained()
        for number in range(20):
            if number == 3 and bad:
                program.step(bad_slope)
            torch.manual_seed(number)
            program.step()
            with torch.no_grad():
                program.x = program.x + good(program.model(program.x)) * 1e-3
        return everything(program.model, [program.optimizer])

    plain = train(bad=False)
    with nanguard.install():
        assert differences(plain, train(bad=True)) == []
    assert traced_ops, "it is a traced run"


def test_after_an_incident_few_steps_are_traced_and_the_same_kind_is_not_searched_for_again(
    traced_ops: Counter[bool], caplog: pytest.LogCaptureFixture
) -> None:
    with nanguard.install() as autopilot:
        program, traced = Trained(), []
        program.step()
        assert not traced_ops, "nothing is traced before"
        program.step(bad_slope)
        for number in range(200):
            before = traced_ops.total()
            program.step()
            traced += [number] if traced_ops.total() > before else []
        assert traced[: search.BURST] == list(range(search.BURST))
        assert len(traced) < 40, "after the burst only as many as fit into a small share of the time"
        autopilot._monitor.registry._shared.search._open.clear()  # as if it had been given up
        before = traced_ops.total()
        for _ in range(5):
            program.step(bad_slope)
            program.step()
        assert traced_ops.total() == before
    assert sum("was not located" in record.message for record in caplog.records) == 1
    diagnosis = autopilot.incidents[-1].diagnosis
    assert diagnosis is not None
    given_up, obstacle = diagnosis.notes
    assert "not traced again" in given_up
    assert "changed in place since" in obstacle


def test_several_optimizers_share_the_search(caplog: pytest.LogCaptureFixture) -> None:
    with nanguard.install():
        programs = [Trained() for _ in range(3)]
        for program in programs:
            program.step(bad_slope)
    assert sum("was not located" in record.message for record in caplog.records) == 1


def test_those_who_ask_have_everything_traced(traced_ops: Counter[bool]) -> None:
    with nanguard.install(trace=True):
        program = Trained()
        for _ in range(30):
            before = traced_ops.copy()
            program.step()
            with torch.no_grad():
                good(program.model(program.x))
            assert traced_ops[True] > before[True]
            assert traced_ops[False] > before[False]


class Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("trace", [False, True])
def test_dispatch_modes_of_the_program_are_left_as_it_entered_them(trace: bool) -> None:
    with nanguard.install(trace=trace):
        program = Trained()
        program.step()
        with Counts() as first:
            program.step(bad_slope)
            program.step()
        assert _get_current_dispatch_mode_stack() == []
        num = first.num
        program.step(bad_slope)
        program.step()
        assert len(_get_current_dispatch_mode_stack()) == 1
        with Counts() as second:  # entered while a trace is active, and left after it was ended
            program.step()
            with torch.no_grad():
                good(program.model(program.x))
            program.step()
        assert (first.num, second.num > 0) == (num, True)
        assert nn.Linear(1, 1)(torch.ones(1)).shape == (1,)


def test_an_op_belongs_to_the_line_that_called_it_not_to_the_programs_mode() -> None:
    """Torch calls the mode for each op, also in the backward pass, where it is no code that was written by hand."""
    with nanguard.install(trace=True) as autopilot:
        program = Trained()
        program.step()
        with Counts():
            program.step(bad_slope)
    diagnosis = autopilot.incidents[0].diagnosis
    assert diagnosis is not None
    assert (diagnosis.capture, diagnosis.cause, diagnosis.op) == ("live", "sqrt_grad_at_zero", "sqrt")
    assert diagnosis.source is not None
    assert diagnosis.source.function == "bad_slope"
