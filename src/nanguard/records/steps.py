"""The records that travel through a step: ``Reading → Verdict → Action → Outcome``, and the ``Incident``.

They are plain, frozen and on the host: no tensors, so that they can be compared, logged and sent anywhere.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from nanguard.records.alert import Alert
from nanguard.records.diagnosis import Diagnosis
from nanguard.records.rebuild import built

Found = Literal["loss", "gradients", "buffers", "update", "output", "input"]
"""Where a non-finite value was seen; in an ``update`` that was taken back, only if updates are checked; in an
``output`` of the model, if there was no backward pass since the program threw it away; in the ``input`` of a torch call
that raised."""

Kind = Literal["healthy", "overflow", "nonfinite", "damage", "divergence", "alert"]
"""What a step was.

``overflow``: finite loss, non-finite scaled fp16 gradients, and the loss scale can still go down. ``damage``: weights,
buffers or optimizer state were non-finite before the step, which no skip undoes. ``divergence``: the loss is finite
and has left its own past. ``alert``: the step was healthy, and a warning stands that something will go wrong.
"""

Cause = Literal["unknown", "input", "batch", "weights"]
"""Whose fault it is, as far as it can be proven: ``input``, the batch holds NaN or Inf, and the last good one did not;
``batch``, weights and loss function still work on a batch known to be good; ``weights``, the weights do not."""

Response = Literal[
    "apply", "warn", "drop_gradients", "back_off", "skip", "lower_lr", "raise_precision", "roll_back", "act", "halt"
]
"""``act``: what a rung does that is none of the others; ``Action.words`` says what."""


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
    ``lrs`` are the learning rates it was made with, one for each parameter group, None where only the device knows it.
    ``mean_loss`` is the mean over ranks. ``damaged`` names what was non-finite before the step, on this rank.
    ``num_stepped_before`` other optimizers had stepped inside the same backward pass by then.
    """

    step: int
    epoch: int
    batch: int | None
    loss: float
    mean_loss: float = math.nan
    norms: tuple[float, ...] = ()
    lrs: tuple[float | None, ...] = ()
    scale: float | None = None
    found: tuple[Found, ...] = ()
    gradients: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    ranks: tuple[Flags, ...] = ()
    dropped_microbatches: tuple[int, ...] = ()
    dropped_gradients: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    num_stepped_before: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Means:
    """What could be done just then: the same on all ranks. ``snapshots`` are the steps of the good ones.

    ``holds_schedule``: the guard advances the learning-rate schedule, so a refused step does not move it.
    """

    can_drop_gradients: bool = False
    lower_precision: bool = False
    can_run_again: bool = False
    holds_schedule: bool = False
    snapshots: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How many steps were applied before this one, None if that is not known, and how many were undone by rollbacks."""

    num_applied: int | None = None
    num_undone: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a reading means, whose fault it is, what could be done about it, and how far the run had come.

    ``alert`` is the warning, if the kind is ``alert``.
    """

    kind: Kind
    reading: Reading
    cause: Cause = "unknown"
    means: Means = Means()
    progress: Progress = Progress()
    alert: Alert | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """What the policy answers to a verdict: the rung of the ladder, and how many times it has been used.

    ``words`` is the name of the rung, as it describes itself. ``passed`` says of each rung below why it was not taken.
    ``because`` is the reason of a halt for lack of progress, which does not ask the ladder. ``then`` names the rung
    that answers such a step when this one is used up; it is empty if that changes nothing.
    """

    response: Response
    rung: int | None = None
    count: int = 0
    times: int | None = None
    per: str | int = ""
    passed: tuple[str, ...] = ()
    because: str = ""
    words: str = ""
    then: str = ""

    @property
    def changes_more(self) -> bool:
        """Whether the rung does more than to refuse the step."""
        return self.response in ("lower_lr", "raise_precision", "roll_back", "act")


APPLY = Action(response="apply")
"""The answer to a healthy step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a step. ``rerun`` and ``lost`` count the steps that were in flight behind a bad one.

    ``did`` says what the rung did, in words: which module, which learning rate, back to which step; ``worked`` is False
    for a rung that was tried, had no use and was taken back; ``went_back`` says that the
    run is at an earlier state now. ``diagnosis`` says where it came from and why, ``bundle``
    is the folder in which the step is kept. ``lost_device``: the GPU has stopped, and nothing on it can be read.
    """

    verdict: Verdict
    action: Action
    applied: bool
    rerun: int = 0
    lost: int = 0
    did: str = ""
    worked: bool = True
    went_back: bool = False
    diagnosis: Diagnosis | None = None
    bundle: str = ""
    lost_device: bool = False

    @property
    def is_left_out(self) -> bool:
        """Whether the program itself did not train on this result; ``did`` says what it did."""
        return self.action.response == "skip" and bool(self.did)

    @property
    def is_rollback(self) -> bool:
        """Whether the run goes on from an earlier state. A halt may put one back too, and does not go on."""
        return self.action.response == "roll_back" or (self.went_back and self.action.response != "halt")

    def as_dict(self) -> dict[str, Any]:
        """Plain containers and numbers only; ``from_dict`` reads it back."""
        return asdict(self)

    def _repr_html_(self) -> str:
        """The HTML for a notebook."""
        from nanguard.records.notebook import outcome_html

        return outcome_html(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Outcome:
        outcome: Outcome = built(cls, data, "outcome")
        return outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """A step that the guard had to answer: numbered from 1, as people speak of it."""

    number: int
    outcome: Outcome

    @property
    def reading(self) -> Reading:
        return self.outcome.verdict.reading

    @property
    def diagnosis(self) -> Diagnosis | None:
        return self.outcome.diagnosis

    def _repr_html_(self) -> str:
        """The HTML for a notebook."""
        return self.outcome._repr_html_()


class Incidents(tuple[Incident, ...]):
    """Incidents in order. A tuple that is printed as one line for each, and that a notebook shows as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        from nanguard.records.panel import headline

        lines = [
            f"step {each.reading.step:,}: {headline(each.outcome)}"
            + ("" if each.diagnosis is None else f" ({each.diagnosis.words})")
            for each in self
        ]
        return "\n".join(lines) or "no incidents"

    def __repr__(self) -> str:
        """As it is printed: a console shows it too."""
        return str(self)

    def _repr_html_(self) -> str:
        """The HTML for a notebook."""
        from nanguard.records.notebook import incidents_html

        return incidents_html(self)


def span_in_words(per: str | int) -> str:
    """``this epoch``, ``this run``, ``within 100 steps``."""
    return f"within {per} steps" if isinstance(per, int) else f"this {per}"
