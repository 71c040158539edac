"""What a ``Diagnosis`` and a ``Guard`` look like in a notebook: the panel's words, in HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from nanguard.report.diagnosis import CAUSES
from nanguard.report.diagnosis import rows as diagnosis_rows
from nanguard.report.html.markup import Child, Markup, tag
from nanguard.report.panel import headline

if TYPE_CHECKING:
    from nanguard.diagnosis.record import Diagnosis
    from nanguard.guard import Guard
    from nanguard.records import Incident

_MOST_INCIDENTS = 5

# Colours come from the notebook itself; what is set apart is so by weight and opacity, in light and dark alike.
_BOX = "border:1px solid rgba(128,128,128,.45);border-radius:8px;padding:10px 14px;max-width:900px;line-height:1.5"
_HEAD = "font-weight:600;margin-bottom:4px"
_NAME = (
    "text-align:left;vertical-align:top;padding:1px 14px 1px 0;font-weight:400;opacity:.8;white-space:nowrap;border:0"
)
_CELL = "text-align:left;vertical-align:top;padding:1px 0;border:0;overflow-wrap:anywhere"
_MONO = "font-family:ui-monospace,Menlo,Consolas,monospace;font-size:.92em"


def diagnosis_html(diagnosis: Diagnosis) -> str:
    """The rows of the panel as a small table; evidence and more in a fold."""
    at = "" if diagnosis.step is None else f"step {diagnosis.step:,}: "
    head = f"{at}{CAUSES[diagnosis.cause]} ({diagnosis.phase}, {diagnosis.confidence})"
    text = tag("pre", diagnosis.report(), style=f"{_MONO};overflow-x:auto;margin:6px 0 0")
    more = tag("details", tag("summary", "all that is known", style="cursor:pointer"), text, style="margin-top:6px")
    return _box(head, _table(diagnosis_rows(diagnosis)), more)


def guard_html(guard: Guard) -> str:
    """Counts, precision and the last incidents."""
    told = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in guard.counts.items())
    rows: list[tuple[str, Child]] = [("steps", told), ("precision", guard.precision)]
    kept_fp32, incidents = guard.kept_fp32, guard.incidents
    if kept_fp32:
        more = len(kept_fp32) - 8
        rows.append(("in fp32", ", ".join(kept_fp32[:8]) + (f" and {more:,} more" if more > 0 else "")))
    rows.append(("host hears", "a little later, no sync" if guard.sync == "late" else "at once, one sync a step"))
    rows.append(("incidents", _last(incidents) if incidents else "none"))
    return _box("Guard", _table(rows))


def _last(incidents: Sequence[Incident]) -> Child:
    shown = [
        tag(
            "li",
            f"step {incident.reading.step:,}: {headline(incident.outcome)}",
            tag("div", _why(incident.diagnosis), style="opacity:.8") if incident.diagnosis is not None else None,
        )
        for incident in reversed(incidents[-_MOST_INCIDENTS:])
    ]
    earlier = len(incidents) - len(shown)
    rest = tag("div", f"and {earlier:,} before", style="opacity:.8") if earlier else None
    return [f"{len(incidents):,}, the last first", tag("ul", shown, style="margin:2px 0;padding-left:18px"), rest]


def _why(diagnosis: Diagnosis) -> str:
    where = diagnosis.module or (str(diagnosis.source) if diagnosis.source is not None else "")
    return f"{CAUSES[diagnosis.cause]}{f' in {where}' if where else ''}"


def _box(head: str, *children: Child) -> str:
    name = tag("span", "nanguard  ", style="opacity:.8;font-weight:400")
    return str(tag("div", tag("div", name, head, style=_HEAD), children, style=_BOX))


def _table(rows: Iterable[tuple[str, Child]]) -> Markup:
    body = [
        tag("tr", tag("th", name, scope="row", style=_NAME), tag("td", text, style=_CELL), style="background:none")
        for name, text in rows
    ]
    return tag("table", tag("tbody", body), style="border-collapse:collapse;border:0;margin:0")
