"""The result of a run in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nanguard.records.diagnosis import Diagnosis
from nanguard.records.steps import Incident
from nanguard.records.words import counted

_LONG = 10
"""From this many steps without effect in a row at the end, the line mentions them."""


def closing_line(
    counts: Mapping[str, int],
    incidents: Sequence[Incident],
    *,
    unsound: Sequence[str] | None,
    refused_in_a_row: int,
    refused_by: str = "",
    num_not_kept: int = 0,
) -> str:
    """How many steps were made, how many were not applied, and why.

    ``unsound`` names what was non-finite at the end; None if that was not checked. ``refused_by`` names the network
    whose steps were refused, if there are several. ``num_not_kept`` is the number of incidents that were not saved to
    disk.
    """
    num_skipped = counts.get("skipped", 0) + counts.get("lost", 0) + counts.get("halted", 0)
    total = counts.get("applied", 0) + num_skipped + counts.get("backed_off", 0) + counts.get("rolled_back", 0)
    told = [counted(total, "step")]
    if num_skipped:
        told.append(f"{num_skipped:,} not applied")
    if counts.get("left_out"):
        told.append(f"{counted(counts['left_out'], 'bad result')} of the model that the program did not train on")
    if counts.get("backed_off"):
        told.append(f"{counts['backed_off']:,} skipped by the loss scale")
    if counts.get("rolled_back"):
        told.append(f"rolled back {counted(counts['rolled_back'], 'time')}")
    if counts.get("halted"):
        told.append("halted")
    if not incidents:
        told.append("none of them non-finite")
    if unsound:
        more = f" and {len(unsound) - 1} more" if len(unsound) > 1 else ""
        told.append(f"NOT FINITE AT THE END: {unsound[0]}{more}")
    elif unsound is not None:
        told.append("weights and optimizer state finite")
    if refused_in_a_row >= _LONG:
        whose = f" ({refused_by})" if refused_by else ""
        told.append(f"the last {refused_in_a_row:,} steps{whose} in a row had no effect: nothing was learned in them")
    if num_not_kept:
        told.append(f"{num_not_kept:,} of {len(incidents):,} incidents not saved to disk")
    return ", ".join(told) + _first(incidents)


def _first(incidents: Sequence[Incident]) -> str:
    """The first incident with a known cause; a later one that is known better takes its place."""
    if not incidents:
        return ""
    known = [(each, each.diagnosis) for each in incidents if each.diagnosis and each.diagnosis.cause != "unknown"]
    if not known:
        return f"; the first at step {incidents[0].reading.step:,}, its cause unknown"
    incident, diagnosis = min(known, key=lambda each: not each[1].is_well_known)
    return f"; first known at step {incident.reading.step:,}: {_why(diagnosis)}"


def _why(diagnosis: Diagnosis) -> str:
    probably = "" if diagnosis.is_line_traced else "probably "
    place = "" if diagnosis.source is None else f"{probably}{diagnosis.source}"
    is_users = bool(diagnosis.op and place) and not (probably or diagnosis.is_line_of_maker)
    where = f"{diagnosis.op} at {place}" if is_users else place or diagnosis.op
    return diagnosis.words + (f" ({where})" if where else "")
