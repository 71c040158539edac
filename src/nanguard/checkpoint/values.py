"""Counting what a tensor holds, a chunk at a time.

Sign aside, floating-point numbers are ordered as their bits are when read as integers: NaN above Inf, Inf above all
finite numbers, subnormal ones next to zero. So everything is counted by comparing integers, which is exact in every
dtype and does not depend on whether this process flushes subnormal numbers to zero.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 20
"""Values looked at together: few enough to stay in a processor's cache, many enough to be worth a call."""

FP16_MAX = 65504.0
FP16_VANISH = 2.0**-25
"""Up to here, fp16 rounds to zero: half of its smallest number, 2**-24."""
BF16_MAX = 3.3895313892515355e38

Tick = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class _Bits:
    """Marks on the scale of a dtype's bits. Without a range, the dtype does not reach beyond fp16."""

    integer: torch.dtype
    magnitude: int
    inf: int
    smallest_normal: int
    range: tuple[int, int, int] | None


def _bits32(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little")


def _bits64(value: float) -> int:
    return int.from_bytes(struct.pack("<d", value), "little")


_RANGE = (FP16_VANISH, FP16_MAX, BF16_MAX)
_a32, _b32, _c32 = map(_bits32, _RANGE)
_a64, _b64, _c64 = map(_bits64, _RANGE)
_SCALES = {
    torch.float16: _Bits(integer=torch.int16, magnitude=0x7FFF, inf=0x7C00, smallest_normal=0x0400, range=None),
    # bf16 is the upper half of fp32; a limit that it cannot hold is cut off, which keeps "above it" true.
    torch.bfloat16: _Bits(
        integer=torch.int16,
        magnitude=0x7FFF,
        inf=0x7F80,
        smallest_normal=0x0080,
        range=(_a32 >> 16, _b32 >> 16, _c32 >> 16),
    ),
    torch.float32: _Bits(
        integer=torch.int32,
        magnitude=0x7FFF_FFFF,
        inf=0x7F80_0000,
        smallest_normal=0x0080_0000,
        range=(_a32, _b32, _c32),
    ),
    torch.float64: _Bits(
        integer=torch.int64,
        magnitude=0x7FFF_FFFF_FFFF_FFFF,
        inf=0x7FF0_0000_0000_0000,
        smallest_normal=0x0010_0000_0000_0000,
        range=(_a64, _b64, _c64),
    ),
}

Counts = Counter[str]


def skip_reason(tensor: Tensor) -> str | None:
    """Why there is nothing to count in this tensor, or None."""
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
    """Counts by the names of ``TensorReport``'s fields. ``tick`` is told how many values are done, chunk by chunk.

    Needs memory for a few chunks besides the tensor, whatever its strides. Expanded dimensions are counted once and
    multiplied. Takes what ``skip_reason`` lets through.
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
    total["num_zero"] += max(0, total["num_values"] - seen)  # what a sparse tensor leaves out
    return total


def num_values(tensor: Tensor) -> int:
    """How many real numbers the tensor has."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def local(tensor: Tensor) -> Tensor:
    """Of a DTensor, what this file has of it."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _dense(tensor: Tensor) -> Iterator[Tensor]:
    """Strided tensors with all the values; what a sparse tensor leaves out is zero, and left out here as well."""
    if tensor.is_nested:
        yield from tensor.unbind()
    elif tensor.layout is torch.sparse_coo:
        yield tensor.coalesce().values()
    elif tensor.layout is torch.strided:
        yield tensor.detach()
    else:
        yield tensor.values()


def _without_expansion(tensor: Tensor) -> tuple[Tensor, int]:
    """One of each value that is there many times over by a stride of zero, and how many times that is."""
    times = 1
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor, times = tensor.narrow(dim, 0, 1), times * size
    return tensor, times


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """The values in flat, contiguous pieces of at most ``CHUNK``, in any order. Copies no more than a piece."""
    # In the order of its strides, a transposed or channels-last tensor is contiguous.
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
    """float8: there are 256 of them, so each is counted and then judged once."""
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
