"""What modules hold besides parameters, buffers and other modules: a hidden state, a counter, a cache."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from nanguard import _compat
from nanguard.state.trees import PLAIN, tensors

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_MISSING = object()
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
        """Changes only what has changed: another thread may be using the modules."""
        for module, noted in self._noted:
            _restore_dict(vars(module), noted)
        for value, entries in self._entries:
            if isinstance(value, dict):
                _restore_dict(value, entries)
                if list(value) != list(entries):  # a cache may depend on the order
                    value.clear()
                    value.update(entries)
            elif len(value) != len(entries) or any(map(operator.is_not, value, entries)):
                value[:] = entries

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


def _restore_dict(now: dict[Any, Any], then: dict[Any, Any]) -> None:
    for name in [name for name in now if name not in then]:
        del now[name]
    for name, value in then.items():
        if now.get(name, _MISSING) is not value:
            now[name] = value
