"""The text that ``nanguard doctor`` prints. Nothing is printed here."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from nanguard.checkup.record import Checkup, CheckupFinding, Fact
from nanguard.records.printable import printable
from nanguard.records.words import counted

_STYLES = {"error": "bold red", "warning": "bold yellow", "advice": "bold cyan"}
_INDENT = " " * 11


def facts_table(facts: Sequence[Fact]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 1))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for fact in facts:
        table.add_row(Text(fact.name), Text(printable(fact.value)))
    return table


def finding_lines(finding: CheckupFinding, width: int) -> Iterator[Text]:
    """What is wrong, where, the line itself, why, and what to change."""
    where = f"   {printable(str(finding.place))}" if finding.place else ""
    yield Text.assemble(
        (f" {finding.severity:<9} ", _STYLES[finding.severity]), printable(finding.what), (where, "dim")
    )
    if finding.place and finding.place.text:
        yield Text(f"{_INDENT}{printable(finding.place.text)}", style="italic")
    for name, words in (("why", finding.why), ("change", finding.change)):
        yield from map(Text, _wrapped(f"{name:<7} {printable(words)}", width))


def sound_script(script: str) -> Text:
    """The line for a program without findings."""
    return Text(f"{printable(script)}: nothing to change", style="bold green")


def summary(checkup: Checkup) -> Text:
    number = len(checkup.findings)
    if not number and checkup.script is not None:
        return sound_script(checkup.script)
    if not number:
        return Text("nothing to change", style="bold green")
    counts = [(name, sum(f.severity == name for f in checkup.findings)) for name in _STYLES]
    told = ", ".join(f"{count} {_plural(name, count)}" for name, count in counts if count)
    return Text(f"{counted(number, 'thing')} to change: {told}", style="bold")


def _plural(name: str, count: int) -> str:
    return name if count == 1 or name == "advice" else f"{name}s"


def _wrapped(words: str, width: int) -> list[str]:
    return textwrap.wrap(
        words,
        max(width, 40),
        initial_indent=_INDENT,
        subsequent_indent=_INDENT + " " * 8,
        break_on_hyphens=False,
        break_long_words=False,
    )
