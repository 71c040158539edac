"""Norms of gradients that are known before the step is measured, since the program's own clipping needs them."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from nanguard import _compat


class KnownNorms:
    """``norms`` has an element for each of ``grads``, which hold what clipping has left of them.

    A gradient that was written to, or replaced, since then is not known any more.
    """

    def __init__(self, grads: Sequence[Tensor], norms: Tensor) -> None:
        self._grads, self._norms = grads, norms
        self._versions = _compat.versions(grads)

    def of(self, grads: Sequence[Tensor], indices: KnownIndices) -> Tensor | None:
        """The norms of these gradients, in their order; None if one of them is not known. Does not sync."""
        if len(grads) == len(self._grads) and all(map(operator.is_, grads, self._grads)):
            return self._norms if _compat.versions(grads) == self._versions else None
        places = {id(grad): place for place, grad in enumerate(self._grads)}
        wanted = [places.get(id(grad), -1) for grad in grads]
        if -1 in wanted or any(_compat.version(g) != self._versions[at] for g, at in zip(grads, wanted, strict=True)):
            return None
        return self._norms[indices.on_device(wanted, self._norms.device)]


class KnownIndices:
    """Keeps the last list of indices on the device: it stays the same from step to step."""

    def __init__(self) -> None:
        self._wanted: list[int] = []
        self._indices = torch.empty(0, dtype=torch.int64, device="cpu")

    def on_device(self, wanted: list[int], device: torch.device) -> Tensor:
        if wanted != self._wanted:
            self._wanted, self._indices = wanted, torch.tensor(wanted, dtype=torch.int64, device=device)
        return self._indices
