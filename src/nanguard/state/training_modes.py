"""Which modules train and which evaluate. Noted at every step, so as quick as can be."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from torch import nn

_training_of = attrgetter("training")


class TrainingModes:
    """``module.training`` of each of ``modules`` as it is now."""

    __slots__ = ("_flags", "_noted")

    def __init__(self, modules: Sequence[nn.Module] = ()) -> None:
        self._noted = modules
        self._flags = list(map(_training_of, modules))

    def by_identity(self) -> dict[int, bool]:
        """The flag of each module, by ``id(module)``."""
        return {id(module): flag for module, flag in zip(self._noted, self._flags, strict=True)}

    def restore(self) -> None:
        for module, flag in zip(self._noted, self._flags, strict=True):
            module.training = flag


NO_MODES = TrainingModes()
"""Of no module."""
