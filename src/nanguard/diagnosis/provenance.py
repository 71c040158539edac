"""The records of a trace: the ops that ran, and the path of non-finite values through them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from nanguard.diagnosis.evidence import Evidence
from nanguard.diagnosis.look import NOTHING, Look
from nanguard.source.frames import Place

PARAMETER, BUFFER, STATE, BATCH, OTHER = 1, 2, 4, 8, 16
"""Bits that say what a value depends on."""

Kind = Literal["birth", "turned", "given", "outside", "heir"]
EventPhase = Literal["forward", "backward", "optimizer"]


@dataclass(slots=True)
class Leaf:
    """A tensor that existed before the step. ``storage`` is its ``storage_key`` if the step does not know its name."""

    name: str
    roots: int
    look: Look
    owner: str = ""
    event: TraceEvent | None = None
    storage: int | None = None


@dataclass(slots=True)
class Note:
    """One op that ran. It holds numbers, not tensors.

    ``node`` is the forward op whose derivative this op belongs to. ``home`` is the module whose code contains the line;
    it may be a parent of ``module``, the innermost one. ``owner`` is the parameter that an update is for.
    """

    index: int
    op: str
    phase: EventPhase
    place: Place | None
    module: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    look: Look = NOTHING
    scalars: tuple[float, ...] = ()
    parents: tuple[Note | Leaf, ...] = ()
    roots: int = 0
    node: str = ""
    in_user_code: bool = False
    is_custom: bool = False
    owner: str = ""
    home: str = ""
    in_place: bool = False

    @property
    def constants(self) -> tuple[float, ...]:
        """The numbers among the arguments that are NaN or Inf."""
        return tuple(number for number in self.scalars if not math.isfinite(number))

    @property
    def name(self) -> str:
        """The name to show: for an op of a derivative, the name of the forward op."""
        return self.node if self.node and not self.in_user_code else self.op


@dataclass(slots=True)
class TraceEvent:
    """An op with a non-finite output. ``wrote`` names the parameter, buffer or state that it wrote to.

    ``storage`` is the ``storage_key`` of a tensor that was there before the step.
    """

    note: Note
    kind: Kind
    has_nan: bool
    parents: tuple[TraceEvent, ...] = ()
    evidence: Evidence = field(default_factory=Evidence)
    origin: str = ""
    wrote: str = ""
    has_posinf: bool = False
    is_mask: bool = False
    storage: int | None = None


@dataclass(frozen=True, slots=True)
class Swallow:
    """An op with non-finite inputs and finite outputs."""

    note: Note
    events: tuple[TraceEvent, ...]
