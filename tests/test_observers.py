"""Observers are called at fixed points, and a run is the same run with and without them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nanguard
from helpers import build, differences, everything, loss_fn, make_batches, own_step, poisoned
from nanguard.records.steps import Incident, Outcome

MODES = ["eager", "late"]


class Recorder(nanguard.Observer):
    """Notes every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.values: list[Tensor] = []
        self.incidents: list[Incident] = []

    def on_open(self, step: int) -> None:
        self.calls.append(("open", step))

    def on_measured(self, step: int, values: Tensor) -> None:
        self.calls.append(("measured", step))
        self.values.append(values)

    def on_heard(self, outcome: Outcome) -> None:
        self.calls.append(("heard", outcome.verdict.reading.step, outcome.applied))

    def on_incident(self, incident: Incident) -> None:
        self.calls.append(("incident", incident.reading.step))
        self.incidents.append(incident)

    def on_epoch(self, epoch: int) -> None:
        self.calls.append(("epoch", epoch))

    def on_event(self, event: str, fields: Mapping[str, Any]) -> None:
        self.calls.append(("event", event))

    def on_close(self, num_steps: int, counts: Mapping[str, int]) -> None:
        self.calls.append(("close", num_steps, counts["applied"]))

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] in names]


def train(observers: Any, *, sync: Any, bad: tuple[int, ...] = (), number: int = 6, style: str = "step") -> Any:
    model, opt = build(lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True))
    schedule = torch.optim.lr_scheduler.StepLR(opt, 3)
    with nanguard.Guard(model, opt, scheduler=schedule, sync=sync, observers=observers) as guard:
        for batch in guard.epoch(poisoned(make_batches(number), *bad)):
            if style == "step":
                guard.step(loss_fn, batch)
            else:
                own_step(guard, batch)
    return everything(model, [opt], schedule, torch.get_rng_state())


# ---- when they are called --------------------------------------------------------------------------------------------


def test_an_eager_run_calls_them_at_the_fixed_points_in_order() -> None:
    seen = Recorder()
    train([seen], sync="eager", bad=(1,), number=3)
    assert seen.calls == [
        ("event", "run"),
        ("epoch", 1),
        *[("open", 0), ("measured", 0), ("heard", 0, True)],
        *[("open", 1), ("measured", 1), ("heard", 1, False), ("incident", 1)],
        *[("open", 2), ("measured", 2), ("heard", 2, True)],
        ("close", 3, 2),
    ]


def test_a_late_run_hears_of_a_step_two_steps_later() -> None:
    seen = Recorder()
    train([seen], sync="late", number=4)
    assert seen.calls == [
        ("event", "run"),
        ("epoch", 1),
        *[("open", 0), ("measured", 0)],
        *[("open", 1), ("measured", 1)],
        *[("heard", 0, True), ("open", 2), ("measured", 2)],
        *[("heard", 1, True), ("open", 3), ("measured", 3)],
        *[("heard", 2, True), ("heard", 3, True)],
        ("close", 4, 4),
    ]


@pytest.mark.parametrize("style", ["step", "own"])
@pytest.mark.parametrize("sync", MODES)
def test_every_step_is_heard_of_once_and_in_order(sync: Any, style: str) -> None:
    seen = Recorder()
    train([seen], sync=sync, bad=(2,), number=8, style=style)
    heard = [step for _, step, _ in seen.named("heard")]
    assert heard == sorted(set(heard))
    assert [step for _, step, applied in seen.named("heard") if not applied] == [2]
    assert seen.named("incident") == [("incident", 2)]
    assert seen.incidents[0].diagnosis is not None


def test_a_step_that_is_run_again_is_measured_again_and_opened_once() -> None:
    seen = Recorder()
    train([seen], sync="late", bad=(2,), number=6)
    assert [step for _, step in seen.named("open")] == list(range(6))
    assert seen.named("measured").count(("measured", 3)) == 2
    assert [step for _, step, _ in seen.named("heard")] == list(range(6))


def test_eager_and_late_hear_the_same() -> None:
    heard = []
    for sync in MODES:
        seen = Recorder()
        train([seen], sync=sync, bad=(1, 4), number=8)
        heard.append((seen.named("heard"), seen.named("incident"), seen.named("close")))
    assert heard[0] == heard[1]


@pytest.mark.parametrize("sync", MODES)
def test_what_is_measured_stays_on_the_device(sync: Any) -> None:
    seen = Recorder()
    train([seen], sync=sync, number=3)
    assert len(seen.values) == 3
    for values in seen.values:
        assert (values.device.type, values.dtype, values.ndim) == ("cpu", torch.float64, 1)


def test_they_are_called_in_the_order_of_the_list() -> None:
    order: list[str] = []

    class Named:  # any object with one of the methods will do
        def __init__(self, name: str) -> None:
            self.name = name

        def on_open(self, step: int) -> None:
            order.append(self.name)

    train([Named("first"), Named("second")], sync="eager", number=2)
    assert order == ["first", "second"] * 2


# ---- they change nothing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [(), (2,)], ids=["healthy", "one bad batch"])
@pytest.mark.parametrize("sync", MODES)
def test_a_run_is_the_same_run_with_and_without_observers(sync: Any, bad: tuple[int, ...]) -> None:
    with_it, without = train([Recorder()], sync=sync, bad=bad), train([], sync=sync, bad=bad)
    assert differences(with_it, without) == []


@pytest.mark.parametrize("method", ["on_open", "on_measured", "on_heard", "on_incident", "on_epoch", "on_event"])
@pytest.mark.parametrize("sync", MODES)
def test_one_that_raises_is_logged_once_and_dropped(sync: Any, method: str, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the disk is full")

    broken, other = type("Broken", (Recorder,), {method: fail})(), Recorder()
    with caplog.at_level(logging.WARNING, "nanguard"):
        state = train([broken, other], sync=sync, bad=(2,))
    told = [record for record in caplog.records if "is dropped" in record.message]
    assert len(told) == 1
    assert method in told[0].message
    assert told[0].exc_info is not None
    assert broken.named("close") == []
    assert len(other.named("heard")) == 6
    assert differences(state, train([], sync=sync, bad=(2,))) == []


def test_the_run_log_goes_on_without_an_observer_that_raises(tmp_path: Path) -> None:
    class Broken(nanguard.Observer):
        def on_heard(self, outcome: Outcome) -> None:
            raise RuntimeError("no")

    model, opt = build(torch.optim.AdamW)
    with nanguard.Guard(model, opt, run_dir=tmp_path, observers=[Broken()]) as guard:
        for batch in guard.epoch(make_batches(4)):
            guard.step(loss_fn, batch)
    assert [record.step for record in nanguard.read_run(tmp_path).steps] == [0, 1, 2, 3]


def test_an_interrupt_in_an_observer_is_not_swallowed() -> None:
    class Stops(nanguard.Observer):
        def on_open(self, step: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train([Stops()], sync="eager")


def test_a_class_a_single_observer_and_a_misspelled_method_are_refused() -> None:
    class Misspelled(nanguard.Observer):
        def on_heared(self, outcome: Any) -> None: ...

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for observers, message in (
        ([Misspelled], r"got the class Misspelled: write Misspelled\(\)"),
        (Misspelled(), r"observers must be a list of observers, got .*: write observers=\[...\]"),
        ([Misspelled()], "at least one of the methods on_open"),
    ):
        with pytest.raises(ValueError, match=message):
            nanguard.Guard(model, optimizer, observers=observers)  # type: ignore[arg-type]


@pytest.mark.parametrize("thing", [print, object(), "progress"], ids=["a function", "an object", "text"])
def test_an_object_without_any_of_the_methods_is_refused(thing: Any) -> None:
    model, opt = build(torch.optim.AdamW)
    with pytest.raises(ValueError, match=r"at least one of the methods on_open, .*on_close, got "):
        nanguard.Guard(model, opt, observers=[thing])
