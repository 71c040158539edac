"""The observer that writes the run log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanguard.records.healthy import SoundStep
from nanguard.records.steps import Incident, Outcome
from nanguard.run_folder import RunFolder
from nanguard.runlog.writer import SCHEMA, RunLog
from nanguard.step.observers import Observer


class RunLogObserver(Observer):
    """Writes each step, incident and event. ``optimizer`` is added to every line if several guards share one log."""

    def __init__(self, run_dir: str | Path | RunFolder, *, optimizer: str = "") -> None:
        self._log = RunLog(run_dir, optimizer=optimizer)

    def __repr__(self) -> str:
        return "the run log"

    @property
    def path(self) -> str:
        return str(self._log.path)

    def on_heard(self, outcome: Outcome) -> None:
        reading = outcome.verdict.reading
        self._log.write_step(reading, skipped=not outcome.applied)
        if outcome.action.response == "back_off":
            self._log.write("overflow", step=reading.step, epoch=reading.epoch, scale=reading.scale)

    def hear_together(self, steps: Sequence[SoundStep]) -> None:
        """As ``on_heard``, for several healthy steps."""
        self._log.write_sound_steps(steps)

    def on_incident(self, incident: Incident) -> None:
        event = "drop" if incident.outcome.action.response in ("apply", "drop_gradients") else "incident"
        self._log.write_incident(event, number=incident.number, **incident.outcome.as_dict())

    def on_event(self, event: str, fields: Mapping[str, Any]) -> None:
        schema = {"schema": SCHEMA} if event in ("run", "optimizer") else {}
        self._log.write(event, **schema, **fields)

    def on_close(self, num_steps: int, counts: Mapping[str, int]) -> None:
        self._log.close()
        self._log.write("end", steps=num_steps, counts=dict(counts))
