"""Writes snapshots to disk while training goes on."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nanguard.state.snapshots.copies import Copies
from nanguard.state.snapshots.disk import DiskStore

log = logging.getLogger("nanguard")


class DiskWriter:
    """Writes snapshots in a thread of its own, in order. Errors are logged and never stop the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._store = DiskStore(folder)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nanguard-snapshots")
        self._last: Future[None] | None = None
        self._has_waited = False
        self._is_ours = False
        if not self._store.is_alone:
            log.warning(
                "%s is open elsewhere: two runs must not share a run_dir, they would mix up their states", folder
            )

    def write(self, step: int, copies: Copies, facts: dict[str, Any]) -> None:
        def work() -> None:
            if not self._is_ours:
                self._set_aside()
            copies.wait()
            self._store.write(step, {name: copies[name] for name in copies.names}, facts)

        self._do(work, f"write the snapshot of step {step}")

    def confirm(self, step: int, *, keep: int) -> None:
        def work() -> None:
            self._store.confirm(step)
            self._store.prune(keep)

        self._do(work, f"keep the snapshot of step {step}")

    def discard(self, step: int) -> None:
        self._do(lambda: self._store.discard(step), f"remove the snapshot of step {step}")

    def rewind(self, step: int) -> None:
        self._is_ours = True
        self._do(lambda: self._store.rewind(step), f"remove what is newer than step {step}")

    def catch_up(self) -> None:
        """Waits for the snapshot before: all ranks take theirs at the same steps, however slow one of the disks is."""
        if self._last is not None and not self._last.done():
            if not self._has_waited:
                log.warning("training waits until the previous snapshot is on disk: take snapshots less often")
            self._has_waited = True
            self.drain()

    def _set_aside(self) -> None:
        """Moves snapshots of an earlier run that was not resumed to another folder: their steps are not this run's."""
        self._is_ours = True
        old = sorted(self.folder.glob("step-*"))
        if old:
            places = (self.folder.with_name(f"{self.folder.name}-before-{n}") for n in itertools.count(1))
            aside = next(place for place in places if not place.exists())
            aside.mkdir()
            for path in old:
                path.rename(aside / path.name)
            log.warning(
                "%s held snapshots of another run, now in %s: guard.resume() goes on from what is there",
                self.folder,
                aside,
            )

    def drain(self) -> None:
        if self._last is not None:
            self._last.result()

    def steps(self) -> list[int]:
        self.drain()
        return self._store.steps()

    def load(self, step: int | None) -> Any:
        self.drain()
        return self._store.load(step)

    def _do(self, work: Callable[[], None], what: str) -> None:
        def carefully() -> None:
            try:
                work()
            except Exception as error:
                log.warning("could not %s to %s (%s): the run goes on with the older ones", what, self.folder, error)

        self._last = self._thread.submit(carefully)
