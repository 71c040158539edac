"""Loops with Fabric in a program under ``nanguard run``: ``fabric.clip_gradients`` does not raise at a bad step.

The step is skipped when the optimizer is called, which Fabric's error would prevent.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from nanguard.autopilot.registry import hosted_step_of

MODULES = ("lightning.fabric.fabric", "lightning_fabric.fabric")
_MOST_ARGUMENTS = 3
"""With more of them, ``error_if_nonfinite`` is given by its position."""


def clip_without_errors(module: str, save: Callable[[Any, str, Any], None]) -> None:
    """Patches ``Fabric.clip_gradients``; ``save`` is told what was there."""
    kind = sys.modules[module].Fabric
    original = kind.clip_gradients

    @functools.wraps(original)
    def clip_gradients(fabric: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        inner = optimizer.optimizer if hasattr(optimizer, "_strategy") else optimizer
        if hosted_step_of(inner) is not None and len(args) <= _MOST_ARGUMENTS:
            kwargs["error_if_nonfinite"] = False
        return original(fabric, model, optimizer, *args, **kwargs)

    save(kind, "clip_gradients", original)
    kind.clip_gradients = clip_gradients
