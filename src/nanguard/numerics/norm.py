"""Norms that neither overflow nor underflow.

A norm in the gradients' own dtype squares them there: fp16 ``[6e4, 6e4]`` has norm Inf, fp32 overflows above
1.8e19 and loses everything below 1e-23. Here all squares are summed in float64, which holds the square of any
fp16, bf16 or fp32 number; float64 tensors are divided by their largest element first. So a norm is finite
exactly when its tensor is, and one number says whether a gradient is sound. On a CPU, where float64 is slow, many fp32
numbers are summed in fp32 first, and in float64 where that was too narrow.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from nanguard import _compat_kernels, _compat_modes

_MANY = 1 << 16
_SMALL = {"cpu": 1 << 11, "cuda": 1 << 16}
"""Tensors of up to so many elements are summed together. A CPU sums them in a simple loop, a GPU with a block each."""

_LEAST_SQUARES = 1e-30
"""A smaller sum of squares in fp32 may have lost some that are too small for it."""

_WORTH_IT = 4
"""From so many small tensors on."""

_LOW = {torch.float32, torch.bfloat16, torch.float16}
_vector_norm: Any = torch.linalg.vector_norm
_grad_of = attrgetter("grad")


def gradients_of(params: Iterable[Tensor]) -> list[Tensor]:
    """Of those that have one. Takes half the time of asking each in Python."""
    return [grad for grad in map(_grad_of, params) if grad is not None]


def are_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether one kernel can take them all: strided, real, of one dtype below float64, and of one device."""
    if not tensors:
        return True
    dtype, device = tensors[0].dtype, tensors[0].device
    if dtype not in _LOW:
        return False
    for each in tensors:
        if each.dtype is not dtype or each.layout is not torch.strided or each.device != device:
            return False
    return True


def tensor_norms(tensors: Sequence[Tensor], order: float = 2.0) -> Sequence[Tensor]:
    """The norm of each tensor as a 0-dim float64 tensor on its device.

    Finite if and only if every element is. Takes mixed devices and dtypes, complex and sparse tensors, and empty
    ones (norm 0). ``order`` is 2 or infinity. Does not sync, except that torch coalesces sparse CUDA tensors.
    """
    if not tensors:
        return []
    plain = [t if t.layout is torch.strided else t.coalesce().values() for t in tensors]
    norms: list[Tensor] = [plain[0]] * len(plain)
    for members, places in _compat_kernels.by_device_and_dtype(plain):
        if members[0].is_complex():
            members = [torch.view_as_real(t.resolve_conj()) for t in members]
        if order != 2.0 or members[0].dtype is not torch.float64:
            found = list(_norms(members, order))
        else:
            found = [_norm_of_float64(t) for t in members]
        for place, norm in zip(places, found, strict=True):
            norms[place] = norm
    return norms


class NormWriter:
    """Writes the norms of many tensors into one vector. Does not sync, except when their sizes change.

    ``_foreach_norm`` makes a tensor for each result, which takes the host longer than the kernels take. So all small
    tensors are copied into one and summed by one kernel.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._small: list[int] = []
        self._large: list[int] = []
        self._lengths = self._small_at = self._large_at = torch.empty(0, dtype=torch.int64, device="cpu")

    def write_(self, out: Tensor, tensors: list[Tensor]) -> None:
        """``tensors`` are alike; ``out`` is float64, on their device, and has an element for each."""
        if not self._sort(tensors):
            torch.stack(list(_norms(tensors, 2.0)), out=out)
        elif not self._large:
            torch.sqrt(self._sums(tensors), out=out)
        else:
            out.index_copy_(0, self._small_at, self._sums([tensors[place] for place in self._small]).sqrt_())
            large = _norms([tensors[place] for place in self._large], 2.0)
            out.index_copy_(0, self._large_at, torch.stack(list(large)))

    def _sums(self, small: list[Tensor]) -> Tensor:
        """The sum of the squares of each."""
        squares = _compat_kernels.flatten(small).double().square_()
        return torch.segment_reduce(squares, "sum", lengths=self._lengths, unsafe=True)

    def _sort(self, tensors: list[Tensor]) -> bool:
        """Whether some are small. Not while a CUDA graph is captured, which cannot take numbers from the host."""
        sizes = [t.numel() for t in tensors]
        if sizes == self._sizes:
            return bool(self._small)
        if _compat_modes.is_capturing():
            return False
        device = tensors[0].device
        limit = _SMALL.get(device.type, 0)
        self._small = [place for place, size in enumerate(sizes) if size <= limit]
        if len(self._small) < _WORTH_IT:
            self._small = []
        self._large = sorted(set(range(len(sizes))) - set(self._small))
        self._lengths = torch.tensor([sizes[place] for place in self._small], dtype=torch.int64, device=device)
        self._small_at = torch.tensor(self._small, dtype=torch.int64, device=device)
        self._large_at = torch.tensor(self._large, dtype=torch.int64, device=device)
        self._sizes = sizes
        return bool(self._small)


def joint_norm(tensors: list[Tensor]) -> float:
    """The norm of all of them together, on the host, in as few calls as possible: for tensors on a CPU.

    If it is finite, so is every element. Otherwise that is not known: they may be sparse, complex, or huge numbers of
    float64.
    """
    if not tensors:
        return 0.0
    try:
        if sum(map(Tensor.numel, tensors)) >= _MANY:
            with _compat_modes.NoGrad():
                return math.hypot(*torch.stack(list(_norms(tensors, 2.0))).tolist())
        flat = _compat_kernels.flatten(tensors)
        if flat.dtype is torch.float32:
            squares: float = flat.dot(flat).item()  # takes half the time of a norm in float64
            if _LEAST_SQUARES < squares < math.inf:
                return math.sqrt(squares)
        norm: float = math.nan if flat.is_complex() else _vector_norm(flat, dtype=torch.float64).item()
        return norm
    except RuntimeError:  # they are sparse, or on several devices
        return math.nan


def combine_(norms: Tensor, each: Sequence[Tensor], groups: Sequence[Tensor], *, alike: bool) -> None:
    """Writes the norm of each group into ``norms``, from float64 vectors of the norms of its members. Does not sync.

    ``each`` are the elements of ``norms`` as views. Where the members are not ``alike`` they may be float64, and then
    their norms cannot be squared either.
    """
    if not alike:
        norms.copy_(torch.stack([_norm_of_float64(group) for group in groups]))
    elif len(groups) > 4:
        norms.copy_(torch.stack(list(_compat_kernels.foreach_norm(groups, 2.0))))
    else:
        for norm, group in zip(each, groups, strict=True):  # a kernel each is quicker for a few
            torch.linalg.vector_norm(group, out=norm)


def torch_norm(tensors: Sequence[Tensor], *, alike: bool = False) -> Tensor | None:
    """The norm ``torch.nn.utils.clip_grad_norm_`` would compute, to the last bit.

    None where it would round to less than fp32 (bf16 and fp16 gradients, where torch's norm is off by up to
    0.4%) or where there is nothing to compute. Does not sync. It takes less time if tensors are known to be ``alike``.
    """
    if alike:
        return _compat_kernels.norms_of_alike(tensors)[1] if tensors and tensors[0].dtype is torch.float32 else None
    dtypes = {t.dtype for t in tensors}
    if dtypes not in ({torch.float32}, {torch.float64}) or any(t.layout is not torch.strided for t in tensors):
        return None
    return _compat_kernels.torch_total_norm(tensors)


@functools.cache
def ordinary_range(dtype: torch.dtype) -> tuple[float, float]:
    """Between which norms squares in ``dtype`` neither overflow nor underflow."""
    limits = torch.finfo(dtype)
    return 1e2 * math.sqrt(limits.tiny), 1e-2 * math.sqrt(limits.max)


def _norms(tensors: list[Tensor], order: float) -> Sequence[Tensor]:
    first = tensors[0]
    is_plain = order == 2.0 and first.device.type == "cpu" and first.dtype is torch.float32
    if is_plain and sum(t.numel() for t in tensors) >= _MANY:
        return _norms_on_cpu(tensors)
    if order == math.inf and any(t.numel() == 0 for t in tensors):  # torch has no maximum of nothing
        return [
            _compat_kernels.foreach_norm([t], order)[0] if t.numel() else t.new_zeros((), dtype=torch.float64)
            for t in tensors
        ]
    return _compat_kernels.foreach_norm(tensors, order)


def _norms_on_cpu(tensors: list[Tensor]) -> Sequence[Tensor]:
    """In fp32, which a CPU sums some twenty times as fast, and in float64 where its squares may have left it."""
    low, high = ordinary_range(torch.float32)
    quick = torch.stack(list(_compat_kernels.foreach_norm_as_is(tensors))).double()
    norms = list(quick.unbind())
    doubtful = [place for place, norm in enumerate(quick.tolist()) if not low < norm < high]
    exact = _compat_kernels.foreach_norm([tensors[place] for place in doubtful], 2.0) if doubtful else ()
    for place, norm in zip(doubtful, exact, strict=True):
        norms[place] = norm
    return norms


def _norm_of_float64(tensor: Tensor) -> Tensor:
    if tensor.numel() == 0:
        return tensor.new_zeros(())
    largest = torch.linalg.vector_norm(tensor, math.inf)
    # A zero or non-finite maximum must not become 0/0: divide by one, and let the norm itself say what it is.
    divisor = torch.where((largest > 0) & (largest < math.inf), largest, torch.ones_like(largest))
    scaled: Tensor = torch.linalg.vector_norm(tensor / divisor)
    return scaled * divisor
