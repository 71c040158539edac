"""Monitors of several ranks that forecast alike: of what they have measured, each takes the worst of all ranks.

What a probe has measured is on the host some steps later. It is then added to the reduction that the next step makes
anyway, and read when the host hears of that step: there is no collective of its own, and no wait. The quantities that
are compared are those of the first rank. It sends their list to the others when that changes, which does wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nanguard.monitor.quantities import Quantity, Samples
from nanguard.state.readback import AsyncReadback, PendingCopy
from nanguard.step.ranks import Ranks

_EVERY, _NEW, _FIRST = 0, 1, 2
"""Places in the vector: how often to probe, whether the first rank has seen something new, the first room."""


@dataclass(slots=True)
class _Round:
    """What was measured at ``step``: for each quantity its room, negated, and then for each the limit, in bits."""

    step: int
    quantities: tuple[Quantity, ...]
    vector: list[float]
    copy: PendingCopy | None = None


@dataclass(frozen=True, slots=True)
class Agreed:
    """The same on all ranks. ``every`` is how many steps to probe one of."""

    step: int
    every: int
    samples: dict[Quantity, tuple[float, float]]


class Agreement:
    """All ranks call all methods at the same steps, whatever has failed on one of them."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._quantities: tuple[Quantity, ...] = ()
        self._needs_list = True
        self._waiting: deque[_Round] = deque()
        self._joined: _Round | None = None
        self._on_its_way: deque[_Round] = deque()
        self._readback = AsyncReadback(device)

    def submit(self, step: int, samples: Samples, every: int) -> None:
        """What this rank has measured, and how often it wants to probe."""
        if self._needs_list:
            self._share_list(samples)
        known = set(self._quantities)
        is_new = self._ranks.rank == 0 and any(quantity not in known for quantity in samples)
        rooms = [-_room(quantity, samples) for quantity in self._quantities]
        limits = [math.log2(samples[q][1]) if q in samples else -math.inf for q in self._quantities]
        vector = [float(every), float(is_new), *rooms, *limits]
        self._waiting.append(_Round(step, self._quantities, vector))

    def join(self) -> None:
        """Before the ranks reduce what was measured of a step. Does not sync."""
        if self._waiting and self._joined is None:  # a step may be measured twice
            self._joined = self._waiting.popleft()
            vector = torch.tensor(self._joined.vector, dtype=torch.float32)
            if self._device.type == "cuda":
                vector = vector.pin_memory().to(self._device, non_blocking=True)
            self._ranks.join(vector)

    def collect(self) -> None:
        """When the next step begins: starts to copy the maxima to the host. Does not sync."""
        maxima = self._ranks.take_maxima()
        if self._joined is not None and maxima is not None:
            self._joined.copy = self._readback.post(maxima.double())
            self._on_its_way.append(self._joined)
        self._joined = None

    def arrived(self) -> Iterator[Agreed]:
        """What the ranks agree on, of all that was collected before; waits for it if it has not arrived."""
        while self._on_its_way:
            done = self._on_its_way.popleft()
            assert done.copy is not None
            values = done.copy.read()
            self._needs_list = self._needs_list or values[_NEW] > 0
            size = len(done.quantities)
            rooms, limits = values[_FIRST : _FIRST + size], values[_FIRST + size :]
            told = zip(done.quantities, rooms, limits, strict=True)
            samples = {quantity: _sample(quantity, *rest) for quantity, *rest in told if all(map(math.isfinite, rest))}
            yield Agreed(done.step, int(values[_EVERY]), samples)

    def _share_list(self, samples: Samples) -> None:
        """The first rank says which quantities are compared. Waits for all ranks."""
        keys = dict.fromkeys(quantity.key for quantity in (*self._quantities, *samples))
        _, text = self._ranks.share("\n".join(keys) if self._ranks.rank == 0 else "")
        self._quantities = tuple(map(Quantity.from_key, filter(None, text.split("\n"))))
        self._needs_list = False


def _sample(quantity: Quantity, worst: float, bits: float) -> tuple[float, float]:
    """Value and limit. A limit that is that of a format is exact again."""
    usual = quantity.usual_limit
    limit = usual if abs(math.log2(usual) - bits) < 1e-3 else math.exp2(bits)
    return quantity.value(-worst, limit), limit


def _room(quantity: Quantity, samples: Samples) -> float:
    """Infinite if this rank has not measured it."""
    if quantity not in samples:
        return math.inf
    room = quantity.room(*samples[quantity])
    return room if math.isfinite(room) else math.inf
