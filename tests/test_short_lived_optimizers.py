"""Programs with optimizers of their own kind: made for one batch, many of them, or of second order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import nanguard
from test_other_loops import Energy, records
from test_run import NANGUARD, done, script
from test_training_loops import found_in

# ---- optimizers that live for one batch ------------------------------------------------------------------------------


def attacked(model: nn.Module, x: Tensor, steps: int = 3) -> Tensor:
    """The worst ``x`` nearby, found by an optimizer of its own, which the program writes to as well."""
    delta = torch.full_like(x, 0.01).requires_grad_()
    attack = SGD([delta], lr=0.01)
    for _ in range(steps):
        attack.zero_grad()
        (-model(x + delta).pow(2).mean()).backward()
        attack.step()
        delta.data.add_(x).clamp_(0, 1).sub_(x)
    return (x + delta).detach()


def panels_in(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if "\n   why" in record.getMessage()]


def test_damage_after_a_skip_is_rolled_back_and_does_not_end_the_program() -> None:
    with nanguard.install() as autopilot:
        model = Energy()
        optimizer = Adam(model.parameters())
        for x, _ in records(bad=9):
            worst = attacked(model, x)
            optimizer.zero_grad()
            model(worst).pow(2).mean().backward()
            optimizer.step()
        del x, worst
        assert autopilot.unsound() == ()
    did = [incident.outcome.action.response for incident in autopilot.incidents]
    assert did == ["skip", "roll_back", "roll_back", "skip"]
    assert found_in(autopilot)[0].dataset_indices == (9,)
    assert "parameter delta, which another optimizer trains, was non-finite before the step: 4 of 16" in str(
        found_in(autopilot)[-1]
    ), "of several that have this name the right one"
    assert autopilot.counts["applied"] == 5 * 3 + 5


def test_steps_in_flight_are_heard_of_before_an_optimizer_that_is_out_of_scope_is_gone() -> None:
    """As in a program with a function ``main``, on a GPU."""

    def main() -> nn.Module:
        model = Energy()
        optimizer = Adam(model.parameters(), fused=True)
        for step, (x, _) in enumerate(records()):
            if step == 5:
                next(model.parameters()).data.fill_(float("nan"))
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
        return model

    with nanguard.install(sync="late") as autopilot:
        model = main()
        assert autopilot.unsound() == ()
    assert all(param.isfinite().all() for param in model.parameters())
    assert [incident.outcome.action.response for incident in autopilot.incidents] == ["roll_back"]


def test_a_tensor_that_the_program_no_longer_has_is_not_told_of() -> None:
    """Also if a module has a parameter that is None, as a layer without bias has."""
    with nanguard.install() as autopilot:
        model = nn.Linear(4, 1, bias=False)
        optimizer = Adam(model.parameters())
        for x, _ in records():
            delta = torch.zeros_like(x).requires_grad_()
            attack = SGD([delta], lr=0.01)
            model(x + delta).mean().backward()
            attack.step()
            delta.data.fill_(float("nan"))
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        assert autopilot.unsound() == ("model.delta",)
        del delta, attack
        assert autopilot.unsound() == ()


def test_weights_that_are_not_finite_are_told_of_although_their_optimizer_is_gone() -> None:
    def train() -> None:
        optimizer = Adam(model.parameters())
        for x, _ in records():
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()

    with nanguard.install() as autopilot:
        model = Energy()
        train()
        with torch.no_grad():
            model.head.weight[0, 1] = float("nan")
        assert autopilot.unsound() == ("model.head.weight",)


def test_what_an_optimizer_trains_is_not_made_again() -> None:
    """The program has made it in the same batch, but it was updated since: only that value shows the fault."""
    with nanguard.install() as autopilot:
        for x, _ in records():
            delta = torch.zeros_like(x).requires_grad_()
            attack = SGD([delta], lr=1.0)
            for step in range(2):
                attack.zero_grad()
                ((delta - 1).square().sum().sqrt() if step == 1 else -delta.sum()).backward()
                attack.step()
    assert {(found.cause, found.op) for found in found_in(autopilot)} == {("sqrt_grad_at_zero", "sqrt")}


def test_an_error_of_ours_is_not_explained_as_one_of_the_program(tmp_path: Path) -> None:
    code = """
        import torch
        from torch import nn

        def train(x):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()

        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(torch.full((2, 4), float("nan")))
    """
    ran = done(*NANGUARD, "--halt-on-first", "--run-dir", "run", script(tmp_path, code), cwd=tmp_path)
    assert ran.returncode == 1
    assert len(nanguard.read_run(tmp_path / "run").incidents) == 1
    assert "1 step, 1 not applied, halted" in ran.stderr


@pytest.mark.parametrize("is_known", [True, False])
def test_one_fault_is_one_panel_whichever_optimizer_it_hits(is_known: bool, caplog: pytest.LogCaptureFixture) -> None:
    with nanguard.install() as autopilot:
        model = Energy()
        optimizer = Adam(model.parameters())
        for x, _ in records():
            delta = torch.zeros_like(x).requires_grad_()
            attack = SGD([delta], lr=0.01)
            for _ in range(2):
                attack.zero_grad()
                (delta.norm().sqrt() if is_known else delta.sum()).backward()
                assert delta.grad is not None
                delta.grad.div_(1 if is_known else 0)
                attack.step()
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    assert len(autopilot.incidents) == 12
    assert len(panels_in(caplog)) == 1


def test_a_learning_rate_is_one_fault_wherever_it_shows(caplog: pytest.LogCaptureFixture) -> None:
    with nanguard.install() as autopilot:
        model = nn.ModuleList([nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(3)])
        optimizer = Adam(model.parameters(), lr=1e30)
        sum(expert(torch.rand(2, 4)).mean() for expert in model).backward()  # type: ignore[union-attr]
        optimizer.step()
        for step in range(6):
            optimizer.zero_grad()
            model[step % 3](torch.rand(2, 4)).mean().backward()
            optimizer.step()
    assert {found.cause for found in found_in(autopilot)} == {"learning_rate_too_high"}
    assert len({found.module for found in found_in(autopilot)}) == 3
    assert len(panels_in(caplog)) == 1


# ---- optimizers ------------------------------------------------------------------------------------------------------


class Curved(Optimizer):
    """Differentiates gradients, and detaches them, so that its step cannot be made twice."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        if any(param.grad.grad_fn is None for param in params):
            raise RuntimeError("no graph")
        curvatures = torch.autograd.grad([p.grad.sum() for p in params], params, retain_graph=True)
        for param, curvature in zip(params, curvatures, strict=True):
            param.data.sub_(0.1 * param.grad.detach_() / (curvature.abs() + 1))


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_an_update_that_cannot_be_made_again_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    with nanguard.install() as autopilot:
        model = Energy()
        optimizer = Curved(model.parameters())
        for step in range(3):
            out = model(torch.rand(4, 4)).mean()
            if step == 1:
                out = out + (out - out.detach()).abs().pow(1.5)
            out.pow(2).backward(create_graph=True)
            optimizer.step()
            optimizer.zero_grad()
    (found,) = found_in(autopilot)
    assert (found.phase, found.cause) == ("optimizer", "unknown")
    assert found.because == "Curved.step() cannot be called again: no graph"
    assert "could not be examined" not in caplog.text


# ---- two networks, one after the other -------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["data", "loss"])
def test_what_the_second_optimizer_uses_of_the_step_of_the_first(fault: str) -> None:
    """The generator runs once, before the discriminator steps; a part of its loss comes before a module is called."""
    with nanguard.install() as autopilot:
        generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
        of_generator, of_critic = Adam(generator.parameters()), Adam(critic.parameters())
        kept = []
        for x, _ in records(bad=9 if fault == "data" else None):
            made = generator(x)
            of_critic.zero_grad()
            (critic(x).mean() - critic(made.detach()).mean()).backward()
            of_critic.step()
            of_generator.zero_grad()
            spread = (made - made.detach()).pow(2).sum() if fault == "loss" else (made - 1).abs().sum()
            loss = spread.sqrt()
            kept.append(loss.detach())  # what an earlier step made may still be there
            (loss - critic(made).mean()).backward()
            of_generator.step()
    told = found_in(autopilot)
    if fault == "data":
        assert [(found.cause, found.module, found.samples) for found in told] == [
            ("input_nonfinite", "generator", (1,))
        ] * 2
    else:
        assert {(found.cause, found.op) for found in told} == {("sqrt_grad_at_zero", "sqrt")}
    assert {found.capture for found in told} == {"tape"}
