"""The rows of earlier steps that rows of this step may refer to."""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor

from nanguard.step.tape import Made

Rows = dict[int, tuple[Any, ...]]
Marks = dict[int, tuple[ref[Tensor], Made]]
"""The tensors that rows made, by identity."""

OlderRows = tuple[Rows, Marks]
"""Not the tape that they are from, which may refer to one before it, and so to all tapes of the run."""


def follow(first: OlderRows | None, rows: Rows, marks: Marks) -> tuple[OlderRows | None, OlderRows | None]:
    """After a step with these rows: those of the first of several refused steps in a row, and what may be used now.

    That is the first and the last: epochs of PPO share advantages of the first, and the loss of one network may use
    what the step of the network before it has computed.
    """
    alive = {key: mark for key, mark in marks.items() if mark[0]() is not None}
    if not alive or (first is not None and first[0] is rows):
        return first, first
    if first is None:
        return (rows, alive), (rows, alive)
    return first, ({**first[0], **rows}, {**first[1], **alive})
