"""A loop that we do not own, guarded without a patch: a trainer with accumulation, clipping, a schedule, a scaler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import nanguard
from helpers import INF, NAN, TinyNet, differences, everything, loss_fn, make_batches, poisoned
from nanguard.hosted.loop import HostedLoop
from nanguard.records.steps import Outcome

ACCUMULATE, STEPS = 2, 8
MAX_NORM = 0.5
Batch = tuple[Tensor, Tensor]
Window = list[Batch]


def windows(number: int = STEPS) -> list[Window]:
    """The micro-batches of each step."""
    batches = make_batches(number * ACCUMULATE)
    return [batches[place : place + ACCUMULATE] for place in range(0, len(batches), ACCUMULATE)]


class Net(TinyNet):
    """Without dropout: a run that never had a step draws other random numbers for the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Identity()


class Trainer:
    """A loop as a framework has it. ``guarded`` adds the calls of ``HostedLoop``, and nothing else."""

    def __init__(
        self,
        *,
        guarded: bool,
        scales: bool = False,
        measures: bool = True,
        make: Callable[..., Optimizer] = torch.optim.AdamW,
        model: nn.Module | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = model or Net()
        self.optimizer = make(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3) if scales else None
        self.loop = HostedLoop(self.model, self.optimizer, **options) if guarded else None
        self.measures = measures
        self.applied: list[bool] = []
        self.refused: list[bool] = []
        self.losses: list[float] = []
        self.spoil: Callable[[nn.Module], None] = lambda model: None
        self.weight = 1.0

    def fit(self, steps: Sequence[Window]) -> Trainer:
        for number, window in enumerate(steps):
            for batch in window:
                self.micro_step(batch)
            if number == 3:
                self.spoil(self.model)
            self.update()
        return self

    def micro_step(self, batch: Batch) -> None:
        if self.loop:
            self.loop.before_forward(batch)
        loss = self.weight * loss_fn(self.model, batch)
        if self.loop:
            self.loop.after_forward(loss)
        self.losses.append(float(loss.detach()))
        shared = loss / ACCUMULATE
        (shared if self.scaler is None else self.scaler.scale(shared)).backward()

    def update(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.loop and self.measures:
            self.loop.measure(self.optimizer, grad_scaler=self.scaler)
        clip_grad_norm_(self.model.parameters(), MAX_NORM)
        advances = True
        if self.loop:
            done = self.loop.step(self.optimizer, self.step, grad_scaler=self.scaler)
            self.applied.append(done.applied)
            self.refused.append(self.loop.was_refused)
            advances = self.loop.should_advance_schedule
            assert advances is done.applied
        else:
            self.step()
        if self.scaler is not None:
            self.scaler.update()
        if advances:
            self.schedule.step()
        self.optimizer.zero_grad()

    def step(self) -> Any:
        return self.optimizer.step() if self.scaler is None else self.scaler.step(self.optimizer)

    def state(self, *, with_scale: bool = True) -> dict[str, Any]:
        scale = [self.scaler] if self.scaler is not None and with_scale else []
        return everything(self.model, [self.optimizer], self.schedule, *scale)


def plain(steps: Sequence[Window], **options: Any) -> Trainer:
    return Trainer(guarded=False, **options).fit(steps)


def guarded(steps: Sequence[Window], **options: Any) -> Trainer:
    return Trainer(guarded=True, **options).fit(steps)


both = pytest.mark.parametrize("scales", [False, True], ids=["plain", "GradScaler"])
MAKERS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "fused AdamW": lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True),
    "SGD": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("measures", [False, True])
@both
def test_a_healthy_run_is_the_same_to_the_bit(scales: bool, measures: bool, make: Any) -> None:
    options: dict[str, Any] = {"scales": scales, "make": make, "model": None}
    torch.manual_seed(0)
    run = guarded(windows(), measures=measures, **options)
    assert run.loop is not None
    assert differences(plain(windows(), **options).state(), run.state()) == []
    assert run.loop.counts["applied"] == STEPS
    assert run.loop.incidents == ()


def test_a_monitor_that_probes_every_step_changes_nothing() -> None:
    """The loss is multiplied by a number, which a dispatch mode such as a probe is not given as a tensor."""
    monitor, runs = nanguard.Monitor(probe_every=1), []
    for run in (plain, guarded):
        options = {"observers": [monitor]} if run is guarded else {}
        torch.manual_seed(0)
        runs.append(run(windows(), **options).state())
    assert differences(*runs) == []
    assert monitor.headroom()


def test_dropout_draws_the_same_random_numbers() -> None:
    runs = []
    for is_guarded in (False, True):
        torch.manual_seed(0)
        runs.append(Trainer(guarded=is_guarded, model=TinyNet()).fit(windows()).state())
    assert differences(*runs) == []


def nan_batch(steps: list[Window]) -> list[Window]:
    steps[3] = poisoned(steps[3], 0)
    return steps


def nan_in_second_microbatch(steps: list[Window]) -> list[Window]:
    steps[3] = poisoned(steps[3], 1)
    return steps


def inf_batch(steps: list[Window]) -> list[Window]:
    steps[3] = poisoned(steps[3], 0, value=INF)
    return steps


@pytest.mark.parametrize("measures", [False, True])
@pytest.mark.parametrize("spoil", [nan_batch, nan_in_second_microbatch, inf_batch])
@both
def test_a_bad_step_never_happened(scales: bool, spoil: Any, measures: bool) -> None:
    steps = windows()
    run = guarded(spoil(windows()), scales=scales, measures=measures)
    never = plain(steps[:3] + steps[4:], scales=scales)
    assert differences(never.state(with_scale=False), run.state(with_scale=False)) == []
    assert run.applied == [True] * 3 + [False] + [True] * 4
    assert run.refused == [not applied for applied in run.applied]
    assert run.schedule.last_epoch == STEPS - 1, "the schedule counts applied steps only"
    assert run.loop is not None
    assert run.loop.counts["applied"] == STEPS - 1
    assert run.loop.counts["skipped"] == 1
    (incident,) = run.loop.incidents
    assert incident.outcome.verdict.reading.step == 3
    assert run.loop.unsound() == ()


def test_the_incident_says_where_it_came_from() -> None:
    run = guarded(nan_batch(windows()))
    assert run.loop is not None
    diagnosis = run.loop.incidents[0].outcome.diagnosis
    assert diagnosis is not None
    assert diagnosis.cause == "input_nonfinite"


@pytest.mark.parametrize("measures", [False, True])
def test_an_inf_gradient_is_skipped_and_stays_the_hosts_to_clear(measures: bool) -> None:
    run = Trainer(guarded=True, measures=measures)

    def spoil(model: nn.Module) -> None:
        model.get_parameter("out.bias").grad[0] = INF  # type: ignore[index]

    run.spoil = spoil
    run.fit(windows())
    steps = windows()
    assert run.applied.count(False) == 1
    assert differences(plain(steps[:3] + steps[4:]).state(), run.state()) == []
    assert run.loop is not None
    assert run.loop.incidents[0].outcome.verdict.reading.found == ("gradients",)
    if measures:
        assert run.loop.incidents[0].outcome.verdict.reading.gradients == ("out.bias",), "before clipping spread it"


def test_gradients_of_a_skipped_step_are_left_alone() -> None:
    run = Trainer(guarded=True)
    assert run.loop is not None
    run.micro_step(poisoned(make_batches(1), 0)[0])
    grads = [p.grad for p in run.model.parameters()]
    made: list[int] = []
    done = run.loop.step(run.optimizer, lambda: made.append(1))
    assert (done.applied, done.result, made) == (False, None, [])
    assert all(p.grad is grad for p, grad in zip(run.model.parameters(), grads, strict=True))


def test_the_result_of_the_call_comes_back() -> None:
    run = Trainer(guarded=True)
    assert run.loop is not None
    run.micro_step(make_batches(1)[0])
    done = run.loop.step(run.optimizer, lambda: run.optimizer.step(lambda: 5.0))
    assert (done.applied, done.result) == (True, 5.0)


class Watcher(nanguard.Observer):
    def __init__(self) -> None:
        self.norms: list[float] = []
        self.num_incidents = 0

    def on_heard(self, outcome: Outcome) -> None:
        self.norms.append(outcome.verdict.reading.norms[0])

    def on_incident(self, incident: Any) -> None:
        self.num_incidents += 1


def test_norms_are_those_before_the_host_clips() -> None:
    early, late = Watcher(), Watcher()
    guarded(windows(), measures=True, observers=[early])
    guarded(windows(), measures=False, observers=[late])
    assert max(late.norms) <= MAX_NORM * 1.001
    assert max(early.norms) > MAX_NORM * 1.1


def test_buffers_of_a_bad_pass_are_put_back_at_once() -> None:
    run = Trainer(guarded=True)
    run.fit(windows(2))
    before = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
    run.fit([poisoned(make_batches(2), 0)])
    assert run.applied[-1] is False
    assert differences(before, dict(run.model.named_buffers())) == []


def test_a_pass_that_the_host_discards_leaves_no_nan_in_buffers() -> None:
    steps = windows()
    run = Trainer(guarded=True)
    assert run.loop is not None
    run.fit(steps[:2])
    bad = poisoned(make_batches(1, seed=5), 0)[0]
    run.loop.before_forward(bad)
    loss_fn(run.model, bad)  # a host that looks at the loss itself, and goes on
    run.fit(steps[2:])
    assert all(run.applied)
    assert differences(plain(steps).state(), run.state()) == []


@pytest.mark.parametrize("reruns", [False, True])
def test_gradients_that_the_host_clears_without_a_step_are_forgotten(reruns: bool) -> None:
    """The last micro-batches of an epoch, if they are too few for a step."""
    steps = windows(4)
    nan = poisoned(steps[0], 0)[0]
    run, expected = Trainer(guarded=True), Trainer(guarded=False)
    assert run.loop is not None
    for number, window in enumerate(steps):
        run.fit([window])
        expected.fit([window])
        run.loop.before_forward(nan, rerun=(lambda batch: loss_fn(run.model, batch)) if reruns else None)
        loss = loss_fn(run.model, nan)
        run.loop.after_forward(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        run.optimizer.zero_grad()
        run.loop.discard()
        assert len(run.loop.incidents) == number + 1
    assert run.applied == [True] * 4
    assert differences(everything(run.model, [run.optimizer]), everything(expected.model, [expected.optimizer])) == []
    assert run.loop.incidents[0].reading.found == ("loss",)
    run.loop.close()


def test_evaluation_between_steps_changes_nothing() -> None:
    steps = windows()
    run = Trainer(guarded=True)
    assert run.loop is not None
    run.fit(steps[:4])
    run.model.eval()
    with torch.no_grad():
        run.loop.before_forward(steps[0][0])
        loss_fn(run.model, steps[0][0])
    run.model.train()
    run.fit(steps[4:])
    assert differences(plain(steps).state(), run.state()) == []


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_an_overflow_that_the_scaler_finds_is_routine() -> None:
    runs = [Trainer(guarded=is_guarded, scales=True) for is_guarded in (False, True)]
    for run in runs:
        run.scaler = GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
        run.weight = 64.0
        run.fit(windows(12))
    without, run = runs
    assert run.loop is not None
    assert run.loop.incidents == ()
    assert run.loop.counts["backed_off"] > 0
    assert not any(run.refused)
    assert run.loop.counts["applied"] > 0
    assert run.schedule.last_epoch == run.loop.counts["applied"]
    assert run.scaler is not None
    assert without.scaler is not None
    assert run.scaler.state_dict() == without.scaler.state_dict()


def test_a_scaler_that_unscales_inside_its_step() -> None:
    def train(is_guarded: bool) -> dict[str, Any]:
        run = Trainer(guarded=is_guarded, scales=True)
        assert run.scaler is not None
        for number, window in enumerate(windows()):
            run.micro_step(poisoned(window, 0)[0] if number == 3 else window[0])
            if run.loop is None:
                run.step()
            else:
                run.loop.step(run.optimizer, run.step, grad_scaler=run.scaler)
            run.scaler.update()
            run.optimizer.zero_grad()
        return run.state()

    changed = differences(train(False), train(True))
    assert [name for name in changed if "norm." not in name] == [], (
        "torch's scaler skips too, but leaves NaN in buffers"
    )
    assert any("running_mean" in name for name in changed)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Net(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def two_optimizers(batches: Sequence[Batch], *, is_guarded: bool, bad: int | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Pair()
    first = torch.optim.SGD(model.body.parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.AdamW(model.head.parameters(), lr=0.01)
    loop = HostedLoop(model, [first, second]) if is_guarded else None
    for number, batch in enumerate(batches):
        if loop:
            loop.before_forward(batch)
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if loop:
            loop.after_forward(loss)
        loss.backward()
        if number == bad:
            model.head.bias.grad[0] = NAN  # type: ignore[index]
        for optimizer in (first, second):
            if loop:
                assert loop.step(optimizer).applied is (number != bad)
            else:
                optimizer.step()
        if loop:
            assert loop.should_advance_schedule is (number != bad)
        first.zero_grad()
        second.zero_grad()
    if loop:
        assert len(loop.incidents) == (bad is not None)
        loop.close()
    return everything(model, [first, second])


def test_of_several_optimizers_all_step_or_none_does() -> None:
    batches = make_batches(6)
    assert differences(two_optimizers(batches, is_guarded=False), two_optimizers(batches, is_guarded=True)) == []
    never = two_optimizers(batches[:2] + batches[3:], is_guarded=False)
    assert differences(never, two_optimizers(batches, is_guarded=True, bad=2)) == []


def test_a_rollback_takes_the_hosts_schedule_with_it() -> None:
    run = Trainer(guarded=False)
    policy = nanguard.Policy([nanguard.Rollback(1, when="damage"), nanguard.Skip(), nanguard.Halt()], divergence=None)
    run.loop = HostedLoop(run.model, run.optimizer, schedulers=run.schedule, policy=policy)
    run.fit(windows(24))
    with torch.no_grad():
        run.model.get_parameter("inp.weight").fill_(NAN)
    run.fit(windows(1))
    assert run.applied[-1] is False
    assert run.loop.counts["rolled_back"] == 1
    assert run.loop.unsound() == ()
    assert run.loop.incidents[0].outcome.did.startswith("back to the state before step 1")
    assert differences(plain(windows(24)[:1]).state(), run.state()) == [], "the schedule as after that step, not before"


def test_the_run_log_and_bundles_are_written(tmp_path: Path) -> None:
    run = guarded(nan_batch(windows()), run_dir=tmp_path)
    assert run.loop is not None
    run.loop.close()
    read = nanguard.read_run(tmp_path)
    assert len(read.incidents) == 1
    assert list((tmp_path / "incidents").iterdir())


def test_observers_hear_of_every_step() -> None:
    watcher = Watcher()
    guarded(nan_batch(windows()), observers=[watcher])
    assert (len(watcher.norms), watcher.num_incidents) == (STEPS, 1)


def test_a_policy_that_halts_ends_the_run() -> None:
    run = Trainer(guarded=True, policy=nanguard.Policy([nanguard.Halt()], divergence=None))
    with pytest.raises(nanguard.NonFiniteError, match="step 3"):
        run.fit(nan_batch(windows()))
    steps = windows()
    assert differences(plain(steps[:3]).state(), run.state()) == []


def test_a_call_that_raises_leaves_a_loop_that_goes_on() -> None:
    steps = windows()
    run = Trainer(guarded=True)
    assert run.loop is not None
    run.micro_step(steps[0][0])

    def fails() -> None:
        raise RuntimeError("of the host")

    with pytest.raises(RuntimeError, match="of the host"):
        run.loop.step(run.optimizer, fails)
    run.optimizer.zero_grad()
    run.fit(nan_batch(windows()))
    assert run.applied.count(False) == 1
    assert run.loop.unsound() == ()


def patched_places() -> list[Any]:
    """What ``nanguard.install()`` replaces, among others."""
    places: list[tuple[Any, str]] = [
        *((kind, name) for kind in (Optimizer, nn.Module) for name in ("__init__", "__setstate__")),
        *((kind, "step") for kind in (torch.optim.AdamW, torch.optim.SGD, GradScaler)),
        *((torch.autograd, name) for name in ("backward", "grad")),
        *((kind, "__call__") for kind in (nn.Module, TinyNet, Net)),
        *((kind, "__enter__") for kind in (torch.no_grad, torch.enable_grad)),
        (Tensor, "backward"),
        (GradScaler, "scale"),
    ]
    return [getattr(owner, name) for owner, name in places]


def facts(run: Trainer) -> list[Any]:
    return [
        sorted(vars(run.optimizer)),
        sorted(vars(run.model)),
        [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in run.model.modules()],
    ]


def test_nothing_in_torch_is_patched_and_close_restores_the_model() -> None:
    before = patched_places()
    clean = facts(plain(windows()))
    run = Trainer(guarded=True).fit(nan_batch(windows()))
    during = patched_places()
    assert all(a is b for a, b in zip(before, during, strict=True))
    assert run.loop is not None
    run.loop.close()
    run.loop.close()
    assert facts(run) == clean
    with pytest.raises(nanguard.ProtocolError, match="was called after"):
        run.loop.before_forward()


def test_it_says_what_is_wrong() -> None:
    run = Trainer(guarded=True, scales=True)
    assert run.loop is not None
    other = torch.optim.SGD(TinyNet().parameters(), lr=1.0)
    with pytest.raises(ValueError, match="SGD that was not given to HostedLoop"):
        run.loop.step(other)
    with pytest.raises(ValueError, match="are not the model's"):
        HostedLoop(run.model, other)
    with pytest.raises(ValueError, match="policy must be a Policy or None, got 'default'"):
        HostedLoop(run.model, run.optimizer, policy="default")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="capture must be one of"):
        HostedLoop(run.model, run.optimizer, capture="all")  # type: ignore[arg-type]
    run.micro_step(make_batches(1)[0])
    with pytest.raises(nanguard.ProtocolError, match="call unscale_ first"):
        run.loop.measure(run.optimizer, grad_scaler=run.scaler)
