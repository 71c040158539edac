"""What there is to say about a run at a glance: its state, how fast it goes, where it is. Nothing is drawn here."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

from nanguard.records.printable import printable
from nanguard.records.run import EventRecord, IncidentRecord, Run, StepRecord
from nanguard.runlog.repeats import likeness, refused_at_end

RunState = Literal["running", "silent", "gone", "halted", "ended"]
"""``silent``: nothing was written for much longer than usual. ``gone``: and the process that wrote it is no more."""

_LEAST_SILENCE = 20.0
_RECENT = 128

_DID = {
    "apply": "micro-batches dropped",
    "drop_gradients": "gradients dropped",
    "back_off": "loss scale lowered",
    "skip": "skipped",
    "warn": "went on",
    "lower_lr": "learning rate lowered",
    "raise_precision": "precision raised",
    "roll_back": "rolled back",
    "halt": "halted",
}


def state_of(run: Run, now: float) -> RunState:
    """``now`` is the time of the clock that the log was written by."""
    if run.is_over:
        return "ended"
    last = run.incidents[-1] if run.incidents else None
    if last is not None and last.outcome.action.response == "halt" and last.time >= last_time(run):
        return "halted"
    if now - last_time(run) <= _usual_silence(run):
        return "running"
    return "gone" if _is_gone(run) else "silent"


def last_time(run: Run) -> float:
    """When something was written last."""
    times = [part[-1].time for part in (run.steps, run.incidents, run.events) if part]
    return max([*times, float(run.header.get("time", 0.0))])


def _usual_silence(run: Run) -> float:
    """Several times the longest of the recent pauses."""
    times = [record.time for record in run.steps[-20:]]
    return max(_LEAST_SILENCE, 5 * max((after - before for before, after in pairwise(times)), default=0.0))


def _is_gone(run: Run) -> bool:
    """Whether the process is known not to run any more: it ran on this machine, and there is none of its number."""
    pid = run.header.get("pid")
    if run.header.get("host") != platform.node() or not isinstance(pid, int) or not 0 < pid < 2**31:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def optimizers_of(run: Run) -> list[str]:
    """The names that steps are written under, ``[""]`` where one guard wrote them all."""
    return list(dict.fromkeys(record.optimizer for record in run.steps))


def steps_of(run: Run, optimizer: str) -> Sequence[StepRecord]:
    return [record for record in run.steps if record.optimizer == optimizer]


def rate_of(run: Run, steps: Sequence[StepRecord]) -> float | None:
    """Steps a second of late, by the times in the log."""
    since = float(run.header.get("time", -math.inf))
    recent = [record for record in steps[-_RECENT:] if record.time >= since]
    if len(recent) < 2 or recent[-1].time <= recent[0].time:
        return None
    return (recent[-1].step - recent[0].step) / (recent[-1].time - recent[0].time)


def counts_of(run: Run) -> dict[str, int]:
    """What became of the steps, over all optimizers. Every step that was skipped is in the log, so this is exact."""
    made = {record.optimizer: record.step + 1 for record in run.steps}
    overflows = sum(event.event == "overflow" for event in run.events)
    skipped = sum(record.skipped for record in run.steps)
    lost = sum(incident.outcome.lost for incident in run.incidents)
    return {
        "applied": max(0, sum(made.values()) - skipped - lost),
        "skipped": max(0, skipped - overflows),
        "backed_off": overflows,
        "lost": lost,
        "rolled_back": sum(incident.outcome.is_rollback for incident in run.incidents)
        + sum(event.event == "roll_back" for event in run.events),
    }


def refused_in_words(run: Run) -> str:
    """Where the last steps were refused one after the other, that they were; empty where not."""
    refused = refused_at_end(run.steps)
    return "" if refused is None else printable(str(refused))


def alike(run: Run) -> Iterator[list[IncidentRecord]]:
    """The incidents of each fault that were answered alike, in order."""
    groups: dict[tuple[Any, ...], list[IncidentRecord]] = {}
    for incident in run.incidents:
        outcome = incident.outcome
        groups.setdefault(
            (incident.optimizer, outcome.action.response, outcome.action.words, *likeness(outcome)), []
        ).append(incident)
    yield from groups.values()


def did_in_words(incident: IncidentRecord) -> str:
    action = incident.outcome.action
    return _DID.get(action.response) or printable(action.words)


def why_in_words(incident: IncidentRecord) -> str:
    """Cause, line, op and module; what was found where it was not examined."""
    diagnosis, verdict = incident.diagnosis, incident.outcome.verdict
    if diagnosis is None:
        if verdict.kind == "divergence":
            return f"the loss has left its past, {verdict.reading.mean_loss:.4g}"
        if verdict.kind == "damage":
            return printable(f"non-finite before the step: {', '.join(verdict.reading.damaged[:3])}")
        return f"non-finite {' and '.join(verdict.reading.found) or 'step'}"
    sure = "" if diagnosis.is_line_traced else "probably "
    line = "" if diagnosis.source is None else f"{sure}{diagnosis.source}"
    what = " in ".join(filter(None, [diagnosis.op, diagnosis.module]))
    return printable(", ".join(filter(None, [diagnosis.words, line, what])))


def alert_in_words(event: EventRecord) -> str:
    module = event.fields.get("module")
    where = f" ({module})" if isinstance(module, str) and module else ""
    return printable(f"{event.fields.get('message', '')}{where}"[:1000])


def as_dict(run: Run, now: float) -> dict[str, Any]:
    """For programs: what the view shows, in plain values."""
    last = {name: steps_of(run, name)[-1] for name in optimizers_of(run)}
    return {
        "run": str(run.path),
        "name": run.name,
        "state": state_of(run, now),
        "silent_for": max(0.0, now - last_time(run)),
        "steps": max((record.step + 1 for record in last.values()), default=0),
        "rate": next((rate_of(run, steps_of(run, name)) for name in last), None),
        "counts": counts_of(run),
        "refused": refused_in_words(run),
        "optimizers": {
            name: {
                "step": record.step,
                "epoch": record.epoch,
                "batch": record.batch,
                "loss": record.loss,
                "norms": record.norms,
                "lrs": record.lrs,
                "scale": record.scale,
            }
            for name, record in last.items()
        },
        "incidents": [
            {
                "number": incident.number,
                "step": incident.reading.step,
                "time": incident.time,
                "did": did_in_words(incident),
                "why": why_in_words(incident),
                "bundle": incident.outcome.bundle,
            }
            for incident in run.incidents
        ],
        "alerts": [{"step": e.step, "message": alert_in_words(e)} for e in run.events if e.event == "alert"],
        "troubles": list(run.troubles),
    }
