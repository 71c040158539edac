"""``nanguard run``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanguard.cli.speech import fail, logging_to, stderr_console
from nanguard.records.layout import fitted, terminal_width
from nanguard.records.run import RUN_LOG

if TYPE_CHECKING:
    from nanguard.autopilot.entry import Autopilot
    from nanguard.autopilot.launch import LaunchedProgram
    from nanguard.hosted.settings import Settings
    from nanguard.incidents.bundle import CaptureLevel
    from nanguard.run_folder import RunFolder

EXAMPLES = (
    "nanguard run train.py --lr 3e-4",
    "nanguard run --halt-on-first -m mypackage.train",
    "nanguard run --trace --run-dir runs/a train.py",
    "torchrun --nproc-per-node 2 -m nanguard run train.py",
)

PARENT = Path("nanguard-runs")
"""The default folder of runs. Programs often use, list or clear a folder named ``runs``, so it has another name."""

CONTEXT = {"allow_interspersed_args": False, "ignore_unknown_options": False}

log = logging.getLogger("nanguard")


def _recipes(incomplete: str) -> list[str]:
    from nanguard.policy.policy import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The program to run. Its own arguments follow it.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Passed on unchanged.")] = None,
    is_module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as with python -m.")] = False,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The recipe for bad steps (default: skip them while the run makes progress).",
            autocompletion=_recipes,
        ),
    ] = None,
    max_norm: Annotated[float | None, typer.Option(help="Clip each parameter group to this gradient norm.")] = None,
    run_dir: Annotated[
        Path | None, typer.Option(file_okay=False, help="Where to write the run log (default: nanguard-runs/SCRIPT).")
    ] = None,
    keep_fp32: Annotated[
        list[str] | None, typer.Option(metavar="MODULE", help="Run this module in fp32. May be given several times.")
    ] = None,
    capture: Annotated[
        str,
        typer.Option(metavar="LEVEL", help="How much of a bad step to save: none, meta, batch, or full."),
    ] = "batch",
    trace: Annotated[bool, typer.Option("--trace", help="Trace every op from the first step on. Slow.")] = False,
    monitor: Annotated[bool, typer.Option("--monitor", help="Warn before something goes wrong.")] = False,
    notify: Annotated[
        str, typer.Option(metavar="COMMAND", help="Run this on the first incident of each kind, and on a halt.")
    ] = "",
    halt_on_first: Annotated[bool, typer.Option("--halt-on-first", help="Stop at the first bad step.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print one line, and only after incidents.")] = False,
) -> None:
    """Run an unchanged PyTorch program under the guard.

    A step with a non-finite loss or gradient never reaches weights, optimizer state or buffers. Its cause is printed to
    stderr. A healthy run gives the same results, bit for bit. Options of nanguard come before the script.

    Exits with the status of the program; 1 if training was halted, even if the program caught the error; 2 if the
    program cannot be found.
    """
    from nanguard.errors import LaunchError

    if policy is not None and halt_on_first:
        raise typer.BadParameter("--policy and --halt-on-first exclude each other: give only one of them")
    if max_norm is not None and not 0 < max_norm < float("inf"):
        raise typer.BadParameter(f"--max-norm must be a number above 0, got {max_norm}")
    try:
        from nanguard.autopilot.launch import LaunchedProgram

        program = LaunchedProgram(script, args or (), is_module=is_module)
        settings = _settings(program, policy, halt_on_first, max_norm, trace)
        place, kept = _place(run_dir, program.name), tuple(keep_fp32 or ())
        settings = dataclasses.replace(
            settings, run_dir=place, keep_fp32=kept, capture=_checked(capture), monitor=monitor, notify=notify
        )
    except LaunchError as error:
        fail(str(error), as_json=False)
    options = functools.partial(_options, settings, policy, halt_on_first, quiet)
    fly = functools.partial(_fly, program, settings, options, quiet)
    if isinstance(context.obj, list):
        context.obj.append(fly)  # run later: inside the command line app, exceptions of the program would be caught
    else:
        fly()


def _settings(
    program: LaunchedProgram, policy: str | None, halts: bool, max_norm: float | None, trace: bool
) -> Settings:
    from nanguard.hosted.settings import Settings, patient_policy
    from nanguard.policy.policy import Policy
    from nanguard.policy.rungs import Halt

    chosen = Policy([Halt()], divergence=None, max_norm=None) if halts else patient_policy()
    if policy is not None:
        try:
            chosen = Policy.recipe(policy)
        except ValueError as error:
            raise typer.BadParameter(f"--policy: {error}") from None
    settings = Settings(policy=chosen, max_norm=max_norm, trace=trace)
    return dataclasses.replace(settings, script=program.path, module=program.module, argv=program.args)


def _checked(capture: str) -> CaptureLevel:
    for level in ("none", "meta", "batch", "full"):
        if capture == level:
            return level
    raise typer.BadParameter(f"--capture must be none, meta, batch or full, got {capture!r}")


def _options(settings: Settings, policy: str | None, halts: bool, quiet: bool) -> list[str]:
    """The options for another rank of the same run. All ranks share the folder, so it is made now to fix its name."""
    folder = None
    if settings.run_dir is not None:
        with contextlib.suppress(OSError):  # the run log of this rank warns about it
            folder = settings.run_dir.make()
    given = {"--policy": policy, "--max-norm": settings.max_norm, "--run-dir": folder, "--capture": settings.capture}
    given["--notify"] = settings.notify or None
    flags = {"--trace": settings.trace, "--monitor": settings.monitor, "--halt-on-first": halts, "--quiet": quiet}
    values = [text for name, value in given.items() if value is not None for text in (name, str(value))]
    values += [text for name in settings.keep_fp32 for text in ("--keep-fp32", name)]
    return values + [name for name, is_given in flags.items() if is_given]


def _place(asked: Path | None, name: str) -> RunFolder | None:
    """The folder of the run, not made yet. None, with a warning, if nothing can be written there."""
    from nanguard.run_folder import RunFolder

    launch = os.environ.get("TORCHELASTIC_RUN_ID", "")
    name = "-".join(filter(None, (name, launch[:8] if launch != "none" else "")))
    path = (asked or PARENT / name).absolute()  # the program may change the working directory
    is_new = asked is None and not launch  # ranks of one launch share a folder
    places = path.parents if is_new else (path, *path.parents)
    there = next(folder for folder in places if folder.exists())
    if os.access(there, os.W_OK) and there.is_dir():
        return RunFolder(path, is_new=is_new)
    typer.echo(f"nanguard: cannot write to {there}, so there will be no run log", err=True)
    return None


def _fly(program: LaunchedProgram, settings: Settings, options: Callable[[], Sequence[str]], quiet: bool) -> None:
    from nanguard.autopilot.launch import WhenImported, is_first_rank
    from nanguard.autopilot.relaunch import Relaunch

    begun: list[Autopilot] = []
    process = os.getpid()

    def begin() -> None:
        from nanguard.autopilot import entry

        begun.append(entry.begin(settings))

    with logging_to(stderr_console(quiet=quiet), alone=True):
        waits, relaunch = WhenImported("torch", begin), Relaunch(program, options)
        left: SystemExit | None = None
        try:
            program.run()
        except SystemExit as leaves:
            left = leaves
        finally:
            waits.forget()
            relaunch.remove()
            if os.getpid() != process:
                pass  # a process that the program forked
            elif is_first_rank():
                _sum_up(begun[0] if begun else None, settings.run_dir, str(relaunch), quiet, left)
            elif begun:
                begun[0].uninstall()
    is_halted = os.getpid() == process and bool(begun) and begun[0].counts.get("halted", 0) > 0
    if is_halted and (left is None or left.code in (None, 0)):
        sys.exit(1)  # the program caught the error, or its last steps were halted
    if left is not None:
        raise left


def _sum_up(
    autopilot: Autopilot | None, folder: RunFolder | None, of_others: str, quiet: bool, leaves: SystemExit | None
) -> None:
    """Prints one line to stderr, and writes the report if there were incidents. Never raises.

    ``of_others`` tells of programs that were started and are not guarded. If it ``leaves``, the program called
    ``sys.exit()``.
    """
    try:
        told, incidents, where = "nothing to guard: torch was never imported", False, ""
        if autopilot is not None:
            from nanguard.autopilot.summary import sentence

            autopilot.end(leaves)
            unsound = autopilot.unsound()
            autopilot.uninstall()
            told, incidents = sentence(autopilot, unsound=unsound), bool(autopilot.incidents)
            has_log = folder is not None and folder.is_made and (folder.path / RUN_LOG).exists()
            where = _report(folder.path, incidents) if folder is not None and has_log else ""
        if (incidents or not quiet) and sys.stderr is not None:
            print(fitted(f"nanguard: {told}{of_others}{where}", terminal_width()), file=sys.stderr)
    except Exception:
        log.exception("the summary of the run could not be written")


def _report(run_dir: Path, is_worth_it: bool) -> str:
    from nanguard.errors import NanguardError
    from nanguard.run_folder import as_seen

    if not is_worth_it:
        return f"; run log {as_seen(run_dir / RUN_LOG)}"
    try:
        from nanguard.report.page import write_report

        return f"; report {as_seen(write_report([run_dir], run_dir / 'report.html'))}"
    except (ImportError, NanguardError, OSError) as error:
        log.info("no report: %s", error)
        return f"\n  nanguard explain {as_seen(run_dir)}"
