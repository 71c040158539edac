"""``nanguard demo``."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nanguard.cli.speech import fail, logging_to, print_json

EXAMPLES = (
    "nanguard demo",
    "nanguard demo --seed 1 --run-dir nanguard-runs/another",
    "nanguard demo --quiet --json",
)


def demo(
    run_dir: Annotated[
        Path, typer.Option(file_okay=False, help="Folder to write to. If it is not empty, a number is added.")
    ] = Path("nanguard-runs/demo"),
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed for data and weights.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps of each of the two runs.")] = 600,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the comparison.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the comparison.")] = False,
) -> None:
    """Train a small GPT in fp16 twice: it fails in a plain loop with a GradScaler and finishes with the guard.

    Takes about a minute on two CPU cores and downloads nothing. The same seed gives the same numbers.

    Exits with status 0 if both happened, 1 if not (about 300 steps are needed), 2 if the folder cannot be written.
    """
    try:
        run_dir = _new_folder(run_dir)
    except OSError as error:
        fail(f"cannot write to --run-dir {run_dir}: {error.strerror or error}", as_json=as_json)

    from nanguard.demo import show
    from nanguard.errors import NonFiniteError

    out, err = Console(highlight=False), Console(stderr=True, quiet=quiet, highlight=False)
    if not quiet and not as_json:
        show.introduce(out)
    try:
        with logging_to(err):
            comparison = show.compare(seed=seed, steps=steps, run_dir=run_dir, err=err)
    except NonFiniteError as error:
        typer.echo(f"the guarded run halted: {error}", err=True)
        if as_json:
            print_json({"schema": 1, "status": 1, "error": str(error)})
        raise typer.Exit(1) from None
    if as_json:
        print_json(comparison.as_dict())
    else:
        show.conclude(comparison, out)
    raise typer.Exit(comparison.status)


def _new_folder(wanted: Path) -> Path:
    """This folder if it is new or empty, else the next free numbered one: two runs never share a log."""
    if wanted.name in ("", ".."):
        wanted = wanted.resolve()
    beside = (wanted.parent / f"{wanted.name or 'demo'}-{number}" for number in itertools.count(2))
    for folder in itertools.chain([wanted], beside):
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            return folder
    raise AssertionError("there is always a next number")
