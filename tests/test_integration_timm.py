"""A loop as timm's train.py has it, guarded: after a bad step everything is as in a run that never had its batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanguard
from frameworks import use_torchvision_without_kernels
from helpers import INF, NAN, differences, everything

use_torchvision_without_kernels()
pytest.importorskip("torchvision")
pytest.importorskip("timm")

from timm.optim import create_optimizer_v2  # noqa: E402
from timm.scheduler import CosineLRScheduler  # noqa: E402
from timm.utils import AverageMeter, ModelEmaV3, NativeScaler, dispatch_clip_grad  # noqa: E402

from nanguard.integrations.timm import attach  # noqa: E402

Batch = tuple[Tensor, Tensor, str]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x).mean(dim=(2, 3)))


def make_batches(number: int = 8) -> list[Batch]:
    g = torch.Generator().manual_seed(0)
    images, labels = torch.randn(number, 4, 3, 6, 6, generator=g), torch.randint(0, 5, (number, 4), generator=g)
    return [(x, y, "") for x, y in zip(images, labels, strict=True)]


def spoiled(batches: Sequence[Batch], place: int, fault: str) -> list[Batch]:
    batches = list(batches)
    x, y, _ = batches[place]
    if fault == "nan batch":
        x = x.clone()
        x[2, 0, 0, 0] = NAN
    batches[place] = (x, y, fault)
    return batches


class Program:
    """What train.py does in an epoch, in its order. ``guarded`` adds two lines."""

    def __init__(
        self,
        *,
        guarded: bool,
        scale: float | None = None,
        accumulate: int = 1,
        clip: float | None = 0.5,
        updates_first: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.accumulate, self.clip, self.updates_first = accumulate, clip, updates_first
        self.model = Net()
        self.optimizer = create_optimizer_v2(self.model, opt="adamw", lr=0.05, weight_decay=0.1)
        self.scheduler = CosineLRScheduler(
            self.optimizer, t_initial=20, warmup_t=3, warmup_lr_init=0.01, t_in_epochs=False
        )
        self.ema = ModelEmaV3(self.model, decay=0.9, use_warmup=True)
        self.loss_scaler: Any = None
        if scale is not None:
            self.loss_scaler = NativeScaler(device="cpu")
            self.loss_scaler._scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        self.num_updates = 0
        self.averages: list[float] = []
        if guarded:
            self.guard = attach(
                self.model,
                self.optimizer,
                loss_scaler=self.loss_scaler,
                scheduler=self.scheduler,
                ema=self.ema,
                **options,
            )
            self.loss_scaler = self.guard.loss_scaler

    def train(self, batches: Sequence[Batch]) -> Program:
        losses_m, updates_m = AverageMeter(), AverageMeter()
        self.model.train()
        self.optimizer.zero_grad()
        for number, (x, y, fault) in enumerate(batches, start=1):
            need_update = number % self.accumulate == 0
            output = self.model(x)
            if "gradient" in fault:
                factor = INF if fault == "inf gradient" else 1e5
                output.register_hook(lambda gradient, factor=factor: gradient * factor)
            loss = F.cross_entropy(output, y)
            loss = loss + NAN if fault == "nan loss" else loss
            if self.accumulate > 1:
                loss /= self.accumulate
            if self.updates_first:  # as older versions of train.py do
                losses_m.update(loss.item() * self.accumulate, x.size(0))
            if self.loss_scaler is not None:
                self.loss_scaler(
                    loss,
                    self.optimizer,
                    clip_grad=self.clip,
                    parameters=self.model.parameters(),
                    need_update=need_update,
                )
            else:
                loss.backward()  # type: ignore[no-untyped-call]
                if need_update:
                    if self.clip is not None:
                        dispatch_clip_grad(self.model.parameters(), self.clip)
                    self.optimizer.step()
            if not self.updates_first:
                losses_m.update(loss.item() * self.accumulate, x.size(0))
            if not need_update:
                continue
            self.num_updates += 1
            self.optimizer.zero_grad()
            self.ema.update(self.model, step=self.num_updates)
            self.scheduler.step_update(num_updates=self.num_updates, metric=losses_m.avg)
            updates_m.update(1.0)
        assert updates_m.count == len(batches) // self.accumulate, "a time is kept: it was spent"
        self.averages.append(losses_m.avg)
        self.validate(batches)
        return self

    @torch.no_grad()
    def validate(self, batches: Sequence[Batch]) -> None:
        losses_m = AverageMeter()
        self.model.eval()
        for x, y, _ in batches[:2]:
            losses_m.update(F.cross_entropy(self.model(x), y).item(), x.size(0))
        self.averages.append(losses_m.avg)

    def facts(self) -> dict[str, Any]:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return {**everything(self.model, [self.optimizer], self.ema), "rates": rates, "averages": self.averages}


@pytest.mark.parametrize("options", [{}, {"scale": 2.0**10}, {"accumulate": 2}, {"clip": None}], ids=str)
def test_a_healthy_run_is_the_same_to_the_bit(options: dict[str, Any]) -> None:
    batches = make_batches()
    run = Program(guarded=True, **options).train(batches)
    run.guard.detach()
    expected = Program(guarded=False, **options).train(batches)
    assert differences(run.facts(), expected.facts()) == []


@pytest.mark.parametrize("fault", ["nan batch", "inf gradient", "nan loss"])
@pytest.mark.parametrize(
    "options", [{}, {"scale": 2.0**10}, {"accumulate": 2}, {"accumulate": 2, "updates_first": True}], ids=str
)
def test_a_bad_step_never_happened(fault: str, options: dict[str, Any]) -> None:
    batches = make_batches()
    without = batches[:4] + batches[6:] if "accumulate" in options else batches[:5] + batches[6:]
    run = Program(guarded=True, **options).train(spoiled(batches, 5, fault)).train(batches)
    expected = Program(guarded=False, **options).train(without).train(batches)
    if fault == "inf gradient" and "scale" in options:
        assert run.guard.counts["backed_off"] == 1  # for a GradScaler this is an overflow, as ever
        return
    assert (run.guard.counts["skipped"], run.guard.num_skipped) == (1, 1)
    assert differences(run.facts(), expected.facts()) == []
    (incident,) = run.guard.incidents
    assert incident.diagnosis is not None
    if fault == "nan batch":
        assert (incident.diagnosis.cause, incident.diagnosis.samples) == ("input_nonfinite", (2,))
        assert incident.diagnosis.source is not None
        assert incident.diagnosis.source.file == __file__
    run.guard.detach()


def test_an_overflow_holds_the_schedule_and_the_average() -> None:
    batches = make_batches()
    run = Program(guarded=True, scale=2.0**120).train(spoiled(batches, 5, "large gradient"))
    assert (run.guard.counts["backed_off"], run.guard.num_skipped, run.guard.incidents) == (1, 1, ())
    expected = Program(guarded=False, scale=2.0**120).train(batches[:5]).train(batches[6:])
    assert run.facts()["rates"] == expected.facts()["rates"]
    assert torch.equal(run.ema.module.head.weight, expected.ema.module.head.weight)
    run.guard.detach()


def test_a_checkpoint_goes_from_a_guarded_to_an_unguarded_run_and_back() -> None:
    batches = make_batches()
    for is_guarded in (True, False):
        run = Program(guarded=True, scale=2.0**10).train(spoiled(batches, 5, "nan batch"))
        saved = run.loss_scaler.state_dict()
        run.guard.detach()
        resumed = Program(guarded=is_guarded, scale=2.0**4)
        resumed.loss_scaler.load_state_dict(saved)
        scale = run.loss_scaler._scaler._scaler.get_scale()
        inner = resumed.loss_scaler._scaler._scaler if is_guarded else resumed.loss_scaler._scaler
        assert inner.get_scale() == scale
        if is_guarded:
            assert resumed.guard.num_skipped == 1
            resumed.guard.detach()


class Overflowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            hidden = self.inner(x)
        return self.outer(torch.tanh(hidden.float()))


def test_modules_that_are_kept_in_fp32_are_in_the_checkpoint() -> None:
    policy = nanguard.Policy([nanguard.RaisePrecision("module"), nanguard.Skip(times=None)], divergence=None)
    saved: dict[str, Any] = {}
    for num_expected in (1, 0):
        model = Overflowing()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with attach(model, optimizer, policy=policy) as guard:
            guard.loss_scaler.load_state_dict(saved)  # type: ignore[attr-defined]
            for size in (1.0, 3e5, 1.0, 3e5):
                guard.loss_scaler(model(torch.full((2, 4), size)).square().mean(), optimizer)  # type: ignore[attr-defined]
                optimizer.zero_grad()
            assert len(guard.incidents) == num_expected
            saved = guard.loss_scaler.state_dict()  # type: ignore[attr-defined]


def test_detach_restores_everything_and_a_scheduler_saves_only_its_own() -> None:
    program = Program(guarded=False)
    update, kind, own = AverageMeter.update, type(program.scheduler), set(program.scheduler.state_dict())
    guard = attach(program.model, program.optimizer, scheduler=program.scheduler, ema=program.ema)
    assert set(program.scheduler.state_dict()) == own
    guard.detach()
    assert AverageMeter.update is update
    assert type(program.scheduler) is kind
    assert "update" not in vars(program.ema)
    assert not program.model._forward_pre_hooks
    program.train(make_batches())


def test_what_is_not_a_scaler_of_timm_is_refused() -> None:
    program = Program(guarded=False)
    with pytest.raises(ValueError, match="loss_scaler must be a NativeScaler of timm, got GradScaler"):
        attach(program.model, program.optimizer, loss_scaler=torch.amp.GradScaler("cpu"))


def test_a_halt_ends_the_loop_with_finite_weights() -> None:
    policy = nanguard.Policy(ladder=(nanguard.Halt(),))
    run = Program(guarded=True, policy=policy)
    with pytest.raises(nanguard.NonFiniteError):
        run.train(spoiled(make_batches(), 5, "nan batch"))
    assert run.guard.unsound() == ()
    expected = Program(guarded=False).train(make_batches()[:5])
    assert differences(everything(run.model, [run.optimizer]), everything(expected.model, [expected.optimizer])) == []
    run.guard.detach()


@pytest.mark.parametrize(
    "options", [{}, {"scale": 2.0**10}, {"accumulate": 2}, {"accumulate": 2, "updates_first": True}], ids=str
)
@pytest.mark.parametrize("fault", ["nan batch", "inf gradient"])
def test_under_nanguard_run_an_unchanged_loop_leaves_the_step_out(fault: str, options: dict[str, Any]) -> None:
    batches = make_batches()
    update = AverageMeter.update
    without = batches[:4] + batches[6:] if "accumulate" in options else batches[:5] + batches[6:]
    expected = Program(guarded=False, **options).train(without).train(batches).facts()
    plain = Program(guarded=False, **options).train(batches).facts()
    with nanguard.install() as autopilot:
        healthy = Program(guarded=False, **options).train(batches).facts()
        run = Program(guarded=False, **options).train(spoiled(batches, 5, fault)).train(batches).facts()
        if fault == "inf gradient" and "scale" in options:
            assert autopilot.counts["backed_off"] == 1
            return
        assert autopilot.counts["skipped"] == 1
    assert differences(healthy, plain) == []
    assert differences(run, expected) == []
    assert AverageMeter.update is update
