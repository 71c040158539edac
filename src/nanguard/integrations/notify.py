"""An observer that runs a command, or calls a function, when something has happened that a person should know."""

from __future__ import annotations

import atexit
import json
import logging
import os
import platform
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any

from nanguard.integrations.first_rank import is_first_rank
from nanguard.records.panel import headline, panel
from nanguard.records.plain import plain
from nanguard.records.steps import Incident
from nanguard.step.observers import Observer
from nanguard.step.repeats import RepeatCounter

log = logging.getLogger("nanguard")

_WAIT = 10.0
"""Seconds that the end of the process waits for a function that is still running."""

_MOST_OUTPUT = 1000
"""Bytes of what a command that failed has printed."""

_IN_ENVIRONMENT = ("event", "step", "headline", "cause", "module", "source", "bundle")


class Notify(Observer):
    """Runs ``target`` on the first incident of each kind, and if the run is halted. The run never waits for it.

    ``target`` is a command (a list of arguments, or a line for the shell) or a function. A command gets the facts as
    one line of JSON on its standard input, and some of them as environment variables: ``NANGUARD_EVENT``,
    ``NANGUARD_STEP``, ``NANGUARD_HEADLINE``, ``NANGUARD_CAUSE``, ``NANGUARD_MODULE``, ``NANGUARD_SOURCE`` and
    ``NANGUARD_BUNDLE``. A function gets them as a dict, in a thread of its own. Only rank 0 notifies.
    """

    def __init__(self, target: str | Sequence[str] | Callable[[dict[str, Any]], object]) -> None:
        is_command = isinstance(target, str) or (
            isinstance(target, Sequence) and bool(target) and all(isinstance(part, str) for part in target)
        )
        if not target or not (is_command or callable(target)):
            raise ValueError(f"target must be a command, as text or as a list of texts, or a function, got {target!r}")
        self._target: Any = target
        self._repeats = RepeatCounter()

    def __repr__(self) -> str:
        return f"Notify({self._target!r})"

    def on_incident(self, incident: Incident) -> None:
        is_halt = incident.outcome.action.response == "halt"
        is_first = self._repeats.count(incident).count == 1
        if not (is_halt or is_first) or not is_first_rank():
            return
        facts = _facts(incident, "halt" if is_halt else "incident")
        if callable(self._target):
            thread = threading.Thread(target=self._call, args=(facts,), name="nanguard notify", daemon=True)
            thread.start()
            atexit.register(thread.join, _WAIT)
        else:
            self._run(facts)

    def _call(self, facts: dict[str, Any]) -> None:
        try:
            self._target(facts)
        except Exception:
            log.warning("step %d: %r failed", facts["step"], self, exc_info=True)

    def _run(self, facts: dict[str, Any]) -> None:
        """Starts the command and does not wait for it. It goes on if this process ends.

        It has files instead of pipes: what it is told does not wait for a reader, and what reads the output of the run
        does not wait for the command.
        """
        known = {f"NANGUARD_{name.upper()}": str(facts[name]) for name in _IN_ENVIRONMENT}
        output = tempfile.TemporaryFile()  # noqa: SIM115, the thread that waits closes it
        try:
            with tempfile.TemporaryFile() as stdin:
                stdin.write(json.dumps(facts).encode() + b"\n")
                stdin.seek(0)
                process = subprocess.Popen(
                    self._target,
                    shell=isinstance(self._target, str),
                    stdin=stdin,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **known},
                    start_new_session=True,
                )
        except OSError as error:
            output.close()
            log.warning("step %d: %r could not be started: %s", facts["step"], self, error)
            return
        threading.Thread(target=self._watch, args=(process, output, facts["step"]), daemon=True).start()

    def _watch(self, process: subprocess.Popen[bytes], output: IO[bytes], step: int) -> None:
        with output:
            if status := process.wait():
                output.seek(0)
                told = output.read(_MOST_OUTPUT).decode(errors="replace").strip()
                log.warning("step %d: %r ended with status %d: %s", step, self, status, told or "it printed nothing")


def _facts(incident: Incident, event: str) -> dict[str, Any]:
    """What is known of the incident, as JSON can hold it. What is not known is empty."""
    outcome, reading, diagnosis = incident.outcome, incident.reading, incident.diagnosis
    return {
        "event": event,
        "number": incident.number,
        "step": reading.step,
        "epoch": reading.epoch,
        "batch": reading.batch,
        "loss": plain(reading.loss),
        "found": list(reading.found),
        "response": outcome.action.response,
        "headline": headline(outcome),
        "cause": diagnosis.cause if diagnosis else "",
        "because": diagnosis.because if diagnosis else "",
        "module": (diagnosis.module or "") if diagnosis else "",
        "source": str(diagnosis.source) if diagnosis and diagnosis.source else "",
        "fix": diagnosis.fix.words if diagnosis else "",
        "bundle": outcome.bundle,
        "text": panel(incident),
        "host": platform.node(),
        "pid": os.getpid(),
    }
