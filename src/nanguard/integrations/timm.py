"""timm: ``guard = attach(model, optimizer, ...)`` and ``loss_scaler = guard.loss_scaler`` in a copy of its train.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanguard.diagnosis.scheduler import How
from nanguard.hosted.loop import HostedLoop
from nanguard.incidents.bundle import CaptureLevel
from nanguard.integrations.attached import AttachedGuard
from nanguard.integrations.packages import require
from nanguard.integrations.timm_means import StepMeans, Where
from nanguard.policy.policy import Policy
from nanguard.step.observers import Observer

TESTED = ("1.0", "2.0")
_SKIPPED = "nanguard_skipped"
_CHANGED = "nanguard_changed"


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    loss_scaler: Any = None,
    scheduler: Any = None,
    ema: Any = None,
    policy: Policy | None = None,
    run_dir: str | Path | None = None,
    observers: Sequence[Observer] = (),
    diagnose: How = "auto",
    capture: CaptureLevel = "batch",
) -> TimmGuard:
    """Guards a training loop as timm's train.py has it. Use ``guard.loss_scaler`` in the place of ``loss_scaler``.

    A non-finite step is skipped: weights, optimizer state, buffers and EMA are not touched, the schedule is held, and
    its losses are left out of ``AverageMeter``.

    Args:
        model: the module that the loop calls; DDP, ``torch.compile`` and timm's training tasks are fine.
        optimizer: the optimizer, for example of ``create_optimizer_v2``.
        loss_scaler: timm's ``NativeScaler``, None without loss scaling.
        scheduler: a scheduler of timm, for which the loop calls ``step_update(num_updates)``. Skipped steps are
            subtracted.
        ema: ``ModelEmaV3`` or an older one. ``update`` does nothing after a skipped step.
        policy: what to do about bad steps; None skips them as long as the run makes progress, and rolls damage back.
        run_dir: where to write the run log and bad steps; None writes nothing.
        observers: objects that are told what happens.
        diagnose: as for ``Guard``.
        capture: as for ``Guard``.
    """
    utils = require("timm.utils", tested=TESTED, extra="timm", package="timm")
    if loss_scaler is not None and getattr(loss_scaler, "_scaler", None) is None:
        raise ValueError(f"loss_scaler must be a NativeScaler of timm, got {type(loss_scaler).__name__}")
    loop = HostedLoop(
        model, optimizer, policy=policy, run_dir=run_dir, observers=observers, diagnose=diagnose, capture=capture
    )
    guard = TimmGuard(loop, loss_scaler, utils.dispatch_clip_grad)
    guard.watch(model, utils.AverageMeter)
    if scheduler is not None:
        guard.wrap_by_class(scheduler, "step_update", guard.in_step_update)
    if ema is not None:
        guard.wrap(ema, "update", guard.in_ema_update)
    return guard


class TimmGuard(AttachedGuard):
    """What ``attach`` returns. ``loss_scaler`` is called by the loop in the place of its own."""

    def __init__(self, loop: HostedLoop, scaler: Any, clip: Callable[..., None]) -> None:
        super().__init__(loop)
        self.loss_scaler = GuardedScaler(loop, scaler, clip)

    @property
    def num_skipped(self) -> int:
        """Steps that were not applied, by a bad value or by an overflow."""
        return self.loss_scaler.num_skipped

    def watch(self, model: nn.Module, meters: Any) -> None:
        """Notes what the model is called with, in training, and keeps skipped steps out of means."""

        def before_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.is_grad_enabled() and module.training and not self.loop.is_rerunning:
                self.loop.before_forward((args, kwargs))
                self.loss_scaler.where = self.loss_scaler.where._replace(has_begun=True)

        def update(original: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(original)
            def leave_out(meter: Any, val: Any, *args: Any, **kwargs: Any) -> None:
                self.loss_scaler.means.update(functools.partial(original, meter), meter, val, *args, **kwargs)

            return leave_out

        handle = model.register_forward_pre_hook(before_forward, prepend=True, with_kwargs=True)
        self.at_detach(handle.remove)
        self.replace(meters, "update", update(meters.update))

    def in_step_update(self, original: Callable[..., None], num_updates: int, metric: Any = None) -> None:
        """The schedule counts applied steps."""
        original(num_updates - self.num_skipped, metric)

    def in_ema_update(self, original: Callable[..., None], model: nn.Module, step: int | None = None) -> None:
        """EMA counts applied steps, and is not told of others."""
        if self.loss_scaler.was_applied:
            original(model, step if step is None else step - self.num_skipped)


class GuardedScaler:
    """Called as timm's ``NativeScaler`` is: backward, clip, step. ``scaler`` is one, or None without loss scaling."""

    def __init__(self, loop: HostedLoop, scaler: Any, clip: Callable[..., None]) -> None:
        self._loop, self._scaler, self._clip = loop, scaler, clip
        self.state_dict_key = getattr(scaler, "state_dict_key", "amp_scaler")
        self.num_skipped = 0
        self.was_applied = True
        self.where = Where()
        self.means = StepMeans(lambda: self.where)

    def __call__(
        self,
        loss: Tensor,
        optimizer: Optimizer,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Any = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> None:
        """Steps the optimizer if the step is good. One sync for each step."""
        inner = getattr(self._scaler, "_scaler", None)
        self._loop.after_forward(loss, is_used=True)
        scaled = loss if inner is None else inner.scale(loss)
        scaled.backward(create_graph=create_graph)
        if not need_update:
            return
        if clip_grad is not None:
            if inner is not None:
                inner.unscale_(optimizer)
            self._loop.measure(optimizer, grad_scaler=inner)
            self._clip(parameters, clip_grad, mode=clip_mode)
        call = optimizer.step if inner is None else lambda: inner.step(optimizer)
        self.was_applied = self._loop.step(optimizer, call, grad_scaler=inner).applied
        self.num_skipped += not self.was_applied
        self.where = Where(num_steps=self.where.num_steps + 1, was_skipped=self._loop.was_refused)
        self.means.look()
        if inner is not None:
            inner.update()

    def state_dict(self) -> dict[str, Any]:
        """The loss scale, if there is one, the number of skipped steps, and what the recovery has changed.

        A ``NativeScaler`` can load it too.
        """
        scale = {} if self._scaler is None else self._scaler.state_dict()
        changed = self._loop.state_dict()
        return {**scale, _SKIPPED: self.num_skipped, **({_CHANGED: changed} if changed else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also loads what a ``NativeScaler`` has saved."""
        scale = {key: value for key, value in state_dict.items() if key not in (_SKIPPED, _CHANGED)}
        self.num_skipped = state_dict.get(_SKIPPED, 0)
        self._loop.load_state_dict(state_dict.get(_CHANGED, {}))
        if self._scaler is not None and scale:
            self._scaler.load_state_dict(scale)
