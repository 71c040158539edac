"""The observer that logs incidents as panels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from nanguard.records.alert import Alert
from nanguard.records.layout import above_bars, fitted, terminal_width
from nanguard.records.panel import panel, repeated
from nanguard.records.steps import Incident
from nanguard.step.observers import Observer
from nanguard.step.repeats import RepeatCounter

log = logging.getLogger("nanguard")


class PanelLogger(Observer):
    """Logs the first incident of a kind as a panel. Repeats are one line each, and then only now and then.

    ``path`` gives the path of the run log, None if there is none. ``repeats`` is shared by several optimizers of a run.
    """

    def __init__(self, path: Callable[[], str | None] = lambda: None, repeats: RepeatCounter | None = None) -> None:
        self._path = path
        self._repeats = repeats or RepeatCounter(skips_only=True)

    def on_event(self, event: str, fields: Mapping[str, Any]) -> None:
        if event == "alert":
            alert = Alert.from_dict(dict(fields))
            level = logging.INFO if alert.state == "withdrawn" else logging.WARNING
            where = f" {alert.module}:" if alert.module else ""
            log.log(level, "step %d:%s %s", alert.step, where, alert.message)
        elif event == "answered":
            about = f" about {fields['module']}" if fields["module"] else ""
            log.warning("step %d: %s, because of the warning%s", fields["step"], fields["did"] or fields["what"], about)

    def on_incident(self, incident: Incident) -> None:
        outcome = incident.outcome
        if outcome.action.response == "halt":  # it says all this in its error
            return
        seen = self._repeats.count(incident)
        try:
            if seen.count == 1:
                text = panel(incident, self._path())
            else:
                text = repeated(incident, same_as=seen.step, count=seen.count, of=seen.network)
        except Exception:  # one that cannot be described must not silence the next
            what = outcome.action.response
            log.exception("step %d: %s, which could not be described", incident.reading.step, what)
        else:
            level = logging.WARNING if seen.is_worth_telling else logging.INFO
            with above_bars():
                log.log(level, "%s", fitted(text, terminal_width()))
