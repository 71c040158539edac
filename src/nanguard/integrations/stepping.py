"""A guard inside a loop that calls ``step`` of optimizers, or of a GradScaler, which cannot be replaced elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from nanguard import _compat
from nanguard.hosted.closures import AnsweredClosure
from nanguard.hosted.loop import HostedLoop
from nanguard.integrations.attached import AttachedGuard


class SteppingGuard(AttachedGuard):
    """Replaces ``step`` of each optimizer, and of the GradScaler if there is one, until ``detach``."""

    def __init__(self, loop: HostedLoop, optimizers: Iterable[Optimizer], scaler: Any) -> None:
        super().__init__(loop)
        self._optimizers, self.scaler = tuple(optimizers), scaler
        self._is_stepping = False
        for optimizer in self._optimizers:
            self.replace(optimizer, "step", self._optimizer_step(optimizer))
        if scaler is not None:
            self.replace(scaler, "step", self._scaler_step(scaler))

    def knows(self, optimizer: Any) -> bool:
        """Whether this optimizer is guarded here."""
        return any(each is optimizer for each in self._optimizers)

    def measure(self, optimizer: Optimizer) -> None:
        """Before clipping. Gradients that a fused optimizer unscales itself can be measured only by the step."""
        if self.scaler is None or _compat.is_unscaled(self.scaler, optimizer):
            self.loop.measure(optimizer, grad_scaler=self.scaler)

    def step(self, optimizer: Optimizer, call: Callable[[], Any], otherwise: Any = None) -> Any:
        """Makes the call if the step is good. Returns ``otherwise`` if it is not."""
        self._is_stepping = True
        try:
            done = self.loop.step(optimizer, call, grad_scaler=self.scaler)
        finally:
            self._is_stepping = False
        self.after_step(optimizer, is_applied=done.applied)
        return done.result if done.applied else otherwise

    def after_step(self, optimizer: Optimizer, *, is_applied: bool) -> None:
        """For adapters that have to do something about it."""

    def _optimizer_step(self, optimizer: Optimizer) -> Callable[..., Any]:
        original = optimizer.step

        @functools.wraps(original)
        def step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            if closure is None:
                call = functools.partial(original, **kwargs)
                return call() if self._is_stepping else self.step(optimizer, call)  # called by the GradScaler
            with torch.enable_grad():
                loss = closure()
            answered = AnsweredClosure(closure, loss)
            return self.step(optimizer, functools.partial(original, answered, **kwargs), loss)

        return step

    def _scaler_step(self, scaler: Any) -> Callable[..., Any]:
        original = scaler.step

        @functools.wraps(original)
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            call = functools.partial(original, optimizer, *args, **kwargs)
            return self.step(optimizer, call) if self.knows(optimizer) else call()

        return step


def can_be_rolled_back(scheduler: object) -> bool:
    """Whether a rollback can put it back. One that is told a metric belongs to the validation of the host."""
    return isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau)


def refuse_sharded(strategy: object, who: str) -> None:
    """Raises ``ValueError`` for the strategies of Lightning and Fabric that keep parameters in pieces."""
    names = [kind.__name__ for kind in type(strategy).__mro__]
    if any(name in _SHARDED for name in names):
        raise ValueError(
            f"{who} does not support {names[0]} yet: parameters are in pieces on several ranks. Use strategy='ddp', or "
            "train without nanguard"
        )


_SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy", "XLAFSDPStrategy")
