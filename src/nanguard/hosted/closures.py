"""``step(closure)`` of optimizers that are not in our table: most call the closure once, before anything else.

If an optimizer does so, its steps are checked like any other: the closure runs first, its gradients are measured, and
the optimizer then gets the loss. One step is watched to find out, since others (SAM, line searches) call it again on
weights that they have changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nanguard.state.training_state import CapturedUpdate

Closure = Callable[[], Any]


def call_after(prepare: Callable[[], None], closure: Closure) -> Any:
    """Calls both."""
    prepare()
    return closure()


class WatchedClosure:
    """Counts the calls that an optimizer makes. ``before`` is set to what the step found."""

    def __init__(self, closure: Closure) -> None:
        self._closure = closure
        self._num_calls = 0
        self._came_first = False
        self.before: CapturedUpdate | None = None

    @property
    def ran_once_and_first(self) -> bool:
        return self._num_calls == 1 and self._came_first

    def __call__(self) -> Any:
        self._num_calls += 1
        if self._num_calls == 1 and self.before is not None:
            self._came_first = self.before.is_unchanged()
        return self._closure()


class AnsweredClosure:
    """Has been called already, and gives ``result`` to the optimizer's first call. Further calls run it again."""

    def __init__(self, closure: Closure, result: Any) -> None:
        self._closure, self._result = closure, result
        self._num_calls = 0

    @property
    def ran_again(self) -> bool:
        return self._num_calls > 1

    def __call__(self) -> Any:
        self._num_calls += 1
        return self._result if self._num_calls == 1 else self._closure()
