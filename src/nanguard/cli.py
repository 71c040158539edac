"""The command line. What is heavy is imported by the command that needs it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import textwrap
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

import nanguard

app = typer.Typer(name="nanguard", no_args_is_help=True, add_completion=False, rich_markup_mode="rich")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nanguard {nanguard.__version__}")
        raise typer.Exit


@app.callback(epilog="Examples:\n\nnanguard demo\n\nnanguard check checkpoint.pt\n\nnanguard check --help")
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


@app.command(
    epilog="Examples:\n\nnanguard check runs/*.pt\n\nnanguard check model.safetensors --allow '*.mask'\n\n"
    "find . -name '*.ckpt' | nanguard check --quiet -"
)
def check(
    paths: Annotated[
        list[str], typer.Argument(metavar="FILE", help="Files or folders; - takes their names from stdin.")
    ],
    allow: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Accept non-finite values in tensors of this name.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="List every tensor.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print one line for each file.")] = False,
) -> None:
    """Say whether checkpoints are clean: which tensors hold NaN or Inf, and what else is odd about them.

    Reads what torch.save, safetensors and torch.distributed.checkpoint write, and runs nothing that a file holds.

    Ends with status 0 if all is clean, 1 if there are non-finite values, 2 if something could not be read.
    """
    from nanguard.checkpoint import checker, view

    out, bar = Console(highlight=False), view.Bar(Console(stderr=True))
    reports = []
    for path in _listed_paths(paths):
        try:
            report = checker.check(path, allow=allow or (), progress=bar.tell)
        finally:
            bar.close()
        reports.append(report)
        if as_json:
            continue
        for file in report.files:
            out.print(view.verdict(file, why=quiet), soft_wrap=True)
            parts = [] if quiet else list(view.section(file, width=out.width, everything=everything))
            for part in parts:
                out.print(part, soft_wrap=isinstance(part, Text))
            if parts:
                out.print()
        if report.passed_over and not quiet:
            names = ", ".join(sorted({Path(name).name for name in report.passed_over}))
            out.print(f"passed over: {view.printable(names)} (settings and random states)", markup=False, style="dim")
    files = [file for report in reports for file in report.files]
    status = max((report.status for report in reports), default=0)
    if as_json:
        told = [file.as_dict(everything=everything) for file in files]
        passed_over = [path for report in reports for path in report.passed_over]
        typer.echo(json.dumps({"schema": 1, "status": status, "files": told, "passed_over": passed_over}, indent=2))
    elif len(files) > 1 and not quiet:
        out.print(view.summary(files))
    for pattern in allow or ():
        if not any(fnmatchcase(name, pattern) for file in files for name in file.names):
            typer.echo(f"--allow {pattern!r} matches no tensor", err=True)
    raise typer.Exit(status)


def _listed_paths(paths: list[str]) -> Iterator[str]:
    """The paths, with those on stdin in the place of ``-``: one a line, or as ``find -print0`` writes them."""
    for path in paths:
        if path == "-":
            listed = typer.get_binary_stream("stdin").read()
            yield from (os.fsdecode(name) for name in listed.split(b"\0" if b"\0" in listed else b"\n") if name)
        else:
            yield path


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
