"""How many incidents of a run are written to disk: the first of each kind, and fewer and fewer of the others."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Literal

log = logging.getLogger("nanguard")

ALL_OF_A_KIND = 10
"""So many incidents of one kind are kept; then the 30th, 100th, 300th, 1,000th and so on."""

_FACTOR = 2
"""The first of a kind is kept, without data, until there are so many times the usual number of folders."""


class Budget:
    """``existing`` lists the folders of all ranks; ``most`` of them and ``size_limit`` bytes are usual."""

    def __init__(self, existing: Callable[[], Sequence[Path]], *, most: int, size_limit: int) -> None:
        self._existing, self._most, self._size_limit = existing, most, size_limit
        self._seen: Counter[Hashable] = Counter()
        self._warned: set[str] = set()
        self.num_left_out = 0

    def allows(self, kind: Hashable, *, in_any_case: bool = False) -> Literal["data", "meta", "none"]:
        """What of the next incident of this kind may be written."""
        self._seen[kind] += 1
        there, nth = len(self._existing()), self._seen[kind]
        is_first = nth == 1 or in_any_case
        if not is_first and nth > ALL_OF_A_KIND and not _is_round(nth):
            self._warn_once("kind", f"{ALL_OF_A_KIND} incidents of one kind are kept, more of it only now and then")
        elif there < self._most:
            return "data"
        elif is_first and there < _FACTOR * self._most:
            self._warn_once("meta", f"{there} incidents are kept: from now on the first of a kind only, without data")
            return "meta"
        else:
            self._warn_once("none", f"{there} incidents are kept: no more of these kinds. Remove what is of no use")
        self._leave_out()
        return "none"

    def room(self) -> int:
        """Bytes that may still be written."""
        return max(0, self._size_limit - sum(map(_size, self._existing())))

    def _leave_out(self) -> None:
        self.num_left_out += 1
        if self.num_left_out >= 100 and str(self.num_left_out).strip("0") == "1":
            log.warning("%s incidents were not kept on disk so far; the run log has them", f"{self.num_left_out:,}")

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s", text)


def _is_round(number: int) -> bool:
    """10, 30, 100, 300, ..."""
    return str(number).rstrip("0") in ("1", "3")


def _size(folder: Path) -> int:
    """Of its files; 0 if it is gone."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except OSError:
        return 0
