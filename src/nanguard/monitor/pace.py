"""How often to probe: from the time that probed and ordinary steps take, measured while training runs."""

from __future__ import annotations

import math
import time
from collections import deque
from statistics import median
from typing import Any

import torch

from nanguard.step.pending import LAG

FIRST_EVERY = 10
_FEWEST_EVERY = LAG + 2
_MOST_EVERY = 10_000


class Pace:
    """Chooses the number of steps between two probes so that probes take ``budget`` of the time.

    On a GPU the steps are timed with events on the stream, which also count what the host does while the GPU waits for
    it. Nothing here waits: an event is read after it has passed. The values of a probe are read on the host ``LAG``
    steps later, so that a probe costs what its own step and the next ``LAG`` take in addition. The first probe does not
    count: much happens only once, such as a compilation.
    """

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._on_cuda = False
        self._device: torch.device | None = None
        self._stamps: deque[tuple[Any, int]] = deque()
        self._since = -1
        self._ordinary: deque[float] = deque(maxlen=32)
        self._probes: deque[float] = deque(maxlen=8)
        self._is_first = True
        self._sum = 0.0

    def use(self, device: torch.device) -> None:
        """Measure on the clock of this device."""
        self._on_cuda, self._device = device.type == "cuda", device

    def begin(self, every: int) -> int:
        """A step begins, and the one before it is over. Returns how many steps to probe one of. Does not sync."""
        self._since += self._since >= 0
        self._stamps.append((self._now(), self._since))
        while len(self._stamps) >= 2 and self._has_passed(self._stamps[1][0]):
            (before, since), (after, _) = self._stamps.popleft(), self._stamps[0]
            self._count(self._between(before, after), since)
        cost = self.cost
        return every if cost is None else max(_FEWEST_EVERY, min(_MOST_EVERY, math.ceil(cost / self._budget)))

    def probe(self) -> None:
        """The step that has just begun is probed."""
        self._since = 0
        stamp, _ = self._stamps.pop()
        self._stamps.append((stamp, 0))

    @property
    def cost(self) -> float | None:
        """What a probe costs, in ordinary steps; None if that is not known yet."""
        if not self._ordinary or not self._probes:
            return None
        usual = median(self._ordinary)
        return max(0.0, median(self._probes) / usual - LAG - 1) if usual > 0 else None

    def _count(self, took: float, since: int) -> None:
        if since < 0 or since > LAG:
            self._ordinary.append(took)
            return
        self._sum = took if since == 0 else self._sum + took
        if since == LAG:
            if not self._is_first:
                self._probes.append(self._sum)
            self._is_first = False

    def _now(self) -> Any:
        """Seconds on the host, or an event of the GPU."""
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _has_passed(self, stamp: Any) -> bool:
        return not self._on_cuda or bool(stamp.query())

    def _between(self, before: Any, after: Any) -> float:
        return float(before.elapsed_time(after)) / 1000 if self._on_cuda else float(after - before)
