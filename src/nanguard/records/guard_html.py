"""How a ``Guard`` is shown in a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nanguard.records.markup import Child
from nanguard.records.notebook import box, incidents_table, table
from nanguard.records.steps import Incident
from nanguard.records.words import listed

_MOST_MODULES = 8


def guard_html(
    *, counts: Mapping[str, int], precision: str, in_fp32: Sequence[str], syncs: bool, incidents: Sequence[Incident]
) -> str:
    """Counts, precision and the last incidents."""
    told = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in counts.items())
    rows: list[tuple[str, Child]] = [("steps", told), ("precision", precision)]
    if in_fp32:
        rows.append(("in fp32", listed(in_fp32, _MOST_MODULES)))
    rows.append(("mode", "eager: one sync per step" if syncs else "late: no sync"))
    rows.append(("incidents", f"{len(incidents):,}" if incidents else "none"))
    return box("Guard", table(rows), incidents_table(incidents) if incidents else None)
