"""What ``attach`` returns: a guard inside a framework's loop, which can be taken out again."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from nanguard.hosted.loop import HostedLoop
from nanguard.records.steps import Incidents

_ABSENT = object()


class AttachedGuard:
    """Guards the loop of a framework until ``detach``. As a context manager it detaches itself at the end."""

    def __init__(self, loop: HostedLoop) -> None:
        self.loop = loop
        self._undo: list[Callable[[], None]] = []

    @property
    def incidents(self) -> Incidents:
        """Every bad step so far."""
        return self.loop.incidents

    @property
    def counts(self) -> dict[str, int]:
        """How many steps were applied, skipped, backed off, and so on."""
        return self.loop.counts

    def unsound(self) -> tuple[str, ...]:
        """Names of weights, buffers and optimizer state that are not finite now. Syncs."""
        return self.loop.unsound()

    def summary(self) -> str:
        """The run in one line. Syncs."""
        return self.loop.summary()

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute of an object of the framework. ``detach`` restores what was there."""
        before = vars(owner).get(name, _ABSENT)

        def restore() -> None:
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        setattr(owner, name, value)
        self._undo.append(restore)

    def at_detach(self, function: Callable[[], None]) -> None:
        """Calls ``function`` when the guard is detached. The last one is called first."""
        self._undo.append(function)

    def detach(self) -> None:
        """Restores everything and ends the run log. The framework goes on as without nanguard."""
        while self._undo:
            self._undo.pop()()
        self.loop.close()

    def __enter__(self) -> AttachedGuard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()
