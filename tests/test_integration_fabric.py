"""Fabric with ``attach``: the loop stays as it is, and a bad step never happened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanguard
from helpers import INF, TinyNet, differences, everything, make_batches, poisoned

lightning_fabric = pytest.importorskip("lightning.fabric")

from nanguard.integrations.fabric import FabricGuard, attach  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

NUMBER, BAD = 8, 3
Batch = tuple[Tensor, Tensor]


class Loop:
    """As people write it. ``guarded`` adds one call, and nothing else."""

    def __init__(
        self,
        *,
        guarded: bool,
        precision: Any = "32-true",
        plugins: Any = None,
        clips: bool = True,
        wraps: bool = False,
        make: Any = torch.optim.AdamW,
        schedule: Any = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        precision = None if plugins else precision
        self.fabric = lightning_fabric.Fabric(accelerator="cpu", devices=1, precision=precision, plugins=plugins)
        net = TinyNet()
        net.drop = nn.Identity()  # type: ignore[assignment]
        optimizer = make(net.parameters(), lr=0.01)
        self.model, self.optimizer = self.fabric.setup(net, optimizer)
        self.schedule = schedule(self.optimizer if wraps else optimizer)
        self.net, self.clips, self.per_epoch = net, clips, False
        self.guard: FabricGuard | None = None
        if guarded:
            self.guard = attach(self.fabric, self.model, self.optimizer, self.schedule, **options)

    def fit(self, batches: Sequence[Batch], *, spoil: int | None = None, accumulate: int = 1) -> Loop:
        for number, (x, y) in enumerate(batches):
            is_last = number % accumulate == accumulate - 1
            with self.fabric.no_backward_sync(self.model, enabled=not is_last):
                loss = F.cross_entropy(self.model(x), y)
                self.fabric.backward(loss / accumulate)
            if not is_last:
                continue
            if number == spoil:
                self.net.out.bias.grad[0] = INF  # type: ignore[index]
            if self.clips:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.5)
            self.optimizer.step()
            if not self.per_epoch:
                self.schedule.step()
            self.optimizer.zero_grad()
        if self.per_epoch:
            self.schedule.step()
        return self

    def state(self) -> dict[str, Any]:
        return everything(self.net, [self.optimizer.optimizer], self.schedule)


def without_bad(batches: list[Batch]) -> list[Batch]:
    return batches[:BAD] + batches[BAD + 1 :]


def scaled(scale: float) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
    return lightning_fabric.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"precision": "bf16-mixed"},
    "fused, without clipping": {"make": lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True), "clips": False},
    "a schedule of the wrapped optimizer": {"wraps": True},
}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_healthy_runs_are_the_same_and_bad_steps_never_happened(options: dict[str, Any]) -> None:
    batches = make_batches(NUMBER)
    plain, healthy = (Loop(guarded=is_guarded, **options).fit(batches) for is_guarded in (False, True))
    assert differences(plain.state(), healthy.state()) == []
    never = Loop(guarded=False, **options).fit(without_bad(batches))
    run = Loop(guarded=True, **options).fit(poisoned(batches, BAD))
    assert differences(never.state(), run.state()) == []
    spoiled = Loop(guarded=True, **options).fit(batches, spoil=BAD)
    assert differences(never.state(), spoiled.state()) == []
    assert run.guard is not None
    assert (run.guard.counts["applied"], run.guard.counts["skipped"]) == (NUMBER - 1, 1)


def test_one_bad_micro_batch_leaves_its_step_out() -> None:
    batches = make_batches(NUMBER)
    never = Loop(guarded=False).fit(batches[:2] + batches[4:], accumulate=2)
    run = Loop(guarded=True).fit(poisoned(batches, BAD), accumulate=2)
    assert differences(never.state(), run.state()) == []


def test_fp16_with_a_real_scaler() -> None:
    batches = make_batches(NUMBER)
    never = Loop(guarded=False, plugins=scaled(2.0**10)).fit(without_bad(batches))
    run = Loop(guarded=True, plugins=scaled(2.0**10)).fit(poisoned(batches, BAD))
    assert differences(never.state(), run.state()) == []
    plugins = [scaled(2.0**22), scaled(2.0**22)]
    loops = [Loop(guarded=number == 1, plugins=each, clips=False).fit(batches) for number, each in enumerate(plugins)]
    assert plugins[0].scaler.state_dict() == plugins[1].scaler.state_dict()
    guard = loops[1].guard
    assert guard is not None
    assert guard.incidents == ()
    assert 0 < guard.counts["backed_off"] < NUMBER
    assert loops[1].schedule.last_epoch == guard.counts["applied"], "the schedule is held, unlike without nanguard"


def test_the_incident_has_names_and_lines_of_the_program(tmp_path: Path) -> None:
    run = Loop(guarded=True, run_dir=tmp_path)
    run.fit(poisoned(make_batches(NUMBER), BAD))
    assert run.guard is not None
    (incident,) = run.guard.incidents
    assert incident.reading.gradients[0] == "inp.weight"
    diagnosis = incident.outcome.diagnosis
    assert diagnosis is not None
    assert (diagnosis.cause, diagnosis.module) == ("input_nonfinite", "inp")
    run.guard.detach()
    assert len(nanguard.read_run(tmp_path).incidents) == 1


def test_detach_restores_everything() -> None:
    facts = []
    for is_guarded in (False, True):
        run = Loop(guarded=is_guarded).fit(poisoned(make_batches(2), 1) if is_guarded else make_batches(2)[:1])
        if run.guard is not None:
            with run.guard:
                pass
        objects: list[Any] = [run.fabric, run.fabric.strategy.precision, run.schedule, run.optimizer.optimizer, run.net]
        facts.append([sorted(vars(each)) for each in objects])
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in run.model.modules())
    assert facts[0] == facts[1]


def test_an_error_of_the_program_and_a_halt() -> None:
    run = Loop(guarded=True)
    assert run.guard is not None
    with pytest.raises(ArithmeticError, match="of the program"), run.guard:
        run.fit(make_batches(2))
        bad = poisoned(make_batches(1), 0)[0]
        F.cross_entropy(run.model(bad[0]), bad[1])
        raise ArithmeticError("of the program")
    assert len(run.guard.incidents) == 1
    assert all(torch.isfinite(value).all() for value in run.net.state_dict().values())
    halts = Loop(guarded=True, policy=nanguard.Policy([nanguard.Halt()], divergence=None))
    with pytest.raises(nanguard.NonFiniteError):
        halts.fit(poisoned(make_batches(NUMBER), BAD))
    assert differences(Loop(guarded=False).fit(make_batches(NUMBER)[:BAD]).state(), halts.state()) == []


def test_what_is_not_supported_is_refused() -> None:
    run = Loop(guarded=False)
    with pytest.raises(ValueError, match="must be what fabric"):
        attach(run.fabric, run.net, run.optimizer)
    with pytest.raises(ValueError, match="schedule_per must be"):
        attach(run.fabric, run.model, run.optimizer, schedule_per="batch")  # type: ignore[arg-type]
    run.fabric.strategy.__class__ = type("DeepSpeedStrategy", (type(run.fabric.strategy),), {})
    with pytest.raises(ValueError, match="does not support DeepSpeedStrategy yet"):
        attach(run.fabric, run.model, run.optimizer)


def test_nanguard_run_knows_names_and_clips_without_an_error() -> None:
    batches = make_batches(NUMBER)
    clip = lightning_fabric.Fabric.clip_gradients
    with nanguard.install() as autopilot:
        healthy, run = Loop(guarded=False).fit(batches), Loop(guarded=False).fit(poisoned(batches, BAD))
        assert (autopilot.counts["applied"], autopilot.counts["skipped"]) == (2 * NUMBER - 1, 1)
        (incident,) = autopilot.incidents
    assert incident.reading.gradients[0].endswith("inp.weight")
    assert "_forward_module" not in str(incident)
    assert lightning_fabric.Fabric.clip_gradients is clip
    assert differences(Loop(guarded=False).fit(batches).state(), healthy.state()) == []
    assert differences(Loop(guarded=False).fit(without_bad(batches)).state(), run.state()) == []


@pytest.mark.parametrize("bad", [0, BAD])
@pytest.mark.parametrize("wraps", [False, True])
def test_nanguard_run_holds_schedules_that_are_advanced_for_each_step(bad: int, *, wraps: bool) -> None:
    def make(optimizer: Any) -> Any:
        parts = [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2), torch.optim.lr_scheduler.StepLR(optimizer, 2)]
        return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])

    batches = make_batches(NUMBER)
    never = Loop(guarded=False, wraps=wraps, schedule=make).fit(batches[:bad] + batches[bad + 1 :])
    before = torch.optim.lr_scheduler.LRScheduler.step
    with nanguard.install():
        run = Loop(guarded=False, wraps=wraps, schedule=make).fit(poisoned(batches, bad))
    assert torch.optim.lr_scheduler.LRScheduler.step is before
    assert run.schedule.last_epoch == NUMBER - 1
    assert differences(never.state(), run.state()) == []


def test_nanguard_run_lets_schedules_of_epochs_advance() -> None:
    batches = make_batches(NUMBER)
    with nanguard.install():
        run = Loop(guarded=False)
        run.per_epoch = True
        for _ in range(3):
            run.fit(poisoned(batches, NUMBER - 1))
    assert run.schedule.last_epoch == 3


def test_nanguard_run_leaves_overflows_to_the_scaler() -> None:
    batches = make_batches(NUMBER)
    plain = Loop(guarded=False, plugins=scaled(2.0**22), clips=False).fit(batches)
    with nanguard.install() as autopilot:
        run = Loop(guarded=False, plugins=scaled(2.0**22), clips=False).fit(batches)
        assert autopilot.counts["backed_off"] > 0
    assert differences(plain.state(), run.state()) == []
