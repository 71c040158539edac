"""Early warning: a forecast is a trend towards a limit, a NaN cannot poison it, and a watched run is the same run."""

from __future__ import annotations

import gc
import json
import logging
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import nanguard
from helpers import TinyNet, build, differences, everything, loss_fn, make_batches, own_step, poisoned
from nanguard import _compat
from nanguard.monitor import pace, signals
from nanguard.monitor.observer import Monitor
from nanguard.monitor.probe import Probe
from nanguard.monitor.quantities import KINDS, Quantity, resolution, smallest
from nanguard.monitor.series import MOST_POINTS, Series
from nanguard.monitor.trend import forecast
from nanguard.monitor.warner import Warner
from nanguard.records.alert import Alert
from nanguard.report import watch
from nanguard.report.page import make_report

OUTPUT = Quantity(kind="overflow", module="block.3", op="mm", form="fp16")
LIMIT = 65504.0


def rooms_of(values: list[float]) -> Warner:
    """A warner that has seen these rooms of one quantity, five steps apart."""
    warner = Warner()
    for place, room in enumerate(values):
        warner.look(5 * place, {OUTPUT: (OUTPUT.value(room, LIMIT), LIMIT)})
    return warner


def alerts_of(values: list[float]) -> list[Alert]:
    warner = Warner()
    return [
        alert
        for place, room in enumerate(values)
        for alert in warner.look(5 * place, {OUTPUT: (OUTPUT.value(room, LIMIT), LIMIT)})
    ]


def noisy(rooms: list[float], size: float = 0.2) -> list[float]:
    dice = random.Random(0)
    return [room + dice.gauss(0, size) for room in rooms]


# ---- trends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_a_steady_fall_is_forecast(noise: float) -> None:
    steps = list(range(0, 300, 5))
    found = forecast(steps, noisy([15 - 0.03 * step for step in steps], noise))
    assert found is not None
    truth = 15 / 0.03 - steps[-1]
    assert found.soonest <= truth <= found.latest
    assert 0.5 * truth <= found.steps_left <= 2 * truth


SHAPES: dict[str, list[float]] = {
    "constant": [8.0] * 60,
    "near the limit": [1.0] * 60,
    "spikes": [1.0 if place % 12 == 11 else 9.0 for place in range(60)],
    "a jump": [12.0] * 40 + [3.0] * 20,
    "grows, then levels off": [7 + 8 * math.exp(-place / 6) for place in range(60)],
    "a clamp": [15 - 0.2 * min(place, 35) for place in range(60)],
    "rises": [1 + 0.2 * place for place in range(60)],
    "too far away": [15 - 0.02 * place for place in range(60)],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_what_is_no_trend_has_no_forecast(shape: str, noise: float) -> None:
    rooms = noisy(SHAPES[shape], noise)
    assert forecast(list(range(0, 5 * len(rooms), 5)), rooms) is None


# ---- warnings --------------------------------------------------------------------------------------------------------


def test_a_warning_names_module_reason_advice_and_step() -> None:
    (alert,) = alerts_of([15 - 0.2 * place for place in range(60)])
    assert (alert.state, alert.module, alert.op, alert.cause) == ("raised", "block.3", "mm", "overflow_fp16")
    assert alert.earliest <= alert.crossing <= alert.latest
    assert alert.crossing == pytest.approx(375, abs=15)
    assert alert.limit == LIMIT
    assert alert.now == pytest.approx(OUTPUT.value(alert.room, LIMIT))
    assert alert.trend == pytest.approx(-0.04)
    assert "65504" in alert.reason
    assert "bf16" in alert.advice
    assert Alert.from_dict(json.loads(json.dumps(alert.as_dict()))) == alert


def test_a_warning_is_not_repeated_and_is_withdrawn_if_the_trend_ends() -> None:
    falls = [15 - 0.2 * place for place in range(50)]
    assert [alert.state for alert in alerts_of([*falls, *[falls[-1]] * 40])] == ["raised", "withdrawn"]


def test_growth_up_to_one_is_no_danger() -> None:
    tiny = [35 - 0.4 * place for place in range(50)]  # from 1e-6 to 0.8
    assert alerts_of(tiny) == []


def test_a_loss_that_rises_is_forecast_and_one_that_jumps_is_not() -> None:
    def told(losses: list[float]) -> list[Alert]:
        warner, alerts = Warner(), []
        for step, loss in enumerate(losses):
            warner.hear(loss)
            if step % 5 == 4:
                alerts += warner.look(step, {})
        return alerts

    rising = [1.0] * 100 + [1.007**place for place in range(200)]
    assert [alert.quantity for alert in told(rising)][:1] == ["loss"]
    assert told([1.0] * 100 + [2.5] * 100) == []
    assert told([1 - 0.02 * place for place in range(200)]) == [], "losses below zero have no ratio"
    assert told([30.0 if place % 60 == 59 else 1.0 for place in range(300)]) == []


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_nan_cannot_poison(data: st.DataObject) -> None:
    """Non-finite values, wherever they are, leave no trace."""
    falls = [15 - 0.2 * place for place in range(60)]
    bad = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0])
    gaps = data.draw(st.dictionaries(st.integers(0, 59), bad, max_size=20))
    clean, dirty = Warner(), Warner()
    for place, room in enumerate(falls):
        step = 5 * place
        samples = {OUTPUT: (OUTPUT.value(room, LIMIT), LIMIT)}
        if place in gaps:
            dirty.hear(math.nan)
            dirty.look(
                step, {OUTPUT: (gaps[place], LIMIT), Quantity(kind="zero", module="x", op="log"): (1.0, math.nan)}
            )
            clean.look(step, {})
        else:
            assert clean.look(step, samples) == dirty.look(step, samples)
    assert clean.state_dict() == dirty.state_dict()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 119), st.lists(st.floats(-2, 2), min_size=8, max_size=8))
def test_saved_and_loaded_it_says_the_same(cut: int, bumps: list[float]) -> None:
    values = [15 - 0.2 * min(place, 55) + bumps[place % 8] for place in range(120)]
    whole, part = Warner(), Warner()
    for place, room in enumerate(values):
        samples = {OUTPUT: (OUTPUT.value(room, LIMIT), LIMIT)}
        for warner in (whole, part):
            warner.hear(abs(room) + 0.1)
        assert whole.look(5 * place, samples) == part.look(5 * place, samples)
        if place == cut:
            saved = json.loads(json.dumps(part.state_dict(), allow_nan=False))
            part = Warner()
            part.load_state_dict(saved)
    assert whole.state_dict() == part.state_dict()


def test_the_memory_of_a_series_is_bounded() -> None:
    series = Series()
    for step in range(100_000):
        series.add(step, 1.0)
    assert len(series.steps) <= MOST_POINTS
    assert series.steps[0] == 0
    assert series.steps == sorted(set(series.steps))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_its_words(kind: str) -> None:
    quantity = Quantity(kind=kind, module="m", op="exp" if kind == "overflow" else "log", form="fp16")  # type: ignore[arg-type]
    assert Quantity.from_key(quantity.key) == quantity
    assert quantity.advice
    assert quantity.reason(1.0, 2.0)
    for room in (0.5, 3.0):
        assert quantity.room(quantity.value(room, 2.0), 2.0) == pytest.approx(room)


# ---- what is measured ------------------------------------------------------------------------------------------------


class LogLoss(nn.Module):
    """A classifier with a hand-written loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.body(x))).squeeze(-1)


def measured(model: nn.Module, loss_of: Any) -> dict[Quantity, tuple[float, float]]:
    from nanguard.monitor.probe import gathered, read

    probe = Probe(model)
    probe.arm()
    loss_of(model).backward()
    probe.disarm()
    assert probe.failure is None
    vector, places = gathered(probe.values)
    return read(probe.quantities, [vector.tolist()[place] for place in places], 1.0)


def test_ops_outside_of_modules_belong_to_the_module_that_made_their_operand() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 6)
    logits: list[Tensor] = []

    def loss_of(model: nn.Module) -> Tensor:
        logits.append(model(x))
        p = torch.sigmoid(logits[-1])
        return -(torch.log(1 - p)).mean() - torch.log(p).mean()

    found = measured(LogLoss(), loss_of)
    value, limit = found[Quantity(kind="zero", module="out", op="log", form="fp32")]
    p = torch.sigmoid(logits[0].detach())
    worst = min(
        (float((1 - p).min()), resolution("fp32")), (float(p.min()), smallest("fp32")), key=lambda e: e[0] / e[1]
    )
    assert (value, limit) == pytest.approx(worst)
    assert Quantity(kind="overflow", module="body", op="addmm", form="fp32") in found
    assert Quantity(kind="overflow", module="body", op="mm", form="fp32", backward=True) in found


def test_masks_are_left_out_and_formats_are_those_of_the_ops() -> None:
    torch.manual_seed(0)
    net = nn.Linear(6, 4)

    def loss_of(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = model(torch.randn(3, 6))
        masked = scores.masked_fill(torch.eye(3, 4, dtype=torch.bool), -math.inf)
        return masked.softmax(-1).square().sum()

    found = measured(net, loss_of)
    forms = {q.form for q in found if q.op == "addmm"}
    assert forms == {"bf16"}
    masked = next(value for q, (value, _) in found.items() if q.op == "masked_fill" and not q.backward)
    assert 0 < masked < 10


# ---- single signals --------------------------------------------------------------------------------------------------


def test_the_bound_of_attention_logits_holds_and_is_reached() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8)
    logits = q @ k.transpose(-1, -2) / 8**0.5
    assert signals.attention_bound(q, k, None) >= logits.abs().max()
    one = torch.full((1, 1, 1, 8), 3.0)
    assert signals.attention_bound(one, one, 0.5).item() == pytest.approx(0.5 * 72)
    half = torch.full((1, 1, 1, 64), 600.0, dtype=torch.float16)
    assert signals.attention_bound(half, half, 1.0).item() > LIMIT, "it does not overflow itself"


def test_a_gradient_that_is_as_before_is_level_with_adams_moment_and_a_larger_one_ahead() -> None:
    param = nn.Parameter(torch.zeros(100))
    adam = torch.optim.Adam([param], betas=(0.9, 0.99))
    for _ in range(5):
        param.grad = torch.full((100,), 0.1)
        adam.step()
    state = adam.state[param]
    moment, step = state["exp_avg_sq"], state["step"]
    assert signals.moment_lag(param.grad, moment, step, 0.99).item() == pytest.approx(1.0, rel=1e-4)
    assert signals.moment_lag(10 * param.grad, moment, step, 0.99).item() == pytest.approx(100.0, rel=1e-4)
    assert signals.moment_lag(param.grad, torch.zeros(100), step, 0.99).item() == 0.0
    assert math.isnan(signals.moment_lag(torch.full((100,), math.nan), moment, step, 0.99).item())


def test_the_growth_of_a_recurrent_weight_is_its_spectral_radius() -> None:
    turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]])  # complex eigenvalues, of size 1
    weight = torch.block_diag(0.5 * torch.eye(3), 1.25 * turn)
    vector = None
    for _ in range(6):
        growth, vector = signals.spectral_growth(weight, vector)
    assert growth.item() == pytest.approx(1.25, rel=1e-2)
    bad, after = signals.spectral_growth(weight * math.nan, vector)
    assert math.isnan(bad.item())
    assert after.isfinite().all(), "a NaN leaves no trace"


def test_the_spread_over_a_batch_vanishes_if_samples_are_the_same() -> None:
    torch.manual_seed(0)
    outputs = torch.randn(8, 4, 3)
    assert 0.1 < signals.spread_over_batch(outputs).item() < 1
    assert signals.spread_over_batch(outputs[:1].expand(8, 4, 3)).item() == 0.0
    nearly = torch.ones(8, 4) + 1e-5 * torch.randn(8, 4)
    assert signals.spread_over_batch(nearly).item() == pytest.approx(1e-5, rel=0.9)


class Recurrent(nn.Module):
    """Attention with a fused kernel, and a cell that is called ten times."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.cell, self.out = nn.Linear(6, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        q = self.inp(x).view(2, 1, -1, 8)
        h = nn.functional.scaled_dot_product_attention(q, q, q).reshape(-1, 8)
        for _ in range(10):
            h = self.cell(h)
        return self.out(h)


def test_each_signal_is_seen_where_it_is_and_its_limit_is_that_of_the_format() -> None:
    model, optimizer = build(lambda p: torch.optim.AdamW(p, lr=1e-3), model=Recurrent())
    monitor = Monitor(probe_every=2)
    guard = nanguard.Guard(model, optimizer, precision="bf16", observers=[monitor])
    for batch in make_batches(6):
        guard.step(loss_fn, batch)
    guard.close()
    watched = monitor.state_dict()["warner"]["watched"]
    found = {Quantity.from_key(key): each for key, each in watched.items()}
    where = {kind: {(q.module, q.op, q.form) for q in found if q.kind == kind} for kind in KINDS}
    assert where["attention"] == {("inp", "", "bf16")}, "ops of the model itself belong to whoever made the operand"
    assert where["spectral"] == {("cell", "weight", "bf16")}
    assert {module for module, _, _ in where["collapse"]} == {"inp", "cell", "out"}
    assert where["moment"] == {("cell", "weight", "")}, "small ones say little"
    limits = {q.kind: each["limit"] for q, each in found.items()}
    assert limits["spectral"] == limits["attention"] == torch.finfo(torch.bfloat16).max
    assert limits["moment"] == pytest.approx(1000)
    assert limits["collapse"] == resolution("bf16")
    radius = torch.linalg.eigvals(model.cell.weight.detach()).abs().max().item()
    room = next(each["rooms"][-1] for q, each in found.items() if q.kind == "spectral")
    assert room == pytest.approx(math.log2(limits["spectral"]) - 10 * math.log2(radius), abs=4)


# ---- a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["eager", "late"])
@pytest.mark.parametrize("own", [False, True])
def test_a_watched_run_is_the_same_run(sync: Any, own: bool) -> None:
    ends = []
    for observers in ([], [Monitor(probe_every=2)]):
        model, optimizer = build(lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))
        guard = nanguard.Guard(model, optimizer, precision="bf16", sync=sync, observers=observers)
        for batch in guard.epoch(poisoned(make_batches(24), 9)):
            own_step(guard, batch) if own else guard.step(loss_fn, batch)
        guard.close()
        ends.append(everything(model, [optimizer]))
    assert differences(*ends) == []


class Growing(nn.Module):
    """Its output doubles every few steps, and passes the limit of fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.gain = nn.Linear(6, 8), nn.Linear(8, 8)
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.gain(self.inp(x)).float()))


def grow(guard: Any, model: Any, steps: int) -> None:
    for batch in make_batches(steps):
        with torch.no_grad():
            model.gain.weight.mul_(1.05)
        guard.step(loss_fn, batch)


def test_a_growing_module_is_named_before_it_overflows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor(probe_every=4)
    model, optimizer = build(lambda p: torch.optim.SGD(p, lr=1e-4), model=Growing())
    guard = nanguard.Guard(
        model, optimizer, precision="fp16", loss_scale=None, observers=[monitor], run_dir=tmp_path, snapshots=None
    )
    with caplog.at_level(logging.WARNING, logger="nanguard"):
        grow(guard, model, 160)
    guard.close()
    assert guard.counts["skipped"] == 0
    first = monitor.alerts[0]
    assert (first.module, first.state) == ("gain", "raised")
    assert 160 < first.crossing < 320
    lines = [record.message for record in caplog.records if "expected" not in record.message]
    assert any(line.startswith(f"step {first.step}: gain: ") for line in lines)
    run = nanguard.read_run(tmp_path)
    told = [event for event in run.events if event.event == "alert"]
    assert [Alert.from_dict({**event.fields, "step": event.step}) for event in told] == monitor.alerts
    rooms = [event.fields["rooms"] for event in run.events if event.event == "headroom"]
    assert min(rooms[-1], key=rooms[-1].__getitem__) == "gain"
    assert monitor.headroom()["gain"] < 8
    shown = watch.view(run, run.header["time"], width=100, height=40).plain
    assert shown.count("gain") >= 2, "in the list of modules with the least room, and in the alert"
    page = make_report([tmp_path]).html
    assert "<h3>Headroom</h3>" in page
    assert page.count('class="forecast"') == sum(alert.state != "withdrawn" for alert in monitor.alerts)


def test_state_is_saved_with_json(tmp_path: Path) -> None:
    monitor = Monitor(probe_every=3)
    model, optimizer = build(lambda p: torch.optim.SGD(p, lr=1e-3))
    guard = nanguard.Guard(model, optimizer, observers=[monitor])
    for batch in make_batches(20):
        guard.step(loss_fn, batch)
    saved = json.loads(json.dumps(monitor.state_dict(), allow_nan=False))
    other = Monitor()
    other.load_state_dict(saved)
    assert other.state_dict() == monitor.state_dict()
    with pytest.raises(ValueError, match="version 1"):
        other.load_state_dict({"version": 9})


def test_an_op_that_cannot_be_measured_does_not_fail_the_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("no such op")

    monkeypatch.setattr(Probe, "_measure_outputs", fails)
    model, optimizer = build(lambda p: torch.optim.SGD(p, lr=1e-3))
    guard = nanguard.Guard(model, optimizer, observers=[Monitor(probe_every=1)])
    with caplog.at_level(logging.WARNING, logger="nanguard"):
        for batch in make_batches(5):
            guard.step(loss_fn, batch)
    assert guard.counts["applied"] == 5
    assert sum("cannot be probed any more" in record.message for record in caplog.records) == 1


def test_a_compiled_model_is_not_traced_and_not_compiled_again() -> None:
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch.manual_seed(0)
    model = torch.compile(TinyNet(), backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = Monitor(probe_every=2)
    guard = nanguard.Guard(model, optimizer, observers=[monitor])
    for batch in make_batches(3):
        guard.step(loss_fn, batch)
    once = len(compiled)
    for batch in make_batches(12):
        guard.step(loss_fn, batch)
    assert len(compiled) == once
    kinds = {key.split("|")[0] for key in monitor.state_dict()["warner"]["watched"]}
    assert kinds == {"gradient", "update"}


def test_a_compiled_model_is_probed_without_compilation_if_that_is_asked_for() -> None:
    """Ordinary steps run what was compiled before, once each, and nothing is compiled again."""
    compiled, called = [], []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)

        def run(*args: Any) -> Any:
            called.append(len(compiled))
            return graph.forward(*args)

        return run

    torch.manual_seed(0)
    model = torch.compile(TinyNet(), backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = Monitor(probe_every=3, probe_compiled=True)
    guard = nanguard.Guard(model, optimizer, precision="bf16", observers=[monitor])
    for batch in make_batches(12):
        guard.step(loss_fn, batch)
    assert len(compiled) == 1
    assert len(called) == 8, "four of twelve steps were probed"
    watched = [Quantity.from_key(key) for key in monitor.state_dict()["warner"]["watched"]]
    assert {"overflow", "gradient", "update"} <= {quantity.kind for quantity in watched}
    assert {"fp32", "bf16"} <= {quantity.form for quantity in watched}
    assert monitor.headroom()


@pytest.mark.cuda
@pytest.mark.parametrize("probe_every", [3, "auto"])
@pytest.mark.parametrize("own", [False, True])
def test_no_step_of_a_watched_run_syncs(probe_every: Any, own: bool) -> None:
    model, optimizer = build(lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True), device="cuda")
    monitor = Monitor(probe_every=probe_every)
    guard = nanguard.Guard(model, optimizer, precision="bf16", max_norm=1.0, observers=[monitor])
    batches = make_batches(48, device="cuda")
    for batch in batches[:8]:
        guard.step(loss_fn, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches[8:]:
            own_step(guard, batch) if own else guard.step(loss_fn, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    guard.settle()
    assert guard.counts["applied"] == len(batches)
    assert monitor.headroom(), "steps were probed"
    assert probe_every != "auto" or monitor.probe_cost is not None


def test_the_number_of_steps_between_probes_follows_from_their_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe costs what its own step and the two after it take in addition; the first probe does not count."""
    now = 0.0
    monkeypatch.setattr(pace.time, "perf_counter", lambda: now)
    paced, every, since = pace.Pace(0.01), pace.FIRST_EVERY, 0
    for step in range(200):
        every = paced.begin(every)
        if step in (0, 10, 100):
            paced.probe()
            since = 0
        now += {0: 1000.0 if step == 0 else 4.0, 2: 2.0}.get(since, 1.0)  # a compilation; reading on the host
        since += 1
        assert (paced.cost is None) == (step <= 12)
    assert paced.cost == pytest.approx(4.0)
    assert every == 400


@pytest.mark.parametrize(("name", "value"), [("probe_every", 0), ("probe_every", "often"), ("budget", 0.0)])
def test_wrong_options_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        Monitor(**{name: value})


def test_a_module_is_named_also_while_a_probe_stands_between_torch_and_its_calls() -> None:
    model, (x, y) = TinyNet(), make_batches(1)[0]
    x[0, 0] = float("nan")
    probe = Probe(model)
    probe.arm()
    try:
        found = nanguard.diagnose(model, loss_fn, (x, y))
    finally:
        probe.disarm()
    assert found.module == "inp"


def test_a_probe_that_is_let_go_of_before_it_begins_leaves_nothing_behind() -> None:
    before = _compat.module_call()
    Probe(TinyNet()).arm()
    gc.collect()
    assert _compat.module_call() is before
