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
        self._asked, self._is_new = self.path, is_new
        self._waiting: list[str] = []
        self._claims: dict[str, Path] = {}

    def __eq__(self, other: object) -> bool:
        """Equal if they were asked for alike: settings with one of them are compared."""
        return isinstance(other, RunFolder) and (self._asked, self._is_new) == (other._asked, other._is_new)

    def __hash__(self) -> int:
        return hash((self._asked, self._is_new))

    def make(self) -> Path:
        """The folder, which exists when this returns. Raises ``OSError`` if it cannot be made.

        Threads may call it at the same time: all get the same folder. There is no lock, since a process that is forked
        while another thread holds one would wait for ever.
        """
        if not self.is_made:
            if self._is_new:
                claimed = _claimed(self.path)
                first = self._claims.setdefault("path", claimed)  # one step in Python: the first thread decides
                if first is not claimed:
                    claimed.rmdir()
                self.path = first
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
