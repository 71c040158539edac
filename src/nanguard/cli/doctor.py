"""``nanguard doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nanguard.cli.speech import fail, print_json

EXAMPLES = (
    "nanguard doctor",
    "nanguard doctor train.py",
    "nanguard doctor train.py --json",
)


def doctor(
    script: Annotated[
        Path | None, typer.Argument(metavar="SCRIPT", help="A program to check. It is read, never run.")
    ] = None,
    run_dir: Annotated[Path, typer.Option(file_okay=False, help="The folder that runs will be written to.")] = Path(
        "nanguard-runs"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Check this machine, and a program if one is given, and list what to change.

    Reports only what is certain about a program: half precision, loss scaling, clipping, losses and order of calls.

    Exits with status 0 if there is nothing to change, 1 if there is, 2 if the program could not be read.
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
        print_json(checkup.as_dict())
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
