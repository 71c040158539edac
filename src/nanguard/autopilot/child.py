"""A process that the program starts with ``multiprocessing``: its function runs guarded, and its counts come back."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanguard.hosted.settings import Settings
from nanguard.records.words import joined
from nanguard.run_folder import RunFolder, as_seen

log = logging.getLogger("nanguard")


class GuardedTarget:
    """In the place of the function that the process runs. It can be pickled if that one can.

    ``results`` is a folder: each process leaves one file with its counts there.
    """

    def __init__(self, target: Callable[..., Any], settings: Settings, results: str) -> None:
        self._target, self._settings, self._results = target, settings, results

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from nanguard.autopilot.entry import begin_in_child

        autopilot = begin_in_child(_for_child(self._settings))
        try:
            return self._target(*args, **kwargs)
        finally:
            if autopilot is not None:
                autopilot.end()
                unsound = autopilot.unsound()
                autopilot.uninstall()
                if autopilot.num_optimizers:
                    counts = {**autopilot.counts, "incidents": len(autopilot.incidents), "unsound": len(unsound or ())}
                    folder = autopilot.settings.run_dir
                    told = {"counts": counts, "run": str(folder.path) if folder is not None and folder.is_made else ""}
                    _write(Path(self._results) / f"{os.getpid()}.json", told)


def _for_child(settings: Settings) -> Settings:
    """Each process has a folder of its own, next to that of the program."""
    settings = replace(settings, is_child=True)
    if settings.run_dir is None:
        return settings
    path = settings.run_dir.path
    return replace(settings, run_dir=RunFolder(path.with_name(f"{path.name}-child-{os.getpid()}")))


def _write(path: Path, told: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(told))
    except OSError as error:
        log.warning("the counts of process %d cannot be told to its parent: %s", os.getpid(), error)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildResults:
    """What became of the guarded processes that trained: how many, their counts together, and runs with incidents."""

    number: int = 0
    counts: Counter[str]
    runs: tuple[str, ...] = ()

    def __str__(self) -> str:
        """For the closing line; empty if there were none."""
        if not self.number:
            return ""
        skipped = sum(self.counts[name] for name in ("skipped", "lost", "halted"))
        total = self.counts["applied"] + skipped + self.counts["backed_off"] + self.counts["rolled_back"]
        who = "1 child process" if self.number == 1 else f"{self.number:,} child processes"
        told = f"; {who} guarded too: {total:,} step{'' if total == 1 else 's'}"
        told += f", {skipped:,} not applied" if skipped else ", none of them non-finite"
        told += ", NOT FINITE AT THE END" if self.counts["unsound"] else ""
        return told + (f" (incidents are in {joined([as_seen(Path(run)) for run in self.runs])})" if self.runs else "")


def read_results(folder: Path) -> ChildResults:
    """Of the processes that have ended."""
    total: Counter[str] = Counter()
    number, runs = 0, []
    for path in sorted(folder.glob("*.json")):
        try:
            told = json.loads(path.read_text())
            total.update(told["counts"])
        except (OSError, ValueError) as error:  # one that was killed while it wrote
            log.info("the counts of a child process cannot be read: %s", error)
        else:
            number += 1
            runs += [told["run"]] if told["run"] and told["counts"]["incidents"] else []
    return ChildResults(number=number, counts=total, runs=tuple(runs))
