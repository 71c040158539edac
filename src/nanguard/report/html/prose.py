"""A run in a few sentences and numbers, for a reader who has one minute."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nanguard.records.diagnosis_text import place_in_words as words_of_place
from nanguard.records.markup import Child, tag
from nanguard.records.panel import noun as noun_of
from nanguard.records.plain import plain
from nanguard.records.words import counted, joined

if TYPE_CHECKING:
    from nanguard.report.html.story import FaultGroup, Figures, Story

SummaryPart = tuple[str, str]
"""An HTML element (empty for none) and the text in it."""

_MOST_OTHERS = 3


def summary(story: Story) -> list[Child]:
    """One to three sentences."""
    return [tag(how, words) if how else words for how, words in _spans(story)]


def plain_summary(story: Story) -> str:
    """The same as text."""
    return "".join(words for _, words in _spans(story))


def as_dict(story: Story) -> dict[str, Any]:
    """The figures and the sentences as plain values for programs."""
    told = plain(asdict(story.figures))
    return {"path": str(story.run.path), "name": story.label, "summary": plain_summary(story), "figures": told}


def figures(figures: Figures) -> Iterator[tuple[str, str, str]]:
    """Name, value and remark of each key figure."""
    skipped = f"{percent(figures.skipped, figures.steps)} of all" if figures.skipped and figures.steps else ""
    yield "steps", f"{figures.steps:,}", state(figures)
    yield "skipped", f"{figures.skipped:,}", skipped
    yield "incidents", f"{figures.incidents:,}", ""
    undone = f"{counted(figures.undone, 'step')} undone" if figures.undone else ""
    yield "rollbacks", f"{figures.rollbacks:,}", undone
    if figures.backed_off:
        yield "back-offs", f"{figures.backed_off:,}", "of the loss scale"
    if math.isfinite(figures.last_loss):
        name, first = "last loss", f"from {number(figures.first_loss)}"
        if figures.last_loss_step is not None:
            name, first = "last finite loss", f"at step {figures.last_loss_step:,}, {first}"
        yield name, number(figures.last_loss), first
    yield "time", duration(figures.seconds), rate(figures)


def state(figures: Figures) -> str:
    if figures.halted_at is not None:
        return "halted"
    return "ended" if figures.is_over else "no end in the log"


def rate(figures: Figures) -> str:
    return f"{figures.steps / figures.seconds:.3g} steps per second" if figures.seconds > 0 and figures.steps else ""


def fault_in_words(fault: FaultGroup) -> str:
    """The cause, as in ``overflow of fp16``."""
    diagnosis = fault.best.diagnosis
    if diagnosis is not None and diagnosis.cause != "unknown":
        return diagnosis.words
    noun = f"a {noun_of(fault.first.outcome)}"
    if diagnosis is not None:
        return f"{noun} of unknown cause"
    return noun if fault.first.outcome.verdict.kind in ("damage", "divergence") else f"{noun} that was not examined"


def place_in_words(fault: FaultGroup) -> str:
    """The module, as in ``layers.7.attn``, or else the line; empty if neither is known."""
    diagnosis = fault.best.diagnosis
    return "" if diagnosis is None else words_of_place(diagnosis.module, diagnosis.source)


def number(value: float) -> str:
    """A short form: ``0.0123``, ``65,504``, ``3.4e38``."""
    if not math.isfinite(value):
        return {math.inf: "Inf", -math.inf: "-Inf"}.get(value, "NaN")
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:.4g}".replace("e+", "e")


def percent(part: int, whole: int) -> str:
    """``0.25%``, ``99.5%``; ``100%`` only if it is everything."""
    share = 100 * part / whole
    if part >= whole:
        return "100%"
    if share >= 99.95:
        return "over 99.9%"
    if 0 < share < 0.01:
        return "under 0.01%"
    return f"{share:.1f}%".replace(".0%", "%") if share >= 10 else f"{share:.2g}%"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 60:
        return f"{int(minutes)} min {int(seconds) % 60} s"
    return f"{int(hours):,} h {int(minutes) % 60} min"


def _steps_sentence(figures: Figures) -> str:
    if not figures.steps:
        return "No steps are in the log."
    what = counted(figures.steps, "step")
    parts = []
    if figures.skipped:
        parts.append(f"{figures.skipped:,} skipped")
    if figures.lost:
        parts.append(f"{figures.lost:,} lost after a bad step")
    if figures.backed_off:
        parts.append(f"{figures.backed_off:,} skipped by routine back-offs of the loss scale")
    if figures.rollbacks:
        by = "a rollback" if figures.rollbacks == 1 else f"{figures.rollbacks:,} rollbacks"
        parts.append(f"{figures.undone:,} undone by {by}" if figures.undone else by)
    others = "; all others applied" if figures.applied else ""
    lost = f"{what}: {joined(parts, most=len(parts))}{others}." if parts else f"{what}, all applied."
    if figures.halted_at is not None:
        return f"{lost} Training halted at step {figures.halted_at:,}."
    return lost if figures.is_over else f"{lost} The log has no end: the run is still going or was stopped."


def _spans(story: Story) -> Iterator[SummaryPart]:
    yield "", _steps_sentence(story.figures)
    if refused := story.figures.refused_at_end:
        words = str(refused)
        yield from (("", " "), ("strong", f"{words[0].upper()}{words[1:]}."))
    if story.faults:
        yield "", " "
        yield from _first_trouble(story)
    if story.faults[1:]:
        yield "", " "
        yield from _others(story.faults[1:])


def _first_trouble(story: Story) -> Iterator[SummaryPart]:
    fault = story.faults[0]
    again = len(fault.incidents) - 1
    yield "", "First problem: " if len(story.faults) > 1 else "Problem: "
    yield "strong", fault_in_words(fault)
    if place := place_in_words(fault):
        yield from (("", " in "), ("code", place))
    yield "", f" at step {fault.first.reading.step:,}"
    if again:
        yield "", f" and {counted(again, 'more time')}"
    acted = [record.outcome.did for record in fault.incidents if record.outcome.did]
    if acted:
        more = f" (and {len(acted) - 1:,} more)" if len(acted) > 1 else ""
        is_answer = any(record.outcome.did and not record.outcome.is_left_out for record in fault.incidents)
        yield "", f". Response: {acted[-1]}{more}." if is_answer else f": {acted[-1]}{more}."
    elif all(record.outcome.action.response == "skip" for record in fault.incidents):
        yield "", ", skipped each time." if again else ", skipped."
    else:
        yield "", "."


def _others(faults: Sequence[FaultGroup]) -> Iterator[SummaryPart]:
    yield "", "Then "
    shown, rest = faults[:_MOST_OTHERS], len(faults) - _MOST_OTHERS
    for place, fault in enumerate(shown):
        if place:
            yield "", " and " if place == len(faults) - 1 else ", "
        yield "", fault_in_words(fault)
        if where := place_in_words(fault):
            yield from (("", " in "), ("code", where))
        if len(fault.incidents) > 1:
            yield "", f" ({len(fault.incidents):,} times)"
    yield "", f" and {rest:,} more causes." if rest > 1 else " and one more cause." if rest == 1 else "."
