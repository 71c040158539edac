"""The program calls ``step(closure)``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from nanguard.autopilot.registry import hosted_step_of
from nanguard.hosted.closures import AnsweredClosure, Closure, WatchedClosure, call_after
from nanguard.hosted.optimizers import ProgramCall

if TYPE_CHECKING:
    from nanguard.autopilot.monitor import ProgramMonitor


def taped(monitor: ProgramMonitor, closure: Closure) -> Closure:
    """The closure, with a tape of what it does."""
    return functools.partial(call_after, monitor.begin_taping, closure)


def step_with_closure(
    monitor: ProgramMonitor, optimizer: Optimizer, call: Callable[[Any], Any], closure: Closure, *, runs_first: bool
) -> Any:
    """``runs_first``: the closure runs before the step is decided on."""
    monitor.guard_new_optimizers()
    hosted = hosted_step_of(optimizer)
    if hosted is None:
        return call(closure)
    if not (runs_first or hosted.runs_closure_first):
        watched = WatchedClosure(taped(monitor, closure))
        return monitor.step(optimizer, ProgramCall(call, watched), check_afterwards=True, watched=watched)
    with torch.enable_grad():
        loss = taped(monitor, closure)()
    answered = AnsweredClosure(closure, loss)
    result = monitor.step(optimizer, ProgramCall(call, answered), otherwise=loss)
    if answered.ran_again:
        hosted.runs_closure_first = False
    return result
