"""``nanguard replay``."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from nanguard.cli.speech import fail, print_json, printable, say

if TYPE_CHECKING:
    from nanguard.incidents.reader import Bundle
    from nanguard.replay.entry import BuiltProgram

EXAMPLES = (
    "nanguard replay nanguard-runs/train --pdb",
    "nanguard replay runs/a/incidents/0001 --entry train.py:build",
)


def replay(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH",
            help="An incident, or a run: then the incident that explain leads with. If not given, the newest run "
            "with incidents.",
            show_default=False,
        ),
    ] = None,
    entry: Annotated[
        str | None, typer.Option(metavar="FILE:FUNCTION", help="Builds the model: train.py:build or pkg.train:build.")
    ] = None,
    pdb: Annotated[bool, typer.Option("--pdb", help="Stop in the debugger at the first bad value.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seeds torch, and is passed to build(seed).")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Run a non-finite step again, with the same data, random states and precision.

    An incident of nanguard run needs no --entry: the program itself is run until it calls its model in that step. Then
    the saved calls of the step are made again, those of the model and those around it, as in a hand-written loss. If
    the weights were saved (--capture full), the first call of the model is enough.

    With --entry, build() or build(seed) returns (model, loss_fn), (model, optimizer, loss_fn), (model, optimizer,
    batches, loss_fn), or a dict of these; loss_fn(model, batch) returns the loss. For an incident of nanguard run,
    build may return the model alone. Weights are taken from the incident if it has them.

    Exits with status 0 if the result is the same (cause, op and module), 1 if not, 2 if the step could not be run.
    """
    from nanguard.errors import NanguardError
    from nanguard.replay import explain as words
    from nanguard.replay import rerun, runs
    from nanguard.replay.debugger import debug
    from nanguard.replay.entry import build

    out = Console(highlight=False)
    try:
        bundle = words.read(path or runs.newest_with_incidents() or runs.newest_run())
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            stage = rerun.prepare(bundle, _found(bundle) if entry is None else build(entry, seed))
            replayed = rerun.replay(stage)
            if pdb and replayed.diagnosis is not None:
                typer.echo(words.outcome(replayed, bundle), err=as_json)
                if not debug(stage, replayed.diagnosis, lambda text: typer.echo(f"\n{text}", err=as_json)):
                    typer.echo("no line of the program was found to stop at", err=True)
    except NanguardError as error:
        fail(str(error), as_json=as_json)
    if as_json:
        print_json({"schema": 1, "path": str(bundle.path), **replayed.as_dict()})
    elif not pdb or replayed.diagnosis is None:
        say(out, words.outcome(replayed, bundle))
    raise typer.Exit(replayed.status)


def _found(bundle: Bundle) -> BuiltProgram:
    """The model of the program that nanguard run has run. Prints which program that is before it is run."""
    from nanguard.replay.program import from_program, program_of

    program = program_of(bundle)
    typer.echo(printable(str(program)), err=True)
    return from_program(bundle, program)
