"""What each thread of a program does now, and our own work in it, which is not the program's.

The contexts are entered several times a step. They are no generators, which would take three times as long.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from nanguard.autopilot.taping import ProgramTape
from nanguard.errors import NonFiniteError
from nanguard.hosted.coordinator import StepCoordinator

log = logging.getLogger("nanguard")


class ThreadState:
    """Of one thread: its step under way, the outermost module that is being called, and our own work."""

    __slots__ = ("coordinator", "depth", "loss", "module", "was_taping")

    def __init__(self, coordinator: StepCoordinator) -> None:
        self.coordinator = coordinator
        self.module: nn.Module | None = None
        self.depth = 0
        """How many contexts of our own work are entered."""
        self.was_taping = False
        self.loss: Tensor | None = None
        """Of a backward pass that has been noted already, and is about to begin."""


class Threads(threading.local):
    """``here`` is the state of this thread. Look it up once in a function: that takes as long as a call."""

    def __init__(self, coordinator: Callable[[], StepCoordinator]) -> None:
        self.here = ThreadState(coordinator())


class _OwnWork:
    """May be entered inside itself. While it is, nothing is taped."""

    def __init__(self, threads: Threads, taper: ProgramTape) -> None:
        self._threads, self._taper = threads, taper

    def __enter__(self) -> None:
        here = self._threads.here
        if not here.depth and self._taper.is_on:
            here.was_taping = self._taper.pause()
        here.depth += 1

    def _leave(self) -> None:
        here = self._threads.here
        here.depth -= 1
        if here.was_taping and not here.depth:
            here.was_taping = False
            self._taper.go_on(True)


class Busy(_OwnWork):
    """Our own work."""

    def __exit__(self, *error: object) -> None:
        self._leave()


class AtWork(_OwnWork):
    """Our own work. Logs our own errors; never lets them end the program. If ``hear`` returns True, it has answered."""

    def __init__(
        self, threads: Threads, taper: ProgramTape, failure: str, hear: Callable[[BaseException], bool]
    ) -> None:
        super().__init__(threads, taper)
        self._failure, self._hear = failure, hear

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self._leave()
        if error is None or not isinstance(error, Exception) or isinstance(error, NonFiniteError):
            return False
        if not self._hear(error):
            log.error("nanguard: %s", self._failure, exc_info=(kind, error, trace))
        return True
