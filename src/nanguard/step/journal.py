"""What the guard remembers and tells: counts, incidents, the history the policy decides by, log lines, the run log."""

from __future__ import annotations

import itertools
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanguard.errors import NonFiniteError
from nanguard.incidents.files import as_seen
from nanguard.policy.divergence import Trend
from nanguard.records.panel import halt_message, panel
from nanguard.records.steps import Incident, Outcome, Progress, Reading
from nanguard.records.summary import closing_line
from nanguard.runlog.writer import SCHEMA, RunFolder, RunLog

log = logging.getLogger("nanguard")

_COUNTED = {
    "back_off": "backed_off",
    "skip": "skipped",
    "lower_lr": "skipped",
    "raise_precision": "skipped",
    "halt": "halted",
}

_A_ROW = 3
"""So many incidents of one kind on neighbouring steps are told in a line, and longer rows only now and then."""


class Journal:
    """Written to once for each step the host has heard of. Only one rank ``speaks`` and has a ``run_dir``.

    ``optimizer`` is the name that each line of the run log gets where several guards write to one.
    """

    def __init__(self, run_dir: str | Path | RunFolder | None, *, speaks: bool, optimizer: str = "") -> None:
        self.history: list[Outcome] = []
        self.counts: Counter[str] = Counter(dict.fromkeys(("applied", "skipped", "lost", "rerun", "backed_off"), 0))
        self.last: Outcome | None = None
        self.trend = Trend()
        self.recent: deque[Reading] = deque(maxlen=64)
        self.refused_in_a_row = 0
        self.numbers: Iterator[int] = itertools.count(1)
        """Where incidents get their numbers from; guards that share a run share it."""
        self.num_not_kept = 0
        """Incidents that were left out on disk, since enough of their kind, or enough in all, are there."""
        self._num_summed_up = 0
        self._pid = os.getpid()
        self._numbers: list[int] = []
        self._next: int | None = None
        self._speaks = speaks
        self._log = RunLog(run_dir, optimizer=optimizer) if run_dir is not None else None

    @property
    def incidents(self) -> tuple[Incident, ...]:
        return tuple(Incident(number=n, outcome=o) for n, o in zip(self._numbers, self.history, strict=True))

    @property
    def progress(self) -> Progress:
        """How far the run has come, as far as the host has heard; the same on all ranks."""
        return Progress(num_applied=self.counts["applied"], num_undone=self.counts["undone"])

    @property
    def next_number(self) -> int:
        """That the next incident will get."""
        if self._next is None:
            self._next = next(self.numbers)
        return self._next

    def begin(self, event: str = "run", **header: Any) -> None:
        if self._log is not None:
            self._log.write(event, schema=SCHEMA, **header)

    def record(self, outcome: Outcome) -> None:
        """Counts, remembers, logs; raises ``NonFiniteError`` where the policy says to halt."""
        self.last = outcome
        reading, response = outcome.verdict.reading, outcome.action.response
        if response != "roll_back":
            self.counts["applied" if outcome.applied else _COUNTED[response]] += 1
        if response != "back_off":
            self.refused_in_a_row = 0 if outcome.applied else self.refused_in_a_row + 1
        self.counts["rerun"] += outcome.rerun
        self.counts["lost"] += outcome.lost
        if self._log is not None:
            self._write_step(self._log, reading, skipped=not outcome.applied)
        if response == "back_off":
            self._note_overflow(outcome)
        elif response != "apply" or reading.dropped_microbatches:
            self.remember(outcome)

    def sit_out(self, reading: Reading) -> None:
        """A step that was left out for the sake of another optimizer's, which says why."""
        self.counts["skipped"] += 1
        if self._log is not None:
            self._write_step(self._log, reading, skipped=True)

    def remember(self, outcome: Outcome) -> None:
        """What had to be answered, whether its step has been counted already or not."""
        incident = Incident(number=self.next_number, outcome=outcome)
        self.history.append(outcome)
        self._numbers.append(incident.number)
        self._next = None
        if outcome.action.response == "roll_back":
            self.counts["rolled_back"] += 1
        self._tell(incident)
        if outcome.action.response == "halt":
            raise NonFiniteError(halt_message(incident, known=self._known_before()), incident)

    def ease(self, step: int, what: str) -> None:
        """A measure was taken back."""
        self.write("eased", step=step, what=what)
        if self._speaks:
            log.info("step %d: after a time without trouble, %s", step, what)

    def write(self, event: str, **fields: Any) -> None:
        """Into the run log."""
        if self._log is not None:
            self._log.write(event, **fields)

    def _write_step(self, runlog: RunLog, reading: Reading, *, skipped: bool) -> None:
        """A log that cannot be written is given up; it never stops a run."""
        try:
            runlog.write_step(
                step=reading.step,
                epoch=reading.epoch,
                batch=reading.batch,
                loss=reading.loss,
                norms=reading.norms,
                lrs=reading.lrs,
                scale=reading.scale,
                skipped=skipped,
            )
        except Exception:
            self._log = None
            log.exception("step %d cannot be written to the run log: the run goes on without it", reading.step)

    def _tell(self, incident: Incident) -> None:
        """Into the run log and the terminal. A fault in the telling is logged and never stops a run that is safe."""
        response = incident.outcome.action.response
        try:
            path = None
            if self._log is not None:
                event = "drop" if response in ("apply", "drop_gradients") else "incident"
                self._log.write_incident(event, number=incident.number, **incident.outcome.as_dict())
                path = str(self._log.path)
            if self._speaks and response != "halt":  # a halt says all this in its error
                in_a_row = self._in_a_row()
                level = logging.WARNING if in_a_row < _A_ROW or _is_round(in_a_row) else logging.INFO
                row = in_a_row if in_a_row >= _A_ROW else 1
                log.log(level, "%s", panel(incident, path, in_a_row=row))
        except Exception:
            log.exception("step %d: %s, which could not be described", incident.reading.step, response)

    def _in_a_row(self) -> int:
        """How many of the last incidents are skips of neighbouring steps for one reason: a bad shard is long."""
        number, later = 1, self.history[-1]
        for past in reversed(self.history[:-1]):
            if not _are_alike(past, later):
                break
            number, later = number + 1, past
        return number

    def _known_before(self) -> Incident | None:
        """The last incident of which a cause is known."""
        causes = (past.diagnosis is not None and past.diagnosis.cause != "unknown" for past in reversed(self.history))
        place = next((place for place, is_known in enumerate(causes, 1) if is_known), None)
        return None if place is None else Incident(number=self._numbers[-place], outcome=self.history[-place])

    def close(self, *, steps: int) -> None:
        if self._log is not None:
            self._log.close()
            self._log.write("end", steps=steps, counts=dict(self.counts))

    def sum_up(self, look: Callable[[], Sequence[str]] | None = None) -> None:
        """Logs in one line what became of the run, if there are incidents that no such line has told of.

        ``look`` names what is not finite now. Never raises: it is called when a guard is closed, let go of, or the
        process ends.
        """
        if len(self.history) <= self._num_summed_up or not self._speaks or os.getpid() != self._pid:
            return
        self._num_summed_up = len(self.history)
        try:
            told = closing_line(
                self.counts,
                self.incidents,
                unsound=None if look is None else look(),
                refused_in_a_row=self.refused_in_a_row,
                num_not_kept=self.num_not_kept,
            )
            where = "guard.incidents" if self._log is None else f"nanguard explain {as_seen(self._log.path.parent)}"
            log.warning("end of the run: %s; more: %s", told, where)
        except Exception:
            log.exception("what became of the run could not be summed up")

    def state_dict(self) -> dict[str, Any]:
        # What a diagnosis found is in the run log; how long it took would make equal runs differ.
        history = [replace(outcome, diagnosis=None).as_dict() for outcome in self.history]
        return {"counts": dict(self.counts), "history": history, "trend": self.trend.as_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = Counter(state["counts"])
        self.history = [Outcome.from_dict(data) for data in state["history"]]
        self._numbers = list(range(1, len(self.history) + 1))
        self.numbers, self._next = itertools.count(len(self.history) + 1), None
        self.trend = Trend.from_dict(state["trend"])
        self._num_summed_up = len(self.history)

    def _note_overflow(self, outcome: Outcome) -> None:
        reading = outcome.verdict.reading
        if self._log is not None:
            self._log.write("overflow", step=reading.step, epoch=reading.epoch, scale=reading.scale)
        if self._speaks:
            log.info(
                "step %d: fp16 gradients overflowed at loss scale %g, backing off",
                reading.step,
                reading.scale,
            )


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
