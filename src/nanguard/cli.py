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
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

import nanguard

app = typer.Typer(name="nanguard", no_args_is_help=True, add_completion=False, rich_markup_mode="rich")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nanguard {nanguard.__version__}")
        raise typer.Exit


@app.callback(epilog="Examples:\n\nnanguard demo\n\nnanguard check checkpoint.pt\n\nnanguard explain runs/a")
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


@app.command(
    epilog="Examples:\n\nnanguard explain runs/a\n\nnanguard explain runs/a/incidents/0001\n\n"
    "nanguard explain runs/a --json"
)
def explain(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A run, an incident of one, or its incident.json.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead, without the data.")] = False,
    brief: Annotated[bool, typer.Option("--brief", "-b", help="Print a few lines of each.")] = False,
) -> None:
    """Say what happened in a step that was not finite: where it came from, why, and what to do about it.

    Of a run all incidents are listed, the last one in full. Runs nothing that a file holds.

    Ends with status 0, or 2 if something could not be read.
    """
    from nanguard.errors import BundleError
    from nanguard.incident import explain as words
    from nanguard.incident.reader import load

    out = Console(highlight=False)
    try:
        paths, is_run = words.find(path)
    except BundleError as error:
        _fail(str(error), as_json=as_json)
    told, parts, troubles = [], [], []
    for place in paths:
        try:
            bundle = load(place)
            told.append(words.as_dict(bundle))
            in_full = not brief and place == paths[-1] and not as_json
            parts.append(words.long(bundle) if in_full else words.short(bundle))
        except BundleError as error:
            troubles.append(str(error))
    if as_json:
        report = {"schema": 1, "status": 2 if troubles else 0, "incidents": told, "troubles": troubles}
        typer.echo(json.dumps(report, indent=2))
    else:
        for part in parts:
            out.print(part, markup=False, soft_wrap=True, end="\n\n" if len(parts) > 1 else "\n")
        if not paths:
            out.print(words.nothing_in(path), markup=False, soft_wrap=True)
        elif is_run and len(paths) > 1:
            out.print(words.hint(paths, path), markup=False, soft_wrap=True, style="dim")
        for trouble in troubles:
            typer.echo(_printable(trouble), err=True)
    raise typer.Exit(2 if troubles else 0)


@app.command(
    epilog="Examples:\n\nnanguard replay runs/a/incidents/0001 --entry train:build\n\n"
    "nanguard replay runs/a --entry path/to/train.py:build --pdb"
)
def replay(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="An incident, or a run: then its last one.")],
    entry: Annotated[
        str, typer.Option(metavar="MODULE:FUNCTION", help="What builds the model: pkg.module:build or file.py:build.")
    ],
    pdb: Annotated[bool, typer.Option("--pdb", help="Stop in the debugger where the value is born.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seeds torch, and goes to build(seed).")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Run a step that was not finite again, with the data, random states and precision it had.

    build() or build(seed) returns (model, loss_fn), (model, optimizer, loss_fn), (model, optimizer, batches, loss_fn),
    or a dict of these; loss_fn(model, batch) returns the loss. Weights are taken from the incident where it has them.

    Ends with status 0 if the same was found (cause, op and module), 1 if not, 2 if it could not be run.
    """
    import sys

    from nanguard.errors import NanguardError
    from nanguard.incident import explain as words
    from nanguard.incident import rerun
    from nanguard.incident.entry import build
    from nanguard.incident.stop import debug

    out = Console(highlight=False)
    try:
        bundle = words.read(path)
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            stage = rerun.prepare(bundle, build(entry, seed))
            replayed = rerun.replay(stage)
            if pdb and replayed.diagnosis is not None:
                typer.echo(words.outcome(replayed, bundle), err=as_json)
                if not debug(stage, replayed.diagnosis, lambda text: typer.echo(f"\n{text}", err=as_json)):
                    typer.echo("there is no line of the program to stop at", err=True)
    except NanguardError as error:
        _fail(str(error), as_json=as_json)
    if as_json:
        from nanguard.runlog import plain

        typer.echo(json.dumps({"schema": 1, "path": str(bundle.path), **plain(replayed.as_dict())}, indent=2))
    elif not pdb or replayed.diagnosis is None:
        out.print(words.outcome(replayed, bundle), markup=False, soft_wrap=True)
    raise typer.Exit(replayed.status)


def _fail(why: str, *, as_json: bool) -> NoReturn:
    """Something could not be read or run."""
    if as_json:
        typer.echo(json.dumps({"schema": 1, "status": 2, "error": why}, indent=2))
    else:
        typer.echo(_printable(why), err=True)
    raise typer.Exit(2)


def _printable(text: str) -> str:
    from nanguard.checkpoint.view import printable

    return "\n".join(map(printable, text.splitlines()))


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
