"""The ring of states known to be good, and the way back to them.

A snapshot is taken between two steps and is only a *candidate* then: it counts as good when later steps, computed from
it, have stayed finite and the loss has not begun to leave its past. A candidate never takes the place of a good one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from nanguard.bench import Bench
from nanguard.data import Data
from nanguard.snapshot import memory
from nanguard.snapshot.copies import Copier, Copies, write_back
from nanguard.snapshot.disk import DiskStore
from nanguard.snapshot.options import Snapshots
from nanguard.snapshot.world import Facts, World
from nanguard.window import LAG

log = logging.getLogger("nanguard")


@dataclass(slots=True)
class Snapshot:
    """The state before step number ``step``; on disk ``copies`` is only there until they are written."""

    step: int
    facts: Facts
    copies: Copies | None


class Keeper:
    """Takes snapshots as steps are made, and keeps the good ones. Does not sync, but to go back."""

    def __init__(
        self,
        bench: Bench,
        data: Data,
        options: Snapshots,
        *,
        folder: Path | None,
        run_facts: Callable[[], Facts],
        prepare: Callable[[Facts], None],
    ) -> None:
        self._bench, self._data, self._options = bench, data, options
        self._run_facts, self._prepare = run_facts, prepare
        self._world = World(bench)
        self._good: list[Snapshot] = []
        self._candidate: Snapshot | None = None
        self._spare: Copies | None = None
        self._next = 1
        self._restarted = 0
        self._disk: _Disk | None = None
        self._copier: Copier | None = None
        if options.where == "disk":
            if folder is None:
                raise ValueError("Snapshots(where='disk') needs a place to write to: give the guard a run_dir")
            self._disk = _Disk(folder / f"rank-{bench.ranks.rank}" if bench.ranks.size > 1 else folder)
        if options.where != "auto":
            self._settle_place()

    @property
    def steps(self) -> tuple[int, ...]:
        """Of the good snapshots, oldest first."""
        return tuple(snapshot.step for snapshot in self._good)

    def saved(self, name: str) -> Tensor | None:
        """One tensor of the newest good snapshot, where it is in memory. Waits for the copy."""
        copies = self._good[-1].copies if self._good else None
        if copies is None or name not in copies.names:
            return None
        copies.wait()
        return copies[name]

    @contextlib.contextmanager
    def weights_of_oldest(self) -> Iterator[bool]:
        """Parameters and buffers are those of the oldest good snapshot; False where none is in memory. Syncs.

        Afterwards they are as they were.
        """
        copies = self._good[0].copies if self._good else None
        if copies is None:
            yield False
            return
        self.fence()
        copies.wait()
        live = {name: t for name, t in self._world.of_model().items() if name in copies.names}
        live = {name: tensor for name, tensor in live.items() if copies[name].shape == tensor.shape}
        now = {name: tensor.detach().clone() for name, tensor in live.items()}
        copies.put_back(live)
        try:
            yield True
        finally:
            write_back(now, live)

    def fence(self) -> None:
        """Before anything that a snapshot holds is written to: the device finishes reading it first."""
        if self._copier is not None:
            self._copier.fence()

    def after_step(self, step: int) -> None:
        """``step`` steps have been made; takes a snapshot where one is due."""
        if step >= self._next and self._candidate is None and not self._bench.journal.trend.beyond:
            self.take(step)

    def take_first(self) -> None:
        """Before the first step: this state was looked at when the guard was made, and is good.

        Not where the place is to be chosen by how much memory training leaves free, which nobody knows yet.
        """
        on_cpu = self._bench.device.type == "cpu"
        if not self._good and self._candidate is None and (on_cpu or self._copier is not None):
            self.take(0)
            if self._candidate is not None:
                self._keep_candidate()
                self._next = 1

    def take(self, step: int) -> None:
        """Takes a snapshot now."""
        if self._copier is None and not self._settle_place():
            return
        assert self._copier is not None
        self._next = step + self._options.every
        if self._disk is not None:
            self._disk.catch_up()  # it reads from the memory that is to be written to
        into, self._spare = self._spare, None
        copies = self._copier.take(self._world.tensors(), into, at_once=self._world.buffers())
        facts = {**self._world.facts(), "data": self._data.mark(), "step": step}
        self._candidate = Snapshot(step, facts, copies)
        if self._disk is not None:
            self._disk.write(step, copies, {**facts, "run": self._run_facts()})

    def heard(self, step: int) -> None:
        """Step number ``step`` is known to have been finite."""
        candidate = self._candidate
        is_due = candidate is not None and step >= candidate.step + self._options.confirm - 1
        if is_due and not self._bench.journal.trend.beyond:
            self._keep_candidate()

    def _keep_candidate(self) -> None:
        candidate, self._candidate = self._candidate, None
        assert candidate is not None
        self._good.append(candidate)
        if self._disk is not None:
            # One rank may die with a snapshot confirmed that another has not: they then need the one before.
            least = 2 if self._bench.ranks.size > 1 else 1
            self._disk.confirm(candidate.step, keep=max(self._options.keep, least))
            self._spare, candidate.copies = candidate.copies, None
        if len(self._good) > self._options.keep:
            self._spare = self._good.pop(0).copies or self._spare
        self._let_go_of_data()

    def trouble(self, step: int, *, routine: bool = False) -> None:
        """Step number ``step`` was not finite: a candidate is of no use. A routine back-off only undoes what it saw.

        The next is taken when the host would have heard of the step in either way of guarding.
        """
        candidate = self._candidate
        if candidate is not None and not (routine and step >= candidate.step):
            self._candidate, self._next = None, 0
            self._spare = candidate.copies
            if self._disk is not None:
                self._disk.discard(candidate.step)
        self._next = max(self._next, step + 1 + LAG)

    def choose(self, step: int, *, back: int, count: int) -> Snapshot | None:
        """The newest good one at least ``back`` steps before ``step``; the next older for each further ``count``."""
        old_enough = [snapshot for snapshot in self._good if snapshot.step <= step - back] or self._good[:1]
        return old_enough[-min(count, len(old_enough))] if old_enough else None

    def go_back(self, snapshot: Snapshot, *, step: int, now: int) -> Facts:
        """Puts everything back as it was before trouble showed at ``step``; ``now`` steps were made. Syncs."""
        self.trouble(now)
        self.fence()
        self._good = self._good[: self._good.index(snapshot) + 1]
        # Where trouble comes back at the same place, the way leads to before it, not to what was taken on the way.
        self._next = now + max(self._options.every, 2 * (step - max(snapshot.step, self._restarted)))
        self._restarted = now
        if snapshot.copies is not None:
            snapshot.copies.wait()
            self._world.restore(snapshot.facts, snapshot.copies.__getitem__, snapshot.copies.put_back)
            return snapshot.facts
        assert self._disk is not None
        facts, loaded = self._load(self._disk, snapshot.step)
        self._good = [each for each in self._good if each.step <= loaded]
        return facts

    def resume(self) -> Facts | None:
        """Puts back the newest good snapshot that an earlier process has left on disk; None where there is none."""
        if self._disk is None:
            raise ValueError("guard.resume() needs snapshots on disk: Guard(..., snapshots=Snapshots(where='disk'))")
        number = len(self._disk.steps())
        fewest, most = self._bench.ranks.lowest(number), -self._bench.ranks.lowest(-number)
        if fewest == 0 and most > 1:
            raise FileNotFoundError(
                f"a rank has no snapshot any more that others have: there are {number} in {self._disk.folder}. Bring "
                "them back, or use another run_dir to begin anew"
            )
        if fewest == 0:  # or only some have kept their first one yet, when the run died
            self._disk.rewind(-1)
            return None
        facts, step = self._load(self._disk, None)
        self._good = [Snapshot(step, facts, None)]
        self._candidate, self._next = None, facts["run"]["num_steps"] + self._options.every
        return facts

    def forget(self) -> None:
        """The run is elsewhere now: nothing that was kept is of its past."""
        self.trouble(-1)
        self._good, self._next = [], 1

    def close(self) -> None:
        """Waits for what is being written."""
        if self._disk is not None:
            self._disk.drain()

    def _load(self, disk: _Disk, step: int | None) -> tuple[Facts, int]:
        """From disk, on all ranks the same step: one of them may have had to take an older one."""
        ranks = self._bench.ranks
        while True:
            try:
                stored, error = disk.load(step), None
            except FileNotFoundError as nothing:
                stored, error = None, nothing
            # All ranks ask twice, whatever each has found: none may wait for another that asks no more.
            here = -1 if stored is None else stored.step
            oldest, newest = ranks.lowest(here), -ranks.lowest(-here)
            if oldest < 0:
                raise error or FileNotFoundError(f"another rank can load no snapshot; rank {ranks.rank} has one")
            if oldest == newest:
                break
            step = oldest
        disk.rewind(stored.step)
        self._prepare(stored.facts["run"])
        self._world.restore(stored.facts, stored.tensors.__getitem__, lambda live: write_back(stored.tensors, live))
        return stored.facts, stored.step

    def _let_go_of_data(self) -> None:
        marks = [snapshot.facts["data"] for snapshot in self._good]
        numbers = [mark["number"] for mark in marks if mark is not None]
        if numbers:
            self._data.forget_before(min(numbers))

    def _settle_place(self) -> bool:
        """Finds out where the ring goes, and says how much memory it takes. False where there is no room."""
        options, device = self._options, self._bench.device
        each = memory.expected_state_bytes(self._bench.model, self._bench.shield.optimizers, self._world.tensors())
        total = each * (options.keep + 1)
        where = self._roomy(total) if options.where == "auto" else options.where
        if options.where == "auto":
            if where is None:
                self._next = 1 << 62
                log.warning(
                    "no snapshots are taken: %d of %s each would take more than a quarter of the memory that is free. "
                    "To have them all the same: snapshots=Snapshots(where='disk')",
                    options.keep + 1,
                    memory.human(each),
                )
                return False
        else:
            folder = None if self._disk is None else self._disk.folder
            memory.require_fit(total, options.where, device, folder=folder, each=each, keep=options.keep)
        log.info(
            "snapshots of %s every %d steps, %d kept and one in the making: %s on the %s",
            memory.human(each),
            options.every,
            options.keep,
            memory.human(total),
            where,
        )
        self._copier = Copier(device, "device" if where == "device" else "host")
        return True

    def _roomy(self, total: int) -> Literal["device", "host"] | None:
        """Where the ring takes at most a quarter of what is free, on all ranks."""
        places: tuple[Literal["device", "host"], ...] = ("device", "host")
        for where in places:
            free = memory.free_bytes(where, self._bench.device)
            fits = free is None or 4 * total <= free
            if self._bench.ranks.lowest(int(fits)):
                return where
        return None


class _Disk:
    """Writes snapshots in a thread of its own, in order; what fails there is said, and never stops the run."""

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

    def write(self, step: int, copies: Copies, facts: Facts) -> None:
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
                log.warning("training waits for the snapshot before to be on disk: take them less often")
            self._has_waited = True
            self.drain()

    def _set_aside(self) -> None:
        """Snapshots of an earlier run that nobody has resumed: their steps are not this run's, and they stay."""
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
