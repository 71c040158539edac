"""``nanguard doctor``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nanguard.cli.speech import fail

EXAMPLES = (
    "nanguard doctor",
    "nanguard doctor train.py",
    "nanguard doctor train.py --json",
)


def doctor(
    script: Annotated[
        Path | None, typer.Argument(metavar="SCRIPT", help="A program to look at. It is read, never run.")
    ] = None,
    run_dir: Annotated[Path, typer.Option(file_okay=False, help="Where runs are going to be written.")] = Path(
        "nanguard-runs"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Look at the machine, and at a program if one is given, and say what to change.

    Of a program only what is certain is said: half precision, loss scaling, clipping, losses, and order of calls.

    Ends with status 0 if there is nothing to change, 1 if there is, 2 if it could not look.
    """
    from nanguard.checkup import machine, rules, view
    from nanguard.checkup.record import Checkup
    from nanguard.checkup.script import Script
    from nanguard.errors import ScriptError

    try:
        seen = [] if script is None else rules.examine(Script.read(script))
    except ScriptError as error:
        fail(str(error), as_json=as_json)
    facts, findings = machine.look(run_dir)
    told = None if script is None else str(script)
    checkup = Checkup(facts=tuple(facts), findings=(*findings, *seen), script=told)
    if as_json:
        typer.echo(json.dumps(checkup.as_dict(), indent=2))
        raise typer.Exit(checkup.status)
    out = Console(highlight=False)
    out.print(view.facts_table(checkup.facts))
    for finding in checkup.findings:
        out.print()
        for line in view.finding_lines(finding, out.width):
            out.print(line, soft_wrap=True)
    out.print()
    if told is not None and findings and not seen:
        out.print(view.sound_script(told), soft_wrap=True)
    out.print(view.summary(checkup), soft_wrap=True)
    raise typer.Exit(checkup.status)
