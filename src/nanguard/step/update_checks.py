"""Updates that are looked at, and taken back if they are not finite: one sync and a copy of the state a step."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator

from nanguard import _compat_modes
from nanguard.state.training_state import TrainingState
from nanguard.step.ranks import Ranks

log = logging.getLogger("nanguard")

_MANY_STEPS = 1000


class UpdateChecks:
    """Off until something has been written to the weights that no gradient shows. Then on for a long while."""

    def __init__(self, state: TrainingState, ranks: Ranks) -> None:
        self._state, self._ranks = state, ranks
        self._since, self._until = math.inf, 0.0

    def are_due(self, num_steps: int) -> bool:
        """``num_steps`` is the number of steps made so far."""
        return num_steps <= self._until and not _compat_modes.is_capturing()

    def had(self, step: int) -> bool:
        """Whether the update of a step was looked at."""
        return self._since <= step <= self._until

    def turn_on(self, num_steps: int) -> None:
        if self._until < num_steps:
            self._since = num_steps
            log.info("every update is checked for the next %d steps", _MANY_STEPS)
        self._until = max(self._until, num_steps + _MANY_STEPS)

    def turn_on_for_good(self) -> None:
        self._since, self._until = 0.0, math.inf

    @contextlib.contextmanager
    def around_update(self, num_steps: int) -> Iterator[list[bool]]:
        """Around the optimizers' step: undoes it if it made something non-finite, and appends True to the list."""
        spoiled: list[bool] = []
        before = self._state.capture_update()
        try:
            yield spoiled
            is_spoiled = self._ranks.any(before.is_spoiled())
        except (KeyboardInterrupt, SystemExit):  # half a step, or one that was not checked
            before.put_back()
            raise
        if is_spoiled:
            before.put_back()
            spoiled.append(True)
            self.turn_on(num_steps)
