"""What speaks for whose fault it is. Looked at when something went wrong, never before; waits for the device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from nanguard.numerics.norm import tensor_norms
from nanguard.state.trees import tensors
from nanguard.step.readback import AsyncReadback


def nonfinite_names(named: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of floating-point tensors that hold NaN or Inf, in their order. Waits for an answer from each device."""
    names = [name for name, tensor in named.items() if _can_be_nonfinite(tensor)]
    norms = tensor_norms([named[name].detach() for name in names])
    by_device: dict[torch.device, list[int]] = {}
    for place, norm in enumerate(norms):
        by_device.setdefault(norm.device, []).append(place)
    bad = set()
    for device, places in by_device.items():
        values = AsyncReadback(device).post(torch.stack([norms[place] for place in places])).values()
        bad |= {place for place, value in zip(places, values, strict=True) if not math.isfinite(value)}
    return tuple(names[place] for place in sorted(bad))


def holds_nonfinite(batch: Any) -> bool:
    """Whether any tensor of a batch holds a NaN or an Inf that is no mask: ``-inf`` may be meant."""
    return any(bool((torch.isnan(t) | torch.isposinf(t.real if t.is_complex() else t)).any()) for t in _tensors(batch))


def _tensors(batch: Any) -> Iterator[Tensor]:
    for tensor in filter(_can_be_nonfinite, tensors(batch)):
        yield tensor if tensor.layout is torch.strided else tensor.coalesce().values()


def _can_be_nonfinite(tensor: Tensor) -> bool:
    whole = tensor.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16) or tensor.is_complex()
    return whole and tensor.numel() > 0 and not tensor.is_meta
