"""``nanguard watch``."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanguard.cli.speech import fail, print_json, printable

if TYPE_CHECKING:
    from rich.console import Console

    from nanguard.records.run import Run
    from nanguard.runlog.follow import Follower

EXAMPLES = (
    "nanguard watch runs/a",
    "nanguard watch runs/a --once",
    "nanguard watch runs/a --json",
    "ssh host nanguard watch runs/a | tee watch.txt",
)

_OVER = {"ended": 0, "halted": 1, "gone": 1}
_LONGEST_NAP = 1.0


def watch(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN",
            help="The folder of a run, or its run.jsonl. If not given, the newest run.",
            show_default=False,
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one view and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and exit.")] = False,
    interval: Annotated[
        float | None,
        typer.Option(min=0.05, max=3600, metavar="SECONDS", help="Time between two views (default: 1, in a pipe 10)."),
    ] = None,
) -> None:
    """Show the progress of a run: step and rate, loss and norms, and incidents as they happen.

    Waits for a run that has not started, and exits when the run ends. In a
    pipe, prints a line for each incident and a status line at intervals.

    Exits with status 0 if the run has ended, 1 if it halted or its process is
    gone, 2 if the log cannot be read, 130 after Ctrl-C. With --once or --json
    the status is the same, and 0 for a run that is still running.
    """
    from rich.console import Console

    from nanguard.errors import NanguardError
    from nanguard.replay.runs import newest_run
    from nanguard.runlog.follow import Follower
    from nanguard.runlog.reader import read_run

    out = Console(highlight=False)
    try:
        path = path or newest_run()
        if as_json:
            status = _print_json(read_run(path))
        elif once:
            status = _print_once(read_run(path), out)
        elif _can_be_drawn_on(out):
            status = _draw(Follower(path), str(path), out, interval or 1.0)
        else:
            status = _print_lines(Follower(path), str(path), interval or 10.0)
    except NanguardError as error:
        fail(str(error), as_json=as_json)
    except KeyboardInterrupt:
        status = 130
    raise typer.Exit(status)


def _can_be_drawn_on(out: Console) -> bool:
    """Whether stdout is a terminal that understands control codes. Forced colour in a pipe does not count."""
    return sys.stdout.isatty() and out.is_terminal and not out.is_dumb_terminal


def _print_json(run: Run) -> int:
    from nanguard.report import glance

    told = glance.as_dict(run, time.time())
    status = _OVER.get(told["state"], 0)
    print_json({"schema": 1, "status": status, **told})
    return status


def _print_once(run: Run, out: Console) -> int:
    from nanguard.report import glance
    from nanguard.report.watch import view

    now = time.time()
    height = len(run.incidents) + len(run.events) + 100
    out.print(view(run, now, width=out.width, height=height, ascii_only=out.options.ascii_only), soft_wrap=True)
    return _OVER.get(glance.state_of(run, now), 0)


def _draw(follower: Follower, path: str, out: Console, interval: float) -> int:
    """Redraws the view until the run is over. The last view stays on the screen."""
    from rich.live import Live

    from nanguard.report import glance
    from nanguard.report.watch import view, waiting

    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            follower.poll()
            now = time.time()
            run = follower.tape.run() if follower.is_there else None
            state = None if run is None else glance.state_of(run, now)
            room = {"width": out.width, "height": max(1, out.height - 1)}
            shown = waiting(path) if run is None else view(run, now, **room, ascii_only=out.options.ascii_only)
            live.update(shown, refresh=True)
            if state in _OVER:
                return _OVER[state]
            time.sleep(interval)


def _print_lines(follower: Follower, path: str, interval: float) -> int:
    """Prints plain lines: one for each incident, and a status line at intervals."""
    from nanguard.report import glance
    from nanguard.report.watch import incident_line, status_line, waiting

    told, next_line, first = 0, 0.0, True
    while True:
        follower.poll()
        now = time.time()
        if not follower.is_there:
            if first:
                _say(waiting(path).plain.strip())
            first = False
            time.sleep(min(interval, _LONGEST_NAP))
            continue
        run = follower.tape.run()
        told = told if told <= len(run.incidents) else 0  # the log was started again
        for incident in run.incidents[told:]:
            _say(incident_line(incident))
        told = len(run.incidents)
        state = glance.state_of(run, now)
        if time.monotonic() >= next_line or state in _OVER:
            next_line = time.monotonic() + interval
            _say(status_line(run, now))
        if state in _OVER:
            return _OVER[state]
        time.sleep(min(interval, _LONGEST_NAP))


def _say(line: str) -> None:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(printable(line).encode(encoding, "backslashreplace").decode(encoding), flush=True)
