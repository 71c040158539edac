"""How a ``Guard`` is shown in a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nanguard.records.diagnosis import Diagnosis
from nanguard.records.markup import Child, tag
from nanguard.records.notebook import QUIET, box, table
from nanguard.records.panel import headline
from nanguard.records.steps import Incident

_MOST_INCIDENTS, _MOST_MODULES = 5, 8


def guard_html(
    *, counts: Mapping[str, int], precision: str, in_fp32: Sequence[str], syncs: bool, incidents: Sequence[Incident]
) -> str:
    """Counts, precision and the last incidents."""
    told = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in counts.items())
    rows: list[tuple[str, Child]] = [("steps", told), ("precision", precision)]
    if in_fp32:
        more = len(in_fp32) - _MOST_MODULES
        rows.append(("in fp32", ", ".join(in_fp32[:_MOST_MODULES]) + (f" and {more:,} more" if more > 0 else "")))
    rows.append(("host hears", "at once, one sync a step" if syncs else "a little later, no sync"))
    rows.append(("incidents", _last(incidents) if incidents else "none"))
    return box("Guard", table(rows))


def _last(incidents: Sequence[Incident]) -> Child:
    shown = [
        tag(
            "li",
            f"step {incident.reading.step:,}: {headline(incident.outcome)}",
            tag("div", _why(incident.diagnosis), style=QUIET) if incident.diagnosis is not None else None,
        )
        for incident in reversed(incidents[-_MOST_INCIDENTS:])
    ]
    earlier = len(incidents) - len(shown)
    rest = tag("div", f"and {earlier:,} earlier", style=QUIET) if earlier else None
    return [f"{len(incidents):,}, newest first", tag("ul", shown, style="margin:2px 0;padding-left:18px"), rest]


def _why(diagnosis: Diagnosis) -> str:
    where = diagnosis.module or (str(diagnosis.source) if diagnosis.source is not None else "")
    return f"{diagnosis.words}{f' in {where}' if where else ''}"
