"""The tapes of earlier steps that rows of this step may refer to."""

from __future__ import annotations

from dataclasses import replace
from weakref import ref

from torch import Tensor

from nanguard.step.tape import CallTape, Made

Marks = dict[int, tuple[ref[Tensor], Made]]
"""The tensors that a tape made, by identity."""

OlderTape = tuple[CallTape, Marks]


def follow(first: OlderTape | None, tape: CallTape, marks: Marks) -> tuple[OlderTape | None, OlderTape | None]:
    """After a step with this tape: the first of several refused ones in a row, and what rows may refer to now.

    That is the first and the last: epochs of PPO share advantages of the first, and the loss of one network may use
    what the step of the network before it has computed.
    """
    alive = {key: mark for key, mark in marks.items() if mark[0]() is not None}
    if not alive or (first is not None and first[0] is tape):
        return first, first
    if first is None:
        return (tape, alive), (tape, alive)
    return first, (replace(tape, rows={**first[0].rows, **tape.rows}), {**first[1], **alive})
