"""Around our own work in a program: what happens inside is not the program's. Entered several times a step.

These are no generators, which would take three times as long.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from nanguard.autopilot.taping import ProgramTape
from nanguard.errors import NonFiniteError

log = logging.getLogger("nanguard")


class Busy(threading.local):
    """May be entered inside itself. While it is, nothing is taped. Each thread of the program has its own."""

    def __init__(self, taper: ProgramTape) -> None:
        self.depth = 0
        self._taper, self._was_taping = taper, False

    def __enter__(self) -> None:
        if not self.depth and self._taper.is_on:
            self._was_taping = self._taper.pause()
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        if self._was_taping and not self.depth:
            self._was_taping = False
            self._taper.go_on(True)


class AtWork:
    """Busy. Logs our own errors; never lets them end the program. May be used again, also inside itself."""

    def __init__(self, busy: Busy, failure: str) -> None:
        self._busy, self._failure = busy, failure

    def __enter__(self) -> None:
        self._busy.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self._busy.__exit__()
        if error is None or not isinstance(error, Exception) or isinstance(error, NonFiniteError):
            return False
        log.error("nanguard: %s", self._failure, exc_info=(type(error), error, trace))
        return True
