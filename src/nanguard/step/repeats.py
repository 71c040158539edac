"""Counts incidents of the same kind, so that repeats of one fault do not drown everything else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanguard.records.diagnosis import OF_EARLIER_STEPS
from nanguard.records.steps import Incident, Outcome

_MOST_KINDS = 1000


@dataclass(slots=True)
class Seen:
    """The step of the first incident of a kind, the network that it was of, and how many there were."""

    step: int
    network: str = ""
    count: int = 1

    @property
    def is_worth_telling(self) -> bool:
        """For the first three, and then the 10th, 30th, 100th, 300th, ..."""
        return self.count == 2 or str(self.count).rstrip("0") in ("1", "3")


class RepeatCounter:
    """Tells the first incident of a kind from repeats of it. With ``skips_only`` other answers are never repeats."""

    def __init__(self, *, skips_only: bool = False) -> None:
        self._skips_only = skips_only
        self._kinds: dict[tuple[Any, ...], Seen] = {}

    def count(self, incident: Incident) -> Seen:
        """How often this kind was seen, with this incident."""
        outcome = incident.outcome
        if self._skips_only and outcome.action.response != "skip":
            return Seen(incident.reading.step, _network(outcome))
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        kind = (outcome.action.response, *likeness(outcome))
        seen = self._kinds.get(kind)
        if seen is None:
            seen = self._kinds[kind] = Seen(incident.reading.step, _network(outcome))
        else:
            seen.count += 1
        return seen


def likeness(outcome: Outcome) -> tuple[Any, ...]:
    """A key that is equal for incidents with the same fault: the same cause at the same place, in any network.

    Where a cause of earlier steps shows is a coincidence. If the line is not known, module and optimizer count. A
    program may make an optimizer for each batch; they are numbered.
    """
    diagnosis, verdict = outcome.diagnosis, outcome.verdict
    if diagnosis is None:
        return verdict.kind, verdict.reading.found, bool(verdict.reading.dropped_microbatches)
    if diagnosis.cause in OF_EARLIER_STEPS:
        return verdict.kind, diagnosis.cause
    place = diagnosis.module, diagnosis.network.rstrip(" 0123456789")
    line = diagnosis.source and (diagnosis.source.file, diagnosis.source.line)
    return verdict.kind, diagnosis.cause, diagnosis.phase, diagnosis.op, line or place


def _network(outcome: Outcome) -> str:
    return "" if outcome.diagnosis is None else outcome.diagnosis.network
