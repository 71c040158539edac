"""The incidents of a run, grouped by fault: one fault, how often it came, and what was done each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from nanguard.incidents.reader import Bundle
from nanguard.records.diagnosis import Diagnosis
from nanguard.records.diagnosis_text import examined
from nanguard.records.panel import done, what_happened
from nanguard.step.repeats import likeness

_MOST_ACTS = 5


@dataclass(slots=True)
class RepeatedIncident:
    """Incidents with the same cause at the same place. Only the best examined one is held.

    ``acts`` are the steps at which more was done than to skip, and what.
    """

    best: Bundle
    count: int = 0
    first_step: int = 0
    last_step: int = 0
    done: Counter[str] = field(default_factory=Counter)
    acts: list[tuple[int, str]] = field(default_factory=list)

    def add(self, bundle: Bundle) -> None:
        outcome, step = bundle.outcome, bundle.outcome.verdict.reading.step
        if self.count == 0:
            self.first_step = step
        self.count += 1
        self.last_step = step
        self.done[done(outcome)] += 1
        if outcome.did:
            self.acts.append((step, outcome.did))
        if examined(bundle.diagnosis) > examined(self.best.diagnosis):
            self.best = bundle

    def told(self, text: str) -> str:
        """The text about the best examined incident, with rows under its headline about all of them."""
        if self.count == 1:
            return text
        head, _, rest = text.partition("\n")
        return "\n".join(filter(None, [head, *self._rows(), rest]))

    def in_one_line(self) -> str:
        """For a list of faults."""
        outcome, diagnosis = self.best.outcome, self.best.diagnosis
        what = what_happened(outcome) if diagnosis is None else diagnosis.words
        line = "" if diagnosis is None or diagnosis.source is None else f", {diagnosis.source}"
        when = f"step {self.first_step:,}"
        if self.count > 1:
            when = f"{self.count:,} times, steps {self.first_step:,} to {self.last_step:,}"
        return f"{what}{line}: {when}; {', '.join(self.done)}"

    def _rows(self) -> list[str]:
        times = f"{self.count:,} times, first at step {self.first_step:,}, last at step {self.last_step:,}"
        rows = [f"   repeated  {times}"]
        if len(self.done) > 1:
            rows.append(f"   in all    {'; '.join(f'{number:,}x {words}' for words, number in self.done.items())}")
        acts = [act for act in self.acts if act[0] != self.best.outcome.verdict.reading.step]
        rows += [f"   at {step:<6} {did}" for step, did in acts[:_MOST_ACTS]]
        if len(acts) > _MOST_ACTS:
            rows.append(f"   and       {len(acts) - _MOST_ACTS:,} more times that something was done")
        return rows


def by_fault(bundles: Iterable[Bundle]) -> list[RepeatedIncident]:
    """Groups incidents by fault, in the order in which they came. If the first is not well known, one that is leads.

    A later fault may be a consequence of the first, as if the program keeps something of a bad step.
    """
    groups: dict[tuple[Any, ...], RepeatedIncident] = {}
    for bundle in bundles:
        groups.setdefault(likeness(bundle.outcome), RepeatedIncident(best=bundle)).add(bundle)
    faults = list(groups.values())
    best = max(faults, key=lambda fault: _known(fault.best.diagnosis), default=None)
    return [] if best is None else [best, *(fault for fault in faults if fault is not best)]


def _known(diagnosis: Diagnosis | None) -> tuple[Any, ...]:
    """How well a fault is known. A greater tuple is better; all that are well known are alike."""
    is_well_known = diagnosis is not None and diagnosis.is_well_known
    return (True,) if is_well_known else (False, *examined(diagnosis))
