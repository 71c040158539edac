"""The events of data that enter a step with a non-finite value."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanguard import _compat
from nanguard.diagnosis.evidence import where_bad
from nanguard.diagnosis.look import Look, look
from nanguard.diagnosis.provenance import BATCH, OTHER, PARAMETER, STATE, Note, TraceEvent


def data_event(note: Note, tensor: Tensor) -> TraceEvent:
    """The event of data that enter the step with a non-finite value. An infinity may be meant: a mask."""
    values, seen = _compat.values_of(tensor), look(tensor)
    event = TraceEvent(note, "outside", seen.has_nan, has_posinf=has_posinf(values, seen))
    may_be_mask = not event.has_nan and not note.roots & (PARAMETER | STATE)
    may_be_mask = may_be_mask and not (note.roots & (BATCH | OTHER) and event.has_posinf)  # a sample weight of Inf
    event.is_mask = may_be_mask and is_mask(values)
    event.evidence = where_bad(tensor)
    return event


def has_posinf(tensor: Tensor, seen: Look) -> bool:
    if not seen.has_nan:
        return seen.high == math.inf
    return bool(torch.isposinf(tensor.detach().real if tensor.is_complex() else tensor.detach()).any())


def is_mask(tensor: Tensor) -> bool:
    """True for zeros and infinities only: a mask that is added to scores."""
    values = tensor.detach()
    return bool((torch.isinf(values) | (values == 0)).all())
