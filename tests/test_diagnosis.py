"""A diagnosis leaves no trace, keeps to its budget, and never stops a run that is safe."""

from __future__ import annotations

import copy
import io
import itertools
import json
import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import nanguard
from helpers import INF, NAN, TinyNet, differences, everything, line, loss_fn, make_batches, poisoned
from nanguard import Guard, Halt, Policy, ProtocolError, Skip, Snapshots
from nanguard.diagnosis import search
from nanguard.diagnosis.examiner import Examiner
from nanguard.diagnosis.replay import Replay
from nanguard.records.diagnosis import Diagnosis, Fix, Link, Operand, Source, Stretch, Trial
from nanguard.records.plain import plain
from nanguard.step import module_rows
from optimizers import ALL

LINES = Path(__file__).read_text().splitlines()
SYNCS = ["eager", "late"]
PATIENT = Policy([Skip(99)])


def the(guard: Guard, place: int = -1) -> Diagnosis:
    diagnosis = guard.incidents[place].diagnosis
    assert diagnosis is not None
    return diagnosis


# ---- no trace ------------------------------------------------------------------------------------------------------


class Rich(nn.Module):
    """Statistics, random numbers of all kinds, a generator of its own, a frozen part, and one in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.still = nn.BatchNorm1d(12).eval()
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.spectral = parametrizations.spectral_norm(nn.Linear(12, 12))
        self.unowned = nn.Parameter(torch.ones(12))
        self.out = nn.Linear(12, 3)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("seen", None)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = x.detach().mean(0)
        h = self.spectral(self.frozen(self.still(self.norm(self.inp(x))))) * self.unowned
        h = F.dropout(h, 0.1, self.training) + torch.randn(12, generator=self.generator) * 0.01
        return self.out(h * (1 + 0.01 * random.random() + 0.01 * float(np.random.rand())))


def owned(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name != "unowned" and p.requires_grad]


def breaking(model: nn.Module, batch: Any) -> Tensor:
    return loss_fn(model, batch) + (model.out.weight * 0).sqrt().sum()


def hooks_of(module: nn.Module) -> list[tuple[str, int]]:
    return [(key, len(value)) for key, value in vars(module).items() if "hooks" in key and isinstance(value, dict)]


def world(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """All that an examination could leave its mark on."""
    state = everything(model, optimizers)
    for name, p in model.named_parameters():
        state[f"gradient {name}"] = None if p.grad is None else p.grad.clone()
        state[f"requires_grad {name}"] = p.requires_grad
        state[f"hooks {name}"] = len(p._backward_hooks or ())
    for name, module in model.named_modules():
        state[f"training {name}"], state[f"hooks {name}"] = module.training, hooks_of(module)
        state[f"keys {name}"] = sorted(key for key in vars(module) if key != "__prepare_scriptable__")  # of our hooks
    state["random"] = [torch.get_rng_state(), random.getstate(), repr(np.random.get_state())]
    state["generator"] = model.generator.get_state() if isinstance(model, Rich) else None
    state["grad mode"] = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    state["autocast"] = torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu"))
    state["autocast cache"] = torch.is_autocast_cache_enabled()
    state["anomaly"] = torch.is_anomaly_enabled()
    state["deterministic"] = torch.are_deterministic_algorithms_enabled()
    return state


@pytest.mark.parametrize("name", ["none", *ALL])
def test_diagnose_leaves_no_trace(name: str) -> None:
    torch.manual_seed(0)
    model, (batch, later) = Rich(), make_batches(2)
    optimizer = None if name == "none" else ALL[name](owned(model))
    loss_fn(model, later).backward()
    if optimizer is not None:
        optimizer.step()
    for place, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, 0.5) if place % 3 else None
    before, data = world(model, *filter(None, [optimizer])), [t.clone() for t in batch]
    diagnosis = nanguard.diagnose(model, breaking, batch, optimizer, precision="bf16")
    assert (diagnosis.cause, diagnosis.depth) == ("sqrt_grad_at_zero", "full")
    assert diagnosis.num_replays > 2
    assert differences(before, world(model, *filter(None, [optimizer]))) == []
    assert all(map(torch.equal, data, batch))


@pytest.mark.parametrize("name", ["none", "AdamW foreach", "Lion", "fused SGD momentum", "RAdam"])
def test_diagnose_leaves_no_trace_where_there_is_nothing_to_find(name: str) -> None:
    """With an optimizer the update was made, on copies, and its state not even created."""
    torch.manual_seed(0)
    model, (batch,) = Rich(), make_batches(1)
    optimizer = None if name == "none" else ALL[name](owned(model))
    model.seen = torch.zeros(6)
    before = world(model, *filter(None, [optimizer]))
    with pytest.raises(ProtocolError, match="nothing to diagnose"):
        nanguard.diagnose(model, loss_fn, batch, optimizer, precision="fp32")
    assert differences(before, world(model, *filter(None, [optimizer]))) == []
    assert optimizer is None or not optimizer.state


class Odd(torch.optim.SGD):
    """Keeps things where torch's own keep none: a list and a tensor as state, an option that its step makes."""

    def step(self, closure: Any = None) -> Any:
        self.state["history"] = [*self.state.get("history", []), len(self.state)]
        self.state["total"] = self.state.get("total", torch.zeros(1)) + 1
        self.param_groups[0]["num_steps"] = self.param_groups[0].get("num_steps", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("has_stepped", [False, True])
def test_an_optimizer_that_keeps_its_state_in_its_own_way(has_stepped: bool) -> None:
    model, (batch,) = TinyNet(), make_batches(1)
    optimizer = Odd(model.parameters(), lr=0.1, momentum=0.9)
    if has_stepped:
        loss_fn(model, batch).backward()
        optimizer.step()
    state, options = copy.deepcopy(dict(optimizer.state)), dict(optimizer.param_groups[0])
    before = {"model": everything(model, []), "state": list(state.values()), "options": {**options, "params": None}}
    with pytest.raises(ProtocolError, match="nothing to diagnose"):
        nanguard.diagnose(model, loss_fn, batch, optimizer, precision="fp32")
    now = {**optimizer.param_groups[0], "params": None}
    after = {"model": everything(model, []), "state": list(optimizer.state.values()), "options": now}
    assert differences(before, after) == []


def test_diagnose_leaves_no_trace_where_the_program_raises() -> None:
    model, (batch,) = Rich(), make_batches(1)
    model.seen = torch.zeros(6)
    optimizer = torch.optim.AdamW(owned(model))

    def raises(model: nn.Module, batch: Any) -> Tensor:
        loss_fn(model, batch)
        model.out.weight.data.zero_()
        raise ArithmeticError("of the program")

    before = world(model, optimizer)
    with pytest.raises(ArithmeticError, match="of the program"):
        nanguard.diagnose(model, raises, batch, optimizer, precision="fp32")
    assert differences(before, world(model, optimizer)) == []


def test_diagnose_inside_the_programs_own_modes() -> None:
    model, (batch,) = Rich().eval(), make_batches(1)
    model.seen = torch.zeros(6)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.autograd.set_detect_anomaly(True, False):
        before = world(model)
        assert before["anomaly"]
        assert nanguard.diagnose(model, breaking, batch).cause == "sqrt_grad_at_zero"
        assert differences(before, world(model)) == []


def test_gradients_of_the_data_stay_as_they_are() -> None:
    model, (batch,) = TinyNet(), make_batches(1)
    x = batch[0].requires_grad_()
    x.grad = torch.ones_like(x)
    nanguard.diagnose(model, breaking, (x, batch[1]), precision="fp32")
    assert bool((x.grad == 1).all())


class Writing(TinyNet):
    """Its forward pass writes to a parameter, a buffer and the optimizer's state, and the loss to the data."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        super().__init__()
        self.optimizers = optimizers
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.out.bias.add_(0.001)
            self.average.mul_(0.9).add_(x.nan_to_num().mean(0), alpha=0.1)
            for state in self.optimizers[0].state.values() if self.optimizers else ():
                state["exp_avg"].mul_(0.99)
        return super().forward(x)


def writing_loss(model: nn.Module, batch: Any) -> Tensor:
    batch[0].mul_(1.01)
    return loss_fn(model, batch)


@pytest.mark.parametrize("sync", SYNCS)
def test_what_the_program_itself_writes_is_not_written_again_by_replays(sync: str) -> None:
    """Compared to a run that is not examined, down to the data."""

    def run(diagnose: Any) -> tuple[dict[str, Any], list[Any], int]:
        torch.manual_seed(0)
        optimizers: list[torch.optim.Optimizer] = []
        model = Writing(optimizers)
        optimizers.append(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
        guard = Guard(model, optimizers[0], precision="bf16", sync=sync, diagnose=diagnose, snapshots=None)
        batches = poisoned(make_batches(12), 5)
        for batch in guard.epoch(batches):
            guard.step(writing_loss, batch)
        replays = sum(i.diagnosis.num_replays for i in guard.incidents if i.diagnosis)
        return everything(model, optimizers), [x.nan_to_num() for x, _ in batches], replays

    state, data, replays = run("full")
    plain_state, plain_data, _ = run("off")
    assert replays > 2
    assert differences(plain_state, state) == []
    assert all(map(torch.equal, plain_data, data))


def guarded_run(
    diagnose: Any, sync: str, precision: Any, style: str, scale: Any = "auto"
) -> tuple[dict[str, Any], Guard]:
    """Poisoned data, and a gradient that is infinite, among healthy steps."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Rich()
    model.seen = torch.zeros(6)
    optimizer = torch.optim.AdamW(owned(model), lr=1e-2, fused=True)
    accumulate = 2 if style == "accumulation" else 1
    options: Any = {"accumulate": accumulate, "diagnose": diagnose, "loss_scale": scale}
    guard = Guard(model, optimizer, precision=precision, sync=sync, snapshots=None, **options)
    guard.keep_fp32("spectral")
    for number, batch in enumerate(guard.epoch(poisoned(make_batches(16), 5))):
        loss_of = breaking if number == 11 else loss_fn
        if style == "own loop":
            with guard.autocast():
                loss = loss_of(model, batch)
            guard.backward(loss)
            guard.update()
        else:
            guard.step(loss_of, batch)
    assert guard.kept_fp32 == ("spectral",)
    assert guard.precision == precision
    model.unowned.grad = None  # it has no optimizer, and keeps whatever the bad steps have left
    state = world(model, optimizer)
    return {key: value for key, value in state.items() if "hooks" not in key}, guard


@pytest.mark.parametrize("style", ["step", "own loop", "accumulation"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("sync", SYNCS)
def test_a_run_that_is_examined_ends_in_the_same_weights(sync: str, precision: Any, style: str) -> None:
    examined, guard = guarded_run("full", sync, precision, style)
    not_examined, other = guarded_run("off", sync, precision, style)
    assert [incident.diagnosis is None for incident in other.incidents] == [True] * len(guard.incidents)
    assert the(guard, 0).cause == "input_nonfinite"
    assert the(guard, 0).num_replays > (style != "accumulation")
    assert guard.counts == other.counts
    assert differences(not_examined, examined) == []


def test_the_loss_scale_and_precision_stay_as_they_are() -> None:
    states = []
    for diagnose in ("full", "off"):
        _, guard = guarded_run(diagnose, "eager", "fp16", "own loop", nanguard.LossScale(initial=1024.0))
        parts = guard._parts
        assert parts.precision.dtype is torch.float16
        states.append(parts.precision.scaler.state_dict())
    assert states[0] == states[1]


# ---- what was captured ---------------------------------------------------------------------------------------------


class Fragile(nn.Module):
    """Breaks where the input is zero: forward, or in its derivative alone."""

    def __init__(self, function: Callable[[Tensor], Tensor] = torch.log) -> None:
        super().__init__()
        self.lin, self.function = nn.Linear(6, 6), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.lin(x) * 0 + x)  # fragile


def with_zero(*, size: int = 8, samples: tuple[int, ...] = (2,)) -> Tensor:
    x = torch.rand(size, 6, generator=torch.Generator().manual_seed(0)) + 0.1
    x[list(samples), 0] = 0.0
    return x


def fragile(function: Callable[[Tensor], Tensor] = torch.log, **options: Any) -> Guard:
    model = Fragile(function)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    return Guard(model, optimizer, **{"precision": "fp32", "policy": PATIENT, **options})


def own(guard: Guard, x: Tensor, loss_of: Callable[[Any], Tensor] = lambda out: out.sum()) -> None:
    with guard.autocast():
        loss = loss_of(guard.model(x))
    guard.backward(loss)
    guard.update()
    guard.settle()


def test_a_step_that_the_guard_runs_is_replayed_whole() -> None:
    guard = fragile()
    guard.step(lambda model, x: model(x).sum(), with_zero())
    assert (the(guard).capture, the(guard).depth, the(guard).op) == ("step", "full", "log")


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize(("function", "phase"), [(torch.log, "forward"), (torch.sqrt, "backward")])
def test_in_a_loop_of_ones_own_the_model_is_replayed_at_once(function: Any, phase: str, sync: str) -> None:
    guard = fragile(function, sync=sync)
    own(guard, with_zero() + 1)
    own(guard, with_zero())
    diagnosis = the(guard)
    assert (diagnosis.capture, diagnosis.phase, diagnosis.op) == ("tape", phase, function.__name__)
    assert diagnosis.source is not None
    assert diagnosis.source.line == line("fragile")
    assert diagnosis.samples == (2,)
    assert diagnosis.repeats


@dataclass
class Output:
    values: Tensor
    name: str = "output"


@pytest.mark.parametrize("wrap", [lambda out: {"values": out}, lambda out: (out, None), Output])
def test_whatever_the_model_returns(wrap: Callable[[Tensor], Any]) -> None:
    def unwrap(out: Any) -> Tensor:
        return (out["values"] if isinstance(out, dict) else out[0] if isinstance(out, tuple) else out.values).sum()

    guard = fragile(lambda x: wrap(x.sqrt()))
    own(guard, with_zero(), unwrap)
    assert (the(guard).capture, the(guard).phase, the(guard).op) == ("tape", "backward", "sqrt")


def test_a_model_that_cannot_be_called_again_is_traced_the_next_time() -> None:
    used: list[Any] = []

    def once(x: Tensor) -> Tensor:
        if any(x.shape == each.shape for each in used):
            raise RuntimeError("used up")
        used.append(x)
        return x.log()  # once

    guard = fragile(once)
    own(guard, with_zero())
    assert (the(guard).capture, the(guard).cause, the(guard).is_line_traced) == ("graph", "log_of_zero", False)
    own(guard, with_zero(size=9))
    assert (the(guard).capture, the(guard).cause) == ("live", "log_of_zero")
    assert the(guard).source.line == line("once")


SEARCHES = f"up to {search.BURST} of the next steps are traced as they run, then at most 2% of the time"


def bad_loss(out: Tensor) -> Tensor:
    return out.sum() + (out.detach() - 9).sum().log()  # bad loss


def bad_slope(out: Tensor) -> Tensor:
    return (out * 0).sqrt().sum()  # bad slope


@pytest.fixture
def without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """All data are too large to keep copies of them."""
    monkeypatch.setattr(module_rows, "_LARGEST_COPY", 0)


def only_once(loss_of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same loss, of something that is counted in place: without copies it cannot be computed again afterwards."""
    count = torch.ones(())

    def loss(out: Tensor) -> Tensor:
        value = loss_of(out + count)  # counted
        count.add_(1)
        return value

    return loss


COUNTED = (
    "the torch calls of the step could not be made again: add (test_diagnosis.py:{}) was given a tensor that has been "
    "changed in place since"
)


@pytest.mark.usefixtures("without_copies")
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize(
    ("loss_of", "mark", "words"),
    [
        (bad_loss, "bad loss", "the fault is in the code around it"),
        (bad_slope, "bad slope", "the fault is in the loss"),
    ],
)
def test_a_loss_that_cannot_be_computed_again_is_traced_the_next_time(
    loss_of: Any, mark: str, words: str, sync: str
) -> None:
    guard = fragile(torch.relu, sync=sync)
    loss_of = only_once(loss_of)
    own(guard, with_zero())
    own(guard, with_zero(), loss_of)
    assert (the(guard).capture, the(guard).cause) == ("module", "unknown")
    assert words in the(guard).because
    assert the(guard).notes == (SEARCHES, COUNTED.format(line("counted")))
    own(guard, with_zero())
    own(guard, with_zero(), loss_of)
    assert the(guard).capture == "live"
    assert the(guard).cause in ("log_of_negative", "sqrt_grad_at_zero")
    assert the(guard).source is not None
    assert the(guard).source.line == line(mark)
    assert len(guard.incidents) == 2


def test_where_nothing_was_captured_it_says_so_and_traces_the_next_steps() -> None:
    guard = fragile(torch.sqrt)  # finite itself, and its derivative is not: the graph of the loss says nothing

    def step() -> None:
        out = guard.model(with_zero())
        with guard.autocast():
            loss = out.sum()
        guard.backward(loss)
        guard.update()

    step()
    assert (the(guard).capture, the(guard).cause) == ("none", "unknown")
    assert "inside `with guard.autocast():`" in the(guard).fix.words
    assert "sum (test_diagnosis.py" in the(guard).because
    assert the(guard).notes == (SEARCHES,)
    step()
    assert the(guard).capture == "live"


class Methods(Fragile):
    """Is never called itself."""

    def encode(self, x: Tensor) -> Tensor:
        return (self.lin(x) * 0 + x).log()  # encode


def test_a_method_called_in_a_loop_of_ones_own_is_found() -> None:
    model = Methods()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp32", policy=PATIENT)
    with guard.autocast():
        loss = model.encode(with_zero()).sum()
    guard.backward(loss)
    guard.update()
    assert the(guard).capture == "tape"
    assert the(guard).source is not None
    assert (the(guard).cause, the(guard).source.line) == ("log_of_zero", line("encode"))


@pytest.mark.usefixtures("without_copies")
def test_a_fault_that_is_not_located_has_few_steps_traced_and_no_other_search(
    traced_ops: Counter[bool], caplog: pytest.LogCaptureFixture
) -> None:
    guard, traced = fragile(torch.relu), []
    own(guard, with_zero(), only_once(bad_loss))
    assert not traced_ops, "nothing is traced before"
    for number in range(200):
        before = traced_ops.total()
        own(guard, with_zero())
        traced += [number] if traced_ops.total() > before else []
    assert traced[: search.BURST] == list(range(search.BURST))
    assert len(traced) < 40, "after the burst only as many as fit into a small share of the time"
    for _ in range(search.BURST):
        own(guard, with_zero(), only_once(bad_slope))
        own(guard, with_zero() + 1)
    assert sum("was not located" in record.message for record in caplog.records) <= 2, "once for each kind"


def test_the_search_keeps_to_its_share_of_the_time_and_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    now, traced = [0.0], []
    found = search.Search(lambda: now[0])
    kind, other = ("loss", "unknown"), ("gradients", "unknown")
    assert not found.wants_step()
    assert found.begin(kind, 7)
    while found.is_on:
        if found.wants_step():
            traced.append(now[0])
            seconds = 9.0 if len(traced) == search.BURST + 10 else 1.0
            now[0] += seconds
            found.spent(seconds)
        else:
            now[0] += 0.1
        assert found.is_on == found.begin(kind, 8), "the same kind does not begin anew"
    assert traced[: search.BURST] == list(range(search.BURST)), "at once"
    later = traced[search.BURST :]
    assert len(traced) == search.MOST_STEPS
    assert (len(later) + 8) / (later[-1] + 1 - search.BURST) <= search.SHARE
    assert all(49 <= b - a < 51 for a, b in itertools.pairwise(later[:9])), "spread out"
    assert later[10] - later[9] >= 49 * 9, "a long one, the tenth, is paid for"
    assert not found.begin(kind, 9)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "the fault of step 7 was not located",
        "the search for the fault has ended",
    ]
    assert found.begin(other, 10)
    assert found.wants_step()
    found.found()
    assert not found.wants_step()


def test_long_steps_end_the_burst_early() -> None:
    now = [0.0]
    found = search.Search(lambda: now[0])
    found.begin(("loss",), 0)
    num = 0
    while found.wants_step():
        now[0] += 25.0
        found.spent(25.0)
        num += 1
    assert num == 3


def test_listening_keeps_nobody_from_copying_or_saving_the_model() -> None:
    guard = fragile()
    own(guard, with_zero() + 1)
    assert len(guard.model._forward_hooks) == len(guard.model._forward_pre_hooks) == 1
    saved = io.BytesIO()
    torch.save(guard.model, saved)
    saved.seek(0)
    for again in (copy.deepcopy(guard.model), torch.load(saved, weights_only=False)):
        again(with_zero())
        assert list(again.state_dict()) == list(guard.model.state_dict())
    assert guard._parts.pending is None
    own(guard, with_zero())
    assert the(guard).capture == "tape"
    assert len(guard.model._forward_hooks) == 1, "one pair of hooks, however many steps"


def test_a_compiled_model_is_listened_to() -> None:
    model = torch.compile(Fragile(torch.sqrt), backend="eager")
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp32")
    for x in (with_zero() + 1, with_zero()):
        own(guard, x)
    assert (the(guard).capture, the(guard).op) == ("tape", "sqrt")
    assert the(guard).source is not None
    assert the(guard).source.line == line("fragile")
    torch.compiler.reset()


def test_nobody_listens_who_was_told_not_to() -> None:
    guard = fragile(diagnose="off")
    own(guard, with_zero())
    assert not guard.model._forward_hooks
    assert not guard.model._forward_pre_hooks
    assert guard.incidents[0].diagnosis is None


# ---- how deeply ----------------------------------------------------------------------------------------------------


def train(guard: Guard, *inputs: Tensor) -> Guard:
    for x in inputs:
        guard.step(lambda model, x: model(x).sum(), x)
    guard.settle()
    return guard


def test_the_first_of_a_kind_is_examined_fully_and_repeats_briefly_up_to_eight() -> None:
    guard = train(fragile(), *[with_zero()] * 10)
    depths = [the(guard, i).depth for i in range(10)]
    assert depths == ["full"] + ["brief"] * 9
    assert [bool(the(guard, i).notes) for i in range(10)] == [False] * 8 + [True] * 2
    assert the(guard).notes == ("not examined: the 8 before it all had the same result",)
    assert the(guard).step == 9
    assert the(guard).cause == "log_of_zero"


def test_a_fault_of_another_kind_is_examined_however_many_came_before() -> None:
    guard = train(fragile(), *[with_zero()] * 10)
    guard.model.function = torch.sqrt
    train(guard, with_zero())
    assert (the(guard).op, the(guard).depth, the(guard).notes) == ("sqrt", "full", ())


def test_after_a_long_while_it_is_looked_at_again() -> None:
    guard = train(fragile(), *[with_zero()] * 10, *[with_zero() + 1] * 110)
    guard.model.function = lambda x: x.log()
    train(guard, with_zero())
    assert the(guard).notes == ()


def test_how_deeply_can_be_chosen() -> None:
    assert [the(train(fragile(diagnose="full"), *[with_zero()] * 10), i).depth for i in range(10)] == ["full"] * 10
    guard = train(fragile(diagnose="brief"), *[with_zero()] * 10)
    assert [(the(guard, i).depth, the(guard, i).num_replays) for i in range(10)] == [("brief", 1)] * 10
    guard = train(fragile(diagnose="off"), with_zero())
    assert guard.incidents[0].diagnosis is None
    with pytest.raises(ValueError, match="diagnose must be one of"):
        fragile(diagnose="deeply")


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("style", ["step", "own loop"])
def test_a_fault_in_the_diagnosis_never_stops_a_run(
    sync: str, style: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise LookupError("in the diagnosis itself")

    monkeypatch.setattr(Examiner, "examine", fails)
    caplog.set_level(logging.INFO, logger="nanguard")
    guard = fragile(sync=sync)
    for x in (with_zero() + 1, with_zero(), with_zero() + 1):
        train(guard, x) if style == "step" else own(guard, x)
    assert guard.counts["applied"] == 2
    assert guard.counts["skipped"] == 1
    assert "in the diagnosis itself" in caplog.text
    diagnosis = guard.incidents[0].diagnosis
    assert diagnosis is None if style == "step" else diagnosis is not None and diagnosis.capture == "graph"


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_program_that_raises_when_it_is_run_again(
    error: type[BaseException], sync: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The step is answered and counted once; an interrupt is then raised, and the run can go on after it."""
    calls: list[int] = []

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        if bool((x == 0).any()):
            calls.append(1)
            if len(calls) == 2:
                raise error("while examined")
        return model(x).sum()

    guard = fragile(sync=sync)
    before = everything(guard.model, guard.optimizers)
    good, bad = with_zero() + 1, with_zero()
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt, match="while examined"):
            guard.step(loss_of, bad)
            guard.settle()
    else:
        guard.step(loss_of, bad)
        guard.settle()
        assert "while examined" in caplog.text
    assert differences(before, everything(guard.model, guard.optimizers)) == []
    assert guard.counts["skipped"] == len(guard.incidents) == 1
    guard.step(loss_of, good)
    guard.step(loss_of, bad)
    guard.settle()
    assert guard.counts["applied"] == 1
    assert guard.counts["skipped"] == 2
    assert the(guard).cause == "log_of_zero"


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_gets_out_of_an_examination_of_a_run_that_halts(interrupt: type[BaseException], sync: str) -> None:
    """Not in the place of a later one, either."""
    calls: list[int] = []

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        if bool((x == 0).any()):
            calls.append(1)
            if len(calls) == 2:
                raise interrupt("while examined")
        return model(x).sum()

    guard = fragile(sync=sync, policy=Policy([Halt()]))
    before = everything(guard.model, guard.optimizers)
    with pytest.raises(interrupt, match="while examined"):
        guard.step(loss_of, with_zero())
        guard.settle()
    assert differences(before, everything(guard.model, guard.optimizers)) == []
    with pytest.raises(nanguard.NonFiniteError):
        guard.step(loss_of, with_zero())
        guard.settle()


# ---- trials --------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Multiplies by so much that fp16 does not hold it, and divides again."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.lin, self.factor = nn.Linear(6, 6), factor
        nn.init.eye_(self.lin.weight)
        nn.init.zeros_(self.lin.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x * self.factor).softmax(-1) * 6


class Chain(nn.Module):
    def __init__(self, *factors: float) -> None:
        super().__init__()
        self.parts = nn.ModuleList(map(Scaled, factors))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.parametrize(
    ("factors", "kept"),
    [
        ((1.0, 1e6, 1.0), {"parts.1"}),
        ((1e6, 1.0, 1e6), {"parts.0", "parts.2"}),
        ((1e6, 1e6, 1.0, 1e6), {"parts.0", "parts.1", "parts.3"}),
    ],
)
def test_the_fewest_modules_that_help_are_named(factors: tuple[float, ...], kept: set[str]) -> None:
    model = Chain(*factors)
    diagnosis = nanguard.diagnose(model, lambda m, x: m(x).square().sum(), torch.rand(4, 6) + 1, precision="fp16")
    assert diagnosis.cause == "overflow_fp16"
    assert diagnosis.confidence == "certain"
    assert diagnosis.fix.worked is True
    assert {name.removesuffix(".lin") for name in diagnosis.modules_to_keep} == kept
    assert len(diagnosis.modules_to_keep) == len(kept)
    assert all(name in diagnosis.fix.code for name in diagnosis.modules_to_keep)


def test_what_no_precision_helps_names_no_module() -> None:
    diagnosis = nanguard.diagnose(Fragile(), lambda m, x: m(x).sum(), with_zero(), precision="bf16")
    assert diagnosis.modules_to_keep == ()
    assert diagnosis.fix.worked is None
    assert diagnosis.tried[0] == Trial(what="the whole step in fp32", result="non-finite")


@pytest.mark.parametrize("bad", [(2,), (7,), (0, 1), (3, 4), (1, 6), (0, 3, 7)])
def test_the_samples_are_named(bad: tuple[int, ...]) -> None:
    """By the op itself, and by halving the batch where the op has lost sight of them."""
    seen = nanguard.diagnose(Fragile(), lambda m, x: m(x).sum(), with_zero(samples=bad), precision="fp32")
    assert seen.samples == bad

    def mixed(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x + 1) * 0 + x).prod(1).min().log()

    halved = nanguard.diagnose(Fragile(), mixed, with_zero(samples=bad), precision="fp32")
    assert halved.op == "log"
    assert halved.samples == bad


def test_a_batch_of_which_every_half_is_needed_names_no_sample() -> None:
    def all_together(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x).sum() * 0 + 1.0 - int(len(x) == 8)).log()

    diagnosis = nanguard.diagnose(Fragile(torch.relu), all_together, with_zero() + 1, precision="fp32")
    assert (diagnosis.cause, diagnosis.samples) == ("log_of_zero", ())


def test_a_program_for_batches_of_one_size_is_tried_with_samples_several_times_over() -> None:
    def fussy(model: nn.Module, x: Tensor) -> Tensor:
        return model(x.view(8, -1)).sum()

    diagnosis = nanguard.diagnose(Fragile(), fussy, with_zero(), precision="fp32")
    tried = [(trial.what, trial.result) for trial in diagnosis.tried]
    assert tried == [("sample 2 alone", "non-finite"), ("the batch without sample 2", "finite")]
    assert diagnosis.samples == (2,)


@pytest.mark.parametrize("size", [8, 3])
def test_a_table_with_as_many_rows_as_the_batch_blames_no_sample(size: int) -> None:
    table = torch.zeros(8, 6)
    table[0, 0] = NAN
    diagnosis = nanguard.diagnose(
        Fragile(torch.relu), lambda m, x: m(x + table[: len(x)]).sum(), torch.ones(size, 6), precision="fp32"
    )
    assert (diagnosis.cause, diagnosis.samples) == ("input_nonfinite", ())


def test_why_something_was_not_tried_is_said() -> None:
    def fussy(model: nn.Module, x: Tensor) -> Tensor:
        if not torch.equal(x, with_zero()):
            raise IndexError("always the same ones")
        return model(x).sum()

    diagnosis = nanguard.diagnose(Fragile(), fussy, with_zero(), precision="fp32")
    assert {trial.result for trial in diagnosis.tried} == {None}
    assert {trial.detail for trial in diagnosis.tried} == {"raises IndexError: always the same ones"}
    assert diagnosis.samples == ()  # no experiment shows it
    assert "no result: raises IndexError" in diagnosis.report()

    def large(model: nn.Module, x: Tensor) -> Tensor:
        if not torch.equal(x, with_zero()):
            raise torch.OutOfMemoryError("too large")
        return model(x).sum()

    diagnosis = nanguard.diagnose(Fragile(), large, with_zero(), precision="fp32")
    assert {trial.detail for trial in diagnosis.tried} == {"not enough memory"}


def test_trials_keep_to_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    replays: list[Any] = []

    def slow(self: Replay, **conditions: Any) -> bool:
        replays.append(conditions)
        self.seconds_of_last = 1.0
        return conditions.get("fp32") == [""]

    monkeypatch.setattr(Replay, "is_finite", slow)
    diagnosis = nanguard.diagnose(
        Chain(*[1e6] * 60), lambda m, x: m(x).square().sum(), torch.rand(64, 6) + 1, precision="fp16"
    )
    assert 10 < len(replays) <= 40
    budgets = [trial for trial in diagnosis.tried if trial.detail == "the budget of time was used up"]
    assert len(budgets) <= 1
    assert len(diagnosis.tried) == len(replays) + len(budgets)

    replays.clear()
    monkeypatch.setattr("nanguard.diagnosis.examiner._BUDGET", 3.0)
    diagnosis = nanguard.diagnose(
        Chain(*[1e6] * 60), lambda m, x: m(x).square().sum(), torch.rand(64, 6) + 1, precision="fp16"
    )
    assert len(replays) == 3
    assert diagnosis.tried[-1].result is None


# ---- damage by the update ------------------------------------------------------------------------------------------


class Spoiler(torch.optim.SGD):
    """Makes a NaN of the finite gradients of one batch, twice: when it comes, and when it comes again."""

    marks: int = 0

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        gradient = self.param_groups[0]["params"][0].grad
        if gradient is not None and bool(gradient.abs().max() == 0) and self.marks < 2:
            self.marks += 1
            with torch.no_grad():
                weight = self.param_groups[0]["params"][0]
                weight.mul_(weight.sum() / 0 * 0)  # spoils


def silent(model: nn.Module, batch: Any) -> Tensor:
    """No gradient at all where the batch is all zeros."""
    return loss_fn(model, batch) * bool((batch[0] != 0).any())


def test_an_update_that_spoils_the_weights_is_caught_when_it_happens_again() -> None:
    batches = make_batches(40)
    batches[25] = (torch.zeros_like(batches[25][0]), batches[25][1])
    torch.manual_seed(0)
    model = TinyNet()
    optimizer = Spoiler(model.parameters(), lr=1e-2)
    guard = Guard(model, optimizer, precision="fp32", max_norm=None, snapshots=Snapshots(every=10, keep=3))
    for batch in guard.epoch(batches):
        guard.step(silent, batch)
    first, second = guard.incidents
    assert first.outcome.verdict.kind == "damage"
    assert first.outcome.action.response == "roll_back"
    assert (the(guard, 0).cause, the(guard, 0).batch) == ("parameter_corrupted", 25), "seen one step later"
    assert "updates are checked from now on" in the(guard, 0).notes[-1]
    assert (second.reading.found, second.reading.batch) == (("update",), 25)
    assert second.outcome.action.response == "skip"
    assert the(guard, 1).phase == "optimizer"
    assert all(bool(t.isfinite().all()) for t in model.state_dict().values())
    assert guard.can_save()


class Underflows(torch.optim.Optimizer):
    """Divides by the root of a mean square that is exactly zero where a gradient is."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2, "eps": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            state.setdefault("square", torch.ones_like(p))
            skip = getattr(self, "found_inf", torch.zeros(())) != 0
            square = state["square"] * bool((p.grad != 0).any())
            change = p.grad / (square.sqrt() + self.param_groups[0]["eps"])  # underflows
            p.copy_(torch.where(skip, p, p - 1e-2 * change))


def test_eager_and_late_find_the_same_fault_of_an_optimizer() -> None:
    def run(sync: str) -> tuple[dict[str, Any], Guard]:
        batches = make_batches(40)
        batches[25] = (torch.zeros_like(batches[25][0]), batches[25][1])
        torch.manual_seed(0)
        model = TinyNet()
        optimizer = Underflows(model.parameters())
        ring = Snapshots(every=10, keep=3)
        guard = Guard(model, optimizer, precision="fp32", max_norm=None, sync=sync, snapshots=ring)
        for batch in guard.epoch(batches):
            guard.step(silent, batch)
        assert all(bool(t.isfinite().all()) for t in model.state_dict().values())
        return everything(model, [optimizer]), guard

    eager, guard = run("eager")
    late, other = run("late")
    for each in (guard, other):
        assert [i.outcome.action.response for i in each.incidents] == ["roll_back", "skip"]
        assert (the(each).phase, the(each).op, the(each).batch) == ("optimizer", "div", 25)
        assert the(each).source is not None
        assert the(each).source.line == line("underflows")
    assert differences(eager, late) == []


# ---- the record ----------------------------------------------------------------------------------------------------

numbers = st.none() | st.floats()
names = st.text(max_size=12)
sources = st.none() | st.builds(Source, file=names, line=st.integers(0, 9999), function=names, text=names)
operands = st.builds(
    Operand,
    name=names,
    dtype=st.sampled_from(["float16", "float32", "bfloat16"]),
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    low=numbers,
    high=numbers,
    num_nan=st.integers(0, 9),
    value=numbers,
)
links = st.builds(Link, op=names, phase=names, module=names, source=sources, dtype=names, became=names)
stretches = st.builds(
    Stretch, module=names, kind=names, op=names, low=numbers, high=numbers, dtype=names, is_finite=st.booleans()
)
experiments = st.builds(Trial, what=names, result=st.sampled_from([None, "finite", "non-finite"]), detail=names)
fixes = st.builds(Fix, words=names, code=names, worked=st.sampled_from([None, True, False]))
BY_HAND = {
    "source": sources,
    "operands": st.lists(operands, max_size=2).map(tuple),
    "chain": st.lists(links, max_size=2).map(tuple),
    "harmless": st.lists(links, max_size=2).map(tuple),
    "trail": st.lists(stretches, max_size=2).map(tuple),
    "tried": st.lists(experiments, max_size=2).map(tuple),
    "fix": fixes,
    "step": st.none() | st.integers(0, 10**9),
    "seconds": st.floats(0, 1e6),
}


def known(value: Any) -> Any:
    """With numbers that are not equal to themselves as words."""
    return plain(value.as_dict())


@settings(max_examples=60, deadline=None)
@given(st.builds(Diagnosis, **BY_HAND))
def test_a_record_goes_through_json_and_into_words_whatever_it_holds(diagnosis: Diagnosis) -> None:
    again = Diagnosis.from_dict(json.loads(json.dumps(plain(diagnosis.as_dict()), allow_nan=False)))
    assert known(again) == known(diagnosis)
    assert str(again) == str(diagnosis)
    assert again.report() == diagnosis.report()


def test_an_operand_of_which_nothing_is_known_goes_into_words() -> None:
    assert "eps" in Diagnosis(phase="forward", cause="unknown", operands=(Operand(name="eps"),)).report()
    bad = Operand(name="output", dtype="float32", shape=(3, 2), low=0.0, high=0.0, num_nan=6)
    text = Diagnosis(phase="forward", cause="unknown", operands=(bad,)).report()
    assert "output: fp32 3 x 2, 6 NaN\n" in f"{text}\n", "without a finite value there is no range"


def test_what_the_doctor_says_goes_through_json() -> None:
    guard = train(fragile(), with_zero())
    own(guard, with_zero(), lambda out: out.sum() / 0)
    for place in range(2):
        diagnosis = the(guard, place)
        again = Diagnosis.from_dict(json.loads(json.dumps(plain(diagnosis.as_dict()))))
        assert known(again) == known(diagnosis)
        assert again.report() == diagnosis.report()
        assert replace(again) == again
    data = the(guard).as_dict()
    assert Diagnosis.from_dict({**data, "of a later version": 1}) == Diagnosis.from_dict(data)
    assert sorted(data) == sorted(field.name for field in fields(Diagnosis))


@pytest.mark.parametrize(
    "garbage",
    [
        None,
        7,
        "text",
        [],
        {},
        {"phase": "forward"},
        {"phase": "sideways", "cause": "unknown"},
        {"phase": ["forward"], "cause": "unknown"},
        {"phase": "forward", "cause": None},
        *(
            {"phase": "forward", "cause": "unknown", key: value}
            for key, value in {
                "op": 3,
                "samples": "0",
                "shape": [1.5],
                "chain": [{}],
                "source": {"file": "a.py"},
                "fix": None,
                "seconds": "soon",
                "step": True,
                "repeats": "yes",
                "tried": [{"what": "a", "result": "maybe"}],
                "operands": {"name": "x"},
                "element": 3,
            }.items()
        ),
    ],
)
def test_garbage_is_no_diagnosis(garbage: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Diagnosis.from_dict(garbage)


def test_infinite_numbers_in_a_record_are_kept() -> None:
    operand = Operand(name="x", dtype="float32", low=-INF, high=INF, value=NAN)
    diagnosis = Diagnosis(phase="forward", cause="unknown", operands=(operand,))
    (again,) = Diagnosis.from_dict(json.loads(json.dumps(plain(diagnosis.as_dict())))).operands
    assert (again.low, again.high, str(again.value)) == (-INF, INF, "nan")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        scores = self.q(h) @ self.k(h).mT
        return scores.softmax(-1) @ h


def test_growth_is_that_of_the_operands_of_the_same_pass() -> None:
    """Gradients that a loss scale has made large pass the same line, by the same op."""
    torch.manual_seed(0)
    model, h = Attention(), torch.randn(2, 3, 4)
    guard = Guard(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-9),
        policy=PATIENT,
        precision="fp16",
        loss_scale=nanguard.LossScale(initial=2.0**14),
        snapshots=Snapshots(every=2, confirm=1, keep=9),
    )
    with torch.no_grad():
        size = max(model.q(h).abs().max(), model.k(h).abs().max()).item()
    for step in range(6):
        if step == 5:
            with torch.no_grad():
                model.q.weight.mul_(400)
                model.k.weight.mul_(400)
        guard.step(lambda model, h: model(h).float().sum(), h)
    assert the(guard).cause == "attention_logit_growth"
    then = float(the(guard).because.partition("grown from ")[2].partition(" ")[0])
    assert then == pytest.approx(size, rel=0.01)
