"""``optimizer.step(closure)`` of optimizers that are not torch's, as Lightning calls all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

import nanguard
from helpers import TinyNet, differences, everything, make_batches, poisoned
from nanguard.state.training_state import CapturedUpdate
from optimizers import Lion

Batches = list[tuple[Tensor, Tensor]]
INSIDE = "computes or changes gradients inside step()"


class Eager(Optimizer):
    """Moves its weights before it calls the closure, through ``.data``, which torch does not count as a write."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"]]
        for p in params:
            p.data.mul_(0.9)
        assert closure is not None
        loss = closure()
        for p in params:
            p.data.sub_(0.1 * p.grad)
        return loss


class Seldom(Lion):
    """Calls the closure again at its third step, as line searches do now and then."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = super().step(closure)
        if self.param_groups[0]["num_steps"] == 3 and closure is not None:
            result = closure()
        return result


def trained(make: Callable[[Any], Optimizer], batches: Batches, calls: list[int] | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = TinyNet()
    model.drop.p = 0.0
    optimizer = make(model.parameters())
    for x, y in batches:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            if calls is not None:
                calls.append(1)
            with torch.enable_grad():
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
            return loss

        assert isinstance(optimizer.step(closure=closure), Tensor)
    return everything(model, [optimizer])


@pytest.mark.parametrize("kind", [Lion, Eager, Seldom])
def test_healthy_steps_with_a_closure_are_the_same(kind: type[Optimizer]) -> None:
    calls: list[int] = []
    plain = trained(kind, make_batches(6), calls)
    expected = len(calls)
    with nanguard.install() as autopilot:
        assert differences(plain, trained(kind, make_batches(6), calls)) == []
    assert len(calls) == 2 * expected
    assert autopilot.counts["applied"] == 6


@pytest.mark.parametrize("place", [0, 3])
def test_a_closure_that_comes_first_is_decided_on_before_the_step(
    place: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = make_batches(6)
    good = trained(Lion, [batch for number, batch in enumerate(batches) if number != place])
    taken: list[int] = []
    put_back = CapturedUpdate.put_back
    monkeypatch.setattr(CapturedUpdate, "put_back", lambda self: (taken.append(1), put_back(self))[1])
    with nanguard.install() as autopilot:
        assert differences(good, trained(Lion, poisoned(batches, place))) == []
    assert INSIDE not in caplog.text
    assert [incident.reading.step for incident in autopilot.incidents] == [place]
    assert len(taken) == (place == 0), "only the first step, which is watched, is taken back afterwards"


@pytest.mark.parametrize(("kind", "warnings"), [(Eager, 1), (Seldom, 0)])
def test_one_that_does_something_else_stays_finite(
    kind: type[Optimizer], warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    with nanguard.install() as autopilot:
        state = trained(kind, poisoned(make_batches(6), 4))
    assert all(torch.isfinite(value).all() for value in state.values() if isinstance(value, Tensor))
    assert [incident.reading.step for incident in autopilot.incidents] == [4]
    assert caplog.text.count(INSIDE) == warnings
