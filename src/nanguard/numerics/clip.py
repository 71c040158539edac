"""Clipping from a norm that was measured before: the norm cannot overflow, and a NaN cannot blind it.

A limit is the largest norm a gradient may have. Fixed limits come from ``max_norm``; ``ZScore`` learns them from
the recent past. ``AGC`` compares each unit's gradient with its weights instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanguard import _compat_kernels
from nanguard.numerics.norm import ordinary_range, torch_norm

_EPS = 1e-6  # what clip_grad_norm_ adds to the norm


@dataclass(frozen=True, kw_only=True, slots=True)
class AGC:
    """Adaptive gradient clipping (Brock et al., 2021): no unit's gradient exceeds ``factor`` times its weights.

    A unit is a row of a matrix or a filter of a convolution; a vector is one unit. ``eps`` is the least weight
    norm, so that units that start at zero can leave it.
    """

    factor: float = 0.01
    eps: float = 1e-3

    def __post_init__(self) -> None:
        _require_positive("AGC factor", self.factor)
        _require_positive("AGC eps", self.eps)


@dataclass(frozen=True, kw_only=True, slots=True)
class ZScore:
    """Clips a norm that lies more than ``threshold`` standard deviations above the mean of the last ``window``.

    Only norms of applied steps enter the window, as they were after clipping: neither a NaN nor an outlier can
    move the limit. Until ``warmup`` steps were applied, ``max_norm`` alone limits.
    """

    threshold: float = 3.0
    window: int = 128
    warmup: int = 32

    def __post_init__(self) -> None:
        _require_positive("ZScore threshold", self.threshold)
        if self.window < 2 or not 2 <= self.warmup <= self.window:
            raise ValueError(
                f"ZScore needs 2 <= warmup <= window, got warmup={self.warmup!r} and window={self.window!r}"
            )


def require_max_norm(max_norm: float | None) -> None:
    """Raises ``ValueError`` unless ``max_norm`` is None or a finite positive number."""
    if max_norm is not None:
        _require_positive("max_norm", max_norm, "; pass None to turn clipping off")


def coefficient(norms: Tensor, limits: Tensor, out: Tensor | None = None) -> Tensor:
    """What to multiply gradients of these norms by so that they keep these limits; at most 1. Does not sync."""
    return torch.div(limits, norms, out=out).clamp_(max=1.0)


def like_torch(exact: Tensor, limit: float, grads: Sequence[Tensor], *, alike: bool = False) -> Tensor:
    """The ``exact`` coefficient, but to the last bit what ``clip_grad_norm_`` uses on ordinary gradients.

    torch sums squares in the gradients' own dtype. Where that neither overflows nor underflows its result is
    taken, else the exact one; the device chooses. ``alike`` as in ``tensor_norms``. Does not sync.
    """
    theirs = torch_norm(grads, alike=alike)
    if theirs is None:
        return exact
    low, high = ordinary_range(theirs.dtype)
    ordinary = (theirs > low) & (theirs < high)
    return torch.where(ordinary, torch.clamp(limit / (theirs + _EPS), max=1.0), exact.to(theirs.dtype))


def scale_(grads: Sequence[Tensor], factor: Tensor, *, alike: bool = False) -> None:
    """Multiplies all gradients by a 0-dim tensor, in place; ``alike`` as in ``tensor_norms``. Does not sync."""
    if alike:
        _compat_kernels.foreach_mul_(grads, factor.to(grads[0].device, torch.float32))
        return
    if any(g.layout is not torch.strided for g in grads):
        for g in grads:
            g.mul_(factor.to(g.device, g.dtype))
        return
    for members, _ in _compat_kernels.by_device_and_dtype(grads):
        first = members[0]
        wide = torch.float64 if first.dtype in (torch.float64, torch.complex128) else torch.float32
        _compat_kernels.foreach_mul_(members, factor.to(first.device, wide))


def clip_units_(params: Sequence[Tensor], grads: Sequence[Tensor], options: AGC) -> None:
    """Adaptive gradient clipping, in place; sparse gradients are left as they are. Does not sync."""
    for param, grad in zip(params, grads, strict=True):
        if grad.layout is not torch.strided or grad.numel() == 0:
            continue
        limit = _unit_norms(param.detach()).clamp_(min=options.eps).mul_(options.factor)
        norm = _unit_norms(grad)
        grad.mul_(torch.where(norm > limit, limit / norm, torch.ones_like(norm)).to(grad.dtype))


class NormWindow:
    """The recent gradient norms behind ``ZScore``: one row for each limit, on the device, written without a sync."""

    def __init__(self, options: ZScore, rows: int, device: torch.device) -> None:
        self.rows = rows
        self._options = options
        self._values = torch.zeros(rows, options.window, dtype=torch.float64, device=device)
        self._count = torch.zeros(rows, dtype=torch.int64, device=device)
        self._places = torch.arange(options.window, device=device)

    def limits(self, max_norm: float | None) -> Tensor:
        """The largest norm allowed now, one for each row. Does not sync."""
        seen = self._count.clamp(max=self._options.window).unsqueeze(1)
        valid = self._places < seen
        mean = self._values.sum(1) / seen.squeeze(1)
        spread = torch.where(valid, self._values - mean.unsqueeze(1), 0.0).square().sum(1)
        limit = mean + self._options.threshold * (spread / (seen.squeeze(1) - 1)).sqrt()
        ceiling = math.inf if max_norm is None else max_norm
        warm = self._count >= self._options.warmup
        return torch.where(warm, limit.clamp(max=ceiling), ceiling)

    def add_(self, norms: Tensor, skip: Tensor | None = None) -> None:
        """Remembers the norms of a step, unless ``skip`` (a 0-dim tensor) is non-zero. Does not sync."""
        keep = torch.isfinite(norms) & (norms > 0)  # a frozen group has nothing to teach
        if skip is not None:
            keep = keep & (skip == 0)
        here = self._places == (self._count % self._options.window).unsqueeze(1)
        write = here & keep.unsqueeze(1)
        torch.where(write, norms.unsqueeze(1), self._values, out=self._values)
        self._count.add_(keep)

    def tensors(self) -> dict[str, Tensor]:
        """What it remembers, as it is on the device."""
        return {"values": self._values, "count": self._count}

    def state_dict(self) -> dict[str, list[list[float]] | list[int]]:
        return {"values": self._values.tolist(), "count": self._count.tolist()}

    def load_state_dict(self, state: dict[str, list[list[float]] | list[int]]) -> None:
        values = torch.tensor(state["values"], dtype=torch.float64, device="cpu")
        if values.shape != self._values.shape:
            raise ValueError(
                f"the saved norm window has shape {tuple(values.shape)}, this guard needs "
                f"{tuple(self._values.shape)}: use the same parameter groups and ZScore options"
            )
        self._values.copy_(values)
        self._count.copy_(torch.tensor(state["count"], device="cpu"))


def _unit_norms(tensor: Tensor) -> Tensor:
    """Norm of each row or filter, in float64 and shaped to broadcast; of the whole where it is a vector."""
    tensor = tensor.abs() if tensor.is_complex() else tensor
    unit = tuple(range(1, tensor.ndim)) or None
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=unit, keepdim=unit is not None, dtype=torch.float64)
    return norms


def _require_positive(name: str, value: float, hint: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above zero, got {value!r}{hint}")
