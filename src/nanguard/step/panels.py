"""The observer that logs incidents as panels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nanguard.records.alert import Alert
from nanguard.records.layout import fitted, terminal_width
from nanguard.records.panel import panel, repeated
from nanguard.records.steps import Incident, Outcome
from nanguard.step.observers import Observer

log = logging.getLogger("nanguard")

_MOST_KINDS = 1000


@dataclass(slots=True)
class _Seen:
    """The step of the first incident of a kind, and how many there were."""

    step: int
    count: int = 1


class PanelLogger(Observer):
    """Logs the first incident of a kind as a panel. Repeats are one line each, and then only now and then.

    ``path`` gives the path of the run log, None if there is none.
    """

    def __init__(self, path: Callable[[], str | None] = lambda: None) -> None:
        self._path = path
        self._kinds: dict[tuple[Any, ...], _Seen] = {}

    def on_heard(self, outcome: Outcome) -> None:
        reading = outcome.verdict.reading
        if outcome.action.response == "back_off":
            log.info("step %d: fp16 gradients overflowed at loss scale %g, backing off", reading.step, reading.scale)

    def on_event(self, event: str, fields: Mapping[str, Any]) -> None:
        if event == "alert":
            alert = Alert.from_dict(dict(fields))
            level = logging.INFO if alert.state == "withdrawn" else logging.WARNING
            where = f" {alert.module}:" if alert.module else ""
            log.log(level, "step %d:%s %s", alert.step, where, alert.message)

    def on_incident(self, incident: Incident) -> None:
        outcome = incident.outcome
        if outcome.action.response == "halt":  # it says all this in its error
            return
        seen = self._counted(incident)
        try:
            if seen.count == 1:
                text = panel(incident, self._path())
            else:
                text = repeated(incident, same_as=seen.step, count=seen.count)
        except Exception:  # one that cannot be described must not silence the next
            what = outcome.action.response
            log.exception("step %d: %s, which could not be described", incident.reading.step, what)
        else:
            level = logging.WARNING if _is_told(seen.count) else logging.INFO
            log.log(level, "%s", fitted(text, terminal_width()))

    def _counted(self, incident: Incident) -> _Seen:
        """How often this kind was seen, with this incident. Only a step that was just skipped can be a repeat."""
        outcome = incident.outcome
        if outcome.action.response != "skip":
            return _Seen(incident.reading.step)
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        kind = _kind(outcome)
        seen = self._kinds.get(kind)
        if seen is None:
            seen = self._kinds[kind] = _Seen(incident.reading.step)
        else:
            seen.count += 1
        return seen


def _kind(outcome: Outcome) -> tuple[Any, ...]:
    """Equal for incidents with the same fault: the same cause at the same place."""
    diagnosis, verdict = outcome.diagnosis, outcome.verdict
    if diagnosis is None:
        return verdict.kind, verdict.reading.found, bool(verdict.reading.dropped_microbatches)
    place = diagnosis.source and (diagnosis.source.file, diagnosis.source.line)
    return verdict.kind, diagnosis.cause, diagnosis.phase, diagnosis.module, diagnosis.op, place


def _is_told(count: int) -> bool:
    """1, 2, 3, 10, 30, 100, 300, ..."""
    return count == 2 or str(count).rstrip("0") in ("1", "3")
