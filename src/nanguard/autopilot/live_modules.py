"""The modules of the program that are alive. They are not kept alive here."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

from torch import nn


class LiveModules:
    """All that exist when this is made, and all that are added. By identity: a module may not be hashable."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[nn.Module]] = {}
        # type() and not isinstance, which asks proxies for their class: some of them then do something.
        for each in gc.get_objects():
            if issubclass(type(each), nn.Module):
                self.add(each)

    def add(self, module: nn.Module) -> None:
        key, refs = id(module), self._refs
        refs[key] = weakref.ref(module, lambda _: refs.pop(key, None))

    def __iter__(self) -> Iterator[nn.Module]:
        return (module for module in (ref() for ref in list(self._refs.values())) if module is not None)
