"""The map of headroom: a row for each module, a column for each probe, and the forecasts of warnings. Plain SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nanguard.records.alert import Alert
from nanguard.records.markup import Markup, tag
from nanguard.report.glance import headroom_of

if TYPE_CHECKING:
    from nanguard.records.run import EventRecord, Run

_MOST_ROWS = 16
_MOST_COLUMNS = 120
_ROW, _LEFT, _WIDE = 18, 190, 640
_FULL = 16.0
"""Bits of room above which a cell has no colour: fp16 has 16 of them above 1."""


def heat_map(run: Run) -> Markup | None:
    """None if the run was not probed."""
    columns = [(event.step, rooms) for event in run.events if event.step is not None and (rooms := headroom_of(event))]
    if not columns:
        return None
    every = -(-len(columns) // _MOST_COLUMNS)
    columns = columns[::-1][::every][::-1]
    least: dict[str, float] = {}
    for _, rooms in columns:
        for name, room in rooms.items():
            least[name] = min(room, least.get(name, room))
    names = sorted(least, key=least.__getitem__)[:_MOST_ROWS]
    alerts = [alert for event in run.events if (alert := _alert_of(event)) is not None and alert.module in names]
    first = columns[0][0]
    last = max([columns[-1][0], *(alert.crossing for alert in alerts)])
    scale = _WIDE / max(1, last - first)
    cells = [*_cells(columns, names, first, scale), *_labels(names), *_forecasts(alerts, names, first, scale)]
    height = _ROW * len(names) + 22
    ends = [(_LEFT, f"step {first:,}", "start"), (_LEFT + _WIDE, f"{last:,}", "end")]
    cells += [tag("text", text, x=x, y=height - 6, text_anchor=anchor) for x, text, anchor in ends]
    words = f"Room to the limits of their formats of {len(names)} modules over the steps; the darkest have the least."
    return tag("svg", cells, class_="heat", viewBox=f"0 0 {_LEFT + _WIDE + 8} {height}", role="img", aria_label=words)


def _cells(columns: Sequence[Any], names: Sequence[str], first: int, scale: float) -> list[Markup]:
    starts = [(step - first) * scale for step, _ in columns]
    usual = (starts[-1] - starts[0]) / max(1, len(starts) - 1) or _WIDE
    found = []
    for at, (step, rooms) in zip(starts, columns, strict=True):
        for row, name in enumerate(names):
            if name in rooms:
                share = 1 - max(0.0, min(1.0, rooms[name] / _FULL))
                title = tag("title", f"{name or 'outside of modules'}, step {step:,}: {rooms[name]:.1f} bits")
                found.append(
                    tag(
                        "rect",
                        title,
                        x=f"{_LEFT + at:.1f}",
                        y=row * _ROW,
                        width=f"{max(1.0, usual):.1f}",
                        height=_ROW - 2,
                        fill_opacity=f"{0.06 + 0.94 * share * share:.2f}",
                    )
                )
    return found


def _labels(names: Sequence[str]) -> list[Markup]:
    return [
        tag("text", (name or "outside of modules")[-28:], x=_LEFT - 8, y=row * _ROW + 12, text_anchor="end")
        for row, name in enumerate(names)
    ]


def _forecasts(alerts: Sequence[Alert], names: Sequence[str], first: int, scale: float) -> list[Markup]:
    """A line from the step of a warning to the step that it expects, which has a mark."""
    found = []
    for alert in alerts:
        if alert.state == "withdrawn":
            continue
        y = names.index(alert.module) * _ROW + _ROW / 2 - 1
        begin, end = (_LEFT + (step - first) * scale for step in (alert.step, alert.crossing))
        path = tag("path", d=f"M{begin:.1f} {y}H{end:.1f}M{end:.1f} {y - 6}v12")
        found.append(tag("g", tag("title", f"{alert.module}: {alert.message}"), path, class_="forecast"))
    return found


def _alert_of(event: EventRecord) -> Alert | None:
    """None if the event is no alert, or was not written by a monitor."""
    if event.event != "alert":
        return None
    try:
        return Alert.from_dict({**event.fields, "step": event.step})
    except ValueError:
        return None
