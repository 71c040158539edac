"""All commands. Each has its own file and imports heavy modules only when it is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import typer

import nanguard
from nanguard.cli import check, demo, doctor, explain, preflight, replay, report, run, watch

app = typer.Typer(name="nanguard", no_args_is_help=True, rich_markup_mode="rich")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nanguard {nanguard.__version__}")
        raise typer.Exit


def _examples(lines: Sequence[str]) -> str:
    return "\n\n".join(("Examples:", *lines))


def _unwrapped(function: Callable[..., None]) -> str:
    """The docstring with one line for each paragraph, to be wrapped to the width of the terminal."""
    return "\n\n".join(" ".join(part.split()) for part in (function.__doc__ or "").split("\n\n"))


@app.callback(epilog=_examples(("nanguard run train.py", "nanguard explain nanguard-runs/train", "nanguard demo")))
def _nanguard(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Keeps mixed-precision PyTorch training finite: a NaN or Inf never reaches weights or optimizer state."""


for command in (run, watch, report, explain, replay, check, doctor, preflight, demo):
    name = command.__name__.rpartition(".")[2]
    context = getattr(command, "CONTEXT", None)
    function = getattr(command, name)
    app.command(help=_unwrapped(function), epilog=_examples(command.EXAMPLES), context_settings=context)(function)


def main() -> None:
    """The entry point of the command ``nanguard``. A program is run after the command line app has returned."""
    programs: list[Callable[[], None]] = []
    try:
        app(prog_name="nanguard", obj=programs)
    except SystemExit:
        if not programs:
            raise
    for run_program in programs:
        run_program()
