"""The one place that knows whether a tensor is a shard of a larger one that is spread over ranks.

Nothing is sharded today, so nothing happens here: no kernel, no sync, no work per tensor. To support DTensor, change
this file. The step measures local tensors, and each sum and maximum over them passes through here to become global.
(``clip="global"`` also compares with the norm that torch computes; for shards only the measured norm will do.)
"""

from __future__ import annotations

from torch import Tensor


def local(tensors: list[Tensor]) -> list[Tensor]:
    """This rank's part of each tensor."""
    return tensors


def global_sum_(values: Tensor, *, power: int = 1) -> None:
    """Turns sums over this rank's shards into sums over all shards, in place; with ``power=2`` norms into norms."""


def global_max_(values: Tensor) -> None:
    """Turns maxima over this rank's shards into maxima over all shards, in place."""
