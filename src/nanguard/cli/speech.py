"""How the commands print errors and what the library logs."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import typer
from rich.console import Console

from nanguard.records.layout import above_bars, fitted
from nanguard.records.plain import plain
from nanguard.records.printable import printable as printable_line


def fail(why: str, *, as_json: bool) -> NoReturn:
    """Print why something could not be read or run, and exit with status 2."""
    if as_json:
        print_json({"schema": 1, "status": 2, "error": why})
    else:
        typer.echo(printable(why), err=True)
    raise typer.Exit(2)


def print_json(told: Mapping[str, Any]) -> None:
    """Print one JSON object. NaN and Inf, which JSON does not have, become strings."""
    typer.echo(json.dumps(plain(told), indent=2, allow_nan=False))


def printable(text: str) -> str:
    return "\n".join(map(printable_line, text.splitlines()))


def say(out: Console, text: str, *, style: str | None = None) -> None:
    """Print text, wrapped to the width of a terminal. If the output is not a terminal, lines are not wrapped."""
    out.print(fitted(text, out.width if out.is_terminal else None), markup=False, soft_wrap=True, style=style)


class _ConsoleHandler(logging.Handler):
    """Prints what the library logs, above a progress bar if there is one. Long lines are wrapped and indented."""

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
        whose = "" if message.startswith((" nanguard ", "end of the run: ")) else "nanguard: "
        try:
            with above_bars():
                for number, line in enumerate((whose + message).splitlines()):
                    text, style = fitted(line, self._console.width), "bold yellow" if number == 0 else None
                    self._console.print(text, style=style, markup=False, soft_wrap=True)
        except (OSError, ValueError):
            self._is_cut_off = True  # stderr is closed or a broken pipe: the program must go on


def stderr_console(*, quiet: bool = False) -> Console:
    """If stderr is not a terminal, lines are not wrapped, so that a file of them can be searched."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return Console(stderr=True, quiet=quiet, highlight=False, width=None if is_terminal else 10_000)


@contextlib.contextmanager
def logging_to(console: Console, *, alone: bool = False) -> Iterator[None]:
    """Inside, what the library logs goes to the console, and with ``alone`` only there."""
    log, handler = logging.getLogger("nanguard"), _ConsoleHandler(console)
    log.addHandler(handler)
    passes_on, log.propagate = log.propagate, log.propagate and not alone
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = passes_on
