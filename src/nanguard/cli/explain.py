"""``nanguard explain``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from nanguard.cli.speech import fail, print_json, printable, say

if TYPE_CHECKING:
    from nanguard.incidents.reader import Bundle

EXAMPLES = (
    "nanguard explain",
    "nanguard explain runs/a",
    "nanguard explain runs/a/incidents/0001",
    "nanguard explain runs/a --json",
)


def explain(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH",
            help="A run, one of its incidents, or a folder of runs. If not given, the newest run.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead, without the data.")] = False,
    brief: Annotated[bool, typer.Option("--brief", "-b", help="Print a few lines for each fault.")] = False,
) -> None:
    """Explain non-finite steps: what happened, where the value came from, why, and what to do.

    For a run, the first well-explained incident is shown in full, and the others are listed. Incidents with the
    same fault are shown once, with a count and everything that was done about them. The runs in a folder are listed.
    Without PATH, the newest run in runs/ or nanguard-runs/ is taken. Never runs code from a file.

    Exits with status 0, or 2 if something could not be read.
    """
    from nanguard.errors import BundleError
    from nanguard.replay import explain as words
    from nanguard.replay import runs

    out = Console(highlight=False)
    try:
        asked, path = path, runs.newest_run() if path is None else path
        if listed := [] if words.is_one(path) else runs.runs_in(path):
            _list(listed, as_json)
        paths, is_run = words.find(path)
        nothing = "" if paths else words.nothing_in(path)
    except BundleError as error:
        fail(str(error), as_json=as_json)
    bundles, troubles = _read(paths)
    if as_json:
        wrong = {"error": "\n".join(troubles)} if troubles else {}
        told = [words.as_dict(bundle) for bundle in bundles]
        status = 2 if troubles else 0
        print_json({"schema": 1, "status": status, **wrong, "incidents": told, "troubles": troubles})
    else:
        if asked is None:
            say(out, f"{path}, the newest run", style="dim")
        if nothing:
            say(out, nothing)
            other = runs.newest_with_incidents() if asked is None else None
            if other is not None:
                say(out, f"the newest run with incidents:\n  {runs.command(other)}")
        for part in words.about(bundles, path if is_run else None, brief=brief):
            say(out, part)
        for trouble in troubles:
            typer.echo(printable(trouble), err=True)
    raise typer.Exit(2 if troubles else 0)


def _read(paths: Sequence[Path]) -> tuple[list[Bundle], list[str]]:
    """The incidents that can be read and described, and why others cannot."""
    from nanguard.errors import BundleError
    from nanguard.incidents.reader import load
    from nanguard.replay import explain as words

    bundles, troubles = [], []
    for place in paths:
        try:
            bundle = load(place)
            words.short(bundle)
            bundles.append(bundle)
        except BundleError as error:
            troubles.append(str(error))
    return bundles, troubles


def _list(found: Sequence[Path], as_json: bool) -> NoReturn:
    from nanguard.incidents.bundle import folders
    from nanguard.replay import runs

    if as_json:
        print_json({"schema": 1, "status": 0, "runs": [str(run) for run in found]})
    else:
        out = Console(highlight=False)
        for run in found:
            say(out, runs.in_one_line(run))
        with_incidents = [run for run in found if folders(run)]
        say(out, f"for one of them:\n  {runs.command((with_incidents or found)[-1])}", style="dim")
    raise typer.Exit(0)
