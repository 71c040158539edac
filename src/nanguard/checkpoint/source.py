"""What a reader hands over: the tensors of one file by name, each fetched when its turn comes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from nanguard.checkpoint.standins import Standin


class Unreadable(Exception):
    """A file, or a part of it, that cannot be read. The message says why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor, whole or in the parts it was sharded into. ``num_values`` may be an estimate, for progress only."""

    name: str
    num_values: int
    parts: Sequence[Callable[[], Tensor]]
    shape: tuple[int, ...] | None = None
    skipped: str | None = None
    dtype: str = ""


@dataclass(kw_only=True)
class OpenedFile:
    """One file, opened."""

    format: str
    entries: list[Entry] = field(default_factory=list)
    numbers: list[tuple[str, float]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, value: Any, name: str = "") -> None:
        """All tensors and non-finite numbers in ``value``, however deep."""
        for path, leaf in _leaves(value, name):
            if isinstance(leaf, Tensor):
                self.entries.append(Entry(name=path, num_values=leaf.numel(), parts=[partial(_same, leaf)]))
            else:
                self.numbers.append((path, leaf))


def _same(tensor: Tensor) -> Tensor:
    return tensor


# A chain of keys, so that the name is put together for the leaves alone.
_Place = tuple["_Place | None", str]


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Tensors and non-finite numbers with their dotted names, in order.

    Keeps a stack of its own and looks into every container once: a file may be nested deeper than Python's calls go,
    and may contain itself.
    """
    start: _Place | None = (None, name) if name else None
    stack: list[tuple[_Place | None, Any]] = [(start, value)]
    seen: set[int] = set()
    while stack:
        place, item = stack.pop()
        if isinstance(item, Standin):
            item = item.contents()
        if isinstance(item, Tensor):
            yield _dotted(place) or "tensor", item
        elif isinstance(item, (float, complex)):
            for part in (item.real, item.imag):
                if not math.isfinite(part):
                    yield _dotted(place) or "number", part
        elif isinstance(item, (dict, list, tuple, set, frozenset)) and id(item) not in seen:
            seen.add(id(item))
            members = item.items() if isinstance(item, dict) else enumerate(item)
            stack.extend(reversed([((place, str(key)), member) for key, member in members]))


def _dotted(place: _Place | None) -> str:
    keys = []
    while place:
        place, key = place
        keys.append(key)
    return ".".join(reversed(keys))
