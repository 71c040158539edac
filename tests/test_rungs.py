"""What each rung does, on real little runs; the run log shows the climb, and late guarding does what eager does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.optim import lr_scheduler

from helpers import NAN, TinyNet, build, differences, everything, loss_fn, make_batches, own_step, poisoned
from nanguard import (
    Guard,
    Halt,
    LowerLR,
    NonFiniteError,
    Policy,
    ProtocolError,
    RaisePrecision,
    Rollback,
    Skip,
    Snapshots,
)
from nanguard.records.panel import headline, rows
from nanguard.testing import Fault, inject
from optimizers import ALL

SYNCS = ["eager", "late"]
RING = Snapshots(every=10, keep=3)


def climb(guard: Guard) -> list[str]:
    return [incident.outcome.action.response for incident in guard.incidents]


def logged(run_dir: Path) -> list[dict[str, Any]]:
    """What happened besides steps."""
    lines = [json.loads(line) for line in (run_dir / "run.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] != "step"]


class Attention(nn.Module):
    """Scores that do not fit into fp16 when the input is large; the softmax of them is NaN there, and fine in fp32."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 16), nn.Linear(6, 16), nn.Linear(6, 16)
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x) * self.gain, self.k(x) * self.gain
        return ((q @ k.mT) / self.gain**2).softmax(-1) @ self.v(x)


class Net(nn.Module):
    def __init__(self, gain: float = 400.0) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 6)
        self.attn = Attention(gain)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attn(self.inp(x)))


def attention_run(sync: str, policy: Policy, *, steps: int = 40, run_dir: Path | None = None) -> tuple[Any, Guard]:
    model, opt = build(ALL["fused AdamW"], model=Net())
    guard = Guard(model, opt, precision="fp16", sync=sync, policy=policy, run_dir=run_dir)
    for batch in guard.epoch(make_batches(steps)):
        guard.step(loss_fn, batch)
    return everything(model, [opt]), guard


# ---- lower the learning rate ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", SYNCS)
def test_a_lowered_learning_rate_survives_the_schedule_and_recovers(sync: str, tmp_path: Path) -> None:
    model, opt = build(ALL["fused AdamW"])
    schedule = lr_scheduler.LambdaLR(opt, lambda step: 0.9**step)
    policy = Policy([Skip(1, per=100), LowerLR(0.5, recover_after=8)])
    guard = Guard(
        model, opt, precision="fp32", sync=sync, policy=policy, scheduler=schedule, run_dir=tmp_path, snapshots=None
    )
    rates = []
    for batch in guard.epoch(poisoned(make_batches(24), 3, 6)):
        guard.step(loss_fn, batch)
        guard.settle()
        rates.append(opt.param_groups[0]["lr"])
    applied = [place for place in range(24) if place not in (3, 6)]
    plain = {place: 1e-3 * 0.9 ** (number + 1) for number, place in enumerate(applied)}
    for place in applied:
        factor = 0.5 if 6 < place < 15 else 1.0
        assert rates[place] == pytest.approx(factor * plain[place], rel=1e-12), place
    assert climb(guard) == ["skip", "lower_lr"]
    events = [line["event"] for line in logged(tmp_path)]
    assert events == ["run", "incident", "incident", "eased"]
    assert logged(tmp_path)[2]["did"].startswith("learning rate multiplied by 0.5, now ")


def test_late_lowers_and_recovers_as_eager_does() -> None:
    def run(sync: str) -> Any:
        model, opt = build(ALL["fused AdamW"])
        schedule = lr_scheduler.CosineAnnealingLR(opt, 40)
        policy = Policy([Skip(1, per=100), LowerLR(0.3, recover_after=8, times=5)])
        guard = Guard(model, opt, precision="fp32", sync=sync, policy=policy, scheduler=schedule)
        for batch in guard.epoch(poisoned(make_batches(40), 3, 6, 17, 18, 27)):
            guard.step(loss_fn, batch)
        return everything(model, [opt], schedule, guard.counts["skipped"], guard.counts["applied"])

    assert differences(run("eager"), run("late")) == []


# ---- raise precision -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", SYNCS)
def test_a_persistent_overflow_is_survived_by_raising_one_module(sync: str, tmp_path: Path) -> None:
    policy = Policy([Skip(3, per=100), RaisePrecision("module"), RaisePrecision("model"), Halt()])
    _, guard = attention_run(sync, policy, run_dir=tmp_path)
    assert guard.kept_fp32 == ("attn",)
    assert climb(guard) == ["skip", "skip", "skip", "raise_precision"]
    assert guard.counts["applied"] == 36
    assert logged(tmp_path)[4]["did"] == "attn in fp32 from now on"
    assert guard.precision == "fp16"


def test_late_raises_the_same_module_and_goes_on_alike() -> None:
    policy = Policy([Skip(3, per=100), RaisePrecision("module", retry_after=12, times=9), Halt()])
    eager, one = attention_run("eager", policy, steps=60)
    late, other = attention_run("late", policy, steps=60)
    assert climb(one) == climb(other)
    assert differences(eager, late) == []


def test_the_lower_precision_is_tried_again_and_left_for_longer_each_time(tmp_path: Path) -> None:
    policy = Policy([Skip(1, per=10), RaisePrecision("module", retry_after=10, times=None), Halt()])
    _, guard = attention_run("eager", policy, steps=60, run_dir=tmp_path)
    eased = [line["step"] for line in logged(tmp_path) if line["event"] == "eased"]
    raised = [i.reading.step for i in guard.incidents if i.outcome.action.response == "raise_precision"]
    assert raised == [1, 13, 35], "one is skipped first"
    assert eased == [12, 34]


@pytest.mark.parametrize("sync", SYNCS)
def test_the_whole_model_leaves_autocast(sync: str) -> None:
    policy = Policy([RaisePrecision("model"), Halt()])
    _, guard = attention_run(sync, policy)
    assert guard.precision == "fp32"
    assert guard.counts["skipped"] == 1
    assert guard.counts["applied"] == 39


def test_precision_that_does_not_help_is_left_alone() -> None:
    model, opt = build(ALL["fused AdamW"])
    policy = Policy([RaisePrecision("module"), RaisePrecision("model"), Skip(9)])
    guard = Guard(model, opt, precision="bf16", policy=policy, snapshots=None)
    with inject(guard, Fault(into="gradient", name="out.bias", steps=(3, 4))):
        for batch in guard.epoch(make_batches(8)):
            guard.step(loss_fn, batch)
    assert guard.kept_fp32 == ()
    assert guard.precision == "bf16"
    assert climb(guard) == ["skip", "skip"]
    assert guard.incidents[0].outcome.action.passed == (
        "raise precision of one module: it did not help just now",
        "raise precision of the model: it did not help just now",
    )


def test_a_model_with_half_weights_is_cast_in_place() -> None:
    torch.manual_seed(0)
    model = Net().to(torch.float16)
    weight = model.out.weight
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    guard = Guard(model, opt, precision="fp32", policy=Policy([RaisePrecision("model", lr=0.5), Halt()]))
    halves = [(x.half(), y) for x, y in make_batches(6)]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0].to(weight.dtype)).float(), batch[1])

    for batch in guard.epoch(halves):
        guard.step(loss, batch)
    assert model.out.weight is weight
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {s.dtype for state in opt.state.values() for s in state.values()} == {torch.float32}
    assert opt.param_groups[0]["lr"] == 5e-4
    assert guard.counts["applied"] == 5


@pytest.mark.parametrize("sync", SYNCS)
def test_modules_are_kept_in_fp32_by_hand_listed_saved_and_let_go(sync: Any) -> None:
    model, opt = build(ALL["fused AdamW"], model=Net())
    guard = Guard(model, opt, precision="fp16", sync=sync, policy=Policy([Halt()]))
    with pytest.raises(ValueError, match="'att'"):
        guard.keep_fp32("att")
    assert guard.keep_fp32("at*n") == ("attn",)
    for batch in make_batches(6):
        guard.step(loss_fn, batch)
    guard.settle()
    assert guard.counts["applied"] == 6
    _, other_opt = build(ALL["fused AdamW"], model=(other := Net()))
    again = Guard(other, other_opt, precision="fp16", sync=sync)
    again.load_state_dict(guard.state_dict())
    assert again.kept_fp32 == ("attn",)
    assert guard.release_fp32() == ("attn",)
    assert guard.kept_fp32 == ()
    with pytest.raises(NonFiniteError):
        guard.step(loss_fn, make_batches(1)[0])
        guard.settle()


# ---- roll back -----------------------------------------------------------------------------------------------------


def teacher(number: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Batches that can be learnt, so that the loss comes down and a divergence shows."""
    g = torch.Generator().manual_seed(seed)
    weights = torch.randn(6, 3, generator=g)
    xs = [torch.randn(32, 6, generator=g) for _ in range(number)]
    return [(x, (x @ weights).argmax(1)) for x in xs]


def learn(sync: str, policy: Policy, batches: Any, *faults: Fault, ring: Any = RING) -> tuple[Any, Guard]:
    model, opt = build(lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))
    guard = Guard(model, opt, precision="fp32", sync=sync, policy=policy, snapshots=ring)
    with inject(guard, *faults):
        for batch in guard.epoch(batches):
            guard.step(loss_fn, batch)
    return everything(model, [opt]), guard


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize(
    "fault",
    [
        Fault(into="weight", name="out.weight", value="nan", steps=(70,), times=1),
        Fault(into="weight", name="out.weight", value="bitflip", steps=(70,), times=1),
        Fault(into="optimizer_state", name="inp.weight.exp_avg_sq", value="nan", steps=(70,), times=1),
        Fault(into="buffer", name="norm.running_var", value="nan", steps=(70,), times=1),
    ],
    ids=lambda fault: f"{fault.value} {fault.into}",
)
def test_damage_of_the_moment_leaves_nothing_behind(fault: Fault, sync: str) -> None:
    """With everything replayed from before it, the run ends bit for bit as if it had never happened."""
    batches = teacher(140)
    clean, _ = learn(sync, Policy(), batches)
    state, guard = learn(sync, Policy(), batches, fault)
    if fault.into != "buffer":
        assert climb(guard) == ["roll_back"]
        assert differences(clean, state) == []


@pytest.mark.parametrize("sync", SYNCS)
def test_a_diverging_run_goes_back_with_a_smaller_learning_rate(sync: str, caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    model, opt = build(lambda p: torch.optim.SGD(p, lr=0.05, fused=True), model=net)
    schedule = lr_scheduler.LambdaLR(opt, lambda step: 1.0 if step < 150 else 40.0)
    guard = Guard(model, opt, precision="fp32", sync=sync, scheduler=schedule, snapshots=RING, max_norm=None)

    def squares(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0])[:, 0], batch[0].sum(1))

    for batch in guard.epoch(teacher(400)):
        guard.step(squares, batch)
    assert set(climb(guard)) == {"roll_back"}
    did = [incident.outcome.did for incident in guard.incidents]
    assert "skipped" not in did[0], "all again"
    assert did[1].endswith("are skipped"), "again but for the batches at which it happened"
    assert "learning rate multiplied by 0.25, now 0.0125" in did[2]
    assert "the weights: they have become worse; the data have not become harder" in caplog.text
    with torch.no_grad():
        assert squares(model, teacher(1, seed=1)[0]) < 0.2


@pytest.mark.parametrize("sync", SYNCS)
def test_harder_data_are_no_divergence(sync: str) -> None:
    easy, g = teacher(120), torch.Generator().manual_seed(5)
    hard = [(x * 20, torch.randint(0, 3, (32,), generator=g)) for x, _ in teacher(80, seed=0)]
    _, guard = learn(sync, Policy(), easy + hard)
    assert guard.incidents == ()


@pytest.mark.parametrize("sync", SYNCS)
def test_failed_batches_are_stepped_over_and_all_others_come_again(sync: str) -> None:
    batches = poisoned(make_batches(60), 33, 34, 35)
    model, opt = build(ALL["fused AdamW"])
    policy = Policy([Skip(2, per=100), Rollback(skip_batches="failed")])
    guard = Guard(model, opt, precision="fp32", sync=sync, policy=policy, snapshots=RING)
    for batch in guard.epoch(batches):
        guard.step(loss_fn, batch)
    plain_model, plain_opt = build(ALL["fused AdamW"])
    plain = Guard(plain_model, plain_opt, precision="fp32")
    for place, batch in enumerate(batches):
        if place not in (33, 34, 35):
            plain.step(loss_fn, batch)
    assert climb(guard) == ["skip", "skip", "roll_back"]
    assert differences(everything(model, [opt]), everything(plain_model, [plain_opt])) == []


@pytest.mark.parametrize("sync", SYNCS)
def test_a_number_of_batches_is_stepped_over(sync: str) -> None:
    seen = []
    batches = poisoned(make_batches(60), 33, 34)
    model, opt = build(ALL["fused AdamW"])
    policy = Policy([Skip(1, per=100), Rollback(steps=10, skip_batches=20)])
    guard = Guard(model, opt, precision="fp32", sync=sync, policy=policy, snapshots=RING)
    for batch in guard.epoch([(x, y, i) for i, (x, y) in enumerate(batches)]):
        seen.append(batch[2])
        guard.step(lambda model, b: loss_fn(model, b[:2]), batch)
    assert climb(guard) == ["skip", "roll_back"]
    back = seen.index(41)
    assert seen[back:] == list(range(41, 60)), "from the snapshot before step 21, twenty batches on"


@pytest.mark.parametrize("sync", SYNCS)
def test_a_stream_that_cannot_be_read_again_goes_on(sync: str, caplog: pytest.LogCaptureFixture) -> None:
    seen = []
    batches = poisoned(make_batches(60), 33, 34)
    model, opt = build(ALL["fused AdamW"])
    policy = Policy([Skip(1, per=100), Rollback(steps=10, skip_batches=20)])
    guard = Guard(model, opt, precision="fp32", sync=sync, policy=policy, snapshots=RING)
    for i, batch in enumerate(guard.epoch(iter(batches))):
        seen.append(i)
        guard.step(loss_fn, batch)
    assert climb(guard) == ["skip", "roll_back"]
    assert "the data are not rewound, since " in caplog.text
    assert len(seen) < 60, "it steps over what is left of the twenty"


# ---- what a skip cannot undo ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", SYNCS)
def test_damage_without_a_snapshot_halts_at_once_and_says_so(sync: str) -> None:
    model, opt = build(ALL["fused AdamW"])
    guard = Guard(model, opt, precision="fp32", sync=sync, snapshots=None)
    fault = Fault(into="weight", name="out.weight", value="nan", steps=(5,), times=1)
    with inject(guard, fault), pytest.raises(NonFiniteError, match="damaged state at step 5") as caught:
        for batch in guard.epoch(make_batches(20)):
            guard.step(loss_fn, batch)
    assert "Not sound: model.out.weight were non-finite before this update" in str(caught.value)
    assert "no good snapshot to put back: this state is damaged" in str(caught.value)
    assert "nanguard check" in str(caught.value)
    assert not guard.can_save()


@pytest.mark.parametrize("style", ["step", "own loop"])
@pytest.mark.parametrize("into", ["weight", "optimizer_state"])
@pytest.mark.parametrize("sync", SYNCS)
def test_a_halt_on_damage_leaves_the_newest_good_snapshot(sync: str, into: Any, style: str) -> None:
    """All of it: weights, moments, buffers, the schedule, random states."""
    name = "out.weight" if into == "weight" else "out.weight.exp_avg"
    fault = Fault(into=into, name=name, value="nan", steps=(27,), times=1)
    model, opt = build(ALL["fused AdamW"])
    schedule = lr_scheduler.CosineAnnealingLR(opt, 100)
    policy = Policy([Skip(3, per=100), Halt()])
    guard = Guard(model, opt, scheduler=schedule, precision="fp32", sync=sync, policy=policy, snapshots=RING)
    seen: dict[int, Any] = {}

    def train() -> None:
        for place, batch in enumerate(guard.epoch(make_batches(60))):
            seen[place] = everything(model, [opt], schedule, torch.get_rng_state())
            guard.step(loss_fn, batch) if style == "step" else own_step(guard, batch)

    with inject(guard, fault), pytest.raises(NonFiniteError, match="damaged state at step 2") as caught:
        train()
    newest = guard.snapshots[-1]
    assert differences(seen[newest], everything(model, [opt], schedule, torch.get_rng_state())) == []
    assert guard.can_save()
    assert "Put back: " in str(caught.value)
    assert f"(back to the state before step {newest}; " in str(caught.value)
    assert "A checkpoint saved now is sound." in str(caught.value)
    assert "Not sound" not in str(caught.value)
    outcome = caught.value.incident.outcome
    what, done = headline(outcome).split(": ")
    assert what == "weights or state were damaged before this update"
    assert done == "training halted, the newest good snapshot put back"
    assert "untouched" not in dict(rows(outcome))


def test_a_halt_on_damage_at_the_end_of_an_epoch_too() -> None:
    model, opt = build(ALL["fused AdamW"])
    guard = Guard(model, opt, precision="fp32", policy=Policy([Halt()]), snapshots=RING)

    def train() -> None:
        for place, batch in enumerate(guard.epoch(make_batches(40))):
            guard.step(loss_fn, batch)
            if place == 39:
                with torch.no_grad():
                    model.out.weight.fill_(NAN)

    with pytest.raises(NonFiniteError, match=r"(?s)damaged state.*Put back: "):
        train()
    assert guard.can_save()


@pytest.mark.parametrize("sync", SYNCS)
def test_bad_data_are_skipped_for_longer_than_anything_else(sync: str) -> None:
    batches = poisoned(make_batches(90), *range(30, 70))
    model, opt = build(ALL["fused AdamW"])
    guard = Guard(model, opt, precision="bf16", sync=sync, snapshots=RING)
    for batch in guard.epoch(batches):
        guard.step(loss_fn, batch)
    assert climb(guard) == ["skip"] * 40
    assert guard.counts["applied"] == 50
    assert guard.incidents[-1].outcome.verdict.cause == "input"


class _Bug:
    """From one step on the loss function gives NaN, whatever the batch."""

    def __init__(self, kind: str, first: int) -> None:
        self.kind, self.first, self.step = kind, first, 0

    def loss_fn(self) -> Any:
        """For the next step."""
        self.step += 1
        is_broken = self.step > self.first
        if self.kind == "a function for each step":
            return lambda model, batch: loss_fn(model, batch[:2]) * (NAN if is_broken else 1.0)
        if self.kind == "the same function":
            return self.now
        # Missing values are NaN in every batch, and from now on they are used.
        return lambda model, batch: loss_fn(model, batch[:2]) + (batch[2].sum() if is_broken else 0.0)

    def now(self, model: Any, batch: Any) -> Any:
        return loss_fn(model, batch[:2]) * (NAN if self.step > self.first else 1.0)


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("kind", ["a function for each step", "the same function", "missing values"])
def test_a_bug_in_the_loss_is_not_taken_for_bad_data_and_ends_the_run(kind: str, sync: str, tmp_path: Path) -> None:
    bug, model_and_opt = _Bug(kind, first=45), build(ALL["fused AdamW"])
    guard = Guard(*model_and_opt, precision="fp32", sync=sync, snapshots=RING, run_dir=tmp_path)  # type: ignore[arg-type]
    batches = [(*batch, torch.full((4,), NAN)) for batch in make_batches(10)]
    with pytest.raises(NonFiniteError):
        for _ in range(120):
            for batch in guard.epoch(batches):
                guard.step(bug.loss_fn(), batch)
    assert not {i.outcome.verdict.cause for i in guard.incidents} & {"input", "batch"}
    assert bug.step < 200
    assert all(torch.isfinite(p).all() for p in guard.model.parameters())


@pytest.mark.parametrize("sync", SYNCS)
def test_data_that_are_never_good_again_end_the_run_with_all_that_is_known(sync: str, tmp_path: Path) -> None:
    """Short epochs: a count that starts afresh with each would never run out."""
    model, opt = build(ALL["fused AdamW"])
    guard = Guard(model, opt, precision="fp32", sync=sync, snapshots=RING, run_dir=tmp_path)  # type: ignore[arg-type]
    for batch in guard.epoch(make_batches(12)):
        guard.step(loss_fn, batch)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(NonFiniteError, match="none of the 100 steps before it was applied") as caught:
        for _ in range(100):
            for batch in guard.epoch(poisoned(make_batches(12), *range(12))):
                guard.step(loss_fn, batch)
    assert (guard.counts["applied"], guard.counts["skipped"], guard.counts["halted"]) == (12, 100, 1)
    assert caught.value.incident.outcome.verdict.cause == "input"
    message = str(caught.value)
    assert "non-finite data: batch[0] holds NaN at [0, 0]" in message, "examined once more, not taken for a repeat"
    assert "max_consecutive_skips" in message
    assert f"nanguard explain {caught.value.incident.outcome.bundle}" in message
    assert (Path(caught.value.incident.outcome.bundle) / "incident.json").exists()
    assert len(list((tmp_path / "incidents").iterdir())) <= 15
    assert differences(before, dict(model.state_dict())) == []


@pytest.mark.parametrize("sync", SYNCS)
def test_a_run_that_is_mostly_refused_ends_too(sync: str) -> None:
    model, opt = build(ALL["fused AdamW"])
    policy = Policy([Skip(times=None)], skipped_share_window=40)
    guard = Guard(model, opt, precision="fp32", sync=sync, policy=policy, diagnose="off")  # type: ignore[arg-type]
    batches = poisoned(make_batches(60), *(place for place in range(60) if place % 3))
    with pytest.raises(NonFiniteError, match="21 of the last 40 steps were refused"):
        for batch in guard.epoch(batches):
            guard.step(loss_fn, batch)
    assert guard.counts["skipped"] == 20


def test_a_resumed_run_goes_on_counting() -> None:
    """The row of skips is part of what is saved."""
    policy = Policy([Skip(times=None)], max_consecutive_skips=20)
    guards = [Guard(*build(ALL["fused AdamW"]), precision="fp32", policy=policy, diagnose="off") for _ in range(2)]
    bad = poisoned(make_batches(15), *range(15))
    guards[0].step(loss_fn, make_batches(1)[0])
    for batch in bad:
        guards[0].step(loss_fn, batch)
    guards[1].load_state_dict(guards[0].state_dict())
    with pytest.raises(NonFiniteError, match="none of the 20 steps"):
        for batch in bad:
            guards[1].step(loss_fn, batch)


def test_a_run_that_goes_round_in_circles_ends() -> None:
    """Every rollback undoes more steps than the span of its count is long."""
    model, opt = build(ALL["fused AdamW"])
    policy = Policy([Rollback(times=2, per=20), Halt()])
    guard = Guard(model, opt, precision="fp32", policy=policy, snapshots=Snapshots(every=40, keep=2), diagnose="off")
    with pytest.raises(NonFiniteError, match="roll back: used 2 of 2 within 20 steps"):
        for number, batch in enumerate(guard.epoch(poisoned(make_batches(100), 75))):
            assert number < 1000, "it never ends"
            guard.step(loss_fn, batch)


def test_a_mask_that_is_meant_to_be_infinite_is_no_damage() -> None:
    model, opt = build(ALL["fused AdamW"])
    guard = Guard(model, opt, precision="fp32", snapshots=RING)
    for place, batch in enumerate(guard.epoch(poisoned(make_batches(40), 30))):
        if place == 5:
            model.register_buffer("mask", torch.full((3, 3), -torch.inf))
        guard.step(loss_fn, batch)
    assert climb(guard) == ["skip"]
    assert guard.can_save()


@pytest.mark.parametrize("sync", SYNCS)
def test_damage_by_the_last_step_of_an_epoch_is_found_at_its_end(sync: str) -> None:
    def run(fault: bool) -> tuple[Any, Guard]:
        model, opt = build(ALL["fused AdamW"])
        guard = Guard(model, opt, precision="fp32", sync=sync, snapshots=RING)
        breaks = iter([fault])

        def spoil(*_: Any) -> None:
            if guard.current_step == 40 and next(breaks, False):  # the last step was counted already
                with torch.no_grad():
                    model.out.weight.fill_(NAN)

        opt.register_step_post_hook(spoil)
        for batch in guard.epoch(make_batches(40)):
            guard.step(loss_fn, batch)
        assert guard.can_save()
        return everything(model, [opt]), guard

    clean, _ = run(False)
    state, guard = run(True)
    assert climb(guard) == ["roll_back"]
    assert differences(clean, state) == []


@pytest.mark.parametrize("sync", SYNCS)
def test_damage_by_the_very_first_step_goes_back_to_the_start(sync: str) -> None:
    batches = teacher(30)
    clean, _ = learn(sync, Policy(), batches)
    state, guard = learn(sync, Policy(), batches, Fault(into="weight", name="out.weight", steps=(1,), times=1))
    assert climb(guard) == ["roll_back"]
    assert differences(clean, state) == []


# ---- saving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", SYNCS)
def test_can_save_vetoes_what_is_not_known_to_be_sound(sync: str) -> None:
    model, opt = build(ALL["fused AdamW"])
    guard = Guard(model, opt, precision="fp32", sync=sync)
    batches = make_batches(6)
    for batch in batches[:3]:
        guard.step(loss_fn, batch)
    guard.settle()
    assert guard.can_save()
    with guard.autocast():
        loss = loss_fn(model, batches[3])
    guard.backward(loss)
    assert not guard.can_save(), "in the middle of a step"
    guard.update()
    guard.settle()
    assert guard.can_save()
    guard.step(loss_fn, poisoned(batches, 4)[4])
    assert guard.can_save() == (sync == "eager"), "a bad step in flight"
    guard.settle()
    assert guard.can_save()
    opt.state[model.out.bias]["exp_avg"][0] = NAN
    assert not guard.can_save(), "a moment that nobody has looked at yet"


def test_measures_in_force_are_saved_and_loaded() -> None:
    policy = Policy([RaisePrecision("module", lr=0.5, retry_after=10), RaisePrecision("model"), Halt()])
    _, guard = attention_run("eager", policy, steps=4)
    state = json.loads(json.dumps(guard.state_dict()))
    model, opt = build(ALL["fused AdamW"], model=Net())
    opt.load_state_dict(guard.optimizers[0].state_dict())
    again = Guard(model, opt, precision="fp16", policy=policy)
    again.load_state_dict(state)
    assert again.kept_fp32 == ("attn",)
    assert opt.param_groups[0]["lr"] == 5e-4
    for batch in again.epoch(make_batches(20)):
        again.step(loss_fn, batch)
    assert climb(again)[:1] == ["raise_precision"]
    assert "attn" not in again.kept_fp32 or len(again.incidents) > 1


# ---- what reviews have broken --------------------------------------------------------------------------------------


def test_a_non_finite_end_of_a_divergence_halts_where_nothing_is_left() -> None:
    model, opt = build(lambda p: torch.optim.SGD(p, lr=0.01), model=nn.Sequential(nn.Linear(6, 1)))
    guard = Guard(
        model, opt, precision="fp32", max_norm=None, policy=Policy([Rollback(times=1), Halt()]), snapshots=RING
    )
    with pytest.raises(NonFiniteError):
        for number, batch in enumerate(guard.epoch(teacher(900))):
            opt.param_groups[0]["lr"] = 0.01 if number < 90 else 50.0
            guard.step(lambda m, b: F.mse_loss(m(b[0])[:, 0], b[0].sum(1)), batch)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_module_is_found_through_activation_checkpointing(reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.utils.checkpoint.checkpoint(self.attn, self.inp(x), use_reentrant=reentrant)
            return self.out(hidden)

    model, opt = build(ALL["fused AdamW"], model=Checkpointed())
    guard = Guard(model, opt, precision="fp16", policy=Policy([RaisePrecision("module"), Halt()]))
    for batch in guard.epoch(make_batches(8)):
        guard.step(loss_fn, batch)
    assert guard.kept_fp32 == ("attn",)
    assert guard.counts["applied"] == 7


def test_a_loss_function_that_cannot_be_called_again_is_no_disaster(caplog: pytest.LogCaptureFixture) -> None:
    used: set[int] = set()

    def once(model: nn.Module, batch: Any) -> Tensor:
        if id(batch) in used:
            raise RuntimeError("the batch is used up")
        used.add(id(batch))
        return loss_fn(model, batch)

    model, opt = build(ALL["fused AdamW"])
    policy = Policy([Skip(1, per=100), RaisePrecision("module"), RaisePrecision("model"), Skip(99)])
    guard = Guard(model, opt, precision="bf16", policy=policy)
    batches = [(x * 1e30, y) if i in (5, 6) else (x, y) for i, (x, y) in enumerate(make_batches(12))]
    for batch in guard.epoch(batches):
        guard.step(once, batch)
    assert climb(guard) == ["skip", "skip"]
    assert "the batch is used up" in caplog.text


def test_a_loop_of_the_users_own_is_told_of_a_divergence_and_left_alone() -> None:
    model, opt = build(lambda p: torch.optim.Adam(p, lr=3e-4, fused=True), model=nn.Sequential(nn.Linear(4, 1)))
    guard = Guard(model, opt, precision="fp32")
    torch.manual_seed(0)
    for number in range(900):
        skill = 10.0 if number < 300 else 60.0 if number < 600 else 200.0
        x = torch.randn(64, 4)
        y = skill * (1 + 0.3 * x[:, :1]) + 0.1 * skill * torch.randn(64, 1)
        with guard.autocast():
            loss = F.mse_loss(model(x), y)
        guard.backward(loss)
        guard.update()
    assert set(climb(guard)) <= {"warn"}
    assert opt.param_groups[0]["lr"] == 3e-4


def test_rates_that_the_program_writes_itself_are_not_multiplied_at_recovery() -> None:
    model, opt = build(ALL["fused AdamW"])
    guard = Guard(model, opt, precision="fp32", policy=Policy([LowerLR(0.5, recover_after=5, times=9)]), snapshots=None)
    rates = []
    opt.register_step_pre_hook(lambda *_: rates.append(opt.param_groups[0]["lr"]))
    for batch in guard.epoch(poisoned(make_batches(20), 3, 4, 5)):
        opt.param_groups[0]["lr"] = 1e-3
        guard.step(loss_fn, batch)
    assert max(rates) == 1e-3


def test_two_epochs_at_once_are_refused() -> None:
    model, opt = build(ALL["fused AdamW"])
    guard = Guard(model, opt, precision="fp32")
    with pytest.raises(ProtocolError, match="one pass at a time"):
        for batch in guard.epoch(make_batches(4)):
            guard.step(loss_fn, batch)
            for _ in guard.epoch(make_batches(2)):
                pass


def test_state_that_belongs_to_no_parameter_is_kept_and_put_back() -> None:
    model, opt = build(ALL["SGD momentum"])
    guard = Guard(model, opt, precision="fp32", snapshots=RING)
    batches = make_batches(40)
    for number, batch in enumerate(batches):
        opt.state["global"] = {"k": number, "seen": [number]}
        guard.step(loss_fn, batch)
    guard.settle()
    guard.roll_back(steps=10)
    assert opt.state["global"] == {"k": 20, "seen": [20]}


def test_a_snapshot_of_another_model_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    def guarded(model: nn.Module) -> Guard:
        _, opt = build(ALL["fused AdamW"], model=model)
        return Guard(model, opt, precision="fp32", run_dir=tmp_path, snapshots=Snapshots(every=10, where="disk"))

    with guarded(TinyNet()) as first:
        for batch in make_batches(30):
            first.step(loss_fn, batch)
    other = guarded(TinyNet(16))
    before = everything(other.model, other.optimizers)
    with pytest.raises(ValueError, match="another model or optimizer"):
        other.resume()
    assert differences(before, everything(other.model, other.optimizers)) == []


def test_loading_the_state_of_another_time_forgets_the_ring() -> None:
    model, opt = build(ALL["fused AdamW"])
    guard = Guard(model, opt, precision="fp32", snapshots=RING)
    state = guard.state_dict()
    for batch in make_batches(40):
        guard.step(loss_fn, batch)
    assert guard.snapshots
    guard.load_state_dict(state)
    assert guard.snapshots == ()


def test_a_buffer_that_was_not_there_is_gone_again() -> None:
    model, opt = build(ALL["fused AdamW"])
    model.register_buffer("cache", None)
    guard = Guard(model, opt, precision="fp32", snapshots=RING)
    for number, batch in enumerate(make_batches(40)):
        if number == 30:
            model.cache = torch.ones(3)
        guard.step(loss_fn, batch)
    guard.settle()
    guard.roll_back(steps=15)
    assert model.cache is None


@pytest.mark.parametrize("where", [0, 1])
def test_can_save_sees_a_nan_wherever_it_is(where: int) -> None:
    model, opt = build(ALL["fused AdamW"])
    if where == 0:
        model.out.weight.data[0, 0] = NAN
    guard = Guard(model, opt, precision="fp32", snapshots=None)
    if where == 1:
        model.norm.running_mean[0] = NAN
    assert not guard.can_save()


@pytest.mark.parametrize("bad", [(12,), (11,), (10, 21), (9, 10, 33)])
def test_late_takes_its_snapshots_when_eager_does(bad: tuple[int, ...]) -> None:
    def run(sync: str) -> tuple[Any, Any]:
        model, opt = build(ALL["fused AdamW"])
        policy = Policy([Skip(times=9), Rollback(skip_batches=3)])
        guard = Guard(model, opt, precision="fp32", sync=sync, policy=policy, snapshots=RING)
        with inject(guard, Fault(into="weight", name="out.weight", steps=(40,), times=1)):
            for batch in guard.epoch(poisoned(make_batches(60), *bad)):
                guard.step(loss_fn, batch)
        return everything(model, [opt]), [i.outcome.did for i in guard.incidents]

    eager, late = run("eager"), run("late")
    assert eager[1] == late[1]
    assert differences(eager[0], late[0]) == []


def test_what_a_module_keeps_besides_tensors_goes_back_too() -> None:
    class Counting(TinyNet):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += self.training
            return super().forward(x)

        def get_extra_state(self) -> Any:
            return {"count": self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    model, opt = build(ALL["fused AdamW"], model=Counting())
    guard = Guard(model, opt, precision="fp32", snapshots=RING)
    for batch in make_batches(40):
        guard.step(loss_fn, batch)
    guard.settle()
    guard.roll_back(steps=10)
    assert model.count == 21
