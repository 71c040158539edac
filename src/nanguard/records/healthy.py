"""The records of a healthy step, made in a fifth of the time: there is one of each at every step.

A frozen dataclass sets each field by a call. Here the same slots are written to as those of a draft, which then becomes
the record by its class.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from nanguard.records.steps import APPLY, Means, Outcome, Progress, Reading, Verdict

_NO_MEANS, _NO_PROGRESS = Means(), Progress()


def _slots(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


class _ReadingDraft:
    __slots__ = _slots(Reading)


class _VerdictDraft:
    __slots__ = _slots(Verdict)


class _OutcomeDraft:
    __slots__ = _slots(Outcome)


def healthy_reading(
    step: int,
    epoch: int,
    batch: int | None,
    loss: float,
    mean_loss: float,
    norms: tuple[float, ...],
    lrs: tuple[float | None, ...],
    num_stepped_before: int,
) -> Reading:
    """A ``Reading`` of these, in which nothing was non-finite."""
    draft: Any = _ReadingDraft()
    draft.step, draft.epoch, draft.batch = step, epoch, batch
    draft.loss, draft.mean_loss, draft.norms, draft.lrs = loss, mean_loss, norms, lrs
    draft.scale, draft.num_stepped_before = None, num_stepped_before
    draft.found = draft.gradients = draft.buffers = draft.ranks = ()
    draft.dropped_microbatches = draft.dropped_gradients = draft.damaged = ()
    draft.__class__ = Reading
    reading: Reading = draft
    return reading


def healthy_verdict(reading: Reading) -> Verdict:
    """``Verdict(kind="healthy", reading=reading)``."""
    draft: Any = _VerdictDraft()
    draft.kind, draft.reading, draft.cause, draft.alert = "healthy", reading, "unknown", None
    draft.means, draft.progress = _NO_MEANS, _NO_PROGRESS
    draft.__class__ = Verdict
    verdict: Verdict = draft
    return verdict


SoundStep = tuple[int, float, tuple[float, ...], tuple[float | None, ...]]
"""Its number, its loss, the norms and the learning rates."""


def sound_reading(step: int, loss: float, norms: tuple[float, ...], lrs: tuple[float | None, ...]) -> Reading:
    """Of a step outside ``guard.epoch`` in which nothing was non-finite."""
    return healthy_reading(step, 0, None, loss, loss, norms, lrs, 0)


def sound_outcome(step: int, loss: float, norms: tuple[float, ...], lrs: tuple[float | None, ...]) -> Outcome:
    """As ``sound_reading``, of a step that was applied."""
    return applied(healthy_verdict(sound_reading(step, loss, norms, lrs)))


def applied(verdict: Verdict) -> Outcome:
    """``Outcome(verdict=verdict, action=APPLY, applied=True)``."""
    draft: Any = _OutcomeDraft()
    draft.verdict, draft.action, draft.applied = verdict, APPLY, True
    draft.rerun = draft.lost = 0
    draft.did = draft.bundle = ""
    draft.worked, draft.went_back, draft.lost_device, draft.diagnosis = True, False, False, None
    draft.__class__ = Outcome
    outcome: Outcome = draft
    return outcome
