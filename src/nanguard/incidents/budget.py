"""Limits how many incidents of a run are saved: the first of each kind, and fewer and fewer of the others."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Literal

log = logging.getLogger("nanguard")

ALL_OF_A_KIND = 10
"""This many incidents of one kind are saved; then the 30th, 100th, 300th, 1,000th and so on."""

_FACTOR = 2
"""The first of a kind is still saved, without data, up to this many times the usual number of folders."""


class Budget:
    """``existing`` lists the folders of all ranks. ``most`` folders and ``size_limit`` bytes are allowed."""

    def __init__(self, existing: Callable[[], Sequence[Path]], *, most: int, size_limit: int) -> None:
        self._existing, self._most, self._size_limit = existing, most, size_limit
        self._seen: Counter[Hashable] = Counter()
        self._warned: set[str] = set()
        self.num_left_out = 0

    def allows(self, kind: Hashable, *, in_any_case: bool = False) -> Literal["data", "meta", "none"]:
        """How much of the next incident of this kind may be saved. ``in_any_case``: as for the first of its kind."""
        self._seen[kind] += 1
        there, nth = len(self._existing()), self._seen[kind]
        is_first = nth == 1 or in_any_case
        if not is_first and nth > ALL_OF_A_KIND and not _is_round(nth):
            self._warn_once("kind", f"{ALL_OF_A_KIND} incidents of one kind are saved; from now on only some are")
        elif there < self._most:
            return "data"
        elif is_first and there < _FACTOR * self._most:
            self._warn_once("meta", f"{there} incidents are saved: now only the first of each new kind, without data")
            return "meta"
        else:
            self._warn_once("none", f"{there} incidents are saved: no more of these kinds. Delete what you do not need")
        self._leave_out()
        return "none"

    def failed(self) -> None:
        """One that was allowed could not be written. Its kind still counts: a full disk is not tried for ever."""
        self.num_left_out += 1
        self._warned.add("kind")

    def room(self) -> int:
        """How many bytes may still be written."""
        return max(0, self._size_limit - sum(map(_size, self._existing())))

    def _leave_out(self) -> None:
        self.num_left_out += 1
        if self.num_left_out >= 100 and str(self.num_left_out).strip("0") == "1":
            log.warning("%s incidents were not saved to disk so far; the run log has them", f"{self.num_left_out:,}")

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s", text)


def _is_round(number: int) -> bool:
    """10, 30, 100, 300, ..."""
    return str(number).rstrip("0") in ("1", "3")


def _size(folder: Path) -> int:
    """The size of its files; 0 if it no longer exists."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except OSError:
        return 0
