"""Loops with Fabric in a program under ``nanguard run``: schedules hold, and ``fabric.clip_gradients`` does not raise.

A bad step is skipped when the optimizer is called, which an error of Fabric would prevent. The schedule has to know of
it at once, so the host decides before each step.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from nanguard import _compat_data
from nanguard.autopilot.launch import WhenImported
from nanguard.autopilot.registry import hosted_step_of

MODULES = ("lightning.fabric.fabric", "lightning_fabric.fabric")
_MOST_ARGUMENTS = 3
"""With more of them, ``error_if_nonfinite`` is given by its position."""

Save = Callable[[Any, str, Any], None]


class _Steps(NamedTuple):
    """How many steps an optimizer of Fabric was asked for, and how many of them were bad, and so skipped."""

    num: int = 0
    num_bad: int = 0


class FabricLoops:
    """``save`` is told what each patch has replaced."""

    def __init__(self, save: Save) -> None:
        self._save = save
        self._steps: WeakKeyDictionary[Optimizer, _Steps] = WeakKeyDictionary()
        self._seen: WeakKeyDictionary[LRScheduler, _Steps] = WeakKeyDictionary()
        """The steps that the optimizer of a scheduler had made when the scheduler was advanced last."""
        self._classes: set[type] = set()

    def waits(self) -> list[WhenImported]:
        """For Fabric to be imported, which may never happen."""
        return [WhenImported(module, functools.partial(self._patch, module)) for module in MODULES]

    def _patch(self, module: str) -> None:
        package = module.rpartition(".")[0]
        self._replace(sys.modules[module].Fabric, "clip_gradients", self._clip_gradients)
        self._replace(sys.modules[f"{package}.wrappers"]._FabricOptimizer, "step", self._step)

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        self._save(owner, name, original)
        setattr(owner, name, functools.wraps(original)(make(original)))

    def _clip_gradients(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip_gradients(fabric: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if hosted_step_of(_raw(optimizer)) is not None and len(args) <= _MOST_ARGUMENTS:
                kwargs["error_if_nonfinite"] = False
            return original(fabric, model, optimizer, *args, **kwargs)

        return clip_gradients

    def _step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            raw = optimizer.optimizer
            hosted = hosted_step_of(raw)
            if hosted is None:
                return original(optimizer, *args, **kwargs)
            if raw not in self._steps:
                self._hold_schedules()
            hosted.ask_the_host()
            overflows = hosted.parts.journal.counts["backed_off"]
            result = original(optimizer, *args, **kwargs)
            hosted = hosted_step_of(raw) or hosted
            is_routine = hosted.parts.journal.counts["backed_off"] > overflows
            before = self._steps.get(raw, _Steps())
            self._steps[raw] = _Steps(before.num + 1, before.num_bad + (not hosted.was_applied and not is_routine))
            return result

        return step

    def _hold_schedules(self) -> None:
        """Wraps ``step`` of all schedulers there are, in the classes that define it."""
        for kind in _with_subclasses(LRScheduler):
            if kind not in self._classes and "step" in vars(kind) and not issubclass(kind, ReduceLROnPlateau):
                self._classes.add(kind)
                self._replace(kind, "step", self._advance)

    def _advance(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> Any:
            return None if self._is_held(scheduler) else original(scheduler, *args, **kwargs)

        return step

    def _is_held(self, scheduler: LRScheduler) -> bool:
        """Whether every step since this schedule was advanced last was bad. After an epoch that is hardly ever so."""
        optimizer = getattr(scheduler, "optimizer", None)
        now = self._steps.get(_raw(optimizer)) if isinstance(optimizer, Optimizer) else None
        if now is None:
            return False
        before = self._seen.get(scheduler, _Steps())
        self._seen[scheduler] = now
        if _compat_data.is_being_made(scheduler):
            return False
        return now.num > before.num and now.num - before.num == now.num_bad - before.num_bad


def _raw(optimizer: Any) -> Any:
    """Inside the wrapper of Fabric."""
    return optimizer.optimizer if hasattr(optimizer, "_strategy") else optimizer


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    subclasses: list[type] = kind.__subclasses__()
    for each in subclasses:
        yield from _with_subclasses(each)
