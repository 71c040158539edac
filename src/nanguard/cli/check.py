"""``nanguard check``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from nanguard.cli.speech import print_json, printable

EXAMPLES = (
    "nanguard check runs/*.pt",
    "nanguard check model.safetensors --allow '*.mask'",
    "find . -name '*.ckpt' | nanguard check --quiet -",
)


def check(
    paths: Annotated[
        list[str], typer.Argument(metavar="FILE", help="Files or folders; - reads their names from stdin.")
    ],
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Accept non-finite values in tensors with such a name."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="List every tensor.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print one line for each file.")] = False,
) -> None:
    """Check checkpoints for NaN and Inf, and list what else is unusual in them.

    Reads files of torch.save, safetensors and torch.distributed.checkpoint. Never runs code from a file.

    Exits with status 0 if everything is clean, 1 if there are non-finite values, 2 if something could not be read.
    """
    from nanguard.checkpoint import checker, view

    out, bar = Console(highlight=False), view.Bar(Console(stderr=True))
    reports = []
    for path in _listed_paths(paths):
        try:
            report = checker.check(path, allow=allow or (), progress=bar.tell)
        finally:
            bar.close()
        reports.append(report)
        if as_json:
            continue
        for file in report.files:
            out.print(view.verdict(file, why=quiet), soft_wrap=True)
            parts = [] if quiet else list(view.section(file, width=out.width, everything=everything))
            for part in parts:
                out.print(part, soft_wrap=isinstance(part, Text))
            if parts:
                out.print()
        if report.passed_over and not quiet:
            names = ", ".join(_named(report.passed_over))
            out.print(
                f"not checked: {printable(names)} (saved incidents, settings and random states)",
                markup=False,
                style="dim",
                soft_wrap=True,
            )
    files = [file for report in reports for file in report.files]
    status = max((report.status for report in reports), default=0)
    if as_json:
        told = [file.as_dict(everything=everything) for file in files]
        passed_over = [path for report in reports for path in report.passed_over]
        problems = [f"{file.path}: {problem}" for file in files for problem in file.problems]
        error = {"error": "\n".join(problems)} if status == 2 else {}
        whole = {"schema": 1, "status": status, **error, "files": told, "passed_over": passed_over}
        print_json(whole)
    elif len(files) > 1 and not quiet:
        out.print(view.summary(files))
    for pattern in allow or ():
        if not any(fnmatchcase(name, pattern) for file in files for name in file.names):
            typer.echo(f"--allow {pattern!r} matches no tensor", err=True)
    raise typer.Exit(status)


def _named(paths: Sequence[str]) -> list[str]:
    """The names of files, each with its count if it is above 1."""
    counts = Counter(Path(path).name for path in paths)
    return [name if count == 1 else f"{name} ({count:,} times)" for name, count in sorted(counts.items())]


def _listed_paths(paths: list[str]) -> Iterator[str]:
    """The paths; ``-`` is replaced by those on stdin, one per line or as ``find -print0`` writes them."""
    for path in paths:
        if path == "-":
            listed = typer.get_binary_stream("stdin").read()
            yield from (os.fsdecode(name) for name in listed.split(b"\0" if b"\0" in listed else b"\n") if name)
        else:
            yield path
