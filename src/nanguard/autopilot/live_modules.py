"""The modules of the program that are alive. They are not kept alive here."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import nn

from nanguard.state.live_objects import live_objects


class LiveModules:
    """All that exist when this is made, and all that are added. By identity: a module may not be hashable."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[nn.Module]] = {}
        for module in live_objects(nn.Module):
            self.add(module)

    def add(self, module: nn.Module) -> None:
        key, refs = id(module), self._refs
        refs[key] = weakref.ref(module, lambda _: refs.pop(key, None))

    def __iter__(self) -> Iterator[nn.Module]:
        return (module for module in (ref() for ref in list(self._refs.values())) if module is not None)
