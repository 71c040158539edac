"""The data of the report, from a run log and its incident folders, before it is written as HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.errors import BundleError
from nanguard.incidents.reader import Bundle, load
from nanguard.records.diagnosis_text import examined
from nanguard.records.rebuild import built
from nanguard.records.run import IncidentRecord
from nanguard.records.steps import Outcome
from nanguard.runlog.repeats import Refused, refused_at_end
from nanguard.step.repeats import likeness

if TYPE_CHECKING:
    from nanguard.records.run import EventRecord, Run

MOST_IN_FULL = 60
"""How many faults of a run are shown in full, with the contents of their folders."""

MOST_REPEATS = 400
"""How many incidents of one fault have their own entry on the page."""

_NOT_LISTED = ("optimizer", "headroom")
"""The header of another guard, and what the map of headroom is drawn of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultGroup:
    """Incidents with the same cause at the same place. ``bundle`` is the saved folder of the best examined one.

    ``places`` are the indices of its incidents in the run.
    """

    places: tuple[int, ...]
    incidents: tuple[IncidentRecord, ...]
    bundle: Bundle | None

    @property
    def first(self) -> IncidentRecord:
        return self.incidents[0]

    @property
    def last(self) -> IncidentRecord:
        return self.incidents[-1]

    @property
    def best(self) -> IncidentRecord:
        """The incident of which most is known; the first of these."""
        return max(self.incidents, key=lambda record: examined(record.diagnosis))


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """The key numbers. ``seconds`` is the time from the first line of the log to the last.

    ``last_loss`` is the last finite loss, ``first_loss`` the first one of the same optimizer. If
    later losses are non-finite, ``last_loss_step`` is its step.
    """

    steps: int
    applied: int
    skipped: int
    backed_off: int
    lost: int
    undone: int
    rollbacks: int
    incidents: int
    first_loss: float
    last_loss: float
    last_loss_step: int | None
    seconds: float
    is_over: bool
    halted_at: int | None
    refused_at_end: Refused | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """One run. ``label`` is unique on the page."""

    run: Run
    number: int
    label: str
    incidents: tuple[IncidentRecord, ...]
    faults: tuple[FaultGroup, ...]
    events: tuple[EventRecord, ...]
    figures: Figures
    troubles: tuple[str, ...]

    def card_id(self, place: int) -> str:
        """The HTML id of the incident at this index. Incident numbers may repeat in a log."""
        return f"run{self.number}-incident{place + 1}"

    def targets(self) -> dict[int, str]:
        """The HTML id to open for each incident, by index."""
        found = {}
        for rank, fault in enumerate(self.faults):
            for nth, place in enumerate(fault.places):
                has_own = nth == 0 or (rank < MOST_IN_FULL and nth <= MOST_REPEATS)
                found[place] = self.card_id(place if has_own else fault.places[0])
        return found


def stories_of(runs: Sequence[Run]) -> list[Story]:
    """One story for each run, in the order given."""
    labels = _labels(runs)
    return [_story(run, number, label) for number, (run, label) in enumerate(zip(runs, labels, strict=True))]


def _story(run: Run, number: int, label: str) -> Story:
    dropped, others, troubles = [], [], list(run.troubles)
    for event in run.events:
        if event.event in _NOT_LISTED:
            continue
        if event.event != "drop":
            others.append(event)
        elif (record := _incident_of(event)) is not None:
            dropped.append(record)
        else:
            troubles.append(f"{run.path}: a drop at step {event.step} does not say what was dropped")
    incidents = tuple(sorted([*run.incidents, *dropped], key=lambda record: (record.time, record.number)))
    faults, told = _faults(run, incidents)
    return Story(
        run=run,
        number=number,
        label=label,
        incidents=incidents,
        faults=faults,
        events=tuple(others),
        figures=_figures(run, incidents),
        troubles=(*troubles, *told),
    )


def _incident_of(event: EventRecord) -> IncidentRecord | None:
    fields = {key: value for key, value in event.fields.items() if key not in ("number", "event", "time", "step")}
    number, owner = event.fields.get("number"), event.fields.get("optimizer", "")
    try:
        outcome = built(Outcome, fields, "drop")
        return IncidentRecord(number=built(int, number, "number"), time=event.time, outcome=outcome, optimizer=owner)
    except ValueError:
        return None


def _faults(run: Run, incidents: Sequence[IncidentRecord]) -> tuple[tuple[FaultGroup, ...], list[str]]:
    groups: dict[tuple[Any, ...], list[int]] = {}
    for place, record in enumerate(incidents):
        groups.setdefault((record.optimizer, *likeness(record.outcome)), []).append(place)
    faults, troubles = [], []
    for rank, places in enumerate(groups.values()):
        group = FaultGroup(places=tuple(places), incidents=tuple(incidents[place] for place in places), bundle=None)
        folder = kept_in(run.path, group.best.outcome.bundle)
        if rank < MOST_IN_FULL and folder is not None:
            try:
                group = replace(group, bundle=load(folder))
            except BundleError as error:
                troubles.append(str(error))
        faults.append(group)
    return tuple(faults), troubles


def kept_in(log: Path, told: str) -> Path | None:
    """The folder of an incident: next to the log (the run may have been moved), or where the log says."""
    if not told:
        return None
    beside = (log if log.is_dir() else log.parent) / "incidents" / Path(told).name
    for folder in (beside, Path(told)):
        if (folder / "incident.json").is_file():
            return folder
    return None


def _figures(run: Run, incidents: Sequence[IncidentRecord]) -> Figures:
    counts = _counts(run, incidents)
    made = {record.optimizer: record.step + 1 for record in run.steps}
    told = _whole((run.end or {}).get("steps")) if len(made) <= 1 else None
    steps = sum(made.values()) if told is None else told
    finite = [record for record in run.steps if math.isfinite(record.loss)]
    times = [
        *(record.time for record in run.steps),
        *(event.time for event in run.events),
        *(record.time for record in incidents),
        *(t for line in (*run.headers, run.end or {}) if isinstance(t := line.get("time"), (int, float))),
    ]
    times = [time for time in times if math.isfinite(time)]
    return Figures(
        steps=steps,
        applied=counts.get("applied", 0),
        skipped=counts.get("skipped", 0),
        backed_off=counts.get("backed_off", 0),
        lost=counts.get("lost", 0),
        undone=counts.get("undone", 0),
        rollbacks=counts.get("rolled_back", 0),
        incidents=len(incidents),
        first_loss=next((each.loss for each in finite if each.optimizer == finite[-1].optimizer), math.nan),
        last_loss=finite[-1].loss if finite else math.nan,
        last_loss_step=finite[-1].step if finite and finite[-1] is not run.steps[-1] else None,
        seconds=max(times) - min(times) if times else 0.0,
        is_over=run.is_over,
        halted_at=run.halted_at,
        refused_at_end=refused_at_end(run.steps),
    )


def _counts(run: Run, incidents: Sequence[IncidentRecord]) -> dict[str, int]:
    """The counts at the end of the log. If there are none, or for one optimizer of several, they are counted here."""
    made = {record.optimizer: record.step + 1 for record in run.steps}
    told = (run.end or {}).get("counts")
    if isinstance(told, Mapping) and len(made) <= 1:
        return {str(name): number for name, value in told.items() if (number := _whole(value)) is not None}
    backed_off = sum(event.event == "overflow" for event in run.events)
    by_hand = sum(event.event == "roll_back" for event in run.events)
    not_applied = sum(record.skipped for record in run.steps)
    refused = [record.outcome for record in incidents if not record.outcome.applied]
    went_on = sum(outcome.action.response != "halt" and not outcome.is_rollback for outcome in refused)
    skipped = max(not_applied - backed_off, went_on)
    lost = sum(record.outcome.lost for record in incidents)
    return {
        "skipped": skipped,
        "backed_off": backed_off,
        "lost": lost,
        "rolled_back": by_hand + sum(record.outcome.is_rollback for record in incidents),
        "applied": max(0, sum(made.values()) - skipped - backed_off - lost),
    }


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _labels(runs: Sequence[Run]) -> list[str]:
    """The names of the folders. Equal names become paths, and equal paths get a number."""
    labels = [run.name or "run" for run in runs]
    for place, run in enumerate(runs):
        if [other.name for other in runs].count(run.name) > 1:
            labels[place] = str(run.path.parent)
    seen: dict[str, int] = {}
    for place, label in enumerate(labels):
        seen[label] = seen.get(label, 0) + 1
        if seen[label] > 1:
            labels[place] = f"{label} ({seen[label]})"
    return labels
