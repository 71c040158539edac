"""The report: one HTML file about one or more runs that needs no network."""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import nanguard
from nanguard.errors import ReportError, RunLogError
from nanguard.records.markup import Child, Markup, embedded, tag
from nanguard.records.run import Run
from nanguard.records.words import counted
from nanguard.report.html import kinds, prose
from nanguard.report.html.cards import card, trails
from nanguard.report.html.climb import ladder
from nanguard.report.html.heat import heat_map
from nanguard.report.html.series import all_nonfinite, curves_of
from nanguard.report.html.story import Story, stories_of
from nanguard.report.html.table import scrolled, scrolled_table, values_table
from nanguard.report.html.where import environment
from nanguard.runlog.reader import read_run

_SCRIPTS = ("curves.js", "timeline.js", "trails.js", "page.js")
_SECTIONS = (
    ("summary", "Summary"),
    ("timeline", "Timeline"),
    ("incidents", "Incidents"),
    ("ladder", "Recovery ladder"),
    ("environment", "Environment"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A page that is ready to be written. ``troubles`` lists what could not be read."""

    html: str
    stories: tuple[Story, ...]
    troubles: tuple[str, ...]


def write_report(runs: Sequence[str | Path], out: str | Path) -> Path:
    """Reads the runs (folders, or their ``run.jsonl``) and writes one page about all of them atomically.

    Raises ``RunLogError`` if none of them can be read, and ``ReportError`` if the page cannot be written. Anything else
    that could not be read is listed on the page.
    """
    return write(make_report(runs), out)


def make_report(runs: Sequence[str | Path]) -> Report:
    """The page about these runs. Raises ``RunLogError`` if none of them can be read."""
    if not runs:
        raise ValueError("a report needs one run or more, got none")
    read: list[Run] = []
    unread = []
    for path in runs:
        try:
            read.append(read_run(path))
        except RunLogError as error:
            unread.append(str(error))
    if not read:
        raise RunLogError("\n".join(unread))
    stories = stories_of(read)
    troubles = (*unread, *(_where(story, trouble) for story in stories for trouble in story.troubles))
    return Report(html=_page(stories, troubles), stories=tuple(stories), troubles=troubles)


def write(report: Report, out: str | Path) -> Path:
    """Writes the page under a temporary name and renames it, so that there is never half a page."""
    out = Path(out)
    passing = out.with_name(f".{out.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with passing.open("x", encoding="utf-8", newline="\n") as file:
            file.write(report.html)
        os.replace(passing, out)
    except OSError as error:
        with suppress(OSError):
            passing.unlink(missing_ok=True)
        why = error.strerror or type(error).__name__
        raise ReportError(f"{out}: the report cannot be written ({why}): choose another place with --out") from None
    return out


def _where(story: Story, trouble: str) -> str:
    return trouble if str(story.run.path.parent) in trouble else f"{story.run.path}: {trouble}"


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError as error:
        raise ReportError("a report needs plotly, which is not installed: pip install plotly") from error
    return str(get_plotlyjs())


def _page(stories: Sequence[Story], troubles: Sequence[str]) -> str:
    title = " and ".join(filter(None, [", ".join(s.label for s in stories[:-1][:3]), stories[-1].label]))
    early, scripts = _asset("theme.js"), [_plotly(), "\n".join(map(_asset, _SCRIPTS))]
    policy = "; ".join(
        [
            "default-src 'none'",
            "script-src " + " ".join(f"'sha256-{_digest(script)}'" for script in (early, *scripts)),
            "style-src 'unsafe-inline'",
            "img-src data: blob:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=f"nanguard {nanguard.__version__}"),
        Markup('<link rel="icon" href="data:,">'),
        tag("title", f"{title} · nanguard report"),
        tag("style", Markup(_asset("page.css"))),
        tag("script", Markup(early)),
    ]
    body = [
        tag("a", "Skip to the content", href="#main", class_="skip"),
        _banner(stories),
        tag("main", _sections(stories, troubles, title), id="main", tabindex=-1),
        _footer(stories),
        tag("div", id="said", class_="unseen", role="status", aria_live="polite"),
        tag("script", _data(stories), type="application/json", id="data"),
        *(tag("script", Markup(script)) for script in scripts),
    ]
    document = tag("html", "\n", tag("head", _lines(head)), "\n", tag("body", _lines(body)), lang="en")
    return f"<!doctype html>\n{document}\n"


def _asset(name: str) -> str:
    return files("nanguard.report.html").joinpath(name).read_text(encoding="utf-8").replace("\r\n", "\n")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


def _lines(children: Sequence[Markup]) -> list[Markup]:
    return [Markup(f"{child}\n") for child in children]


def _data(stories: Sequence[Story]) -> Markup:
    return embedded(
        {
            "runs": [
                {"label": story.label, **curves_of(story.run), "marks": kinds.marks_of(story)} for story in stories
            ],
            "kinds": [{"name": kind.name, "label": kind.label, "symbol": kind.symbol} for kind in kinds.KINDS.values()],
            "trails": {name: trail for story in stories for name, trail in trails(story).items()},
        }
    )


# ---- parts of the page -------------------------------------------------------------------------------------------


def _banner(stories: Sequence[Story]) -> Markup:
    count = sum(len(story.incidents) for story in stories)
    links = [
        tag(
            "li", tag("a", name, tag("span", f" {count:,}", class_="num") if at == "incidents" else None, href=f"#{at}")
        )
        for at, name in _SECTIONS
    ]
    toggle = tag("button", "Dark", type="button", id="theme", hidden=True)
    nav = tag("nav", tag("ul", links), aria_label="On this page")
    return tag("header", tag("div", tag("span", "nanguard", class_="brand"), nav, toggle, class_="inner"))


def _sections(stories: Sequence[Story], troubles: Sequence[str], title: str) -> Iterator[Child]:
    yield tag("section", tag("p", "Report", class_="kicker"), tag("h1", title), _summary(stories), id="summary")
    if troubles:
        shown = [tag("li", trouble) for trouble in troubles[:50]]
        more = tag("li", f"and {len(troubles) - 50:,} more") if len(troubles) > 50 else None
        yield tag(
            "section", tag("h2", "What could not be read"), tag("ul", shown, more), class_="troubles", id="troubles"
        )
    yield tag("section", tag("h2", "Timeline"), _timeline(stories), id="timeline")
    yield tag("section", tag("h2", "Incidents"), _incidents(stories), id="incidents")
    yield tag("section", tag("h2", "Recovery ladder"), _ladders(stories), id="ladder")
    yield tag("section", tag("h2", "Environment"), environment(stories), id="environment")


def _summary(stories: Sequence[Story]) -> Iterator[Child]:
    for story in stories:
        name = tag("h2", _swatch(story), story.label) if len(stories) > 1 else None
        cells = [
            tag("div", tag("dt", label), tag("dd", tag("span", value, class_="value"), tag("small", remark)))
            for label, value, remark in prose.figures(story.figures)
        ]
        yield tag("div", name, tag("p", prose.summary(story), class_="lede"), tag("dl", cells, class_="figures"))


def _swatch(story: Story) -> Markup:
    return tag("span", class_=f"swatch run-{story.number % 8}", aria_hidden="true")


def _timeline(stories: Sequence[Story]) -> Iterator[Child]:
    if not any(story.run.steps for story in stories):
        yield tag("p", "There are no steps in the log, so only events are drawn.", class_="quiet")
    there = {mark["kind"] for story in stories for mark in kinds.marks_of(story)}
    runs = [
        tag("button", _swatch(s), s.label, type="button", class_="key", data_run=s.number, aria_pressed="true")
        for s in stories
    ]
    marks = [
        tag("button", kinds.glyph(k), k.label, type="button", class_="key", data_kind=k.name, aria_pressed="true")
        for k in kinds.KINDS.values()
        if k.name in there
    ]
    moves = [
        tag("button", name, type="button", data_move=move, aria_label=label)
        for move, name, label in (
            ("in", "+", "Zoom in"),
            ("out", "−", "Zoom out"),
            ("left", "←", "Earlier steps"),
            ("right", "→", "Later steps"),
            ("reset", "Reset", "Show all steps"),
        )
    ]
    bars = [
        tag("div", runs, class_="keys", role="group", aria_label="Runs") if len(stories) > 1 else None,
        tag(
            "div",
            tag("div", marks, class_="keys", role="group", aria_label="Marks"),
            tag("div", moves, class_="keys moves", role="group", aria_label="Zoom"),
            class_="row",
        ),
        tag(
            "div",
            tag("div", class_="keys", id="groups", role="group", aria_label="Parameter groups"),
            tag("div", class_="keys", id="scales", role="group", aria_label="Logarithmic axes"),
            class_="row",
        ),
    ]
    several = " several" if len(stories) > 1 else ""
    yield tag("div", bars, class_=f"controls{several}", id="controls", hidden=True)
    for story in stories:
        for words in all_nonfinite(story.run):
            yield tag("p", tag("strong", f"{story.label}: " if several else ""), words, class_="empty")
    words = "Loss, gradient norm, learning rate and loss scale over the steps. The tables below have the same values."
    yield tag("div", id="chart", role="img", aria_label=words)
    yield tag("noscript", tag("p", "Charts need JavaScript. Everything else on this page works without it."))
    yield tag(
        "p",
        "Drag to zoom, double-click to show all steps. Point at a mark to see its step, click it to open its incident. "
        "Marks that overlap are drawn once, with their number; zoom in to separate them.",
        class_="quiet hint",
    )
    for story in stories:
        yield from _headroom(story, named=len(stories) > 1)
        yield values_table(story, named=len(stories) > 1)


def _headroom(story: Story, *, named: bool) -> Iterator[Child]:
    """The map of the early warning, if the run was probed."""
    drawn = heat_map(story.run)
    if drawn is not None:
        whose = f" of {story.label}" if named else ""
        yield tag("h3", f"Headroom{whose}")
        hint = "The darker, the less room there is to a limit. A line leads from a warning to the step it expects."
        yield tag("p", hint, class_="quiet hint")
        yield scrolled(drawn, f"Headroom{whose}")


def _incidents(stories: Sequence[Story]) -> Iterator[Child]:
    total = sum(len(story.faults) for story in stories)
    if total > 1:
        yield tag(
            "div",
            tag("label", "Filter ", tag("input", type="search", id="filter", placeholder="module, cause, file …")),
            tag("button", "Open all", type="button", id="open-all"),
            tag("button", "Close all", type="button", id="close-all"),
            class_="controls",
            id="finder",
            hidden=True,
        )
    for story in stories:
        several = len(stories) > 1
        name = tag("h3", _swatch(story), story.label) if several else None
        if story.faults:
            cards: Child = [card(story, f, rank=rank, level=4 if several else 3) for rank, f in enumerate(story.faults)]
        else:
            cards = tag("p", "No incidents: every step was finite.", class_="quiet")
        yield tag("div", name, cards, _other_events(story), class_="cards")


def _other_events(story: Story) -> Markup | None:
    if not story.events:
        return None
    shown = story.events[: kinds.MOST_EVENTS]
    items = [
        tag(
            "tr",
            tag("td", kinds.glyph(kind), " ", kind.label),
            tag("td", "–" if event.step is None else f"{event.step:,}", class_="num"),
            tag("td", kinds.event_in_words(event)),
            id=kinds.event_id(story, place),
            tabindex=-1,
        )
        for place, event in enumerate(shown)
        for kind in [kinds.kind_of_event(event)]
    ]
    more = len(story.events) - len(shown)
    rest = tag("p", f"and {more:,} more", class_="quiet") if more else None
    table = scrolled_table(("what", "step", ""), items, "Other events")
    summary = tag("summary", f"Other events: {counted(len(story.events), 'back-off, warning or change')}")
    return tag("details", summary, table, rest, class_="more", id=f"run{story.number}-events")


def _ladders(stories: Sequence[Story]) -> Iterator[Child]:
    yield tag("p", "Rungs from the mildest to the last. The first rung that applies is taken.", class_="quiet")
    for story in stories:
        name = tag("h3", _swatch(story), story.label) if len(stories) > 1 else None
        missing = tag("p", "The policy of the run is not in the log.", class_="quiet")
        yield tag("div", name, ladder(story) or missing)


def _footer(stories: Sequence[Story]) -> Markup:
    made = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime())
    logs = ", ".join(str(story.run.path) for story in stories)
    return tag("footer", tag("p", f"Written by nanguard {nanguard.__version__} on {made} from {logs}"))
