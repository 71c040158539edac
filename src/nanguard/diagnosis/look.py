"""Read the values of tensors. Used after a bad step only: everything here waits for the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanguard import _compat

_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Look:
    """The range of a tensor. Both bounds are NaN if it holds a NaN."""

    low: float
    high: float

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def has_nan(self) -> bool:
        return math.isnan(self.low)


NOTHING = Look(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class ValueCounts:
    """How many values of each kind a tensor holds, and the range of the finite ones (0, 0 if there are none)."""

    num: int
    num_nan: int
    num_inf: int
    low: float
    high: float


def can_look(tensor: Tensor) -> bool:
    """True if a dense tensor can hold a NaN and its values can be read."""
    return tensor.layout is torch.strided and can_hold_nan(tensor)


def can_hold_nan(tensor: Tensor) -> bool:
    """The same for sparse tensors too."""
    kind = tensor.dtype in _FLOATS or tensor.is_complex()
    return kind and not tensor.is_meta and tensor.layout in _LAYOUTS and tensor.numel() > 0


def look(tensor: Tensor) -> Look:
    """The range of a tensor, of a sparse one that of the values it stores: one kernel, no copy."""
    if not can_hold_nan(tensor):
        return NOTHING
    tensor = _compat.values_of(tensor)
    if tensor.numel() == 0:
        return NOTHING
    low, high = torch.aminmax(real(tensor.detach()))
    if tensor.device.type == "cpu":
        return Look(low.item(), high.item())
    return Look(*torch.stack([low, high]).tolist())


def count_values(tensor: Tensor) -> ValueCounts:
    """Count the values chunk by chunk, so that a large tensor needs little extra memory."""
    values = real(tensor.detach()).reshape(-1) if tensor.numel() else tensor.new_zeros(0)
    nan = inf = 0
    low, high = math.inf, -math.inf
    for part in torch.split(values, 1 << 24):
        nan += int(torch.isnan(part).sum())
        inf += int(torch.isinf(part).sum())
        finite = part[torch.isfinite(part)]
        if finite.numel():
            low, high = min(low, finite.min().item()), max(high, finite.max().item())
    if low > high:
        low = high = 0.0
    return ValueCounts(values.numel(), nan, inf, low, high)


def real(tensor: Tensor) -> Tensor:
    """View complex numbers as pairs of real numbers."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def largest(tensor: Tensor) -> float:
    """The largest absolute value: 0 for an empty tensor, NaN if it holds a NaN."""
    seen = look(tensor)
    return max(abs(seen.low), abs(seen.high)) if not seen.has_nan else math.nan


def place_of_first(mask: Tensor) -> tuple[int, ...]:
    """The index of the first True."""
    flat = int(mask.reshape(-1).to(torch.uint8).argmax())
    place = torch.tensor(flat, device="cpu")
    return tuple(int(i) for i in torch.unravel_index(place, mask.shape))


def value_at(tensor: Tensor, shape: torch.Size, index: tuple[int, ...]) -> float | None:
    """The value of a tensor at an index of the shape that it is broadcast to. None if it cannot be broadcast."""
    try:
        value = tensor.detach().expand(shape)[index]
    except RuntimeError:
        return None
    return abs(value.item()) if value.is_complex() else float(value.item())
