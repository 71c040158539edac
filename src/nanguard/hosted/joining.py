"""A loop that is a part of a program under ``nanguard run``: it shares the run log, and counts with the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from nanguard.hosted.settings import Settings
from nanguard.hosted.shared import Shared

if TYPE_CHECKING:
    from nanguard.hosted.loop import HostedLoop

CLAIMED = "_nanguard_loop"
"""Of an optimizer: torch leaves such attributes out of copies, pickles and ``state_dict``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """The program that a loop is a part of. ``shared`` is what all its optimizers have in common.

    ``adopt`` is called with each loop that begins, and returns whether it is the first to be guarded. ``release`` is
    called when it has ended.
    """

    settings: Settings
    shared: Shared
    adopt: Callable[[HostedLoop], bool]
    release: Callable[[HostedLoop], None]


_PROGRAM: ContextVar[Program | None] = ContextVar("nanguard program", default=None)


@contextmanager
def joining(program: Program | None) -> Iterator[None]:
    """Loops that are made inside are parts of ``program``: adapters need not know of it."""
    token = _PROGRAM.set(program)
    try:
        yield
    finally:
        _PROGRAM.reset(token)


def joined_program() -> Program | None:
    """None if a loop stands for itself."""
    return _PROGRAM.get()


def claim(optimizer: Optimizer) -> None:
    """Patches of ``nanguard run`` leave it alone: a loop guards it."""
    vars(optimizer)[CLAIMED] = True


def disclaim(optimizer: Optimizer) -> None:
    vars(optimizer).pop(CLAIMED, None)


def is_claimed(optimizer: Optimizer) -> bool:
    return CLAIMED in vars(optimizer)
