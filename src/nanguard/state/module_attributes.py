"""What modules hold besides parameters, buffers and other modules: a hidden state, a counter, a cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from nanguard import _compat
from nanguard.state.trees import PLAIN, tensors

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_MOST_ENTRIES = 4096
"""A longer list or dict is not copied: the module may hold a whole dataset."""


class ModuleAttributes:
    """The attributes of each of ``modules`` as they are now; of lists and dicts also the entries."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._noted = [(module, dict(vars(module))) for module in modules]
        self._entries = [
            (value, value.copy())
            for _, noted in self._noted
            for name, value in noted.items()
            if name not in _OF_TORCH and type(value) in (list, dict) and len(value) <= _MOST_ENTRIES
        ]

    def restore(self) -> None:
        for module, noted in self._noted:
            now = vars(module)
            if now.keys() != noted.keys() or any(now[name] is not value for name, value in noted.items()):
                now.clear()
                now.update(noted)
        for value, entries in self._entries:
            value.clear()
            if isinstance(value, list):
                value.extend(entries)
            else:
                value.update(entries)

    def replaced(self) -> dict[int, str]:
        """The ``storage_key`` and name of each tensor that was noted, and that its module no longer holds there."""
        copies = {id(value): entries for value, entries in self._entries}
        found = {}
        for module, noted in self._noted:
            for name, value in noted.items():
                if name not in _OF_TORCH and type(value) not in PLAIN:
                    now = set(_keys(vars(module).get(name)))
                    gone = (key for key in _keys(copies.get(id(value), value)) if key not in now)
                    found.update(dict.fromkeys(gone, f"{type(module).__name__}.{name}"))
        return found


def _keys(value: Any) -> Iterator[int]:
    return map(_compat.storage_key, tensors(value))
