"""The records of a trace: ops that ran, and where non-finite values came from and went."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from nanguard.diagnosis.evidence import Evidence, without_evidence
from nanguard.diagnosis.look import NOTHING, Look
from nanguard.source.frames import Place

PARAMETER, BUFFER, STATE, BATCH, OTHER = 1, 2, 4, 8, 16
"""What a value depends on, as bits."""

Kind = Literal["birth", "turned", "given", "outside", "heir"]
EventPhase = Literal["forward", "backward", "optimizer"]


@dataclass(slots=True)
class Leaf:
    """A tensor that was there before the step."""

    name: str
    roots: int
    look: Look
    owner: str = ""
    event: TraceEvent | None = None


@dataclass(slots=True)
class Note:
    """One op that ran, in scalars.

    ``node`` names the forward op whose derivative it belongs to; ``home`` is the module whose code the line is in, it
    may be around the innermost one; ``owner`` is the parameter that an update is for.
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
    def name(self) -> str:
        """As people know it: that of the forward op, for one of its derivative."""
        return self.node if self.node and not self.in_user_code else self.op


@dataclass(slots=True)
class TraceEvent:
    """An op with a non-finite output. ``wrote`` names the parameter, buffer or state that it wrote to."""

    note: Note
    kind: Kind
    has_nan: bool
    parents: tuple[TraceEvent, ...] = ()
    evidence: Evidence = field(default_factory=without_evidence)
    origin: str = ""
    wrote: str = ""
    has_posinf: bool = False
    is_mask: bool = False


@dataclass(frozen=True, slots=True)
class Swallow:
    """An op that took non-finite values and gave finite ones."""

    note: Note
    events: tuple[TraceEvent, ...]
