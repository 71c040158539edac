"""How records are shown in a notebook: the text of the panels as small tables of self-contained HTML."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from nanguard.records.diagnosis_text import place_in_words, rows
from nanguard.records.markup import Child, Markup, tag
from nanguard.records.panel import done, headline, what_happened
from nanguard.records.panel import rows as panel_rows
from nanguard.records.words import counted

if TYPE_CHECKING:
    from nanguard.records.diagnosis import Diagnosis
    from nanguard.records.run import Run
    from nanguard.records.steps import Incident, Outcome

_MOST_INCIDENTS = 20

# Colours come from the notebook. Weight and opacity set text apart, which works in light and dark themes.
QUIET = "opacity:.8"
_BOX = "border:1px solid rgba(128,128,128,.45);border-radius:8px;padding:10px 14px;max-width:900px;line-height:1.5"
_HEAD = "font-weight:600;margin-bottom:4px"
_CELL = "text-align:left;vertical-align:top;padding:1px 0;border:0;white-space:pre-wrap;overflow-wrap:anywhere"
_NAME = f"text-align:left;vertical-align:top;padding:1px 14px 1px 0;border:0;font-weight:400;white-space:nowrap;{QUIET}"
_TABLE = "border-collapse:collapse;border:0;margin:0;color:inherit;font-size:inherit"
_COLUMN = "text-align:left;vertical-align:top;padding:2px 18px 2px 0;border:0;overflow-wrap:anywhere"
_MONO = "font-family:ui-monospace,Menlo,Consolas,monospace;font-size:.92em"


def diagnosis_html(diagnosis: Diagnosis) -> str:
    """The rows of the panel as a small table, with the full text in a collapsed section."""
    at = "" if diagnosis.step is None else f"step {diagnosis.step:,}: "
    head = f"{at}{diagnosis.words} ({diagnosis.phase}, {diagnosis.confidence})"
    text = tag("pre", diagnosis.report(), style=f"{_MONO};overflow-x:auto;margin:6px 0 0")
    more = tag("details", tag("summary", "full diagnosis", style="cursor:pointer"), text, style="margin-top:6px")
    return box(head, table(rows(diagnosis)), more)


def outcome_html(outcome: Outcome) -> str:
    """What became of a step: the panel if it was an incident."""
    reading = outcome.verdict.reading
    if outcome.verdict.kind == "healthy":
        norms = ", ".join(f"{norm:.4g}" for norm in reading.norms)
        told = [("loss", f"{reading.loss:.6g}"), *([("norm", norms)] if norms else [])]
        return box(f"step {reading.step:,}: {'applied' if outcome.applied else 'not applied'}", table(told))
    return box(f"step {reading.step:,}: {headline(outcome)}", table(panel_rows(outcome)))


def incidents_html(incidents: Sequence[Incident]) -> str:
    """A row for each incident; of many only the last."""
    if not incidents:
        return box("no incidents")
    return box(counted(len(incidents), "incident"), incidents_table(incidents))


def run_html(run: Run) -> str:
    """What a run log holds."""
    steps = max((record.step + 1 for record in run.steps), default=0)
    skipped = sum(record.skipped for record in run.steps)
    told: list[tuple[str, Child]] = [("log", str(run.path)), ("steps", f"{steps:,}, {skipped:,} not applied")]
    finite = [record.loss for record in run.steps if math.isfinite(record.loss)]
    if finite:
        told.append(("loss", f"{finite[0]:.6g} at first, {finite[-1]:.6g} at last"))
    elif run.steps:
        told.append(("loss", "NaN or Inf in all steps"))
    told.append(("end", "ended" if run.is_over else "no end in the log"))
    if run.troubles:
        told.append(("not read", f"{len(run.troubles):,} lines, the first: {run.troubles[0]}"))
    told.append(("incidents", f"{len(run.incidents):,}" if run.incidents else "none"))
    return box(f"run {run.name}", table(told), incidents_table(run.incidents) if run.incidents else None)


def incidents_table(incidents: Sequence[Incident]) -> Markup:
    """Step, what happened, why and where, and what was done."""
    shown = incidents[-_MOST_INCIDENTS:]
    head = tag("tr", (tag("th", name, scope="col", style=_NAME) for name in ("step", "what", "why", "done")))
    body = [
        tag(
            "tr",
            tag("td", f"{incident.reading.step:,}", style=_COLUMN),
            tag("td", what_happened(incident.outcome), style=_COLUMN),
            tag("td", _why(incident.diagnosis), style=_COLUMN),
            tag("td", incident.outcome.did or done(incident.outcome), style=_COLUMN),
            style="background:none",
        )
        for incident in shown
    ]
    earlier = len(incidents) - len(shown)
    more = tag("div", f"and {earlier:,} earlier", style=QUIET) if earlier else None
    return tag("div", tag("table", tag("thead", head), tag("tbody", body), style=_TABLE), more, style="overflow-x:auto")


def _why(diagnosis: Diagnosis | None) -> str:
    if diagnosis is None:
        return "not examined"
    line = f", {diagnosis.source}" if diagnosis.source is not None else ""
    return f"{diagnosis.words}{f' in {place_in_words(diagnosis.module)}' if diagnosis.module else ''}{line}"


def box(head: str, *children: Child) -> str:
    """A frame with a headline and its contents."""
    name = tag("span", "nanguard  ", style=f"{QUIET};font-weight:400")
    return str(tag("div", tag("div", name, head, style=_HEAD), children, style=_BOX))


def table(told: Iterable[tuple[str, Child]]) -> Markup:
    """A table of rows of a name and a text."""
    body = [
        tag("tr", tag("th", name, scope="row", style=_NAME), tag("td", text, style=_CELL), style="background:none")
        for name, text in told
    ]
    return tag("table", tag("tbody", body), style=_TABLE)
