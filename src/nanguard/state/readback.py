"""Copies a measurement to the host without a sync: into pinned memory, with an event that says when it has arrived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class PendingCopy:
    """A copy on its way to the host."""

    copy: Tensor
    arrived: Any
    pool: list[tuple[Tensor, Any]]

    def has_arrived(self) -> bool:
        """Whether the copy has arrived. Does not wait."""
        return self.arrived is None or bool(self.arrived.query())

    def read(self) -> list[float]:
        """The values. Waits for this copy, not for later work of the device. Call it once: the memory is reused."""
        if self.arrived is not None:
            self.arrived.synchronize()
        values: list[float] = self.copy.tolist()
        self.give_back()
        return values

    def give_back(self) -> None:
        """The memory may be used for another copy. The pool does not hold this object, which holds the pool."""
        self.pool.append((self.copy, self.arrived))


class AsyncReadback:
    """Starts copies from the device. Pinned memory is reused."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._pool: list[tuple[Tensor, Any]] = []

    def post(self, values: Tensor) -> PendingCopy:
        """Starts copying ``values`` to the host. Does not sync."""
        readback = self._take(len(values), values.dtype)
        try:
            readback.copy.copy_(values, non_blocking=True)
            if readback.arrived is not None:
                readback.arrived.record()
        except RuntimeError:
            readback.give_back()  # pinned memory cannot be freed once the GPU has stopped
            raise
        return readback

    def _take(self, size: int, dtype: torch.dtype) -> PendingCopy:
        if self._pool and (len(self._pool[-1][0]) != size or self._pool[-1][0].dtype is not dtype):
            self._pool.clear()
        if self._pool:
            return PendingCopy(*self._pool.pop(), self._pool)
        event: Any = torch.cuda.Event() if self._on_cuda else None  # type: ignore[no-untyped-call]
        memory = torch.empty(size, dtype=dtype, device="cpu", pin_memory=self._on_cuda)
        return PendingCopy(memory, event, self._pool)
