"""What the guard remembers and tells: counts, incidents, the history the policy decides by, log lines, the run log."""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanguard.divergence import Trend
from nanguard.errors import NonFiniteError
from nanguard.records import Incident, Outcome, Reading
from nanguard.report.panel import halt_message, panel
from nanguard.runlog import SCHEMA, RunLog

log = logging.getLogger("nanguard")

_COUNTED = {
    "back_off": "backed_off",
    "skip": "skipped",
    "lower_lr": "skipped",
    "raise_precision": "skipped",
    "halt": "halted",
}


class Journal:
    """Written to once for each step the host has heard of. Only one rank ``speaks`` and has a ``run_dir``."""

    def __init__(self, run_dir: str | Path | None, *, speaks: bool) -> None:
        self.history: list[Outcome] = []
        self.counts: Counter[str] = Counter(dict.fromkeys(("applied", "skipped", "lost", "rerun", "backed_off"), 0))
        self.last: Outcome | None = None
        self.trend = Trend()
        self.recent: deque[Reading] = deque(maxlen=64)
        self._speaks = speaks
        self._log = RunLog(run_dir) if run_dir is not None else None

    @property
    def incidents(self) -> tuple[Incident, ...]:
        return tuple(Incident(number=i, outcome=outcome) for i, outcome in enumerate(self.history, start=1))

    def begin(self, **header: Any) -> None:
        if self._log is not None:
            self._log.write("run", schema=SCHEMA, **header)

    def record(self, outcome: Outcome) -> None:
        """Counts, remembers, logs; raises ``NonFiniteError`` where the policy says to halt."""
        self.last = outcome
        reading, response = outcome.verdict.reading, outcome.action.response
        if response != "roll_back":
            self.counts["applied" if outcome.applied else _COUNTED[response]] += 1
        self.counts["rerun"] += outcome.rerun
        self.counts["lost"] += outcome.lost
        if response == "back_off":
            self._note_overflow(outcome)
        elif response != "apply" or reading.dropped_microbatches:
            self.remember(outcome)

    def remember(self, outcome: Outcome) -> None:
        """What had to be answered, whether its step has been counted already or not."""
        self.history.append(outcome)
        incident = Incident(number=len(self.history), outcome=outcome)
        if outcome.action.response == "roll_back":
            self.counts["rolled_back"] += 1
        self._tell(incident)
        if outcome.action.response == "halt":
            raise NonFiniteError(halt_message(incident), incident)

    def ease(self, step: int, what: str) -> None:
        """A measure was taken back."""
        self.write("eased", step=step, what=what)
        if self._speaks:
            log.info("step %d: after a time without trouble, %s", step, what)

    def write(self, event: str, **fields: Any) -> None:
        """Into the run log."""
        if self._log is not None:
            self._log.write(event, **fields)

    def _tell(self, incident: Incident) -> None:
        """Into the run log and the terminal. A fault in the telling is logged and never stops a run that is safe."""
        response = incident.outcome.action.response
        try:
            path = None
            if self._log is not None:
                event = "drop" if response in ("apply", "drop_gradients") else "incident"
                self._log.write(event, number=incident.number, **incident.outcome.as_dict())
                path = str(self._log.path)
            if self._speaks and response != "halt":  # a halt says all this in its error
                log.warning("%s", panel(incident, path, again=self._is_the_same_again()))
        except Exception:
            log.exception("step %d: %s, which could not be described", incident.reading.step, response)

    def _is_the_same_again(self) -> bool:
        """Whether the last three incidents are skips of neighbouring steps for one reason: a bad shard is long."""
        if len(self.history) < 3:
            return False
        skips = [past.action.response == "skip" and past.action.rung for past in self.history[-3:]]
        steps = [past.verdict.reading.step for past in self.history[-3:]]
        causes = {past.verdict.cause for past in self.history[-3:]}
        return skips[0] is not False and len(set(skips)) == len(causes) == 1 and steps[2] - steps[0] == 2

    def close(self, *, steps: int) -> None:
        if self._log is not None:
            self._log.write("end", steps=steps, counts=dict(self.counts))

    def state_dict(self) -> dict[str, Any]:
        # What a diagnosis found is in the run log; how long it took would make equal runs differ.
        history = [replace(outcome, diagnosis=None).as_dict() for outcome in self.history]
        return {"counts": dict(self.counts), "history": history, "trend": self.trend.as_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = Counter(state["counts"])
        self.history = [Outcome.from_dict(data) for data in state["history"]]
        self.trend = Trend.from_dict(state["trend"])

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
