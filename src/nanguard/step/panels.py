"""The observer that logs incidents as panels."""

from __future__ import annotations

import logging
from collections.abc import Callable

from nanguard.records.layout import fitted, terminal_width
from nanguard.records.panel import panel
from nanguard.records.steps import Incident, Outcome
from nanguard.step.observers import Observer

log = logging.getLogger("nanguard")

_A_ROW = 3
"""So many incidents of one kind on neighbouring steps are told in a line, and longer rows only now and then."""


class PanelLogger(Observer):
    """``path`` gives the path of the run log, None if there is none."""

    def __init__(self, path: Callable[[], str | None] = lambda: None) -> None:
        self._path = path
        self._last: Outcome | None = None
        self._in_a_row = 0

    def on_heard(self, outcome: Outcome) -> None:
        reading = outcome.verdict.reading
        if outcome.action.response == "back_off":
            log.info("step %d: fp16 gradients overflowed at loss scale %g, backing off", reading.step, reading.scale)

    def on_incident(self, incident: Incident) -> None:
        outcome = incident.outcome
        is_alike = self._last is not None and _are_alike(self._last, outcome)
        self._in_a_row = self._in_a_row + 1 if is_alike else 1
        self._last = outcome
        if outcome.action.response != "halt":  # a halt says all this in its error
            row = self._in_a_row if self._in_a_row >= _A_ROW else 1
            level = logging.WARNING if self._in_a_row < _A_ROW or _is_round(self._in_a_row) else logging.INFO
            try:
                text = fitted(panel(incident, self._path(), in_a_row=row), terminal_width())
            except Exception:  # one that cannot be described must not silence the next
                what = outcome.action.response
                log.exception("step %d: %s, which could not be described", incident.reading.step, what)
            else:
                log.log(level, "%s", text)


def _are_alike(one: Outcome, next_one: Outcome) -> bool:
    """Whether two neighbouring steps were skipped for the same reason."""
    skips = one.action.response == next_one.action.response == "skip"
    neighbours = next_one.verdict.reading.step - one.verdict.reading.step == 1
    return skips and neighbours and one.verdict.cause == next_one.verdict.cause


def _is_round(number: int) -> bool:
    """3, 10, 30, 100, 300, ..."""
    while number % 10 == 0:
        number //= 10
    return number in (1, 3)
