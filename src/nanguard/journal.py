"""What the guard remembers and tells: counts, incidents, the history the policy decides by, log lines, the run log."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

from nanguard.errors import NonFiniteError
from nanguard.records import Incident, Outcome
from nanguard.report.panel import halt_message, panel
from nanguard.runlog import SCHEMA, RunLog

log = logging.getLogger("nanguard")

_COUNTED = {
    "apply": "applied",
    "drop_gradients": "applied",
    "back_off": "backed_off",
    "skip": "skipped",
    "halt": "halted",
}


class Journal:
    """Written to once for each step the host has heard of. Only one rank ``speaks`` and has a ``run_dir``."""

    def __init__(self, run_dir: str | Path | None, *, speaks: bool) -> None:
        self.history: list[Outcome] = []
        self.counts: Counter[str] = Counter(dict.fromkeys(("applied", "skipped", "lost", "rerun", "backed_off"), 0))
        self.last: Outcome | None = None
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
        self.counts[_COUNTED[response]] += 1
        self.counts["rerun"] += outcome.rerun
        self.counts["lost"] += outcome.lost
        if response == "apply" and not reading.dropped_microbatches:
            return
        if response == "back_off":
            self._note_overflow(outcome)
            return
        self.history.append(outcome)
        incident = Incident(number=len(self.history), outcome=outcome)
        self._tell(incident)
        if response == "halt":
            raise NonFiniteError(halt_message(incident), incident)

    def _tell(self, incident: Incident) -> None:
        """Into the run log and the terminal. A fault in the telling is logged and never stops a run that is safe."""
        response = incident.outcome.action.response
        try:
            path = None
            if self._log is not None:
                event = "incident" if response in ("skip", "halt") else "drop"
                self._log.write(event, number=incident.number, **incident.outcome.as_dict())
                path = str(self._log.path)
            if self._speaks and response != "halt":  # a halt says all this in its error
                log.warning("%s", panel(incident, path))
        except Exception:
            log.exception("step %d was %s, but could not be described", incident.reading.step, _COUNTED[response])

    def close(self, *, steps: int) -> None:
        if self._log is not None:
            self._log.write("end", steps=steps, counts=dict(self.counts))

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "history": [outcome.as_dict() for outcome in self.history]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = Counter(state["counts"])
        self.history = [Outcome.from_dict(data) for data in state["history"]]

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
