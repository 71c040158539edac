"""The recovery ladder as it was climbed: each rung, how often it was taken and where, and why it was passed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from nanguard.policy.rungs import (
    BUILT_IN,
    DropBadGradients,
    Halt,
    LowerLR,
    RaisePrecision,
    Rollback,
    Rung,
    Skip,
    answers_alerts,
)
from nanguard.records.markup import Child, Markup, tag
from nanguard.records.steps import span_in_words
from nanguard.records.words import counted, step_range

if TYPE_CHECKING:
    from nanguard.report.html.story import Story

_RUNGS = {kind.__name__: kind for kind in BUILT_IN}
_MOST_LINKS, _MOST_REASONS = 24, 6


def ladder(story: Story) -> Markup | None:
    """A list of the rungs, mildest first; None if the log does not have the policy."""
    told = _told_rungs(story.run.header)
    if told is None:
        return None
    used: dict[int, list[int]] = {}
    passed: dict[int, Counter[str]] = {}
    for place, record in enumerate(story.incidents):
        action = record.outcome.action
        if action.rung is not None:
            used.setdefault(action.rung, []).append(place)
        for below, why in enumerate(action.passed):
            passed.setdefault(below, Counter())[why.partition(": ")[2] or why] += 1
    answers: dict[int, list[int]] = {}
    for event in story.events:
        rung, step = event.fields.get("rung"), event.step
        if event.event == "answered" and type(rung) is int and step is not None:
            answers.setdefault(rung, []).append(step)
    if not told or told[-1].get("rung") != "Halt":
        told = [*told, {"rung": "Halt"}]
    items = [
        _rung(story, _built(each), each, used.get(place, []), passed.get(place, Counter()), answers.get(place, []))
        for place, each in enumerate(told)
    ]
    return tag("ol", items, class_="ladder")


def _rung(
    story: Story,
    rung: Rung | None,
    told: Mapping[str, Any],
    used: list[int],
    passed: Counter[str],
    answers: list[int],
) -> Markup:
    """``answers`` are the steps before which the rung answered a warning."""
    name = str(told.get("words") or told.get("rung", "")) if rung is None else rung.describe()
    options = ", ".join(_told_options(told) if rung is None else _options(rung))
    number = len(used) + len(answers)
    taken = f"taken {counted(number, 'time')}" if number else "not taken"
    links = tag("p", "at ", _links(story, used), class_="steps") if used else None
    steps = ", ".join(f"{step:,}" for step in answers[:_MOST_LINKS])
    warned = tag("p", f"for a warning, before step {steps}", class_="steps") if answers else None
    reasons = [
        tag("li", f"{why} ", tag("span", counted(times, "time"), class_="quiet"))
        for why, times in passed.most_common(_MOST_REASONS)
    ]
    why = tag("details", tag("summary", f"passed {counted(passed.total(), 'time')}"), tag("ul", reasons), class_="more")
    return tag(
        "li",
        tag("div", tag("strong", name[:1].upper() + name[1:]), tag("span", taken, class_="taken"), class_="name"),
        tag("p", options, class_="quiet") if options else None,
        links,
        warned,
        why if reasons else None,
        class_="rung used" if number else "rung",
    )


def _options(rung: Rung) -> Iterator[str]:
    if isinstance(rung, Halt):
        yield "training stops, and nothing is corrupted"
        return
    yield _budget(rung.times, rung.per)
    if answers_alerts(rung):
        yield "only for warnings"
    if isinstance(rung, Skip) and rung.when == "data":
        yield "only where the data are at fault"
    if isinstance(rung, DropBadGradients):
        yield "the rest of the step is applied"
    if isinstance(rung, LowerLR):
        yield f"times {rung.factor:g}"
        if rung.recover_after is not None:
            yield f"back after {rung.recover_after:,} quiet steps"
    if isinstance(rung, RaisePrecision):
        if rung.verify and not answers_alerts(rung):
            yield "tried on the failing step first"
        if rung.retry_after is not None:
            yield f"lower again after {rung.retry_after:,} quiet steps"
    if isinstance(rung, Rollback):
        yield f"at least {counted(rung.steps, 'step')} back"
        if rung.skip_batches:
            batches = rung.skip_batches
            yield "without the batches that failed" if batches == "failed" else f"without {batches:,} batches"
        if rung.raise_precision:
            yield "then in fp32"
    if isinstance(rung, (RaisePrecision, Rollback)) and rung.lr != 1.0:
        yield f"learning rate times {rung.lr:g}"


def _budget(times: int | None, per: str | int) -> str:
    span = "" if per == "run" and times is None else f" {span_in_words(per).replace('this', 'an')}"
    span = span.replace("an run", "in a run").replace("an epoch", "in an epoch")
    return f"any number of times{span}" if times is None else f"up to {counted(times, 'time')}{span}"


def _told_options(told: Mapping[str, Any]) -> Iterator[str]:
    """Of a rung that is not ours: what the log has written down of it."""
    times, per = told.get("times"), told.get("per")
    if "times" in told and (times is None or type(times) is int) and isinstance(per, (int, str)):
        yield _budget(times, per)
    for name, value in told.items():
        if name not in ("rung", "words", "times", "per") and isinstance(value, (str, int, float)):
            yield f"{name.replace('_', ' ')}: {value!s:.80}"


def _links(story: Story, places: Sequence[int]) -> list[Child]:
    """The steps, each a link to its card; neighbours are taken together, also those of several optimizers."""
    targets = story.targets()
    stretches: list[list[int]] = []
    for place in sorted(places, key=lambda place: story.incidents[place].reading.step):
        step = story.incidents[place].reading.step
        if stretches and step <= story.incidents[stretches[-1][-1]].reading.step + 1:
            stretches[-1].append(place)
        else:
            stretches.append([place])
    told: list[Child] = []
    for stretch in stretches[:_MOST_LINKS]:
        first, last = (story.incidents[place].reading.step for place in (stretch[0], stretch[-1]))
        told += [", ", tag("a", step_range(first, last), href=f"#{targets[stretch[0]]}")]
    more = len(stretches) - _MOST_LINKS
    return [*told[1:], f" and {more:,} more places" if more > 0 else None]


def _told_rungs(header: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    policy = header.get("policy")
    rungs = policy.get("ladder") if isinstance(policy, Mapping) else None
    return [rung for rung in rungs if isinstance(rung, Mapping)] if isinstance(rungs, (list, tuple)) else None


def _built(told: Mapping[str, Any]) -> Rung | None:
    """The rung that the log tells of; None for one that this nanguard does not know."""
    kind = _RUNGS.get(str(told.get("rung")))
    if kind is None:
        return None
    try:
        rung: Rung = kind(**{f.name: told[f.name] for f in fields(kind) if f.name in told})
    except (TypeError, ValueError):
        return None
    return rung
