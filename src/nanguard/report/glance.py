"""The state of a run at a glance: whether it runs, how fast, and how far it is. Nothing is drawn here."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

from nanguard.records.printable import printable
from nanguard.records.run import EventRecord, IncidentRecord, Run, StepRecord
from nanguard.runlog.repeats import refused_at_end
from nanguard.step.repeats import likeness

RunState = Literal["running", "silent", "gone", "halted", "ended"]
"""``silent``: nothing was written for much longer than usual. ``gone``: silent, and the process has ended."""

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
    """The state of the run. ``now`` must come from the same clock as the times in the log."""
    if run.halted_at is not None:
        return "halted"
    if run.is_over:
        return "ended"
    if now - last_time(run) <= _usual_silence(run):
        return "running"
    return "gone" if _is_gone(run) else "silent"


def last_time(run: Run) -> float:
    """The time of the last line."""
    times = [part[-1].time for part in (run.steps, run.incidents, run.events) if part]
    return max([*times, float(run.header.get("time", 0.0))])


def _usual_silence(run: Run) -> float:
    """Five times the longest recent pause."""
    times = [record.time for record in run.steps[-20:]]
    return max(_LEAST_SILENCE, 5 * max((after - before for before, after in pairwise(times)), default=0.0))


def _is_gone(run: Run) -> bool:
    """Whether the process has certainly ended: it ran on this machine, and no process has its number."""
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
    """The names of the optimizers in the log; ``[""]`` if one guard wrote it."""
    return list(dict.fromkeys(record.optimizer for record in run.steps))


def steps_of(run: Run, optimizer: str) -> Sequence[StepRecord]:
    return [record for record in run.steps if record.optimizer == optimizer]


def rate_of(run: Run, steps: Sequence[StepRecord]) -> float | None:
    """Recent steps per second, by the times in the log."""
    since = float(run.header.get("time", -math.inf))
    recent = [record for record in steps[-_RECENT:] if record.time >= since]
    if len(recent) < 2 or recent[-1].time <= recent[0].time:
        return None
    return (recent[-1].step - recent[0].step) / (recent[-1].time - recent[0].time)


def counts_of(run: Run) -> dict[str, int]:
    """Counts of steps by result, over all optimizers. They are exact: every skipped step is in the log."""
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
    """A sentence if the last steps in a row were refused, else an empty string."""
    refused = refused_at_end(run.steps)
    return "" if refused is None else printable(str(refused))


def alike(run: Run) -> Iterator[list[IncidentRecord]]:
    """Groups of incidents with the same fault and the same response, in order."""
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
    """Cause, line, op and module. If the step was not examined, what was found."""
    diagnosis, verdict = incident.diagnosis, incident.outcome.verdict
    if diagnosis is None:
        if verdict.kind == "divergence":
            return f"the loss diverged to {verdict.reading.mean_loss:.4g}"
        if verdict.kind == "damage":
            return printable(f"non-finite before the step: {', '.join(verdict.reading.damaged[:3])}")
        return f"non-finite {' and '.join(verdict.reading.found) or 'step'}"
    sure = "" if diagnosis.is_line_traced else "probably "
    line = "" if diagnosis.source is None else f"{sure}{diagnosis.source}"
    what = " in ".join(filter(None, [diagnosis.op, diagnosis.module]))
    return printable(", ".join(filter(None, [diagnosis.words, line, what])))


def alert_in_words(event: EventRecord) -> str:
    module = event.fields.get("module")
    where = f"{module}: " if isinstance(module, str) and module else ""
    return printable(f"{where}{event.fields.get('message', '')}"[:1000])


def answer_in_words(event: EventRecord) -> str:
    """What was done about a warning."""
    did, module = event.fields.get("did"), event.fields.get("module")
    about = f" about {module}" if isinstance(module, str) and module else ""
    told = f"{did}, " if isinstance(did, str) and did else ""
    return printable(f"{told}because of the warning{about}"[:1000])


def headroom_of(event: EventRecord) -> dict[str, float]:
    """The room of each module in bits, the least first; empty if the event does not hold it."""
    rooms = event.fields.get("rooms")
    if event.event != "headroom" or not isinstance(rooms, dict):
        return {}
    sound = {n: float(r) for n, r in rooms.items() if type(r) in (int, float) and math.isfinite(r)}
    return dict(sorted(sound.items(), key=lambda item: item[1]))


def last_headroom(run: Run) -> dict[str, float]:
    return next((rooms for event in reversed(run.events) if (rooms := headroom_of(event))), {})


def as_dict(run: Run, now: float) -> dict[str, Any]:
    """What the view shows, as plain values for programs."""
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
        "answers": [{"step": e.step, "message": answer_in_words(e)} for e in run.events if e.event == "answered"],
        "headroom": last_headroom(run),
        "troubles": list(run.troubles),
    }
