"""The tensors of one opened file by name. Each is loaded when it is needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from nanguard.checkpoint.standins import Standin


class Unreadable(Exception):
    """A file or a part of it cannot be read. The message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor, whole or in shards. ``num_values`` may be an estimate and is used only for progress."""

    name: str
    num_values: int
    parts: Sequence[Callable[[], Tensor]]
    shape: tuple[int, ...] | None = None
    skipped: str | None = None
    dtype: str = ""


@dataclass(kw_only=True)
class OpenedFile:
    """An opened checkpoint file."""

    format: str
    entries: list[Entry] = field(default_factory=list)
    numbers: list[tuple[str, float]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, value: Any, name: str = "") -> None:
        """Adds all tensors and non-finite numbers in ``value``, at any depth."""
        for path, leaf in _leaves(value, name):
            if isinstance(leaf, Tensor):
                self.entries.append(Entry(name=path, num_values=leaf.numel(), parts=[partial(_same, leaf)]))
            else:
                self.numbers.append((path, leaf))


def _same(tensor: Tensor) -> Tensor:
    return tensor


# A linked list of keys, so that full names are built only for leaves.
_Place = tuple["_Place | None", str]


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Tensors and non-finite numbers with their dotted names, in order.

    Uses its own stack and visits every container once: a file may be nested deeper than Python can recurse, and may
    contain itself.
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
