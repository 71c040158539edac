"""Finds runs: the newest one, and those in a folder."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanguard.errors import BundleError, RunLogError
from nanguard.incidents.bundle import folders
from nanguard.incidents.reader import Bundle
from nanguard.records.printable import printable
from nanguard.records.run import RUN_LOG
from nanguard.records.words import counted
from nanguard.runlog.reader import read_run

PARENTS = ("runs", "nanguard-runs")
"""Where runs usually are: as in the documentation, and by default of ``nanguard run``."""


def newest_run() -> Path:
    """The run in ``runs/`` or ``nanguard-runs/`` that was written to last. Raises ``BundleError`` if there is none."""
    found = [run for parent in PARENTS for run in runs_in(Path(parent))]
    if not found:
        where = " nor in ".join(f"{parent}/" for parent in PARENTS)
        raise BundleError(f"there is no run in {where}: give the path of a run")
    return max(found, key=_written)


def newest_with_incidents() -> Path | None:
    """As ``newest_run``, of the runs with saved incidents; None if there are none."""
    found = [run for parent in PARENTS for run in runs_in(Path(parent)) if folders(run)]
    return max(found, key=_written, default=None)


def runs_in(folder: Path) -> list[Path]:
    """The runs in a folder, also those one folder deeper, the one that was written to last at the end."""
    try:
        inside = [path for path in folder.iterdir() if path.is_dir()]
        deeper = [path for each in inside if not _is_run(each) for path in each.iterdir() if path.is_dir()]
        return sorted((path for path in (*inside, *deeper) if _is_run(path)), key=_written)
    except OSError:
        return []


def in_one_line(run: Path) -> str:
    """The name of a run, its steps and its incidents."""
    num_saved = len(folders(run))
    try:
        log = read_run(run)
    except RunLogError as error:
        return f"{run}   {num_saved:,} saved incidents; its log cannot be read: {printable(str(error))}"
    steps = sum({record.optimizer: record.step + 1 for record in log.steps}.values())
    causes = list(dict.fromkeys(each.diagnosis.words for each in log.incidents if each.diagnosis is not None))
    more = " and more" if len(causes) > 3 else ""
    told = f": {'; '.join(causes[:3])}{more}" if causes else ""
    return printable(f"{run}   {counted(steps, 'step')}, {counted(len(log.incidents), 'incident')}{told}")


def header_of(bundle: Bundle) -> Mapping[str, Any]:
    """The header of the log of an incident's run. Empty if there is no log."""
    try:
        return read_run(bundle.path.resolve().parent.parent).header
    except RunLogError:
        return {}


def command(run: Path) -> str:
    """The command that explains a run."""
    return f"nanguard explain {shlex.quote(str(run))}"


def _is_run(path: Path) -> bool:
    return (path / RUN_LOG).is_file() or (path / "incidents").is_dir()


def _written(path: Path) -> float:
    times = [file.stat().st_mtime for file in (path / RUN_LOG, path / "incidents") if file.exists()]
    return max(times, default=0.0)
