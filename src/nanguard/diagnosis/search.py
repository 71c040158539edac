"""How many steps are traced after a fault that was not located: a few at once, then some, then none."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

log = logging.getLogger("nanguard")

BURST = 3
"""This many steps are traced right after the incident: a fault often repeats soon. Each takes as long as some thirty
ordinary ones, so more would show in the total time of a run of some thousand steps."""

LONGEST_BURST = 60.0
"""In seconds. If steps are long, the burst ends earlier."""

SHARE = 0.02
"""After the burst, tracing takes at most this share of the run time."""

MOST_STEPS = 100
"""After this many traced steps without a result the search ends."""

Kind = tuple[str, ...]


class Search:
    """Decides which steps to trace. All optimizers of a program share it, and so its time limits.

    There is one search per kind of incident; it is not repeated. The whole time of a traced step counts, not only what
    tracing adds to it. ``clock`` returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._kinds: set[Kind] = set()
        self._open: set[Kind] = set()
        self._burst = 0
        self._burst_seconds = 0.0
        self._not_before = -math.inf
        self._num_traced = 0
        self._seconds = 0.0

    @property
    def is_on(self) -> bool:
        return bool(self._open)

    def begin(self, kind: Kind, step: int) -> bool:
        """Start a search for an incident that was not located. True if steps are traced for it."""
        if kind in self._kinds:
            return kind in self._open
        self._kinds.add(kind)
        self._open.add(kind)
        self._burst, self._burst_seconds, self._num_traced, self._seconds = BURST, 0.0, 0, 0.0
        log.warning(
            "the fault of step %d was not located: up to %d of the next steps are traced, which makes them several "
            "times slower; after them tracing takes at most %g%% of the time",
            step,
            BURST,
            SHARE * 100,
        )
        return True

    def wants_step(self) -> bool:
        """True if the step that starts now should be traced."""
        return self.is_on and (self._burst > 0 or self._clock() >= self._not_before)

    def spent(self, seconds: float) -> None:
        """Count the time of a traced step and delay the next one. End the search after the last one."""
        self._num_traced += 1
        self._seconds += seconds
        if self._burst > 0:
            self._burst_seconds += seconds
            self._burst = self._burst - 1 if self._burst_seconds < LONGEST_BURST else 0
        self._not_before = self._clock() + seconds * (1 / SHARE - 1)
        if self.is_on and self._num_traced >= MOST_STEPS:
            self._open.clear()
            log.warning(
                "the search for the fault has ended: %d steps were traced in %.1f s, and it did not happen again; this "
                "kind of incident is not traced any more",
                self._num_traced,
                self._seconds,
            )

    def found(self) -> None:
        """End the search with a result. The kinds that were searched for may be searched for again."""
        self._kinds -= self._open
        self._open.clear()
