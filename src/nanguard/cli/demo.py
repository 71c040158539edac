"""``nanguard demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nanguard.cli.speech import logging_to

EXAMPLES = (
    "nanguard demo",
    "nanguard demo --steps 200 --quiet",
)


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
        with logging_to(err):
            status = main(seed=seed, steps=steps, run_dir=run_dir, out=out, err=err)
    except NonFiniteError as error:
        typer.echo(f"the guarded run halted: {error}", err=True)
        status = 1
    raise typer.Exit(status)
