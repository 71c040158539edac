"""Counts the kinds of values in a tensor, chunk by chunk.

Without the sign, floating-point numbers have the order of their bits read as integers: NaN is above Inf, Inf above all
finite numbers, and subnormal numbers are next to zero. So values are counted by comparing integers. This is exact in
every dtype and does not depend on whether this process flushes subnormal numbers to zero.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 20
"""Values per chunk: few enough for the cache of a CPU, many enough to be worth a call."""

FP16_MAX = 65504.0
FP16_VANISH = 2.0**-25
"""Up to this value fp16 rounds to zero. It is half of the smallest fp16 number, 2**-24."""
BF16_MAX = 3.3895313892515355e38

Tick = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class _Bits:
    """Limits of a dtype as bits. ``range`` is None if the dtype has no larger range than fp16."""

    integer: torch.dtype
    magnitude: int
    inf: int
    smallest_normal: int
    range: tuple[int, int, int] | None


def _bits(dtype: torch.dtype, integer: torch.dtype, code: str, shift: int = 0) -> _Bits:
    def of(value: float) -> int:
        return int.from_bytes(struct.pack(code, value), "little") >> shift

    return _Bits(
        integer=integer,
        magnitude=torch.iinfo(integer).max,
        inf=of(math.inf),
        smallest_normal=of(torch.finfo(dtype).smallest_normal),
        range=None if dtype is torch.float16 else (of(FP16_VANISH), of(FP16_MAX), of(BF16_MAX)),
    )


_SCALES = {
    torch.float16: _bits(torch.float16, torch.int16, "<e"),
    # bf16 is the upper half of fp32. Limits that it cannot represent are truncated, so "above" stays correct.
    torch.bfloat16: _bits(torch.bfloat16, torch.int16, "<f", shift=16),
    torch.float32: _bits(torch.float32, torch.int32, "<f"),
    torch.float64: _bits(torch.float64, torch.int64, "<d"),
}

Counts = Counter[str]


def skip_reason(tensor: Tensor) -> str | None:
    """Why this tensor is not counted, or None."""
    if tensor.is_quantized:
        return "quantised"
    if tensor.is_meta:
        return "meta: no data"
    if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        return "integer or bool"
    if str(tensor.dtype).startswith("torch.float4"):
        return "float4 has no NaN or Inf"
    return None


@torch.no_grad()
def count(tensor: Tensor, tick: Tick = lambda done: None) -> Counts:
    """Counts by the field names of ``TensorReport``. ``tick`` is called with the number of values of each chunk.

    Needs memory for a few chunks besides the tensor, for any strides. Expanded dimensions are counted once and
    multiplied. Accepts tensors for which ``skip_reason`` is None.
    """
    tensor = local(tensor)
    total: Counts = Counter(num_values=num_values(tensor))
    seen = 0
    for dense in _dense(tensor):
        dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        dense, times = _without_expansion(dense.resolve_neg())
        for chunk in _chunks(dense):
            for field, number in _count_chunk(chunk).items():
                total[field] += number * times
            seen += chunk.numel() * times
            tick(chunk.numel() * times)
    total["num_zero"] += max(0, total["num_values"] - seen)  # the implicit zeros of a sparse tensor
    return total


def num_values(tensor: Tensor) -> int:
    """How many real numbers the tensor has."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def local(tensor: Tensor) -> Tensor:
    """The local part of a DTensor; other tensors unchanged."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _dense(tensor: Tensor) -> Iterator[Tensor]:
    """Strided tensors with all explicit values. Implicit zeros of sparse tensors are left out."""
    if tensor.is_nested:
        yield from tensor.unbind()
    elif tensor.layout is torch.sparse_coo:
        yield tensor.coalesce().values()
    elif tensor.layout is torch.strided:
        yield tensor.detach()
    else:
        yield tensor.values()


def _without_expansion(tensor: Tensor) -> tuple[Tensor, int]:
    """The tensor with one element per expanded dimension, and how often each value is repeated."""
    times = 1
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor, times = tensor.narrow(dim, 0, 1), times * size
    return tensor, times


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """The values in flat, contiguous chunks of at most ``CHUNK``, in any order. Copies at most one chunk."""
    # Ordered by strides, a transposed or channels-last tensor is contiguous.
    tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True))
    if tensor.is_contiguous():
        yield from torch.split(tensor.view(-1), CHUNK)
    elif tensor.numel() <= CHUNK:
        yield tensor.reshape(-1)
    else:
        row = tensor.numel() // tensor.shape[0]
        for part in torch.split(tensor, max(1, CHUNK // row)):
            yield from _chunks(part if part.shape[0] > 1 else part[0])


def _count_chunk(values: Tensor) -> dict[str, int]:
    if values.numel() == 0:
        return {}
    if values.dtype.itemsize == 1:
        return _count_bytes(values)
    scale = _SCALES[values.dtype]
    bits = values.view(scale.integer) & scale.magnitude
    largest = int(bits.max())
    nonzero = _how_many(bits)
    zero = bits.numel() - nonzero
    counts = {"num_zero": zero, "num_subnormal": _how_many(bits < scale.smallest_normal) - zero}
    if scale.range:
        vanish, fp16, bf16 = scale.range
        counts["num_under_fp16"] = _how_many(bits <= vanish) - zero
        if largest > fp16:
            nonfinite = _how_many(bits >= scale.inf)
            counts["num_over_fp16"] = _how_many(bits > fp16) - nonfinite
            counts["num_over_bf16"] = _how_many(bits > bf16) - nonfinite
    if largest >= scale.inf:
        inf = bits == scale.inf
        counts["num_nan"] = _how_many(bits > scale.inf)
        counts["num_neginf"] = _how_many(inf & values.signbit())
        counts["num_posinf"] = _how_many(inf) - counts["num_neginf"]
    return counts


def _count_bytes(values: Tensor) -> dict[str, int]:
    """For float8: each of the 256 possible values is counted and classified once."""
    numbers = torch.arange(256, dtype=torch.uint8).view(values.dtype).float()
    times = torch.bincount(values.view(torch.uint8), minlength=256)

    def total(which: Tensor) -> int:
        return int(times[which].sum())

    return {
        "num_nan": total(numbers.isnan()),
        "num_posinf": total(numbers.isposinf()),
        "num_neginf": total(numbers.isneginf()),
        "num_zero": total(numbers == 0),
    }


def _how_many(truths: Tensor) -> int:
    return int(torch.count_nonzero(truths))
