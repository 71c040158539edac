"""Which tensors are non-finite. For use after something went wrong: everything here waits for the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nanguard.numerics.norm import tensor_norms
from nanguard.state.readback import AsyncReadback
from nanguard.state.trees import named_tensors

_FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def nonfinite_names(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of the tensors that hold NaN or Inf, in their order. Waits once for each device."""
    names = [name for name, tensor in tensors.items() if _can_be_nonfinite(tensor)]
    norms = tensor_norms([tensors[name].detach() for name in names])
    by_device: dict[torch.device, list[int]] = {}
    for place, norm in enumerate(norms):
        by_device.setdefault(norm.device, []).append(place)
    bad = set()
    for device, places in by_device.items():
        values = AsyncReadback(device).post(torch.stack([norms[place] for place in places])).read()
        bad |= {place for place, value in zip(places, values, strict=True) if not math.isfinite(value)}
    return tuple(names[place] for place in sorted(bad))


def holds_nonfinite(batch: Any) -> bool:
    """Whether a tensor of a batch holds NaN or +Inf. ``-inf`` does not count: it may be a mask."""
    return any(_holds_nan_or_inf(tensor) for _, tensor in named_tensors(batch) if _can_be_nonfinite(tensor))


def _holds_nan_or_inf(tensor: Tensor) -> bool:
    values = tensor if tensor.layout is torch.strided else tensor.coalesce().values()
    return bool((torch.isnan(values) | torch.isposinf(values.real if values.is_complex() else values)).any())


def _can_be_nonfinite(tensor: Tensor) -> bool:
    return (tensor.dtype in _FLOATING or tensor.is_complex()) and tensor.numel() > 0 and not tensor.is_meta
