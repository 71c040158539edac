"""Which warnings the program has been shown. Python shows most of them once for each line."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_REGISTRY = "__warningregistry__"


class _Probe(Warning):
    """Never shown."""


@contextlib.contextmanager
def as_warned_before() -> Iterator[None]:
    """Warnings inside do not count: afterwards Python shows each warning as if the block had not run.

    ``warnings.catch_warnings``, which torch and the standard library use, makes Python forget what it has shown. Works
    as a decorator too.
    """
    version, saved = _version(), [(registry, dict(registry)) for registry in _registries()]
    try:
        yield
    finally:
        now, known = _version(), {id(registry) for registry, _ in saved}
        for registry in _registries():
            if id(registry) not in known:
                registry.clear()
        for registry, entries in saved:
            registry.clear()
            registry.update(entries)
            if version is not None and entries.get("version") == version:
                registry["version"] = now


def _registries() -> list[dict[Any, Any]]:
    """Those of all modules. There are thousands, and few have one, so this is written for speed."""
    found = []
    for module in list(sys.modules.values()):
        names = module.__dict__ if type(module) is ModuleType else getattr(module, "__dict__", {})
        if _REGISTRY in names and isinstance(names[_REGISTRY], dict):
            found.append(names[_REGISTRY])
    return found


def _version() -> int | None:
    """The number of the filters, which Python writes into a registry when it looks at it."""
    registry: dict[Any, Any] = {}
    show, warnings.showwarning = warnings.showwarning, _show_nothing
    try:
        with contextlib.suppress(_Probe):  # raised if all warnings are errors here
            warnings.warn_explicit("", _Probe, __file__, 1, registry=registry)
    finally:
        warnings.showwarning = show
    return registry.get("version")


def _show_nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of ``warnings.showwarning``."""
