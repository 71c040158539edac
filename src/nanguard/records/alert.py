"""A warning before something goes wrong: a forecast with a module, a reason and the number of steps that are left."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from nanguard.records.rebuild import built

AlertState = Literal["raised", "updated", "withdrawn"]

Severity = Literal["warning", "critical"]

_COARSE = (
    ("overflow", "fp16"),
    ("attention", "fp16"),
    ("spectral", "fp16"),
    ("zero", "fp16"),
    ("zero", "bf16"),
    ("gradient", "fp16"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """A forecast that a quantity will reach its limit.

    ``number`` identifies a warning: an ``updated`` forecast and a ``withdrawn`` warning have the number of the one that
    was ``raised``. ``quantity`` says in words what is watched, ``now`` and ``limit`` are its value and its limit, and
    ``room`` is the distance between them in bits (one bit is a factor of two). ``trend`` is the change of the room in
    bits per step. ``crossing`` is the step at which the limit is expected to be reached, between ``earliest`` and
    ``latest``. ``cause`` names a row of the table of causes and a page in ``docs/causes``; ``advice`` says what helps.
    ``kind`` is what the quantity is held against (``QuantityKind`` in ``monitor/quantities.py``), ``form`` the format
    that its op runs in: fp16, bf16, fp32 or fp64; for gradients that vanish it is the coarsest one in use.
    ``backward`` says that it is a gradient. ``inside`` is the smallest module that the value does not leave.
    """

    number: int
    state: AlertState
    step: int
    module: str
    op: str
    quantity: str
    now: float
    limit: float
    room: float
    trend: float
    crossing: int
    earliest: int
    latest: int
    reason: str
    cause: str
    advice: str
    severity: Severity
    kind: str = ""
    form: str = ""
    backward: bool = False
    inside: str | None = None

    @property
    def steps_left(self) -> int:
        return max(0, self.crossing - self.step)

    @property
    def helps_precision(self) -> bool:
        """Whether fp32 would move the limit away: bf16 has the range of fp32, and a coarser resolution."""
        return (self.kind, self.form) in _COARSE

    @property
    def message(self) -> str:
        """The warning in one line, without its module."""
        if self.state == "withdrawn":
            return f"no longer expected: {self.reason}"
        left = f"in about {self.steps_left:,} steps (step {self.earliest:,} to {self.latest:,})"
        return f"{self.reason} {left}; {self.advice}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values; ``from_dict`` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Alert:
        alert: Alert = built(cls, data, "alert")
        return alert
