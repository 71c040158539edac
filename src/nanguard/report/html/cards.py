"""A card for each fault: the text of the panel, and everything in the diagnosis and the incident folder."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nanguard.records.diagnosis_text import facts, format_name, how_found, page_of
from nanguard.records.diagnosis_text import place_in_words as place_of
from nanguard.records.markup import Child, Markup, tag
from nanguard.records.panel import done, headline, rows, what_happened
from nanguard.records.run import can_run_again
from nanguard.records.words import counted, joined, step_range
from nanguard.report.html.kinds import glyph, kind_of
from nanguard.report.html.prose import fault_in_words, number, place_in_words
from nanguard.report.html.story import MOST_IN_FULL, MOST_REPEATS, FaultGroup, Story, kept_in
from nanguard.report.html.table import scrolled_table
from nanguard.source.excerpt import excerpt

if TYPE_CHECKING:
    from nanguard.incidents.reader import Bundle
    from nanguard.records.diagnosis import Diagnosis, Link, Stretch
    from nanguard.records.run import IncidentRecord

LIMITS = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}
_SURE = {
    "certain": "an experiment on this step confirmed it",
    "likely": "the values point to it",
    "guess": "there is little evidence",
}
_FROM_DIAGNOSIS = frozenset({"where", "why", "sample", "fix", "tried", "saved to", "log", "docs"})
_MOST_ACTS = 12
_MOST = 40


def card(story: Story, fault: FaultGroup, *, rank: int, level: int) -> Markup:
    """One fault: its first incident in full, the others collapsed below. ``level`` is that of its heading."""
    record, best = fault.first, fault.best
    times = len(fault.incidents)
    where = place_in_words(fault)
    title = [_capital(fault_in_words(fault)), [" in ", tag("code", where)] if where else None]
    summary = tag(
        "summary",
        glyph(kind_of(record)),
        tag("span", step_range(record.reading.step, fault.last.reading.step), class_="at"),
        tag(f"h{level}", title),
        tag("span", f"{times:,} times", class_="count") if times > 1 else None,
        tag("span", _done_in_all(fault), class_="headline"),
    )
    in_full = rank < MOST_IN_FULL
    body = _body(story, fault, level + 1) if in_full else [_rows(story, best, every=True)]
    repeats = _repeats(story, fault) if in_full and times > 1 else None
    first = story.number == rank == 0
    return tag(
        "details",
        summary,
        tag("div", body, repeats, class_="body"),
        class_="card",
        id=story.card_id(fault.places[0]),
        open=first,
    )


def _done_in_all(fault: FaultGroup) -> str:
    """What was done about all its incidents: what one rung did among skips is not hidden."""
    what = what_happened(fault.first.outcome)
    counts = Counter(done(record.outcome) for record in fault.incidents)
    if len(counts) == 1:
        return f"{what}: {next(iter(counts))}"
    return f"{what}: {'; '.join(f'{number:,}x {words}' for words, number in counts.items())}"


def _acts(fault: FaultGroup) -> list[tuple[str, Child]]:
    """What rungs did about incidents that are not shown in full."""
    others = [record for record in fault.incidents if record.outcome.did and record is not fault.best]
    return [(f"at step {record.reading.step:,}", record.outcome.did) for record in others[:_MOST_ACTS]]


def trails(story: Story) -> dict[str, list[dict[str, Any]]]:
    """The values through the modules for the chart of each card, by the id of the card."""
    return {
        story.card_id(fault.places[0]): [_stretch(stretch) for stretch in diagnosis.trail]
        for fault in story.faults[:MOST_IN_FULL]
        if (diagnosis := fault.best.diagnosis) is not None and diagnosis.trail
    }


def _body(story: Story, fault: FaultGroup, level: int) -> Iterator[Child]:
    record, diagnosis = fault.best, fault.best.diagnosis
    shown = [("shown here", f"step {record.reading.step:,}")] if record is not fault.first else []
    yield _rows(story, record, every=diagnosis is None, more=[*shown, *_acts(fault)])
    if diagnosis is None:
        yield tag("p", "The step was not examined, so its cause is not known.", class_="quiet")
    else:
        yield from _diagnosis(diagnosis, level, story.card_id(fault.places[0]))
    yield tag("div", _details(story, fault, level), class_="columns")


def _details(story: Story, fault: FaultGroup, level: int) -> Iterator[Child]:
    record, diagnosis = fault.best, fault.best.diagnosis
    if diagnosis is not None:
        harmless = "Other non-finite values that reached neither loss nor gradient"
        yield _section(level, "The data", _data(diagnosis, fault.bundle))
        yield _section(level, "From the first bad value to the loss", _chain(diagnosis.chain))
        yield _section(level, "Evidence", _list(facts(diagnosis)))
        yield _section(level, "Tried on this step", _trials(diagnosis))
        yield _section(level, harmless, _chain(diagnosis.harmless))
        yield _section(level, "How this was found", _list(how_found(diagnosis)))
    yield _section(level, "Rungs that were not taken, and why", _list(record.outcome.action.passed))
    yield _section(level, "Where it is saved", _kept(story, record, fault.bundle))


def _diagnosis(diagnosis: Diagnosis, level: int, card_id: str) -> Iterator[Child]:
    where = place_of(diagnosis.module) or "(top level)"
    what = [diagnosis.op, diagnosis.phase, format_name(diagnosis.dtype)]
    because = f": {diagnosis.because}" if diagnosis.because else ""
    told: list[tuple[str, Child]] = [
        ("first used in" if diagnosis.phase == "data" else "where", [tag("code", where), _dotted(what)]),
        ("why", [tag("strong", diagnosis.words), because]),
        ("sure?", f"{diagnosis.confidence}: {_SURE[diagnosis.confidence]}"),
        ("docs", tag("code", page_of(diagnosis))),
    ]
    yield tag(
        "div",
        _section(level, "Diagnosis", _definitions(told)),
        _section(level, "What to do", _fix(diagnosis), class_="fix"),
        class_="stack",
    )
    if diagnosis.source is not None:
        yield _section(level, "The line", _source(diagnosis))
    if diagnosis.trail:
        yield _section(level, "Values through the modules", _trail(diagnosis.trail, card_id), class_="wide")


def _rows(
    story: Story, record: IncidentRecord, *, every: bool = False, more: Sequence[tuple[str, Child]] = ()
) -> Markup:
    told = [(name, text) for name, text in rows(record.outcome) if every or name not in _FROM_DIAGNOSIS]
    is_one_of_several = any(event.event == "optimizer" for event in story.run.events)
    whose = [("optimizer", record.optimizer)] if record.optimizer and is_one_of_several else []
    return _definitions([*whose, *more, *told])


def _source(diagnosis: Diagnosis) -> Iterator[Child]:
    source = diagnosis.source
    assert source is not None
    shown = excerpt(source)
    width = len(str(shown.lines[-1][0]))
    lines = [
        tag(
            "mark" if at == source.line else "span",
            tag("span", f"{'>' if at == source.line else ' '} {at:>{width}}  ", class_="number"),
            line,
            "\n",
        )
        for at, line in shown.lines
    ]
    function = f", in {source.function}" if source.function else ""
    found = "" if diagnosis.is_line_traced else " (a likely line: found by reading the program, not by running it)"
    yield tag("p", tag("code", f"{source.file}:{source.line}"), f"{function}{found}", class_="path")
    yield tag("pre", tag("code", lines), class_="lines", tabindex=0, role="region", aria_label=f"Lines around {source}")
    if shown.note:
        yield tag("p", shown.note, class_="quiet")


def _fix(diagnosis: Diagnosis) -> Iterator[Child]:
    fix = diagnosis.fix
    if fix.words:
        yield tag("p", f"{_capital(fix.words)}.")
    if fix.worked is not None:
        what = f"{joined(diagnosis.modules_to_keep) or 'the whole model'} in fp32"
        result, mark = ("finite", "good") if fix.worked else ("not enough", "bad")
        yield tag("p", f"Tried on this step: {what} ", tag("span", result, class_=f"verdict {mark}"))
    if fix.code:
        yield _copyable(fix.code)


def _trail(trail: Sequence[Stretch], card_id: str) -> Iterator[Child]:
    finite = [s for s in trail if s.low is not None and s.high is not None]
    largest = max((max(abs(s.low or 0.0), abs(s.high or 0.0)) for s in finite), default=0.0)
    words = f"The largest finite value is {number(largest)}." if finite else "All of them have NaN or Inf."
    if not all(s.is_finite for s in trail):
        words += " A cross marks non-finite values from the fault on. Infinities of a mask before it are not marked."
    yield tag("p", "The smallest and largest value in each module, in forward order. ", words, class_="quiet")
    yield tag("div", class_="trail", data_trail=card_id, role="img", aria_label=f"Chart of the table below. {words}")
    body = [
        tag(
            "tr",
            tag("th", tag("code", s.module or "(top level)"), scope="row"),
            tag("td", "–" if s.low is None else number(s.low), class_="num"),
            tag("td", "–" if s.high is None else number(s.high), class_="num"),
            tag("td", format_name(s.dtype)),
            tag("td", tag("code", s.op)),
            tag("td", "" if s.is_finite else "non-finite", class_=None if s.is_finite else "bad"),
        )
        for s in trail
    ]
    names = ("module", "smallest", "largest", "format", "op", "")
    table = scrolled_table(names, body, "Values through the modules")
    yield tag("details", tag("summary", "As a table"), table, class_="more")


def _data(diagnosis: Diagnosis, bundle: Bundle | None) -> Iterator[Child]:
    if diagnosis.samples:
        shown = ", ".join(map(str, diagnosis.samples[:_MOST]))
        more = len(diagnosis.samples) - _MOST
        which = "Sample" if len(diagnosis.samples) == 1 else "Samples"
        yield tag("p", f"{which} ", tag("strong", shown), f" and {more:,} more" if more > 0 else "", " of the batch.")
    if diagnosis.dataset_indices:
        records = ", ".join(map(str, diagnosis.dataset_indices[:_MOST]))
        yield tag(
            "p",
            "In the dataset: ",
            "index " if len(diagnosis.samples) == 1 else "indices ",
            tag("strong", records),
            ", if collate_fn keeps the order" if diagnosis.is_order_assumed else "",
            ", finite if it is read again" if diagnosis.is_record_finite else "",
        )
    if diagnosis.element is not None:
        shape = " x ".join(map(str, diagnosis.shape)) or "one number"
        yield tag("p", "The first bad element is at ", tag("code", str(list(diagnosis.element))), f" of {shape}.")
    microbatches = [] if bundle is None else bundle.facts["microbatches"]
    for place, micro in enumerate(microbatches[:4]):
        tensors = micro.get("tensors") if isinstance(micro, dict) else None
        told = [_tensor(each) for each in tensors if isinstance(each, dict)] if isinstance(tensors, list) else []
        if told:
            name = f"Micro-batch {place}: " if len(microbatches) > 1 else "The batch: "
            yield tag("p", name, _between(told[:_MOST], ", "), ".")


def _tensor(each: dict[str, Any]) -> Child:
    shape = each.get("shape")
    sizes = " x ".join(map(str, shape)) if isinstance(shape, list) else ""
    kind = format_name(each["dtype"]) if isinstance(each.get("dtype"), str) else ""
    name = each.get("name")
    return [tag("code", name or "batch") if isinstance(name, str) else None, f" {kind} {sizes or 'one number'}"]


def _chain(links: Sequence[Link]) -> Markup | None:
    if not links:
        return None
    items = [
        tag(
            "li",
            tag("span", link.became, class_="became"),
            " ",
            tag("code", link.op),
            _dotted([link.phase, format_name(link.dtype), link.module or "(top level)"]),
            tag("span", f"{link.source}  ", tag("code", link.source.text), class_="line") if link.source else None,
        )
        for link in links[:_MOST]
    ]
    return tag("ol", items, class_="chain")


def _trials(diagnosis: Diagnosis) -> Markup | None:
    if not diagnosis.tried:
        return None
    marks = {"finite": "good", "non-finite": "bad"}
    items = [
        tag(
            "tr",
            tag("th", trial.what, scope="row"),
            tag(
                "td",
                tag("span", trial.result or "no result", class_=f"verdict {marks.get(trial.result or '', 'open')}"),
            ),
            tag("td", trial.detail),
        )
        for trial in diagnosis.tried[:_MOST]
    ]
    return scrolled_table(("experiment", "result", ""), items, "What was tried on this step")


def _kept(story: Story, record: IncidentRecord, bundle: Bundle | None) -> Iterator[Child]:
    told = record.outcome.bundle
    folder = bundle.path if bundle is not None else kept_in(story.run.path, told)
    if folder is None:
        gone = f"{told} no longer exists." if told else "Only the line in the log was saved."
        yield tag("p", gone, class_="quiet")
        return
    captured = "" if bundle is None else f": {', '.join(bundle.captured) or 'a description without data'}"
    yield tag("p", tag("code", str(folder)), captured, class_="path")
    where = shlex.quote(str(folder))
    yield _copyable(f"nanguard explain {where}")
    if bundle is not None and {"batch", "samples"} & set(bundle.captured):
        entry = "" if can_run_again(story.run.header) else " --entry train.py:build"
        yield _copyable(f"nanguard replay {where}{entry}")


def _repeats(story: Story, fault: FaultGroup) -> Markup:
    again = list(zip(fault.places, fault.incidents, strict=True))[1:]
    steps = [record.reading.step for _, record in again]
    items = [
        tag(
            "details",
            tag(
                "summary",
                glyph(kind_of(record)),
                tag("span", f"step {record.reading.step:,}", class_="at"),
                tag("span", headline(record.outcome), class_="headline"),
            ),
            tag("div", _rows(story, record, every=True), class_="body"),
            class_="repeat",
            id=story.card_id(place),
        )
        for place, record in again[:MOST_REPEATS]
    ]
    more = len(again) - len(items)
    rest = tag("p", f"and {more:,} more, up to step {max(steps):,}", class_="quiet") if more else None
    summary = f"{counted(len(again), 'more incident')} like this one, steps {min(steps):,} to {max(steps):,}"
    return tag("details", tag("summary", summary), items, rest, class_="more repeats")


def _stretch(stretch: Stretch) -> dict[str, Any]:
    return {
        "module": stretch.module or "(top level)",
        "kind": stretch.kind,
        "op": stretch.op,
        "low": stretch.low if stretch.low is not None and abs(stretch.low) < float("inf") else None,
        "high": stretch.high if stretch.high is not None and abs(stretch.high) < float("inf") else None,
        "format": format_name(stretch.dtype),
        "limit": LIMITS.get(stretch.dtype),
        "finite": stretch.is_finite,
    }


def _section(level: int, title: str, children: Child, *, class_: str = "") -> Markup | None:
    inner = tag("div", children)
    if inner == "<div></div>":
        return None
    return tag("section", tag(f"h{min(level, 6)}", title), inner, class_=f"part {class_}".strip())


def _definitions(told: Sequence[tuple[str, Child]]) -> Markup:
    return tag("dl", (tag("div", tag("dt", name), tag("dd", text)) for name, text in told), class_="rows")


def _list(lines: Iterable[str]) -> Markup | None:
    items = [tag("li", line) for line in list(lines)[:_MOST]]
    return tag("ul", items) if items else None


def _copyable(code: str) -> Markup:
    button = tag("button", "Copy", type="button", class_="copy", hidden=True)
    return tag("div", tag("pre", tag("code", code), tabindex=0), button, class_="copyable")


def _dotted(words: Sequence[str]) -> str:
    return "".join(f" · {word}" for word in words if word)


def _between(children: Sequence[Child], comma: str) -> list[Child]:
    return [part for child in children for part in (comma, child)][1:]


def _capital(words: str) -> str:
    """With a capital letter, unless it begins with code."""
    return words if "." in words.partition(" ")[0] or "(" in words.partition(" ")[0] else words[:1].upper() + words[1:]
