"""How ``nanguard watch`` looks: a view that fits the terminal, and single lines for a pipe. Nothing is printed here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from textwrap import wrap

from rich.text import Text

from nanguard.records.printable import printable
from nanguard.records.run import IncidentRecord, Run, StepRecord
from nanguard.records.words import counted
from nanguard.report import glance
from nanguard.report.sparkline import columns, is_flat, mean_of_finite, sparkline

Line = list[tuple[str, str]]
"""Text and style, part by part."""

_STYLES = {"running": "green", "silent": "yellow", "gone": "bold red", "halted": "bold red", "ended": "cyan"}
_LABEL, _VALUE, _RANGE = 9, 10, 20
_LEAST_CURVE, _MOST_CURVE = 10, 100
_MOST_GROUPS = 4
_MOST_OPTIMIZERS = 3
_FEWEST_FOLDED = 3
"""Fewer incidents of one fault have a row each."""

_MODULES_SHOWN = 5
_BAR = 16
"""A bar of one column for each bit: fp16 has 16 of them above 1."""

_MARK = "\N{MULTIPLICATION SIGN}"


def waiting(path: str) -> Text:
    """The view while there is no log yet."""
    return Text.assemble(" waiting for ", (printable(path), "bold"), ": no run has been logged there yet (Ctrl-C ends)")


def view(run: Run, now: float, *, width: int, height: int, ascii_only: bool = False) -> Text:
    """The whole view, in at most ``height`` lines of at most ``width`` columns."""
    lines = [_title(run, now, width), *_about(run), []]
    lines += [*_numbers(run, width, ascii_only), _counts(run), *_refused(run, width), *_troubles(run)]
    lines += _headroom(run, ascii_only)
    lines += _happenings(run, height - len(lines))
    return Text("\n").join(_fitted(line, width, ascii_only) for line in lines[: max(1, height)])


def status_line(run: Run, now: float) -> str:
    """Where the run is, in one line."""
    parts = [f"{printable(run.name)}: {_state_in_words(run, now)}"]
    names = glance.optimizers_of(run)
    for name in names[:_MOST_OPTIMIZERS]:
        last = glance.steps_of(run, name)[-1]
        whose = f"{printable(name)} " if name else ""
        norms = ", ".join(f"{norm:.4g}" for norm in last.norms[:_MOST_GROUPS])
        scale = "" if last.scale is None else f", loss scale {last.scale:g}"
        parts.append(f"{whose}step {last.step:,}, loss {last.loss:.4g}, norm {norms}{scale}")
    rate = _rate(glance.rate_of(run, glance.steps_of(run, names[0]))) if names else ""
    counts = glance.counts_of(run)
    told = [rate, f"{counts['applied']:,} applied", f"{counts['skipped']:,} skipped"]
    return "; ".join(filter(None, [*parts, ", ".join(filter(None, told)), glance.refused_in_words(run)]))


def incident_line(incident: IncidentRecord) -> str:
    """What happened, where and why, in one line."""
    return f"step {incident.reading.step:,}: {glance.did_in_words(incident)}: {glance.why_in_words(incident)}"


def _fitted(line: Line, width: int, ascii_only: bool) -> Text:
    """In the width there is, and in characters that the terminal knows."""
    if ascii_only:
        line = [(text.encode("ascii", "backslashreplace").decode(), style) for text, style in line]
    fitted = Text.assemble(*line)
    fitted.truncate(max(1, width), overflow="crop" if ascii_only else "ellipsis")
    return fitted


def _title(run: Run, now: float, width: int) -> Line:
    state = _state_in_words(run, now)
    name = printable(str(run.path.parent if run.path.suffix else run.path))
    room = max(8, width - len(state) - 13)
    name = name if len(name) <= room else "..." + name[3 - room :]
    gap = " " * max(2, width - len(name) - len(state) - 11)
    return [(" nanguard  ", "dim"), (name, "bold"), (gap, ""), (state, _STYLES[glance.state_of(run, now)])]


def _about(run: Run) -> Iterator[Line]:
    """What runs, as far as the header says it."""
    header, optimizers = run.header, run.header.get("optimizers")
    told = [f"{header[key]}" for key in ("precision", "device") if isinstance(header.get(key), str)]
    told += [str(each) for each in optimizers[:_MOST_OPTIMIZERS]] if isinstance(optimizers, list) else []
    if type(header.get("parameters")) is int:
        told.append(f"{min(header['parameters'], 10**15):,} parameters")
    if told:
        yield [(" " * 11 + printable(", ".join(told)), "dim")]


def _state_in_words(run: Run, now: float) -> str:
    state = glance.state_of(run, now)
    silence = f"silent for {_duration(now - glance.last_time(run))}"
    return {"silent": silence, "gone": f"its process is gone, {silence}"}.get(state, state)


def _numbers(run: Run, width: int, ascii_only: bool) -> Iterator[Line]:
    names = glance.optimizers_of(run)
    if not names:
        yield [(" no step is in the log yet", "dim")]
    room = max(_LEAST_CURVE, min(_MOST_CURVE, width - _LABEL - _VALUE - _RANGE - 4))
    for name in names[:_MOST_OPTIMIZERS]:
        steps = glance.steps_of(run, name)
        yield _progress(run, steps, name if len(names) > 1 else "")
        yield _curve("loss", [(r.step, r.loss) for r in steps], room, ascii_only, "cyan")
        yield from _marks(run, steps, room, ascii_only)
        yield from _curves(steps, room, ascii_only)
    if len(names) > _MOST_OPTIMIZERS:
        yield [(f" and {len(names) - _MOST_OPTIMIZERS} more optimizers", "dim")]


def _progress(run: Run, steps: Sequence[StepRecord], name: str) -> Line:
    last = steps[-1]
    batch = "" if last.batch is None else f", batch {last.batch:,}"
    at = f"epoch {last.epoch}{batch}" if last.epoch else ""  # only guard.epoch knows of any
    took = f"in {_duration(last.time - float(run.header.get('time', last.time)))}"
    rest = "   ".join(filter(None, [at, _rate(glance.rate_of(run, steps)), took, printable(name)]))
    return [(f" {'step':<{_LABEL}}", "dim"), (f"{last.step:>{_VALUE},}", "bold"), (f"  {rest}", "")]


def _curves(steps: Sequence[StepRecord], room: int, ascii_only: bool) -> Iterator[Line]:
    last = steps[-1]
    for number in range(min(len(last.norms), _MOST_GROUPS)):
        label = "norm" if len(last.norms) == 1 else f"norm {number}"
        points = [(r.step, r.norms[number]) for r in steps if number < len(r.norms)]
        yield _curve(label, points, room, ascii_only, "magenta")
    if len(last.norms) > _MOST_GROUPS:
        yield [(f" {'':<{_LABEL + _VALUE}}  and the norms of {len(last.norms) - _MOST_GROUPS} more groups", "dim")]
    if last.lrs:
        yield _curve("lr", [(r.step, r.lrs[0]) for r in steps if r.lrs], room, ascii_only, "blue", may_be_log=False)
    if last.scale is not None:
        yield _curve("scale", [(r.step, r.scale) for r in steps if r.scale is not None], room, ascii_only, "yellow")


def _curve(
    label: str,
    points: Sequence[tuple[int, float]],
    room: int,
    ascii_only: bool,
    style: str,
    *,
    may_be_log: bool = True,
) -> Line:
    value, means = points[-1][1], [mean_of_finite(each) for each in columns(points, room)]
    curve = sparkline(means, ascii_only=ascii_only, may_be_log=may_be_log)
    finite = [v for _, v in points if math.isfinite(v)]
    span = f"{_short(min(finite))} .. {_short(max(finite))}" if finite and not is_flat(min(finite), max(finite)) else ""
    return [
        (f" {label:<{_LABEL}}", "dim"),
        (f"{_short(value):>{_VALUE}}", "bold" if math.isfinite(value) else "bold red"),
        (f"  {curve:<{room}}", style),
        (f"  {span}", "dim"),
    ]


def _marks(run: Run, steps: Sequence[StepRecord], room: int, ascii_only: bool) -> Iterator[Line]:
    """Under the loss: a mark where a step was skipped, unless by a routine back-off of the loss scale."""
    routine = {event.step for event in run.events if event.event == "overflow"}
    found = columns([(r.step, float(r.skipped and r.step not in routine)) for r in steps], room)
    marks = "".join(("x" if ascii_only else _MARK) if any(each) else " " for each in found)
    if marks.strip():
        yield [(f" {'skipped':<{_LABEL}}", "dim"), (" " * (_VALUE + 2), ""), (marks, "red")]


def _counts(run: Run) -> Line:
    counts = glance.counts_of(run)
    words = {"applied": "applied", "skipped": "skipped", "backed_off": "backed off", "lost": "lost"}
    told = [f"{counts[key]:,} {word}" for key, word in words.items() if counts[key] or key in ("applied", "skipped")]
    back = counts["rolled_back"]
    told += [f"rolled back {counted(back, 'time')}"] if back else []
    return [(f" {'steps':<{_LABEL}}", "dim"), (f"{'':<{_VALUE - 7}}{'   '.join(told)}", "")]


def _refused(run: Run, width: int) -> Iterator[Line]:
    if words := glance.refused_in_words(run):
        yield from ([(f" {line}", "bold red")] for line in wrap(words, max(20, width - 2)))


def _troubles(run: Run) -> Iterator[Line]:
    if run.troubles:
        more = f" (and {len(run.troubles) - 1:,} more)" if len(run.troubles) > 1 else ""
        yield [(f" {'unread':<{_LABEL}}   {printable(run.troubles[0])}{more}", "yellow")]


def _headroom(run: Run, ascii_only: bool) -> Iterator[Line]:
    """The modules with the least room to a limit of their format, in bits."""
    rooms = list(glance.last_headroom(run).items())[:_MODULES_SHOWN]
    names = [printable(name) or "(outside of modules)" for name, _ in rooms]
    wide = min(40, max(map(len, names), default=0))
    for place, (name, (_, room)) in enumerate(zip(names, rooms, strict=True)):
        size = round(max(0.0, min(_BAR, room)))
        bar = ("#" if ascii_only else "\N{FULL BLOCK}") * size + ("." if ascii_only else "\N{LIGHT SHADE}") * (
            _BAR - size
        )
        style = "red" if room < 2 else "yellow" if room < 5 else "green"
        label = "headroom" if place == 0 else ""
        yield [
            (f" {label:<{_LABEL}}", "dim"),
            (f"{room:>{_VALUE}.1f}", "bold"),
            ("  ", ""),
            (bar, style),
            (f"  {name:.{wide}}", ""),
        ]


def _happenings(run: Run, room: int) -> Iterator[Line]:
    """Incidents and alerts, newest first, as many as there is room for; those of one fault in one row."""
    alerts = [event for event in run.events if event.event == "alert"]
    told = [row for group in glance.alike(run) for row in _incident_rows(group)]
    told += [(e.time, e.step or 0, "alert", glance.alert_in_words(e), "yellow", 1) for e in alerts]
    for event in (each for each in run.events if each.event == "answered"):
        what, why = _word(event.fields.get("what")), glance.answer_in_words(event)
        told.append((event.time, event.step or 0, what, why, "yellow", 1))
    told.sort(reverse=True)
    room -= 2
    shown = told if len(told) <= room else told[: max(0, room - 1)]
    incidents = counted(len(run.incidents), "incident") if run.incidents else "no incidents"
    yield []
    yield [(f" {incidents}" + (f", {counted(len(alerts), 'alert')}" if alerts else ""), "bold")]
    digits = max((len(f"{step:,}") for _, step, *_ in shown), default=1)
    for _, step, did, why, style, _ in shown:
        yield [(f"  step {step:>{digits},}  ", ""), (did, style), (f"  {why}", "")]
    if len(shown) < len(told):
        yield [(f"  and {sum(count for *_, count in told[len(shown) :]):,} before them", "dim")]


def _incident_rows(group: Sequence[IncidentRecord]) -> Iterator[tuple[float, int, str, str, str, int]]:
    """Time, step, what was done, why, style and how many, of the incidents of one fault."""
    folded = len(group) >= _FEWEST_FOLDED
    for incident in group[-1:] if folded else group:
        did = glance.did_in_words(incident)
        if folded:
            did = f"{did} {len(group):,} times since step {group[0].reading.step:,}"
        why, count = glance.why_in_words(incident), len(group) if folded else 1
        yield incident.time, incident.reading.step, did, why, "red", count


def _word(told: object) -> str:
    return printable(told[:80]) if isinstance(told, str) else "answered"


def _short(value: float) -> str:
    is_round = math.isfinite(value) and 1e4 <= abs(value) < 1e8 and value == int(value)
    return f"{int(value)}" if is_round else f"{value:.4g}"


def _rate(rate: float | None) -> str:
    if rate is None or rate <= 0:
        return ""
    if rate < 1:
        return f"{1 / rate:.3g} s/step"
    return f"{rate:.3g} steps/s" if rate < 1000 else f"{rate:,.0f} steps/s"


def _duration(seconds: float) -> str:
    seconds = int(max(0.0, min(seconds, 1e12)))
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    if days:
        return f"{days:,} d {hours} h"
    if hours:
        return f"{hours} h {rest // 60:02} min"
    return f"{rest // 60} min {rest % 60:02} s" if rest >= 60 else f"{rest} s"
