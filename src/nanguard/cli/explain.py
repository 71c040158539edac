"""``nanguard explain``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nanguard.cli.speech import fail, printable

EXAMPLES = (
    "nanguard explain runs/a",
    "nanguard explain runs/a/incidents/0001",
    "nanguard explain runs/a --json",
)


def explain(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A run, one of its incidents, or an incident.json.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead, without the data.")] = False,
    brief: Annotated[bool, typer.Option("--brief", "-b", help="Print a few lines for each incident.")] = False,
) -> None:
    """Explain non-finite steps: what happened, where the value came from, why, and what to do.

    For a run, all incidents are listed, the last one in full. Incidents with the same fault are shown once, with a
    count. Never runs code from a file.

    Exits with status 0, or 2 if something could not be read.
    """
    from nanguard.errors import BundleError
    from nanguard.incidents.reader import load
    from nanguard.replay import explain as words

    out = Console(highlight=False)
    try:
        paths, is_run = words.find(path)
    except BundleError as error:
        fail(str(error), as_json=as_json)
    told, troubles, faults = [], [], words.RepeatedIncidents()
    for place in paths:
        try:
            bundle = load(place)
            if as_json:
                told.append(words.as_dict(bundle))
            words.short(bundle)
            faults.add(bundle)
        except BundleError as error:
            troubles.append(str(error))
    if as_json:
        wrong = {"error": "\n".join(troubles)} if troubles else {}
        report = {"schema": 1, "status": 2 if troubles else 0, **wrong, "incidents": told, "troubles": troubles}
        typer.echo(json.dumps(report, indent=2))
    else:
        parts, listed = [], faults.in_order()
        for fault in listed:
            try:
                in_full = fault is listed[-1] and not brief
                parts.append(fault.told(words.long(fault.newest) if in_full else words.short(fault.newest)))
            except BundleError as error:
                troubles.append(str(error))
        for part in parts:
            out.print(part, markup=False, soft_wrap=True, end="\n\n" if len(parts) > 1 else "\n")
        if not paths:
            out.print(words.nothing_in(path), markup=False, soft_wrap=True)
        elif is_run and len(paths) > 1:
            out.print(words.hint(paths, path), markup=False, soft_wrap=True, style="dim")
        for trouble in troubles:
            typer.echo(printable(trouble), err=True)
    raise typer.Exit(2 if troubles else 0)
