"""The incidents of a run, grouped by fault: one fault, how often it came, and what was done each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nanguard.incidents.reader import Bundle
from nanguard.records.diagnosis import Diagnosis
from nanguard.records.diagnosis_text import examined
from nanguard.records.panel import done, what_happened
from nanguard.records.steps import Outcome
from nanguard.step.repeats import likeness

_MOST_ACTS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatedIncident:
    """Incidents with the same cause at the same place. Of those that were saved only the best examined one is held."""

    best: Bundle
    outcomes: tuple[Outcome, ...]
    """Of all of them in order, saved or not."""

    @property
    def count(self) -> int:
        return len(self.outcomes)

    @property
    def first_step(self) -> int:
        return self.outcomes[0].verdict.reading.step

    @property
    def last_step(self) -> int:
        return self.outcomes[-1].verdict.reading.step

    @property
    def done(self) -> Counter[str]:
        """What was done about them, and how often."""
        return Counter(done(outcome) for outcome in self.outcomes)

    @property
    def acts(self) -> list[tuple[int, str]]:
        """The steps at which more was done than to skip, and what."""
        return [(outcome.verdict.reading.step, outcome.did) for outcome in self.outcomes if outcome.did]

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


def by_fault(bundles: Iterable[Bundle], logged: Iterable[Outcome] = ()) -> list[RepeatedIncident]:
    """Groups incidents by fault, in the order in which they came. If the first is not well known, one that is leads.

    A later fault may be a consequence of the first, as if the program keeps something of a bad step. ``logged`` are
    the incidents in the run log: not all of them are saved. Faults of which none was saved are left out.
    """
    best: dict[tuple[Any, ...], Bundle] = {}
    saved: dict[tuple[Any, ...], list[Outcome]] = {}
    for bundle in bundles:
        kind = likeness(bundle.outcome)
        saved.setdefault(kind, []).append(bundle.outcome)
        if kind not in best or examined(bundle.diagnosis) > examined(best[kind].diagnosis):
            best[kind] = bundle
    written: dict[tuple[Any, ...], list[Outcome]] = {}
    for outcome in logged:
        written.setdefault(likeness(outcome), []).append(outcome)
    faults = [
        RepeatedIncident(best=best[kind], outcomes=_all_of(outcomes, written.get(kind, ())))
        for kind, outcomes in saved.items()
    ]
    leads = max(faults, key=lambda fault: _known(fault.best.diagnosis), default=None)
    return [] if leads is None else [leads, *(fault for fault in faults if fault is not leads)]


def _all_of(saved: Iterable[Outcome], logged: Iterable[Outcome]) -> tuple[Outcome, ...]:
    """Most incidents are in both. Some are only in the log, and, if the log was removed, some are only saved."""
    by_step: dict[int, tuple[list[Outcome], list[Outcome]]] = {}
    for place, outcomes in enumerate((saved, logged)):
        for outcome in outcomes:
            by_step.setdefault(outcome.verdict.reading.step, ([], []))[place].append(outcome)
    return tuple(outcome for _, both in sorted(by_step.items()) for outcome in max(both, key=len))


def _known(diagnosis: Diagnosis | None) -> tuple[Any, ...]:
    """How well a fault is known. A greater tuple is better; all that are well known are alike."""
    is_well_known = diagnosis is not None and diagnosis.is_well_known
    return (True,) if is_well_known else (False, *examined(diagnosis))
