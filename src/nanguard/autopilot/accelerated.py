"""Loops with Accelerate in a program under ``nanguard run``: a step that was not let through counts as skipped there.

``accelerator.optimizer_step_was_skipped`` is then True, and prepared schedulers hold.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from nanguard.autopilot.registry import hosted_step_of
from nanguard.hosted.step import HostedStep

MODULE = "accelerate.optimizer"


def hold_schedules(save: Callable[[Any, str, Any], None]) -> None:
    """Patches ``AcceleratedOptimizer.step``; ``save`` is told what was there."""
    kind = sys.modules[MODULE].AcceleratedOptimizer
    original = kind.step

    @functools.wraps(original)
    def step(optimizer: Any, closure: Any = None) -> None:
        hosted = _hosted_step(optimizer)
        if hosted is not None:
            hosted.ask_the_host()  # the schedule has to know at once
        original(optimizer, closure)
        hosted = _hosted_step(optimizer)
        if hosted is not None and optimizer.gradient_state.sync_gradients:
            has_overflow = optimizer.scaler is not None and optimizer.step_was_skipped
            optimizer._is_overflow = has_overflow or not hosted.was_applied

    save(kind, "step", original)
    kind.step = step


def _hosted_step(optimizer: Any) -> HostedStep | None:
    """Of the optimizer inside Accelerate's wrappers; None before its first step, and if it is not guarded."""
    while hasattr(optimizer, "step_was_skipped"):
        optimizer = optimizer.optimizer
    return hosted_step_of(optimizer)
