"""How a ``Diagnosis`` is shown in a notebook: the text of the panel as self-contained HTML."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from nanguard.records.diagnosis_text import rows
from nanguard.records.markup import Child, Markup, tag

if TYPE_CHECKING:
    from nanguard.records.diagnosis import Diagnosis

# Colours come from the notebook. Weight and opacity set text apart, which works in light and dark themes.
QUIET = "opacity:.8"
_BOX = "border:1px solid rgba(128,128,128,.45);border-radius:8px;padding:10px 14px;max-width:900px;line-height:1.5"
_HEAD = "font-weight:600;margin-bottom:4px"
_CELL = "text-align:left;vertical-align:top;padding:1px 0;border:0;white-space:pre-wrap;overflow-wrap:anywhere"
_NAME = f"text-align:left;vertical-align:top;padding:1px 14px 1px 0;border:0;font-weight:400;white-space:nowrap;{QUIET}"
_TABLE = "border-collapse:collapse;border:0;margin:0;color:inherit;font-size:inherit"
_MONO = "font-family:ui-monospace,Menlo,Consolas,monospace;font-size:.92em"


def diagnosis_html(diagnosis: Diagnosis) -> str:
    """The rows of the panel as a small table, with the full text in a collapsed section."""
    at = "" if diagnosis.step is None else f"step {diagnosis.step:,}: "
    head = f"{at}{diagnosis.words} ({diagnosis.phase}, {diagnosis.confidence})"
    text = tag("pre", diagnosis.report(), style=f"{_MONO};overflow-x:auto;margin:6px 0 0")
    more = tag("details", tag("summary", "full diagnosis", style="cursor:pointer"), text, style="margin-top:6px")
    return box(head, table(rows(diagnosis)), more)


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
