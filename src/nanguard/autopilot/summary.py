"""What became of a program, in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from nanguard.autopilot.entry import Autopilot
from nanguard.diagnosis.record import Diagnosis
from nanguard.records import Incident


def sentence(autopilot: Autopilot, *, unsound: Sequence[str]) -> str:
    """For the last line of ``nanguard run``; ``unsound`` are names of what was not finite at the end."""
    if not autopilot.num_optimizers:
        if autopilot.has_guard:
            return "nothing to do, since the program has a Guard of its own"
        return "nothing to guard, since no gradients were computed in this process"
    counts, incidents = autopilot.counts, autopilot.incidents
    num_skipped = counts.get("skipped", 0) + counts.get("lost", 0) + counts.get("halted", 0)
    total = counts.get("applied", 0) + num_skipped + counts.get("backed_off", 0)
    told = [f"{total:,} step{'' if total == 1 else 's'}"]
    if num_skipped:
        told.append(f"{num_skipped:,} not applied")
    if counts.get("backed_off"):
        told.append(f"{counts['backed_off']:,} left out by the loss scale")
    if counts.get("rolled_back"):
        told.append(f"rolled back {counts['rolled_back']:,} time{'' if counts['rolled_back'] == 1 else 's'}")
    if not incidents:
        told.append("none of them non-finite")
    more = f" and {len(unsound) - 1} more" if len(unsound) > 1 else ""
    told.append(f"NOT FINITE AT THE END: {unsound[0]}{more}" if unsound else "weights and optimizer state finite")
    return ", ".join(told) + _first(incidents)


def _first(incidents: Sequence[Incident]) -> str:
    """The first that says where it came from."""
    if not incidents:
        return ""
    known = [(each, each.diagnosis) for each in incidents if each.diagnosis is not None]
    incident, diagnosis = next((k for k in known if k[1].cause != "unknown"), (incidents[0], incidents[0].diagnosis))
    return f"; first known at step {incident.reading.step:,}{_where(diagnosis)}"


def _where(diagnosis: Diagnosis | None) -> str:
    if diagnosis is None:
        return ""
    place = f" at {diagnosis.source}" if diagnosis.source is not None else ""
    op = f" ({diagnosis.op}{place})" if diagnosis.op or place else ""
    return f": {diagnosis.cause.replace('_', ' ')}{op}"
