"""The command line. What is heavy is imported by the command that needs it."""

from __future__ import annotations

import contextlib
import logging
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import nanguard

app = typer.Typer(name="nanguard", no_args_is_help=True, add_completion=False, rich_markup_mode="rich")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nanguard {nanguard.__version__}")
        raise typer.Exit


@app.callback(epilog="Examples:\n\nnanguard demo\n\nnanguard demo --seed 3 --run-dir runs/third")
def _nanguard(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Keeps mixed-precision PyTorch training finite: a NaN or Inf never touches weights or optimizer state."""


@app.command(epilog="Examples:\n\nnanguard demo\n\nnanguard demo --steps 200 --quiet")
def demo(
    run_dir: Annotated[Path, typer.Option(file_okay=False, help="Where to write the run log.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of data and weights.")] = 0,
    steps: Annotated[int, typer.Option(min=8, help="How many steps each of the two runs takes.")] = 500,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the comparison only.")] = False,
) -> None:
    """Train a small net on data with two bad clips: it dies in a plain loop and finishes under the guard.

    Takes about 20 seconds on a CPU and downloads nothing. Ends with status 0 when it went that way, else 1.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        typer.echo(f"cannot write to --run-dir {run_dir}: {error.strerror}", err=True)
        raise typer.Exit(1) from None

    from nanguard.demo import main
    from nanguard.errors import NonFiniteError

    out, err = Console(highlight=False), Console(stderr=True, quiet=quiet, highlight=False)
    try:
        with _logging_to(err):
            status = main(seed=seed, steps=steps, run_dir=run_dir, out=out, err=err)
    except NonFiniteError as error:
        typer.echo(f"the guarded run halted: {error}", err=True)
        status = 1
    raise typer.Exit(status)


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
def _logging_to(console: Console) -> Iterator[None]:
    log, handler = logging.getLogger("nanguard"), _ConsoleHandler(console)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
