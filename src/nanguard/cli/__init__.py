"""The command line. Each command has a file of its own, and imports what is heavy when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

import nanguard
from nanguard.cli import check, demo, explain, replay

app = typer.Typer(name="nanguard", no_args_is_help=True, rich_markup_mode="rich")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nanguard {nanguard.__version__}")
        raise typer.Exit


def _examples(lines: Sequence[str]) -> str:
    return "\n\n".join(("Examples:", *lines))


@app.callback(epilog=_examples(("nanguard demo", "nanguard check checkpoint.pt", "nanguard explain runs/a")))
def _nanguard(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Keeps mixed-precision PyTorch training finite: a NaN or Inf never touches weights or optimizer state."""


for command in (demo, check, explain, replay):
    app.command(epilog=_examples(command.EXAMPLES))(getattr(command, command.__name__.rpartition(".")[2]))
