"""How many of the next steps are traced for a fault that was not located: a few at once, then seldom, then none."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

log = logging.getLogger("nanguard")

BURST = 10
"""So many steps are traced right after the incident: a fault often comes again at once."""

LONGEST_BURST = 60.0
"""In seconds. Where steps are long the burst ends earlier."""

SHARE = 0.02
"""After the burst tracing takes at most this share of the run's time."""

MOST_STEPS = 100
"""After so many traced steps without a result the search is given up."""

Kind = tuple[str, ...]


class Search:
    """Shared by all optimizers of a program, so that they share the time too.

    There is one search for each kind of incident: what it did not find is not searched for again. All the time that a
    traced step takes is counted, not only what tracing adds to it. ``clock`` gives seconds.
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
        """An incident of this kind was not located. True if steps are traced for it from now on, or already."""
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
        """Whether the step that begins now is to be traced."""
        return self.is_on and (self._burst > 0 or self._clock() >= self._not_before)

    def spent(self, seconds: float) -> None:
        """A traced step took so long; the next one is put off accordingly. Gives the search up after the last one."""
        self._num_traced += 1
        self._seconds += seconds
        if self._burst > 0:
            self._burst_seconds += seconds
            self._burst = self._burst - 1 if self._burst_seconds < LONGEST_BURST else 0
        self._not_before = self._clock() + seconds * (1 / SHARE - 1)
        if self.is_on and self._num_traced >= MOST_STEPS:
            self._open.clear()
            log.warning(
                "the search for the fault is given up: %d steps were traced in %.1f s and it did not come again; this "
                "kind of incident is not traced any more",
                self._num_traced,
                self._seconds,
            )

    def found(self) -> None:
        """A traced step has told what there is to tell. What else was searched for may be searched for again."""
        self._kinds -= self._open
        self._open.clear()
