"""Sound steps that are made in few calls: nothing is lost of what the usual way does, and it is left in time."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import nanguard
from helpers import NAN, TinyNet, differences, everything, make_batches, poisoned
from nanguard.hosted.sound import AskedSteps, LateSteps
from nanguard.records.healthy import sound_reading
from nanguard.state.readback import AsyncReadback
from nanguard.step.journal import Journal
from nanguard.step.observers import Observers

BAD, STEPS = 7, 11
BATCHES = make_batches(STEPS)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Masked(Plain):
    """With a buffer that no step changes."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.mask


class OwnStatistics(Plain):
    """Torch does not count what ``batch_norm`` writes, and nothing here says that these are running statistics."""

    center: Tensor
    spread: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(6))
        self.register_buffer("spread", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(F.batch_norm(x, self.center, self.spread, training=True))


class Counting(Plain):
    """With a buffer that steps write to from some step on, which torch counts."""

    number: Tensor
    counts = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.number += 1
        return self.layers(x)


class Dropping(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(F.dropout(x, 0.2))


MODELS = [Plain, Masked, Counting, OwnStatistics, Dropping, TinyNet]
LATE = [Plain, Masked, Counting, Dropping]
"""Their steps are made in few calls also if the host learns of a step late."""


def optimizer_of(model: nn.Module, sync: str) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01, fused=True if sync == "late" else None)


def train(
    make: Callable[[], nn.Module], sync: str, batches: Any, each: Callable[..., None] | None = None
) -> dict[str, Any]:
    """The state after all steps, random numbers included; ``each`` is called after each step with what there is."""
    torch.manual_seed(0)
    model = make()
    optimizer = optimizer_of(model, sync)
    for number, (x, y, *weight) in enumerate(batches):
        loss = F.cross_entropy(model(x), y)
        for each_weight in weight:
            loss = loss * each_weight
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if each is not None:
            each(number, model, optimizer)
    return everything(model, [optimizer], torch.get_rng_state())


def hosted_step(autopilot: Any) -> Any:
    (hosted,) = autopilot._monitor.registry.hosted_steps
    return hosted


SYNCS = pytest.mark.parametrize("sync", ["eager", "late"])


@SYNCS
@pytest.mark.parametrize("make", MODELS)
def test_a_healthy_program_is_the_same_and_most_of_its_steps_take_few_calls(make: Any, sync: Any) -> None:
    plain = train(make, sync, BATCHES)
    on: list[bool] = []
    with nanguard.install(sync=sync) as autopilot:

        def look(number: int, *_: Any) -> None:
            hosted = hosted_step(autopilot)
            assert isinstance(hosted.sound, AskedSteps if sync == "eager" else LateSteps)
            on.append(hosted.sound.is_on)
            assert autopilot.counts["applied"] >= number + 1 - (0 if sync == "eager" else 2)

        guarded = train(make, sync, BATCHES, look)
    assert differences(plain, guarded) == []
    assert autopilot.counts["applied"] == STEPS
    assert all(on[2:]) == (sync == "eager" or make in LATE), on


@SYNCS
@pytest.mark.parametrize("bad", ["data", "loss"])
@pytest.mark.parametrize("make", MODELS)
def test_a_bad_step_after_sound_ones_changes_nothing(make: Any, bad: str, sync: Any) -> None:
    """A bad loss leaves running statistics finite, but they are changed. In late mode a step after it is lost."""
    states: dict[int, Any] = {}

    def note(number: int, model: nn.Module, optimizer: Optimizer) -> None:
        states[number] = everything(model, [optimizer])
        if isinstance(model, Counting):
            model.counts = number == BAD - 1

    batches: Any = poisoned(BATCHES, BAD)
    if bad == "loss":
        batches = [(*batch, NAN if number == BAD else 1.0) for number, batch in enumerate(BATCHES)]
    with nanguard.install(sync=sync) as autopilot:
        train(make, sync, batches, note)
    lost = autopilot.counts["lost"]
    (incident,) = autopilot.incidents
    assert incident.reading.step == BAD
    assert incident.diagnosis is not None
    assert incident.diagnosis.cause == ("input_nonfinite" if bad == "data" else "nonfinite_constant")
    assert autopilot.counts["applied"] == STEPS - 1 - lost
    assert lost == (0 if sync == "eager" else 1)
    names = [name for name in states[BAD] if sync == "eager" or "running" not in name]
    before, after = ({name: states[number][name] for name in names} for number in (BAD - 1, BAD))
    assert differences(before, after) == []
    assert all(torch.isfinite(value).all() for value in states[STEPS - 1].values() if isinstance(value, Tensor))


@SYNCS
def test_what_the_program_writes_to_a_buffer_between_two_steps_stays(sync: Any) -> None:
    def write(number: int, model: Any, optimizer: Optimizer) -> None:
        if number == BAD - 1:
            model.mask.fill_(2.0)
        elif number >= BAD:
            assert torch.equal(model.mask, torch.full((3,), 2.0))

    with nanguard.install(sync=sync) as autopilot:
        train(Masked, sync, poisoned(BATCHES, BAD), write)
    assert len(autopilot.incidents) == 1


def test_a_batch_that_the_program_leaves_out_leaves_no_trace_in_running_statistics() -> None:
    def leaving_out(batches: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        model = TinyNet()
        optimizer = SGD(model.parameters(), lr=0.1)
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if not torch.isfinite(loss):
                continue
            loss.backward()
            optimizer.step()
        return everything(model, [optimizer])

    with nanguard.install() as autopilot:
        state = leaving_out(poisoned(BATCHES, BAD))
    assert all(torch.isfinite(value).all() for value in state.values() if isinstance(value, Tensor))
    assert len(autopilot.incidents) == 1


class Broken(SGD):
    """Raises in one step."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise OSError("a disk of the program")
        return super().step(closure)


def test_an_error_of_the_programs_own_step_passes_and_the_program_is_guarded_afterwards() -> None:
    torch.manual_seed(0)
    model = Plain()
    with nanguard.install() as autopilot:
        optimizer = Broken(model.parameters(), lr=0.1)
        for number, (x, y) in enumerate(poisoned(BATCHES, BAD)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.fails = number == 4
            if optimizer.fails:
                with pytest.raises(OSError, match="a disk of the program"):
                    optimizer.step()
            else:
                optimizer.step()
    assert [incident.reading.step for incident in autopilot.incidents] == [BAD]
    assert autopilot.counts["applied"] == STEPS - 2


def test_parameters_that_are_added_are_guarded() -> None:
    torch.manual_seed(0)
    model, head = Plain(), nn.Linear(3, 3)
    with nanguard.install() as autopilot:
        optimizer = Adam(model.parameters(), lr=0.01)
        for number, (x, y) in enumerate(BATCHES):
            optimizer.zero_grad()
            if number == 5:
                optimizer.add_param_group({"params": head.parameters()})
            out = model(x)
            out = head(out) if number >= 5 else out
            loss = F.cross_entropy(out, y)
            loss.backward()
            if number == BAD:
                head.weight.grad = torch.full_like(head.weight, NAN)
            optimizer.step()
            assert len(hosted_step(autopilot).parts.state.parameters()) == (6 if number >= 5 else 4)
    (incident,) = autopilot.incidents
    assert incident.reading.step == BAD
    assert all(torch.isfinite(p).all() for p in [*model.parameters(), *head.parameters()])


def test_a_hook_before_the_step_that_spoils_gradients_is_noticed() -> None:
    torch.manual_seed(0)
    model = Plain()

    def spoil(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        next(model.parameters()).grad = torch.full_like(next(model.parameters()), NAN)

    with nanguard.install() as autopilot:
        optimizer = Adam(model.parameters(), lr=0.01)
        for number, (x, y) in enumerate(BATCHES):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            handle = optimizer.register_step_pre_hook(spoil) if number == BAD else None
            optimizer.step()
            if handle is not None:
                handle.remove()
    assert [incident.reading.step for incident in autopilot.incidents] == [BAD]
    assert all(torch.isfinite(p).all() for p in model.parameters())


@SYNCS
def test_a_network_that_is_trained_from_the_middle_on_is_guarded_with_the_first(sync: Any) -> None:
    torch.manual_seed(0)
    model, other = Plain(), Plain()
    batches = poisoned(BATCHES, BAD)
    with nanguard.install(sync=sync) as autopilot:
        first, second = optimizer_of(model, sync), None
        for number, (x, y) in enumerate(batches):
            if number == 4:
                second = optimizer_of(other, sync)
            for network, optimizer in ((model, first), (other, second)):
                if optimizer is not None:
                    optimizer.zero_grad()
                    F.cross_entropy(network(x), y).backward()
                    optimizer.step()
    assert len(autopilot.incidents) == 2
    assert all(torch.isfinite(p).all() for network in (model, other) for p in network.parameters())


def test_learning_rates_that_change_are_those_of_the_run_log(tmp_path: Path) -> None:
    def lower(number: int, model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    with nanguard.install(run_dir=tmp_path / "run"):
        train(Plain, "eager", BATCHES, lower)
    steps = [each for each in logged(tmp_path / "run") if each["event"] == "step"]
    assert [each["step"] for each in steps] == list(range(STEPS))
    assert [each["lrs"][0] for each in steps] == [0.01 * 0.5**number for number in range(STEPS)]


@pytest.mark.parametrize("make", [Plain, Counting, TinyNet])
@pytest.mark.parametrize("bad", [5, 6, BAD, None])
def test_an_optimizer_that_is_not_fused_any_more_is_guarded_by_asking(make: Any, bad: int | None) -> None:
    """The state of one that was not fused is loaded before step 6: the device cannot skip its steps."""

    def unfuse(number: int, model: nn.Module, optimizer: Optimizer) -> None:
        if number == 5:
            state = copy.deepcopy(optimizer.state_dict())
            for group in state["param_groups"]:
                group["fused"] = None
            optimizer.load_state_dict(state)

    plain = train(make, "late", BATCHES, unfuse) if bad is None else None
    with nanguard.install(sync="late") as autopilot:
        guarded = train(make, "late", BATCHES if bad is None else poisoned(BATCHES, bad), unfuse)
        assert hosted_step(autopilot).sync == "eager"
    assert plain is None or differences(plain, guarded) == []
    assert autopilot.counts["applied"] + autopilot.counts["skipped"] + autopilot.counts["lost"] == STEPS
    assert [each.outcome.verdict.reading.step for each in autopilot.incidents] == ([] if bad is None else [bad])
    finite = [value.isfinite().all() for value in guarded.values() if isinstance(value, Tensor)]
    assert finite
    assert all(finite)


FORKS = """
import os, sys
import torch
from torch import nn
import nanguard
autopilot = nanguard.install(run_dir=sys.argv[1])
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(11):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
    if number in (3, 8):
        child = os.fork()
        if not child:
            autopilot.counts
            sys.exit()
        os.waitpid(child, 0)
"""


class Clipped:
    """A program that clips: its final state, and the readings that nanguard has recorded of its steps."""

    def __init__(self, device: str, bad: str = "") -> None:
        torch.manual_seed(0)
        model = Masked().to(device)
        optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
        for number, (x, y) in enumerate(BATCHES):
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            if number == BAD and bad == "loss":
                loss = loss + NAN
            loss.backward()
            if number == BAD and bad == "gradient":
                model.layers[2].bias.grad[1] = NAN
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
        self.state = everything(model, [optimizer], torch.get_rng_state())


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The readings of the steps that are recorded from now on."""
    readings: list[Any] = []
    record = Journal.record

    def noting(journal: Journal, outcome: Any) -> None:
        record(journal, outcome)
        readings.append(outcome.verdict.reading)

    hear_together = Observers.hear_together

    def noting_together(observers: Observers, steps: Any) -> None:
        hear_together(observers, steps)
        readings.extend(sound_reading(*each) for each in steps)

    monkeypatch.setattr(Journal, "record", noting)
    monkeypatch.setattr(Observers, "hear_together", noting_together)
    return readings


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("bad", ["", "loss", "gradient"])
def test_the_loss_goes_beside_the_norms_of_a_program_that_clips(
    bad: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[torch.dtype] = []
    post = AsyncReadback.post
    monkeypatch.setattr(AsyncReadback, "post", lambda self, values: copies.append(values.dtype) or post(self, values))
    readings = recorded(monkeypatch)
    with nanguard.install(sync="eager"):
        eager = Clipped(device, bad)
    of_eager, readings[:] = list(readings), []
    with nanguard.install(sync="late") as autopilot:
        late = Clipped(device, bad)
    assert copies.count(torch.float32) >= STEPS - 5  # most steps need no vector of their own
    num_alike = BAD + 1 if bad else STEPS  # what is in flight behind a bad step counts as lost
    assert [r.step for r in readings[:num_alike]] == list(range(num_alike))
    for ours, other in zip(readings[:num_alike], of_eager, strict=False):
        assert (ours.found, ours.gradients) == (other.found, other.gradients)
        assert [ours.loss, *ours.norms] == pytest.approx([other.loss, *other.norms], rel=1e-6, nan_ok=True)
    assert [each.outcome.verdict.reading.step for each in autopilot.incidents] == ([BAD] if bad else [])
    if not bad:
        assert differences(Clipped(device).state, late.state) == []
        assert differences(eager.state, late.state) == []


def test_a_forked_process_does_not_write_the_steps_of_its_parent(tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(FORKS)
    subprocess.run([sys.executable, tmp_path / "forks.py", tmp_path / "run"], check=True)
    steps = [each["step"] for each in logged(tmp_path / "run") if each["event"] == "step"]
    assert steps == list(range(11))


def logged(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (run_dir / "run.jsonl").read_text().splitlines()]


class Hearing(nanguard.Observer):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_heard(self, outcome: Any) -> None:
        self.steps.append(outcome.verdict.reading.step)


class Patient(Hearing):
    def hear_together(self, steps: Any) -> None:
        self.steps += [step for step, *_ in steps]


def test_steps_wait_to_be_recorded_only_if_no_observer_of_the_user_hears_of_them() -> None:
    observer = Hearing()
    journal = Journal(Observers([observer]))
    for step in range(3):
        journal.add_sound((step, 1.0, (1.0,), (0.1,)))
        assert observer.steps == list(range(step + 1))

    waiting = Patient()
    journal = Journal(Observers([waiting]))
    for step in range(3):
        journal.add_sound((step, 1.0, (1.0,), (0.1,)))
    assert waiting.steps == []
    assert journal.counts["applied"] == 3
    assert waiting.steps == [0, 1, 2]
    assert [reading.step for reading in journal.recent] == [0, 1, 2]


def test_our_own_error_in_a_sound_step_does_not_end_the_program(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = train(Plain, "eager", BATCHES)
    with nanguard.install() as autopilot:

        def spoil(number: int, *_: Any) -> None:
            if number == 4:

                def broken(*_: Any) -> None:
                    raise IndexError("a bug of ours")

                monkeypatch.setattr(hosted_step(autopilot).sound, "measure", broken)

        guarded = train(Plain, "eager", BATCHES, spoil)
    assert differences(plain, guarded) == []
    assert "not guarded from now on" in caplog.text


@pytest.mark.cuda
@pytest.mark.parametrize("make", LATE)
def test_sound_steps_never_wait_for_the_gpu(make: Any) -> None:
    def trained(*, guarded: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model = make().to("cuda")
        optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
        batches = [(x.to("cuda"), y.to("cuda")) for x, y in make_batches(50)]
        try:
            for number, (x, y) in enumerate(batches):
                torch.cuda.set_sync_debug_mode("error" if number >= 10 else "default")
                F.cross_entropy(model(x), y).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if guarded:
            assert hosted_step(autopilot).sound.is_on
        return everything(model, [optimizer])

    plain = trained(guarded=False)
    with nanguard.install() as autopilot:
        guarded = trained(guarded=True)
    assert differences(plain, guarded) == []
    assert autopilot.counts["applied"] == 50
