"""Norms of gradients that are known before the step is measured, since the program's own clipping needs them."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from nanguard import _compat


class KnownNorms:
    """``values`` has an element for each of ``grads``, which hold what clipping has left of them.

    If there is a ``loss``, it is the last of the values.

    A gradient that was written to, or replaced, since then is not known any more.
    """

    def __init__(self, grads: Sequence[Tensor], values: Tensor, loss: Tensor | None) -> None:
        self._grads, self._values, self._loss = grads, values, loss
        self._versions = _compat.versions(grads)

    def with_loss(self, grads: Sequence[Tensor], loss: Tensor) -> Tensor | None:
        """The norms of these gradients, in their order, and then this loss. None if they are not all of the values."""
        return self._values if loss is self._loss and self._are_known(grads) else None

    def _are_known(self, grads: Sequence[Tensor]) -> bool:
        """Whether they are exactly the gradients that were clipped."""
        are_same = len(grads) == len(self._grads) and all(map(operator.is_, grads, self._grads))
        return are_same and _compat.versions(grads) == self._versions

    def of(self, grads: Sequence[Tensor], indices: KnownIndices) -> Tensor | None:
        """The norms of these gradients, in their order; None if one of them is not known. Does not sync."""
        norms = self._values[: len(self._grads)]
        if self._are_known(grads):
            return norms
        places = {id(grad): place for place, grad in enumerate(self._grads)}
        wanted = [places.get(id(grad), -1) for grad in grads]
        if -1 in wanted or any(_compat.version(g) != self._versions[at] for g, at in zip(grads, wanted, strict=True)):
            return None
        return norms[indices.on_device(wanted, norms.device)]


class KnownIndices:
    """Keeps the last list of indices on the device: it stays the same from step to step."""

    def __init__(self) -> None:
        self._wanted: list[int] = []
        self._indices = torch.empty(0, dtype=torch.int64, device="cpu")

    def on_device(self, wanted: list[int], device: torch.device) -> Tensor:
        if wanted != self._wanted:
            self._wanted, self._indices = wanted, torch.tensor(wanted, dtype=torch.int64, device=device)
        return self._indices
