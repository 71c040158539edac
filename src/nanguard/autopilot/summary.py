"""What became of a program, in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from nanguard.autopilot.entry import Autopilot
from nanguard.diagnosis.record import Diagnosis
from nanguard.records import Incident
from nanguard.report.diagnosis import CAUSES

_LONG = 10
"""So many refused steps at the end are worth a word."""


def sentence(autopilot: Autopilot, *, unsound: Sequence[str]) -> str:
    """For the last line of ``nanguard run``; ``unsound`` are names of what was not finite at the end."""
    if not autopilot.num_optimizers and autopilot.unguarded:
        return f"NOT GUARDED: {', '.join(dict.fromkeys(autopilot.unguarded))} could not be"
    if not autopilot.num_optimizers:
        if autopilot.has_guard:
            return "nothing to do, since the program has a Guard of its own"
        none = "nothing to guard, since no gradients were computed in this process"
        return none + _children(autopilot.num_children)
    counts, incidents = autopilot.counts, autopilot.incidents
    num_skipped = counts.get("skipped", 0) + counts.get("lost", 0) + counts.get("halted", 0)
    total = counts.get("applied", 0) + num_skipped + counts.get("backed_off", 0) + counts.get("rolled_back", 0)
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
    row = autopilot.refused_in_a_row
    if row >= _LONG:
        told.append(f"the last {row:,} in a row refused: nothing was learned in them")
    return ", ".join(told) + _first(incidents) + _children(autopilot.num_children)


def _children(number: int) -> str:
    """Processes that the program started."""
    if not number:
        return ""
    if number == 1:
        return "; a child process was started, which is guarded only if it calls nanguard.install()"
    return f"; {number:,} child processes were started, which are guarded only if they call nanguard.install()"


def _first(incidents: Sequence[Incident]) -> str:
    """The first that says where it came from."""
    if not incidents:
        return ""
    known = [each for each in incidents if each.diagnosis is not None and each.diagnosis.cause != "unknown"]
    if not known or known[0].diagnosis is None:
        return f"; the first at step {incidents[0].reading.step:,}, its cause unknown"
    return f"; first known at step {known[0].reading.step:,}: {_why(known[0].diagnosis)}"


def _why(diagnosis: Diagnosis) -> str:
    probably = "" if diagnosis.is_line_traced else "probably "
    place = "" if diagnosis.source is None else f"{probably}{diagnosis.source}"
    where = f"{diagnosis.op} at {place}" if diagnosis.op and place and not probably else place or diagnosis.op
    return CAUSES[diagnosis.cause] + (f" ({where})" if where else "")
