"""Values of a traced step that have almost no room left: they are finite, and the next larger input is not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from nanguard import _compat_modes
from nanguard.diagnosis.causes import with_remedy
from nanguard.diagnosis.exam import plain_dtype, size_of
from nanguard.diagnosis.look import can_look
from nanguard.diagnosis.provenance import Note
from nanguard.diagnosis.trace import Trace
from nanguard.diagnosis.watched import WatchedRun
from nanguard.monitor.probe import MAKERS
from nanguard.monitor.quantities import Quantity, largest, name_of
from nanguard.records.diagnosis import Diagnosis
from nanguard.source.frames import source_of
from nanguard.source.modules import Modules
from nanguard.state.trees import tensors

_LEAST_BITS = 1.0
"""Less room than this is too little: the value is more than half of the largest number."""


def without_room(run: WatchedRun, scale: float) -> Iterator[tuple[int, Diagnosis]]:
    """The number and a diagnosis of each op whose result is more than half of the largest number of its format.

    Gradients are multiplied by the loss ``scale``, which adapts itself: their true size counts.
    """
    for note in run.trace.notes:
        form = name_of(getattr(torch, plain_dtype(note.dtype), torch.int64)) if note.dtype else ""
        if not form or note.op in MAKERS or note.phase == "optimizer" or not note.look.is_finite:
            continue
        quantity = Quantity(
            kind="overflow", module=note.module, op=note.name, form=form, backward=note.phase == "backward"
        )
        limit = largest(form)
        size = size_of(note) / (scale if quantity.backward else 1.0)
        if size and quantity.room(size, limit) < _LEAST_BITS and not _is_inherited(note, limit):
            yield note.index, _diagnosed(note, quantity, size, limit)


class SpoiledTrace(Trace):  # type: ignore[no-untyped-call]
    """A trace that makes the result of one op, given by its number, infinite."""

    def __init__(self, modules: Modules, number: int) -> None:
        super().__init__(modules)
        self._number = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self.notes)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if before <= self._number < len(self.notes):
            with torch.no_grad(), _compat_modes.unwatched():
                for tensor in filter(can_look, tensors(result)):
                    values = tensor.detach().reshape(-1)
                    values[values.abs().argmax()] = math.copysign(math.inf, float(values[values.abs().argmax()]))
                    tensor.copy_(values.reshape(tensor.shape))
                    break
        return result


def _is_inherited(note: Note, limit: float) -> bool:
    """Whether an operand is as large already, or a number of the program is, such as the constant of a mask."""
    numbers = [*map(abs, note.scalars), *(size_of(parent) for parent in note.parents)]
    return any(number >= limit * 2**-_LEAST_BITS for number in numbers if not math.isnan(number))


def _diagnosed(note: Note, quantity: Quantity, size: float, limit: float) -> Diagnosis:
    bits = quantity.room(size, limit)
    because = f"the {quantity.words} is {size:.3g}; {quantity.form} ends at {limit:.5g} ({bits:.1f} bits left)"
    return with_remedy(
        Diagnosis(
            phase="backward" if quantity.backward else "forward",
            cause=quantity.cause,
            op=note.name,
            module=note.module,
            source=source_of(note.place),
            dtype=plain_dtype(note.dtype),
            shape=note.shape,
            because=because,
            confidence="certain",
            capture="step",
        )
    )
