"""How the commands speak: errors, and what the library logs."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
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
    from nanguard.records.printable import printable as printable_line

    return "\n".join(map(printable_line, text.splitlines()))


class _ConsoleHandler(logging.Handler):
    """Prints what the library logs, above a progress bar if there is one; long lines go on under their own text."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console
        self._is_cut_off = False

    def emit(self, record: logging.LogRecord) -> None:
        if self._is_cut_off:
            return
        message = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            message += f" ({type(error).__name__}: {error})"
        whose = "" if message.startswith(" nanguard ") else "nanguard: "
        try:
            for number, line in enumerate((whose + message).splitlines()):
                text = textwrap.fill(line, self._console.width, subsequent_indent=" " * 13, break_on_hyphens=False)
                self._console.print(text, style="bold yellow" if number == 0 else None, markup=False, soft_wrap=True)
        except (OSError, ValueError):
            self._is_cut_off = True  # stderr was closed, or nobody reads it: no reason for a program to end


def stderr_console(*, quiet: bool = False) -> Console:
    """Where it is no terminal, lines are not broken: they are for a file or a search."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return Console(stderr=True, quiet=quiet, highlight=False, width=None if is_terminal else 10_000)


@contextlib.contextmanager
def logging_to(console: Console, *, alone: bool = False) -> Iterator[None]:
    """What the library logs goes to the console, and with ``alone`` nowhere else."""
    log, handler = logging.getLogger("nanguard"), _ConsoleHandler(console)
    log.addHandler(handler)
    passes_on, log.propagate = log.propagate, log.propagate and not alone
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = passes_on
