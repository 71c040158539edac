"""One device flag for any set of tensors, and what to do with it without asking the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanguard import _compat_kernels
from nanguard.numerics.norm import tensor_norms

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def nonfinite(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """1.0 if any element of any tensor is NaN or Inf, else 0.0; 0-dim float32 on ``device``. Does not sync."""
    flag = torch.zeros((), dtype=torch.float32, device=device)
    norms = [norm.to(device) for norm in tensor_norms(tensors)]
    if norms:
        raise_flag_(flag, torch.stack(norms))
    return flag


def raise_flag_(flag: Tensor, values: Tensor) -> None:
    """Sets a 0-dim float32 ``flag`` to 1 if any of ``values`` is NaN or Inf, else leaves it. Does not sync.

    ``values`` are float32 or float64.
    """
    _compat_kernels.raise_if_nonfinite_(flag, values, torch.ones_like(flag))


def zero_if_(tensors: Sequence[Tensor], flag: Tensor) -> None:
    """Sets every element to +0 if the 0-dim ``flag`` is 1; changes no bit if it is 0. Does not sync.

    NaN times zero is NaN, so the bits are multiplied as integers.
    """
    keep = 1 - flag
    bits = [_bits(t if t.layout is torch.strided else t._values()) for t in tensors]
    for members, _ in _compat_kernels.by_device_and_dtype(bits):
        _compat_kernels.foreach_mul_(members, keep.to(members[0].device, members[0].dtype))


def _bits(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGER_OF_SIZE[tensor.element_size()])
