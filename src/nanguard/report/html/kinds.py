"""What is marked in the timeline: the kinds of events, each with a word, a symbol and a colour of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanguard.records.diagnosis_text import place_in_words
from nanguard.records.markup import Markup, tag
from nanguard.records.panel import headline

if TYPE_CHECKING:
    from nanguard.records.run import EventRecord, IncidentRecord
    from nanguard.report.html.story import Story

MOST_EVENTS = 500
"""Of those that are no incidents, how many are listed one by one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """``symbol`` is plotly's name, ``shape`` the same as an SVG path in a box of 16."""

    name: str
    label: str
    symbol: str
    shape: str
    filled: bool = True


KINDS = {
    kind.name: kind
    for kind in (
        Kind(name="halt", label="halted", symbol="square", shape="M3 3h10v10h-10z"),
        Kind(name="roll_back", label="rolled back", symbol="triangle-left", shape="M13 2v12L2 8z"),
        Kind(name="raise_precision", label="precision raised", symbol="triangle-up", shape="M8 2l6 11h-12z"),
        Kind(name="lower_lr", label="learning rate lowered", symbol="triangle-down", shape="M8 14l-6 -11h12z"),
        Kind(name="act", label="another rung taken", symbol="pentagon", shape="M8 1l7 5.1-2.7 8.4h-8.6L1 6.1z"),
        Kind(
            name="skip",
            label="step skipped",
            symbol="x",
            shape="M4 2l4 4 4-4 2 2-4 4 4 4-2 2-4-4-4 4-2-2 4-4-4-4z",
        ),
        Kind(name="left_out", label="not used for training", symbol="cross", shape="M6 2h4v4h4v4h-4v4h-4v-4h-4v-4h4z"),
        Kind(name="drop", label="bad part dropped", symbol="diamond", shape="M8 1l7 7-7 7-7-7z"),
        Kind(name="warn", label="not answered", symbol="hexagon", shape="M8 1l6 3.5v7l-6 3.5-6-3.5v-7z"),
        Kind(
            name="alert",
            label="early warning",
            symbol="star",
            shape="M8 1l2 5h5l-4 3.4 1.5 5.1-4.5-3-4.5 3 1.5-5.1-4-3.4h5z",
        ),
        Kind(
            name="overflow",
            label="loss scale backed off",
            symbol="circle-open",
            shape="M8 3a5 5 0 1 0 .01 0z",
            filled=False,
        ),
        Kind(
            name="eased",
            label="measure taken back",
            symbol="diamond-open",
            shape="M8 2l6 6-6 6-6-6z",
            filled=False,
        ),
        Kind(name="other", label="other", symbol="circle", shape="M8 3a5 5 0 1 0 .01 0z"),
    )
}


def glyph(kind: Kind) -> Markup:
    """The symbol, for a legend or a card. It says nothing that the words beside it do not."""
    path = tag("path", d=kind.shape)
    outlined = "" if kind.filled else " outlined"
    return tag("svg", path, class_=f"glyph kind-{kind.name}{outlined}", viewBox="0 0 16 16", aria_hidden="true")


def kind_of(record: IncidentRecord) -> Kind:
    outcome = record.outcome
    response = "roll_back" if outcome.is_rollback else "left_out" if outcome.is_left_out else outcome.action.response
    return KINDS.get("drop" if response in ("apply", "drop_gradients") else response, KINDS["other"])


def kinds_of(record: IncidentRecord) -> list[Kind]:
    """All that a step is marked by: it may have been skipped beside what else was done."""
    first, outcome = kind_of(record), record.outcome
    is_skipped = not outcome.applied and outcome.action.changes_more and not outcome.is_rollback
    return [first, KINDS["skip"]] if is_skipped else [first]


def kind_of_event(event: EventRecord) -> Kind:
    name = event.fields.get("response") if event.event == "answered" else event.event
    return KINDS.get(name, KINDS["other"]) if isinstance(name, str) else KINDS["other"]


def event_id(story: Story, place: int) -> str:
    return f"run{story.number}-event{place}" if place < MOST_EVENTS else f"run{story.number}-events"


def event_in_words(event: EventRecord) -> str:
    """What an event that is no incident says of itself."""
    fields = event.fields
    if event.event == "overflow":
        scale = fields.get("scale")
        at = f" at loss scale {scale:g}" if isinstance(scale, (int, float)) else ""
        return f"scaled fp16 gradients overflowed{at}: the step is left out and the scale goes down"
    told = [fields.get(key) for key in ("message", "what", "did")]
    words = "; ".join(value for value in told if isinstance(value, str) and value)
    module = fields.get("module")
    return f"{words or event.event}{f' ({module})' if isinstance(module, str) and module else ''}"


def _in_words(record: IncidentRecord) -> str:
    """What happened at a mark, what was done, and why."""
    diagnosis = record.diagnosis
    if diagnosis is None:
        return headline(record.outcome)
    if diagnosis.cause == "unknown":
        return f"{headline(record.outcome)} · cause unknown"
    place = place_in_words(diagnosis.module, diagnosis.source)
    return f"{headline(record.outcome)} · {diagnosis.words}{f' in {place}' if place else ''}"


def marks_of(story: Story) -> list[dict[str, Any]]:
    """Every mark of a run: kind, step, a line to read, and the id of what to open.

    A step that was skipped while something else was done about it too has a mark of each.
    """
    targets = story.targets()
    marks = [
        {
            "kind": kind.name,
            "x": record.outcome.verdict.reading.step,
            "text": _in_words(record) if rank == 0 else "this step was skipped as well",
            "to": targets[place],
        }
        for place, record in enumerate(story.incidents)
        for rank, kind in enumerate(kinds_of(record))
    ]
    for place, event in enumerate(story.events):
        if event.step is not None:
            mark = {"kind": kind_of_event(event).name, "x": event.step, "text": event_in_words(event)}
            marks.append({**mark, "to": event_id(story, place)})
    return marks
