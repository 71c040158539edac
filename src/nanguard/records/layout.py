"""Panels and other text in lines that fit a terminal."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

_INDENT = 13
_VERBATIM = re.compile(r"\s*nanguard [a-z]|  [> ] *\d+  | {15}|(   .{9})?\s*\S+$")
"""Lines that are never broken: commands, numbered lines of a program, lines that are indented further than rows, and
those with a single word, such as a path."""


def laid_out(head: str, rows: Iterable[tuple[str, str]]) -> str:
    """A headline, and rows of a name and a text under it. Further lines of a text stand under its first line."""
    return "\n".join([head, *(_row(name, text) for name, text in rows)])


def verbatim(line: str) -> str:
    """A line of code or a command as a further line of a row: it is never broken."""
    return f"\n  {line}"


def fitted(text: str, width: int | None) -> str:
    """The text with long lines wrapped and indented. None: as it is. Commands, code and paths are not broken."""
    if width is None:
        return text
    return "\n".join(_fitted_line(line, width) for line in text.split("\n"))


def terminal_width() -> int | None:
    """The number of columns of the terminal that stderr goes to. None if it goes elsewhere."""
    try:
        if sys.stderr is None or not sys.stderr.isatty():
            return None
        told = os.environ.get("COLUMNS", "")
        return int(told) if told.isdigit() and int(told) else os.get_terminal_size(sys.stderr.fileno()).columns or None
    except (OSError, ValueError):  # a stream that only looks like a terminal, as in a notebook
        return None


def _row(name: str, text: str) -> str:
    first, *rest = text.split("\n")
    return "\n".join([f"   {name:<9} {first}", *(f"{' ' * _INDENT}{line}" for line in rest)])


def _fitted_line(line: str, width: int) -> str:
    if len(line) <= width or _VERBATIM.match(line):
        return line
    margin = len(line) - len(line.lstrip(" "))
    under = _INDENT if margin == 3 or line.startswith(" nanguard") else margin + 2 * (margin > 0)
    return textwrap.fill(
        line, max(width, 40), subsequent_indent=" " * under, break_long_words=False, break_on_hyphens=False
    )


def above_bars() -> contextlib.AbstractContextManager[Any]:
    """Inside, the bars of tqdm that the program shows are not in the way; afterwards they are drawn again below."""
    bars = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    return contextlib.nullcontext() if bars is None else bars.external_write_mode(file=sys.stderr)
