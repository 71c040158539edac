"""How large parameters were at one moment, to tell later by how much they have grown."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from nanguard.numerics.norm import tensor_norms
from nanguard.state.trees import is_float


class ParameterSizes:
    """The largest absolute value of each parameter at one moment. Only ``read`` syncs."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        measured = {name: p.detach() for name, p in parameters.items() if _has_size(p)}
        self._sizes = dict(zip(measured, tensor_norms(list(measured.values()), math.inf), strict=True))

    def read(self) -> dict[str, float]:
        return {name: float(size) for name, size in self._sizes.items()}


def _has_size(tensor: Tensor) -> bool:
    return is_float(tensor) and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0
