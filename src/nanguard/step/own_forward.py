"""A forward pass in a loop of the user's own: ``with guard.autocast():``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from nanguard.step.out_of_memory import GivingMemoryBack
from nanguard.step.precision import MixedPrecision
from nanguard.step.protocols import StepTracer


class OwnForward:
    """Calls ``begin``, follows the pass if the tracer is on, and runs it in the precision of the run.

    Not a generator: these take longer, at every step.
    """

    def __init__(
        self, begin: Callable[[], None], memory: GivingMemoryBack, tracer: StepTracer, precision: MixedPrecision
    ) -> None:
        self._begin, self._memory, self._tracer, self._precision = begin, memory, tracer, precision
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._begin()
        if self._tracer.is_on:
            self._enter(self._tracer.watching())
        self._enter(self._precision.autocast())

    def _enter(self, context: contextlib.AbstractContextManager[None]) -> None:
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        while self._entered:
            self._entered.pop().__exit__(kind, error, trace)
        self._memory.give_back(error)
