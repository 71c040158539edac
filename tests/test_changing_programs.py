"""Random programs that change in the middle of a run: steps made in few calls do what steps made the usual way do.

Healthy ones equal the program without nanguard, bit for bit. With a fault, the state after each step, the counts and
what is said of the fault are the same in both ways.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import nanguard
from helpers import INF, NAN, differences, everything, make_batches
from nanguard.hosted.sound import AskedSteps, LateSteps, SoundSteps

STEPS = 16
SLICE = {0, 10, 21, 40, 41, 51, 62, 90}
"""Most of these have found something once."""

SEEDS = [pytest.param(n, marks=() if n in SLICE else [pytest.mark.campaign]) for n in range(120)]


class Net(nn.Module):
    """``kind`` says which buffers it has, and how it writes to them."""

    state: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inp, self.out, self.kind = nn.Linear(6, 8), nn.Linear(8, 3), kind
        self.norm = (
            nn.BatchNorm1d(8) if kind == "batch norm" else nn.Dropout(0.2) if kind == "dropout" else nn.Identity()
        )
        self.register_buffer("state", torch.full((8,), -INF) if kind == "-inf" else torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.inp(x)))
        if self.kind == "counted":
            with torch.no_grad():
                self.state.lerp_(hidden.float().mean(0), 0.1)
        elif self.kind == "not counted":
            self.state.data.lerp_(hidden.detach().float().mean(0), 0.1)
        elif self.kind == "replaced":
            self.state = self.state.lerp(hidden.detach().float().mean(0), 0.1)
        return self.out(hidden if self.kind == "-inf" else hidden * self.state.clone())


KINDS = ["batch norm", "dropout", "-inf", "constant", "counted", "not counted", "replaced"]


class Left(Exception):
    """The program goes on with the next batch."""


class Program:
    """``forms`` says what each step does instead of the ordinary."""

    def __init__(self, kind: str, make: Callable[[Any], Optimizer]) -> None:
        self.model, self.second = Net(kind), nn.Linear(3, 3)
        self.optimizer = make(self.model.parameters())
        self.other: Optimizer | None = None
        self.average: AveragedModel | None = None
        self.fault = ""

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(out, y)
        return loss * NAN if self.fault == "loss" else loss

    def step(self, *args: Any) -> None:
        if self.fault == "gradient" and self.model.inp.bias.grad is not None:
            self.model.inp.bias.grad[0] = NAN
        self.optimizer.step(*args)

    def one(self, form: str, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = getattr(self, form)(x, y)
        if loss is not None:
            loss.backward()
            self.step()
        if self.average is not None:
            self.average.update_parameters(self.model)
        self.model.train().requires_grad_(True)

    def ordinary(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.model(x), y)

    def twice(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.model(x) + self.model(x.flip(0)), y)

    def accumulates(self, x: Tensor, y: Tensor) -> Tensor:
        (self.ordinary(x, y) / 2).backward()
        return self.ordinary(x * 0.9, y) / 2

    def clears(self, x: Tensor, y: Tensor) -> Tensor:
        self.ordinary(x, y).backward()
        self.optimizer.zero_grad()
        return self.ordinary(x * 0.9, y)

    def two_losses(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.model(x)
        self.loss(out, y).backward(retain_graph=True)
        return out.square().mean()

    def closure(self, x: Tensor, y: Tensor) -> None:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.ordinary(x, y)
            loss.backward()
            return loss

        self.step(closure)

    def gradients_by_hand(self, x: Tensor, y: Tensor) -> None:
        params = list(self.model.parameters())
        for param, grad in zip(params, torch.autograd.grad(self.ordinary(x, y), params), strict=True):
            param.grad = grad
        self.step()

    def of_both(self, x: Tensor, y: Tensor) -> None:
        self.other = self.other or Adam(self.second.parameters(), lr=0.01)
        self.other.zero_grad()
        self.loss(self.second(self.model(x)), y).backward()
        self.step()
        self.other.step()

    def evaluates(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.ordinary(x, y)
        self.model.eval()
        with torch.no_grad():
            self.model(torch.ones(2, 6))
        return loss

    def leaves_out(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.ordinary(x, y)
        if not torch.isfinite(loss):
            raise Left
        return loss

    def raises_in_forward(self, x: Tensor, y: Tensor) -> Tensor:
        with contextlib.suppress(KeyError):
            self.model(x)
            raise KeyError
        return self.ordinary(x, y)

    def raises_in_step(self, x: Tensor, y: Tensor) -> None:
        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        self.ordinary(x, y).backward()
        handle = self.optimizer.register_step_post_hook(interrupt)
        with contextlib.suppress(KeyboardInterrupt):
            self.step()
        handle.remove()

    def checkpoints(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(checkpoint(self.model, x, use_reentrant=False), y)

    def calls_forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.model.forward(x), y)

    def without_module(self, x: Tensor, y: Tensor) -> Tensor:
        model = self.model
        return self.loss(F.linear(F.linear(x, model.inp.weight, model.inp.bias), model.out.weight), y)

    def with_one_element(self, x: Tensor, y: Tensor) -> Tensor:
        return self.ordinary(x, y).double().reshape(1)

    def freezes(self, x: Tensor, y: Tensor) -> Tensor:
        self.model.out.requires_grad_(False)
        return self.ordinary(x, y)

    def writes_to_buffers(self, x: Tensor, y: Tensor) -> Tensor:
        self.model.state.data.mul_(0.9)
        return self.ordinary(x, y)

    def lowers_rate(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.param_groups[0]["lr"] *= 0.9
        return self.ordinary(x, y)

    def averages(self, x: Tensor, y: Tensor) -> Tensor:
        self.average = self.average or AveragedModel(self.model)
        return self.ordinary(x, y)

    def clips(self, x: Tensor, y: Tensor) -> None:
        self.ordinary(x, y).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.step()

    def in_half_precision(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.ordinary(x, y)


FORMS = [name for name in vars(Program) if not name.startswith("_") and name not in ("loss", "step", "one", "ordinary")]


def program_of(seed: int, sync: str) -> tuple[Callable[[bool], list[Any]], list[str]]:
    """``run(with_faults)`` returns the state after each step."""
    draw = random.Random(f"{seed} {sync}")
    options = {"fused": True} if sync == "late" else {}
    make = draw.choice(
        [
            lambda params: SGD(params, lr=0.1, momentum=0.9, **options),
            lambda params: AdamW(params, lr=0.01, **options),
            lambda params: SGD(params, lr=0.1, **options),
        ]
    )
    kind, few, often = draw.choice(KINDS), draw.sample(FORMS, draw.randint(1, 3)), draw.choice([0.2, 0.5])
    forms = ["ordinary" if n < 3 or draw.random() > often else draw.choice(few) for n in range(STEPS)]
    fault, bad = draw.choice(["data", "data", "loss", "gradient"]), draw.sample(range(4, STEPS), draw.randint(1, 2))

    def run(with_faults: bool) -> list[Any]:
        torch.manual_seed(seed)
        program, states = Program(kind, make), []
        for n, (form, (x, y)) in enumerate(zip(forms, make_batches(STEPS, seed=seed), strict=True)):
            program.fault = fault if with_faults and n in bad else ""
            if program.fault == "data":
                x[0, 0] = NAN
            with contextlib.suppress(Left):
                program.one(form, x, y)
            average = [] if program.average is None else [program.average]
            optimizers = [each for each in (program.optimizer, program.other) if each is not None]
            state = everything(program.model, optimizers, program.second, torch.get_rng_state(), *average)
            states.append({key: comparable(value) for key, value in state.items()})
        return states

    return run, [kind, *forms, fault, *map(str, bad)]


def comparable(value: Any) -> Any:
    """NaN equals NaN: until the next batch, one that the program leaves out may have left some in buffers."""
    return value.nan_to_num(nan=1e30) if isinstance(value, Tensor) else value


def guarded(run: Callable[[bool], list[Any]], sync: Any, *, with_faults: bool) -> tuple[list[Any], Any, Any]:
    """The states, what is said, and the counts."""
    with nanguard.install(sync=sync) as autopilot:
        states = run(with_faults)
    said = []
    for incident in autopilot.incidents:
        found = incident.diagnosis
        assert found is not None
        where = (found.cause, found.phase, found.op, found.module, str(found.source), found.samples, found.confidence)
        said.append((incident.reading.step, incident.reading.found, incident.outcome.action.response, where))
    return states, said, autopilot.counts


def first_difference(one: list[Any], two: list[Any]) -> tuple[int, list[str]] | None:
    both = enumerate(zip(one, two, strict=True))
    return next(((n, found) for n, (a, b) in both if (found := differences(a, b))), None)


@pytest.mark.parametrize("sync", ["eager", "late"])
@pytest.mark.parametrize("seed", SEEDS)
def test_both_ways_of_making_steps_do_the_same(seed: int, sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, described = program_of(seed, sync)
    states, said, _ = guarded(run, sync, with_faults=False)
    assert said == [], described
    assert first_difference(run(False), states) is None, described

    states, said, counts = guarded(run, sync, with_faults=True)
    monkeypatch.setattr(SoundSteps, "look", lambda self, **_: None)
    usual_states, usually_said, usual_counts = guarded(run, sync, with_faults=True)
    assert first_difference(usual_states, states) is None, described
    assert said == usually_said, described
    assert counts == usual_counts, described


def test_most_of_these_steps_are_made_in_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for kind in (AskedSteps, LateSteps):
        monkeypatch.setattr(kind, "made", lambda self, step, made_by=kind.made: (made.append(1), made_by(self, step)))
    for sync in ("eager", "late"):
        run, _ = program_of(0, sync)
        guarded(run, sync, with_faults=False)
    assert len(made) > STEPS // 2
