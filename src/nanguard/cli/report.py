"""``nanguard report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nanguard.cli.speech import fail, print_json, printable, say

EXAMPLES = (
    "nanguard report runs/a --open",
    "nanguard report runs/a runs/b --out both.html",
    "nanguard report runs/a --json",
)


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN...",
            help="Folders of runs, or their run.jsonl. If not given, the newest run.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="File to write (default: RUN/report.html).")
    ] = None,
    in_browser: Annotated[bool, typer.Option("--open", help="Open the report in the browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Write one HTML page about one or more runs: what happened, where, why, and what to do.

    The page needs no other files and no network. Several runs share the charts. Never runs code from a file.

    Exits with status 0, or 2 if something could not be read or written.
    """
    from nanguard.errors import NanguardError
    from nanguard.replay.runs import newest_run
    from nanguard.report import page
    from nanguard.report.html.prose import as_dict, plain_summary

    try:
        runs = runs or [newest_run()]
        place = out or (runs[0] if runs[0].is_dir() else runs[0].parent) / "report.html"
        made = page.make_report(runs)
        written = page.write(made, place)
    except NanguardError as error:
        fail(str(error), as_json=as_json)
    if as_json:
        told = [as_dict(story) for story in made.stories]
        status = 2 if made.troubles else 0
        wrong = {"error": "\n".join(made.troubles)} if made.troubles else {}
        whole = {"schema": 1, "status": status, **wrong, "report": str(written), "runs": told}
        print_json({**whole, "troubles": made.troubles})
    else:
        console = Console(highlight=False)
        for story in made.stories:
            name = f"{story.label}: " if len(made.stories) > 1 else ""
            say(console, printable(f"{name}{plain_summary(story)}"))
        say(console, printable(str(written)))
        for trouble in made.troubles:
            typer.echo(printable(trouble), err=True)
    if in_browser:
        import webbrowser

        webbrowser.open(written.resolve().as_uri())
    raise typer.Exit(2 if made.troubles else 0)
