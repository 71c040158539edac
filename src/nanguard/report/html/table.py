"""The curves as a table, for screen readers and pages without scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanguard.records.markup import Markup, tag
from nanguard.report.html.prose import number

if TYPE_CHECKING:
    from nanguard.records.run import StepRecord
    from nanguard.report.html.story import Story

_MOST_ROWS, _MOST_COLUMNS = 60, 4


def values_table(story: Story, *, named: bool) -> Markup | None:
    """Evenly chosen steps, and those that were skipped."""
    steps = story.run.steps
    if not steps:
        return None
    every = max(1, -(-len(steps) // _MOST_ROWS))
    skipped = [record for record in steps if record.skipped][: _MOST_ROWS // 2]
    chosen = {id(record): record for record in (*steps[::every], *skipped, steps[-1])}
    records = sorted(chosen.values(), key=lambda record: record.step)
    norms = min(_MOST_COLUMNS, max(len(record.norms) for record in records))
    rates = min(_MOST_COLUMNS, max(len(record.lrs) for record in records))
    names = ["step", "epoch", "loss"]
    names += [f"norm {place}" if norms > 1 else "gradient norm" for place in range(norms)]
    names += [f"rate {place}" if rates > 1 else "learning rate" for place in range(rates)]
    has_scale = any(record.scale is not None for record in records)
    names += ["loss scale"] * has_scale + [""]
    table = scrolled_table(names, [_row(record, norms, rates, has_scale) for record in records], "Values")
    which = "every step" if every == 1 else f"1 step in {every:,}, and skipped steps"
    summary = tag("summary", f"The values{f' of {story.label}' if named else ''} as a table ({which})")
    return tag("details", summary, table, class_="more")


def scrolled_table(names: Sequence[str], body: Sequence[Markup], label: str) -> Markup:
    """A table with the names of its columns, in a ``scrolled`` box."""
    head = tag("tr", (tag("th", name, scope="col") for name in names))
    return scrolled(tag("table", tag("thead", head), tag("tbody", body)), label)


def scrolled(table: Markup, label: str) -> Markup:
    """A table or drawing that scrolls if it is wider than the screen, also with the keyboard."""
    return tag("div", table, class_="scrolled", tabindex=0, role="region", aria_label=label)


def _row(record: StepRecord, norms: int, rates: int, has_scale: bool) -> Markup:
    values = [record.loss]
    values += [record.norms[place] if place < len(record.norms) else math.nan for place in range(norms)]
    values += [record.lrs[place] if place < len(record.lrs) else math.nan for place in range(rates)]
    if has_scale:
        values.append(math.nan if record.scale is None else record.scale)
    return tag(
        "tr",
        tag("th", f"{record.step:,}", scope="row", class_="num"),
        tag("td", record.epoch, class_="num"),
        (tag("td", number(value), class_="num") for value in values),
        tag("td", "skipped" if record.skipped else "", class_="bad" if record.skipped else None),
    )
