"""Many tensors copied by few kernels."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nanguard import _compat_kernels

_ALONE = 32 << 20
"""From this size on a memcpy of its own is quicker, within a device, than a share in a kernel for many."""

_TOGETHER = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
_PLAIN = {Tensor, nn.Parameter}
_AS_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16}


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copies the second of each pair into the first, bit for bit if the dtypes are the same. Does not sync."""
    together: dict[tuple[torch.dtype, torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for to, source in pairs:
        if _goes_together(to, source):
            if to.dtype is source.dtype and to.dtype in _AS_BITS:  # else by way of fp32, where a NaN becomes another
                to, source = to.view(_AS_BITS[to.dtype]), source.view(_AS_BITS[to.dtype])
            members = together.setdefault((to.dtype, source.dtype, to.device), ([], []))
            members[0].append(to)
            members[1].append(source)
        else:
            _copy(to, source)
    for members in together.values():
        _compat_kernels.foreach_copy_(*members)


def _goes_together(to: Tensor, source: Tensor) -> bool:
    return (
        type(to) in _PLAIN
        and type(source) in _PLAIN
        and to.layout is source.layout is torch.strided
        and to.nbytes < _ALONE
        and to.dtype in _TOGETHER
        and source.dtype in _TOGETHER
        and to.device == source.device
        and (stride := to.stride()) == source.stride()
        and 0 not in stride
    )


def _copy(to: Tensor, source: Tensor) -> None:
    if to.layout is torch.strided:
        for dim, stride in enumerate(to.stride()):
            if stride == 0 and to.shape[dim] > 1:  # an expanded tensor: its elements share memory, so one is enough
                to, source = to.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    to.copy_(source)
