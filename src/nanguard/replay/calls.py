"""Calls of a model, as ``nanguard run`` saves them: a list of ``(args, kwargs)`` instead of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanguard.state.trees import is_float, tensors


def is_calls(batch: Any) -> bool:
    """Whether this is a list of calls."""
    return isinstance(batch, list) and bool(batch) and all(_is_call(each) for each in batch)


def calls_in(batch: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return list(batch) if is_calls(batch) else []


def call_again(
    device: str = "cpu", dtype: torch.dtype = torch.bfloat16, enabled: bool = False, *, rng: Tensor | None = None
) -> Callable[[Any, Any], Tensor]:
    """A loss function that makes the calls again, under this autocast, and sums up what comes out."""

    def loss_fn(model: Any, calls: Any) -> Tensor:
        if rng is not None:
            torch.set_rng_state(rng)
        parts = []
        for args, kwargs in calls:
            with torch.autocast(device, dtype=dtype, enabled=enabled or torch.is_autocast_enabled(device)):
                given = model(*args, **kwargs)
            parts += [t.float().sum() for t in tensors(given) if is_float(t) and t.requires_grad]
        if not parts:
            raise ValueError("the model returns no tensor that a gradient could reach")
        return torch.stack(parts).sum()

    return loss_fn


def _is_call(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple) and isinstance(value[1], dict)
