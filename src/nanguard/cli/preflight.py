"""``nanguard preflight``."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from nanguard.cli.speech import fail, print_json, say

if TYPE_CHECKING:
    from nanguard.replay.entry import BuiltProgram

EXAMPLES = (
    "nanguard preflight train.py:build",
    "nanguard preflight pkg.train:build --precision bf16 --minutes 10",
    "nanguard preflight train.py:build --json",
)

PrecisionName = Literal["auto", "fp32", "bf16", "fp16"]
PRECISIONS: tuple[PrecisionName, ...] = ("auto", "fp32", "bf16", "fp16")

_MOST_BATCHES = 16


def preflight(
    entry: Annotated[
        str, typer.Argument(metavar="FILE:FUNCTION", help="Builds the model: train.py:build or pkg.train:build.")
    ],
    precision: Annotated[
        str, typer.Option(help="What the run is trained in: fp32, bf16, fp16, or auto for the best of the device.")
    ] = "auto",
    no_loss_scale: Annotated[
        bool, typer.Option("--no-loss-scale", help="In fp16, do not scale the loss as a GradScaler does.")
    ] = False,
    minutes: Annotated[float, typer.Option(min=0.01, help="Stop after this time.")] = 3.0,
    run_dir: Annotated[Path, typer.Option(file_okay=False, help="The folder that findings are saved to.")] = Path(
        "nanguard-runs/preflight"
    ),
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seeds torch, and is passed to build(seed).")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Stress a model before a run, and list what breaks and what nearly breaks.

    build() or build(seed) returns (model, optimizer, batches, loss_fn), or a dict of these; loss_fn(model, batch)
    returns the loss. The first 16 batches are used. They should be healthy: what counts as a legal input is derived
    from them.

    Runs some steps in the wanted precision, then extreme but legal inputs, a learning rate that is ten times higher,
    and a search for inputs and weights that bring an operation to the edge of its domain. Each step that breaks is
    saved for nanguard replay.

    Exits with status 0 if nothing is found, 1 if something is, 2 if the program could not be run.
    """
    from nanguard.errors import ReplayError
    from nanguard.preflight_checks.flight import preflight as fly
    from nanguard.replay.entry import build, told
    from nanguard.run_folder import RunFolder
    from nanguard.step.precision import LossScale

    wanted = _checked(precision)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            program = build(entry, seed)
            batches = _batches(program, entry)
    except ReplayError as error:
        fail(str(error).removeprefix("--entry "), as_json=as_json)
    try:
        with contextlib.redirect_stdout(sys.stderr), _bar() as progress:
            report = fly(
                program.model,
                program.loss_fn or _no_loss(entry, as_json),
                batches[0],
                program.optimizer,
                more_batches=batches[1:],
                precision=wanted,
                loss_scale=None if no_loss_scale else LossScale(),
                minutes=minutes,
                run_dir=RunFolder(run_dir, is_new=True),
                progress=progress,
            )
    except Exception as error:
        fail(f"{entry}: the step cannot be run: {told(error)}", as_json=as_json)
    report = report.with_entry(entry)
    if as_json:
        print_json(report.as_dict())
    else:
        say(Console(highlight=False), str(report))
    raise typer.Exit(report.status)


def _checked(precision: str) -> PrecisionName:
    for name in PRECISIONS:
        if precision == name:
            return name
    raise typer.BadParameter(f"--precision must be auto, fp32, bf16 or fp16, got {precision!r}")


def _batches(program: BuiltProgram, entry: str) -> list[Any]:
    from nanguard.errors import ReplayError
    from nanguard.replay.entry import told

    if program.batches is None:
        raise ReplayError(f"{entry}: it returns no batches; let it return (model, optimizer, batches, loss_fn)")
    try:
        batches = list(itertools.islice(iter(program.batches), _MOST_BATCHES))
    except Exception as error:
        raise ReplayError(f"{entry}: the batches raised {told(error)}") from error
    if not batches:
        raise ReplayError(f"{entry}: there are no batches")
    return batches


def _no_loss(entry: str, as_json: bool) -> Callable[[Any, Any], Any]:
    fail(f"{entry}: it returns only a model; let it return (model, optimizer, batches, loss_fn)", as_json=as_json)


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[str, float], None]]:
    """A progress bar on stderr. Nothing if stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("preflight", total=1.0)
        yield lambda words, share: bar.update(task, description=words, completed=share)
