"""The records that travel through a step: ``Reading → Verdict → Action → Outcome``, and the ``Incident``.

They are plain, frozen and on the host: no tensors, so that they can be compared, logged and sent anywhere.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Found = Literal["loss", "gradients", "buffers"]
"""Where a non-finite value was seen."""

Kind = Literal["healthy", "overflow", "nonfinite"]
"""``overflow``: finite loss, non-finite scaled fp16 gradients, and the loss scale can still go down."""

Response = Literal["apply", "drop_gradients", "back_off", "skip", "halt"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """What one rank saw on its own, before gradients were averaged between ranks."""

    rank: int
    loss: bool
    gradients: bool
    buffers: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What was measured of one step. ``batch`` is its position in the epoch, None outside ``guard.epoch``.

    ``found`` says what was non-finite, on this rank or any other: it is the same on all of them. ``gradients`` and
    ``buffers`` name what was so on this rank; ``ranks`` are those that saw something of their own.
    ``norms`` are gradient norms before clipping, one for each parameter group (a single one with ``clip="global"``).
    """

    step: int
    epoch: int
    batch: int | None
    loss: float
    norms: tuple[float, ...] = ()
    scale: float | None = None
    found: tuple[Found, ...] = ()
    gradients: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    ranks: tuple[Flags, ...] = ()
    dropped_microbatches: tuple[int, ...] = ()
    dropped_gradients: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a reading means."""

    kind: Kind
    reading: Reading


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """What the policy answers to a verdict, with its count of patience where that applies."""

    response: Response
    count: int = 0
    patience: int = 0
    per: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a step. ``rerun`` and ``lost`` count the steps that were in flight behind a bad one."""

    verdict: Verdict
    action: Action
    applied: bool
    rerun: int = 0
    lost: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain containers and numbers only; ``from_dict`` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Outcome:
        fields = data["verdict"]["reading"].items()
        reading: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields}
        reading["ranks"] = tuple(Flags(**flags) for flags in reading["ranks"])
        verdict = Verdict(kind=data["verdict"]["kind"], reading=Reading(**reading))
        return cls(**{**data, "verdict": verdict, "action": Action(**data["action"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """A step that the guard had to answer: numbered from 1, as people speak of it."""

    number: int
    outcome: Outcome

    @property
    def reading(self) -> Reading:
        return self.outcome.verdict.reading
