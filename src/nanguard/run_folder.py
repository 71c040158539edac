"""The folder that a run is written to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path


class RunFolder:
    """The folder of a run, made when there is something to keep: the first step, or the first incident.

    A program that trains nothing leaves nothing behind. If ``is_new``, the folder is the first of ``path``, ``path-2``,
    ... that does not exist when it is made; until then ``path`` is the name to begin with.
    """

    def __init__(self, path: str | Path, *, is_new: bool = False) -> None:
        self.path = Path(path)
        self.is_made = False
        self._is_new = is_new
        self._waiting: list[str] = []

    def make(self) -> Path:
        """The folder, which exists when this returns. Raises ``OSError`` if it cannot be made."""
        if not self.is_made:
            if self._is_new:
                self.path = _claimed(self.path)
            else:
                self.path.mkdir(parents=True, exist_ok=True)
            self.is_made = True
        return self.path

    def hold(self, lines: Sequence[str]) -> None:
        """Keeps lines until the folder is made. Optimizers share a log: the first line must stay the first."""
        self._waiting += lines

    def release(self) -> list[str]:
        """The lines that were held."""
        waiting, self._waiting = self._waiting, []
        return waiting


def _claimed(base: Path) -> Path:
    """The first of ``base``, ``base-2``, ... that does not exist, made here: another process may be looking too."""
    for number in itertools.count(1):
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise AssertionError("there is always a next number")


def as_seen(path: Path) -> str:
    """A path from where the program is now; whole if that is elsewhere."""
    try:
        return str(path.relative_to(Path.cwd())) if path.is_absolute() else str(path)
    except (OSError, ValueError):
        return str(path)
