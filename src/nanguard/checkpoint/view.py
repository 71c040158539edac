"""The text that ``nanguard check`` prints. Nothing is printed here."""

from __future__ import annotations

import glob
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from nanguard.checkpoint.findings import FileReport, Note, TensorReport, short_number
from nanguard.records.printable import printable
from nanguard.records.words import listed

LIMIT = 20
"""How many tensors are listed without --all."""

_STYLES = {0: "bold green", 1: "bold red", 2: "bold yellow"}
_INDENT, _LABEL = " " * 3, 8

_NOTES: dict[Note, tuple[str, str]] = {
    "zero": ("all zero", "all zero"),
    "subnormal": ("subnormal", "1% or more of the non-zero values are subnormal, which costs precision and speed"),
    "over_fp16": ("> fp16", "above 65504, the largest number in fp16: Inf if cast to it"),
    "under_fp16": ("< fp16", "1% or more of the non-zero values become zero in fp16"),
    "over_bf16": ("> bf16", "above 3.39e38, the largest number in bf16: Inf if cast to it"),
}
"""In the table, and as a sentence."""


def verdict(report: FileReport, *, why: bool = False) -> Text:
    """``path  verdict`` on one line; with ``why``, also why something could not be read."""
    told, colon, rest = (report.verdict if why else report.headline).partition(":")
    line = Text.assemble((printable(report.path), "bold"), "  ", (told, _STYLES[report.status]))
    return line.append(colon + printable(rest))


def section(report: FileReport, *, width: int, everything: bool = False) -> Iterator[RenderableType]:
    """What follows the verdict of one file, ``width`` columns wide. May be empty."""
    bad = report.nonfinite
    listed = report.tensors if everything else bad[:LIMIT]
    if listed:
        yield _table(listed)
    if len(listed) < len(bad):
        yield Text(f"{_INDENT}and {len(bad) - len(listed):,} more; --all lists every tensor", style="dim")
    for label, text in _remarks(report):
        yield _labelled(label, text, width)


def summary(reports: Sequence[FileReport]) -> Text:
    words = {0: "clean", 1: "NOT clean", 2: "unreadable"}
    counts = Counter(report.status for report in reports)
    parts = [f"{counts[status]:,} {word}" for status, word in words.items() if counts[status]]
    return Text(f"{len(reports):,} files: {', '.join(parts)}", style=_STYLES[max(counts, default=0)])


def _table(tensors: Sequence[TensorReport]) -> Table:
    table = Table(
        Column("", width=len(_INDENT) - 2),
        Column("tensor", overflow="fold"),
        Column("dtype", no_wrap=True),
        Column("values", justify="right", no_wrap=True),
        Column("holds"),
        box=None,
        header_style="dim",
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    for t in tensors:
        style = "red" if t.faulty else "dim"
        table.add_row("", Text(printable(t.name)), t.dtype, f"{t.num_values:,}", Text(_holds(t), style=style))
    return table


def _holds(t: TensorReport) -> str:
    counts = ((t.num_nan, "NaN"), (t.num_posinf, "+Inf"), (t.num_neginf, "-Inf"))
    parts = [f"{'all' if n == t.num_values > 1 else f'{n:,}'} {kind}" for n, kind in counts if n]
    parts += ["allowed"] if parts and t.allowed else []
    return t.skipped or ", ".join(parts + [_NOTES[n][0] for n in t.notes])


def _remarks(report: FileReport) -> Iterator[tuple[str, str]]:
    """Labels and sentences, the most important first."""
    for problem in report.problems[:LIMIT]:
        yield "why", problem
    if len(report.problems) > LIMIT:
        yield "why", f"and {len(report.problems) - LIMIT:,} more"
    for number in report.numbers:
        if number.faulty:
            yield "number", f"{number.name} is {number.value}"
    for note, (_, meaning) in _NOTES.items():
        names = [t.name for t in report.tensors if note in t.notes]
        if names:
            yield "note", f"{meaning}: {listed(names)}"
    on_purpose = [n.name for n in report.numbers if not n.faulty and not n.allowed]
    if on_purpose:
        yield "note", f"Inf, probably on purpose: {listed(on_purpose)}"
    allowed = [t.name for t in report.tensors if t.allowed and t.num_nonfinite]
    allowed += [n.name for n in report.numbers if n.allowed]
    if allowed:
        yield "note", f"non-finite and allowed: {listed(allowed)}"
    if not report.tensors and not report.problems:
        yield "note", "it contains no tensors"
    skipped = Counter(t.skipped for t in report.tensors if t.skipped)
    if skipped:
        told = ", ".join(f"{n:,} {why}" for why, n in skipped.items())
        yield "note", f"tensors not checked: {told}"
    masks = [t.name for t in report.nonfinite if not t.num_nan and not t.num_posinf]
    if masks:
        yield "hint", f"-Inf on purpose, as in a mask? --allow {shlex.quote(glob.escape(masks[0]))} accepts it"


def _labelled(label: str, text: str, width: int) -> Text:
    rest = " " * (len(_INDENT) + _LABEL)
    lines = textwrap.wrap(printable(text), width - len(rest), break_on_hyphens=False, break_long_words=False)
    return Text.assemble(
        (f"{_INDENT}{label:<{_LABEL}}", "dim" if label == "note" else "bold"),
        ("\n" + rest).join(lines),
    )


class Bar:
    """A progress bar for large files, shown only on a terminal."""

    LONG = 1 << 26
    """Number of values. Smaller files need no bar."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn(" {task.description}"), BarColumn(28), TextColumn("{task.fields[told]}"))
        self._progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
        self._terminal = console.is_terminal
        self._task: TaskID | None = None
        self._path = ""

    def tell(self, path: str, done: int, total: int) -> None:
        if not self._terminal or total < self.LONG:
            return
        if self._task is None or path != self._path:
            self.close()
            self._path, self._task = path, self._progress.add_task(printable(path)[-40:], total=total, told="")
            self._progress.start()
        told = f"{short_number(done)} of {short_number(total)} values"
        self._progress.update(self._task, completed=done, total=total, told=told)

    def close(self) -> None:
        if self._task is not None:
            self._progress.stop()
            self._progress.remove_task(self._task)
            self._task = None
