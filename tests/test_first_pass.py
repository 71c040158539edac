"""The first backward pass of a program without an optimizer and without modules: nothing of it is on a tape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import nanguard
from nanguard.autopilot import first_pass
from nanguard.diagnosis import backward_probe
from nanguard.hosted import coordinator

Update = Callable[[Tensor, Tensor], Tensor]


def by_backward(loss: Tensor, w: Tensor) -> Tensor:
    loss.backward()
    assert w.grad is not None
    return w.grad


def by_grad(loss: Tensor, w: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss, [w])
    return grad


def by_grad_of_one(loss: Tensor, w: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss, w)
    return grad


def by_grad_of_an_iterator(loss: Tensor, w: Tensor) -> Tensor:
    """As of ``model.parameters()``."""
    (grad,) = torch.autograd.grad(loss, iter([w]))
    return grad


ways = pytest.mark.parametrize("way", [by_backward, by_grad, by_grad_of_one, by_grad_of_an_iterator])


def spread(w: Tensor) -> Tensor:
    gaps = w[:, None] - w[None]
    distances = gaps.pow(2).sum(-1).sqrt()
    return (distances - 1).pow(2).sum()


def train(way: Update, num_steps: int, loss_of: Callable[[Tensor], Tensor] = spread) -> Tensor:
    torch.manual_seed(0)
    w = torch.randn(4, 2, requires_grad=True)
    for _ in range(num_steps):
        gradient = way(loss_of(w), w)
        w = (w - 0.01 * gradient).detach().requires_grad_()
    return w.detach()


@ways
def test_a_bad_derivative_in_the_very_first_step_has_op_line_and_cause(way: Update) -> None:
    torch.manual_seed(0)
    with nanguard.install() as autopilot:
        w = torch.randn(4, 2, requires_grad=True)
        gaps = w[:, None] - w[None]
        distances = torch.sqrt(gaps.pow(2).sum(-1))
        loss = (distances - 1).pow(2).sum()
        gradient = way(loss, w)
        assert torch.equal(gradient, torch.zeros_like(gradient))
    (incident,) = autopilot.incidents
    diagnosis = incident.diagnosis
    assert diagnosis is not None
    assert (diagnosis.cause, diagnosis.op, diagnosis.phase) == ("sqrt_grad_at_zero", "sqrt", "backward")
    assert diagnosis.capture == "graph"
    assert not diagnosis.is_line_traced  # it says "probably"


@pytest.mark.parametrize("way", [by_backward, by_grad])
def test_the_line_is_found_in_the_source(way: Update, tmp_path: Path) -> None:
    script = tmp_path / "first_step.py"
    script.write_text(
        "import torch\n"
        "w = torch.zeros(3, requires_grad=True)\n"
        "sizes = torch.sqrt(w.abs())\n"
        "loss = (sizes - 1).pow(2).sum()\n"
        + ("loss.backward()\n" if way is by_backward else "(gradient,) = torch.autograd.grad(loss, [w])\n")
    )
    with nanguard.install() as autopilot:
        exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
    (incident,) = autopilot.incidents
    assert incident.diagnosis is not None
    assert incident.diagnosis.source is not None
    assert (Path(incident.diagnosis.source.file).name, incident.diagnosis.source.line) == ("first_step.py", 3)


def test_a_bad_loss_in_the_very_first_step_is_examined_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a loss on a GPU the graph is not examined at every step, since that would mean to wait."""
    monkeypatch.setattr(coordinator, "examine_if_bad", lambda losses: None)
    with nanguard.install() as autopilot:
        w = torch.zeros(3, requires_grad=True)
        torch.log(w).sum().backward()
    (incident,) = autopilot.incidents
    assert incident.diagnosis is not None
    assert (incident.diagnosis.cause, incident.diagnosis.op) == ("log_of_zero", "log")


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_in_the_targets_of_a_loss_by_hand_is_data(sign: float, tmp_path: Path) -> None:
    """A difference saves nothing for its derivative."""
    script = tmp_path / "targets.py"
    script.write_text(
        "import torch\n"
        "w = torch.ones(3, requires_grad=True)\n"
        "x, targets = torch.ones(4, 3), torch.tensor([1.0, float('nan'), 2.0, 3.0])\n"
        + ("errors = x @ w - targets\n" if sign > 0 else "errors = targets - x @ w\n")
        + "loss = errors.pow(2).mean()\n"
        "loss.backward()\n"
    )
    with nanguard.install() as autopilot:
        exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
    (incident,) = autopilot.incidents
    found = incident.diagnosis
    assert found is not None
    assert (found.cause, found.op) == ("input_nonfinite", "sub")
    assert found.because == "what sub is given, and needs no gradient, holds NaN at [1]"
    assert found.source is not None
    assert found.source.line == 4
    assert "probably first used at targets.py:4 (sub, data)" in str(found)


@ways
def test_a_healthy_program_is_the_plain_program(way: Update) -> None:
    def loss_of(w: Tensor) -> Tensor:
        return (torch.dropout(w, 0.5, train=True).exp() - w).pow(2).mean()

    plain, rng = train(way, 4, loss_of), torch.get_rng_state()
    with nanguard.install() as autopilot:
        assert torch.equal(plain, train(way, 4, loss_of))
        assert torch.equal(rng, torch.get_rng_state())
    assert not autopilot.incidents


@ways
def test_only_the_first_pass_is_followed(way: Update, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []

    class Counted(first_pass.BackwardProbe):
        def run(self, *args: Any, **kwargs: Any) -> Any:
            runs.append(args)
            return super().run(*args, **kwargs)

    monkeypatch.setattr(first_pass, "BackwardProbe", Counted)
    with nanguard.install():
        train(way, 5, lambda w: w.exp().sum())
    assert len(runs) == 1


def test_a_program_with_an_optimizer_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_pass, "BackwardProbe", None)
    with nanguard.install() as autopilot:
        w = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=0.1)
        w.exp().sum().backward()
        optimizer.step()
    assert autopilot.counts["applied"] == 1


def test_gradients_that_are_not_of_an_update_are_the_programs() -> None:
    """Those of an input that is no leaf, maybe infinite: the pass is followed, and nothing comes of it."""
    with nanguard.install() as autopilot:
        w = torch.zeros(3, requires_grad=True)
        inner = w * 1.0
        (gradient,) = torch.autograd.grad(inner.sqrt().sum(), [inner])
        assert torch.isinf(gradient).all()
        w.exp().sum().backward()
    assert not autopilot.incidents


def test_what_the_forward_pass_made_is_not_blamed_on_the_backward_pass() -> None:
    """The loss is finite, and a gradient is NaN since an Inf was made and left out before: no op of backward did it."""
    with nanguard.install() as autopilot:
        w = torch.full((3,), 100.0, requires_grad=True)
        large = w.exp()
        torch.where(large > 1e30, torch.ones(3), large.pow(2)).sum().backward()
    for incident in autopilot.incidents:
        assert incident.diagnosis is not None
        assert incident.diagnosis.cause in ("unknown", "zero_times_inf", "exp_overflow")


def test_inside_a_dispatch_mode_of_the_program_nothing_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Listens(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def fails(trace: Any) -> None:
        raise AssertionError("a trace was entered")

    monkeypatch.setattr(backward_probe.Trace, "__enter__", fails)
    with nanguard.install():
        w = torch.ones(3, requires_grad=True)
        with Listens():  # type: ignore[no-untyped-call]
            w.exp().sum().backward()
    assert torch.equal(w.grad, w.detach().exp())  # type: ignore[arg-type]


def test_compiled_code_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(trace: Any) -> None:
        raise AssertionError("a trace was entered")

    with nanguard.install():
        monkeypatch.setattr(backward_probe.Trace, "__enter__", fails)
        w = torch.ones(3, requires_grad=True)
        torch.compile(lambda w: w.exp().sum(), backend="aot_eager")(w).backward()
    assert torch.allclose(w.grad, w.detach().exp())  # type: ignore[arg-type]


def test_the_line_that_uses_bad_data_is_not_said_to_make_them(tmp_path: Path) -> None:
    script = tmp_path / "first_step.py"
    script.write_text(
        "import torch\nw = torch.ones(3, requires_grad=True)\ngain = torch.ones(1).std()\n(w * gain).sum().backward()\n"
    )
    with pytest.warns(UserWarning, match="degrees of freedom"), nanguard.install() as autopilot:
        exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
    (incident,) = autopilot.incidents
    assert incident.diagnosis is not None
    assert "where     probably first used at first_step.py:4 (mul, data)" in str(incident.diagnosis)
