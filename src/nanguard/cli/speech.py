"""How the commands speak: errors, and what the library logs."""

from __future__ import annotations

import contextlib
import json
import logging
import textwrap
from collections.abc import Iterator
from typing import NoReturn

import typer
from rich.console import Console


def fail(why: str, *, as_json: bool) -> NoReturn:
    """Something could not be read or run."""
    if as_json:
        typer.echo(json.dumps({"schema": 1, "status": 2, "error": why}, indent=2))
    else:
        typer.echo(printable(why), err=True)
    raise typer.Exit(2)


def printable(text: str) -> str:
    from nanguard.checkpoint.view import printable as printable_line

    return "\n".join(map(printable_line, text.splitlines()))


class _ConsoleHandler(logging.Handler):
    """Prints what the library logs, above a progress bar if there is one; long lines go on under their own text."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        for number, line in enumerate(record.getMessage().splitlines()):
            text = textwrap.fill(line, self._console.width, subsequent_indent=" " * 13, break_on_hyphens=False)
            self._console.print(text, style="bold yellow" if number == 0 else None, markup=False, soft_wrap=True)


@contextlib.contextmanager
def logging_to(console: Console) -> Iterator[None]:
    log, handler = logging.getLogger("nanguard"), _ConsoleHandler(console)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
