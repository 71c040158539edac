"""The ring of states known to be good, and the way back to them.

A snapshot is taken between two steps and is only a *candidate* then: it counts as good when later steps, computed from
it, have stayed finite and the loss has not begun to leave its past. A candidate never takes the place of a good one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from nanguard.state.data import Data
from nanguard.state.snapshots import memory
from nanguard.state.snapshots.copies import Copier, Copies, write_back
from nanguard.state.snapshots.options import Snapshots
from nanguard.state.snapshots.writer import DiskWriter
from nanguard.state.training_state import Facts, TrainingState

log = logging.getLogger("nanguard")


@dataclass(slots=True, eq=False)  # facts hold objects of the user, which may not be comparable
class Snapshot:
    """The state before step number ``step``; on disk ``copies`` is only there until they are written."""

    step: int
    facts: Facts
    copies: Copies | None


class AgreeingRanks(Protocol):
    """The ranks that train together: they take and load the same snapshots."""

    rank: int
    size: int

    def lowest(self, here: int) -> int:
        """The smallest of all ranks' numbers."""

    def any(self, here: bool) -> bool:
        """Whether it is so on any rank."""


class SnapshotRing:
    """Takes snapshots as steps are made, and keeps the good ones. Does not sync, but to go back.

    ``lag`` steps pass before the host hears of one; ``is_calm`` says whether the loss is within its past.
    """

    def __init__(
        self,
        state: TrainingState,
        data: Data,
        options: Snapshots,
        *,
        ranks: AgreeingRanks,
        lag: int,
        is_calm: Callable[[], bool],
        folder: Path | None,
        run_facts: Callable[[], Facts],
        prepare: Callable[[Facts], None],
    ) -> None:
        self._state, self._data, self._options = state, data, options
        self._ranks, self._lag, self._is_calm = ranks, lag, is_calm
        self._run_facts, self._prepare = run_facts, prepare
        self._good: list[Snapshot] = []
        self.candidate: Snapshot | None = None
        """The last one that was taken, until it is known to be good."""
        self._spare: Copies | None = None
        self.next_step = 1
        """After so many steps the next snapshot is due."""
        self._restarted = 0
        self._keep, self._where = options.keep, options.where
        self.is_over = False
        """Whether no more snapshots are taken, since there is no memory for them."""
        self._disk: DiskWriter | None = None
        self._copier: Copier | None = None
        if options.where == "disk":
            if folder is None:
                raise ValueError("Snapshots(where='disk') needs a place to write to: give the guard a run_dir")
            self._disk = DiskWriter(folder / f"rank-{ranks.rank}" if ranks.size > 1 else folder)
        if options.where != "auto":
            self._settle_place()

    @property
    def steps(self) -> tuple[int, ...]:
        """Of the good snapshots, oldest first."""
        return tuple(snapshot.step for snapshot in self._good)

    def saved(self, name: str) -> Tensor | None:
        """One tensor of the newest good snapshot; None if it is not in memory. Waits for the copy."""
        copies = self._good[-1].copies if self._good else None
        if copies is None or name not in copies.names:
            return None
        copies.wait()
        return copies[name]

    @contextlib.contextmanager
    def weights_of_oldest(self) -> Iterator[bool]:
        """Parameters and buffers are those of the oldest good snapshot; False if none is in memory. Syncs.

        Afterwards they are as they were.
        """
        copies = self._good[0].copies if self._good else None
        if copies is None:
            yield False
            return
        self.fence()
        copies.wait()
        live = {name: t for name, t in self._state.of_model().items() if name in copies.names}
        live = {name: tensor for name, tensor in live.items() if copies[name].shape == tensor.shape}
        now = {name: tensor.detach().clone() for name, tensor in live.items()}
        try:
            copies.put_back(live)
            yield True
        finally:
            write_back(now, live)

    @property
    def is_being_read(self) -> bool:
        """Whether ``fence`` has an effect."""
        return self._copier is not None and self._copier.is_reading

    def fence(self) -> None:
        """Before anything that a snapshot holds is written to: the device finishes reading it first."""
        if self._copier is not None:
            self._copier.fence()

    def after_step(self, step: int) -> None:
        """``step`` steps have been made; takes a snapshot if one is due."""
        if step >= self.next_step and self.candidate is None and self._is_calm():
            self.take(step)

    def hasten(self) -> None:
        """The next snapshot is due at once, unless one was just taken that is not known to be good yet."""
        self.next_step = 0

    def take_first(self, step: int) -> None:
        """Before the first step, number ``step``: this state was looked at when the guard was made, and is good.

        Not if the place depends on how much memory training leaves free, which is not known yet.
        """
        on_cpu = self._state.device.type == "cpu"
        if not self._good and self.candidate is None and (on_cpu or self._copier is not None):
            self.take(step)
            if self.candidate is not None:
                self._keep_candidate()
                self.next_step = step + 1

    def take(self, step: int) -> None:
        """Takes a snapshot now. If memory runs out, that is logged, and training goes on with none."""
        if self.is_over or (self._copier is None and not self._settle_place()):
            return
        assert self._copier is not None
        self.next_step = step + self._options.every
        if self._disk is not None:
            self._disk.catch_up()  # it reads from the memory that is to be written to
        into, self._spare = self._spare, None
        tensors, buffers, copy_facts = self._state.now()
        try:
            copies = self._copier.take(tensors, into, at_once=buffers)
        except Exception as error:
            if not memory.is_out_of_memory(error):
                raise
            del into
            self._go_without(f"the snapshot of step {step} does not fit into memory")
            return
        facts = {**copy_facts(), "data": self._data.mark(), "step": step}
        self.candidate = Snapshot(step, facts, copies)
        if self._disk is not None:
            self._disk.write(step, copies, {**facts, "run": self._run_facts()})

    def heard(self, step: int) -> None:
        """Step number ``step`` is known to have been finite."""
        candidate = self.candidate
        is_due = candidate is not None and step >= candidate.step + self._options.confirm - 1
        if is_due and self._is_calm():
            self._keep_candidate()

    def _keep_candidate(self) -> None:
        candidate, self.candidate = self.candidate, None
        assert candidate is not None
        self._good.append(candidate)
        if self._disk is not None:
            # One rank may die with a snapshot confirmed that another has not: they then need the one before.
            least = 2 if self._ranks.size > 1 else 1
            self._disk.confirm(candidate.step, keep=max(self._keep, least))
            self._spare, candidate.copies = candidate.copies, None
        if len(self._good) > self._keep:
            self._spare = self._good.pop(0).copies or self._spare
        self._let_go_of_data()

    def trouble(self, step: int, *, routine: bool = False) -> None:
        """Step number ``step`` was not finite: a candidate is of no use. A routine back-off only undoes what it saw.

        The next is taken when the host would have heard of the step in either way of guarding.
        """
        candidate = self.candidate
        if candidate is not None and not (routine and step >= candidate.step):
            self.candidate, self.next_step = None, 0
            self._spare = candidate.copies
            if self._disk is not None:
                self._disk.discard(candidate.step)
        self.next_step = max(self.next_step, step + 1 + self._lag)

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
        self.next_step = now + max(self._options.every, 2 * (step - max(snapshot.step, self._restarted)))
        self._restarted = now
        if snapshot.copies is not None:
            snapshot.copies.wait()
            self._state.restore(snapshot.facts, snapshot.copies.__getitem__, snapshot.copies.put_back)
            return snapshot.facts
        assert self._disk is not None
        facts, loaded = self._load(self._disk, snapshot.step)
        self._good = [each for each in self._good if each.step <= loaded]
        return facts

    def resume(self) -> Facts | None:
        """Puts back the newest good snapshot that an earlier process has left on disk; None if there is none."""
        if self._disk is None:
            raise ValueError("guard.resume() needs snapshots on disk: Guard(..., snapshots=Snapshots(where='disk'))")
        number = len(self._disk.steps())
        fewest, most = self._ranks.lowest(number), -self._ranks.lowest(-number)
        if fewest == 0 and most > 1:
            raise FileNotFoundError(
                f"a rank has lost the snapshots that other ranks have: there are {number} in {self._disk.folder}. "
                "Bring them back, or use another run_dir to begin anew"
            )
        if fewest == 0:  # or only some have kept their first one yet, when the run died
            self._disk.rewind(-1)
            return None
        facts, step = self._load(self._disk, None)
        self._good = [Snapshot(step, facts, None)]
        self.candidate, self.next_step = None, facts["run"]["num_steps"] + self._options.every
        return facts

    def forget(self) -> None:
        """The run is at another state now: no snapshot is of its past."""
        self.trouble(-1)
        self._good, self.next_step = [], 1

    def give_back(self) -> bool:
        """Training has run out of memory: drops the ring if it takes the same memory. True if it did."""
        shares = self._copier is not None and (self._copier.where == "device" or self._state.device.type == "cpu")
        held = [each for each in (*self._good, self.candidate) if each is not None and each.copies is not None]
        if not shares or not (held or self._spare is not None):
            return False
        self._go_without("training needs the memory that snapshots take", stays=self._state.device.type == "cpu")
        return True

    def agree(self) -> None:
        """If one rank has no memory left for snapshots, all ranks drop theirs, so that they decide alike."""
        if self._ranks.any(self.is_over):
            self.give_up()

    def give_up(self) -> None:
        """Drops what is in memory, and takes no more snapshots."""
        memory.HostMemory.reserve(self, 0)
        self.is_over = True
        for each in (*self._good, self.candidate):
            if each is not None and each.copies is not None:
                self._drop(each.copies)
        if self._spare is not None:
            self._drop(self._spare)
        self.candidate = self._spare = None
        # What is on disk stays there to go back to, unless other ranks have more of it than this one.
        self._good = self._good if self._disk is not None and self._ranks.size == 1 else []

    def _drop(self, copies: Copies) -> None:
        if self._disk is not None:
            self._disk.drain()  # it may be reading them
        copies.drop()

    def _go_without(self, why: str, *, stays: bool = False) -> None:
        """Drops the ring. On a single GPU the next snapshots go to host memory; with ``stays`` they are taken anew."""
        on_gpu = self._copier is not None and self._copier.where == "device" and self._state.device.type == "cuda"
        moves = on_gpu and self._ranks.size == 1
        self.give_up()
        self.is_over = not (moves or stays)
        if moves:
            self._copier, self._where = None, "auto"
        then = "no more are taken" if self.is_over else "the next ones are in host memory" if moves else "taken anew"
        log.warning("%s: those in memory are dropped, and %s", why, then)

    def close(self) -> None:
        """Waits for what is being written."""
        if self._disk is not None:
            self._disk.drain()

    def _load(self, disk: DiskWriter, step: int | None) -> tuple[Facts, int]:
        """From disk, on all ranks the same step: one of them may have had to take an older one."""
        ranks = self._ranks
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
        self._state.restore(stored.facts, stored.tensors.__getitem__, lambda live: write_back(stored.tensors, live))
        return stored.facts, stored.step

    def _let_go_of_data(self) -> None:
        marks = [snapshot.facts["data"] for snapshot in self._good]
        numbers = [mark["number"] for mark in marks if mark is not None]
        if numbers:
            self._data.forget_before(min(numbers))

    def _settle_place(self) -> bool:
        """Finds out where the ring goes, and logs how much memory it takes. False if there is no room."""
        options, device = self._options, self._state.device
        each = memory.expected_state_bytes(self._state.optimizers, self._state.tensors())
        if self._where == "auto":
            self._keep = self._room_in_host_memory(each)
            if self._keep == 0:
                self.is_over = True
                log.warning(
                    "no snapshots are taken: the fewest, 2 of %s each, would take more than a quarter of the host "
                    "memory that is free. To have them all the same: snapshots=Snapshots(where='disk')",
                    memory.human(each),
                )
                return False
        else:
            folder = None if self._disk is None else self._disk.folder
            total = each * (options.keep + 1)
            memory.require_fit(total, self._where, device, folder=folder, each=each, keep=options.keep)
            if self._where == "disk":  # one copy is being written while the next is taken
                memory.require_fit(2 * each, "host", device, each=each)
        fewer = f" of {options.keep}, since memory is short," if self._keep < options.keep else ""
        log.info(
            "snapshots of %s every %d steps, %d kept%s and one in the making: %s %s",
            memory.human(each),
            options.every,
            self._keep,
            fewer,
            memory.human(each * (self._keep + 1)),
            {"device": f"on {device}", "disk": "on disk"}.get(self._where, "in host memory"),
        )
        self._copier = Copier(device, "device" if self._where == "device" else "host")
        return True

    def _room_in_host_memory(self, each: int) -> int:
        """How many snapshots can be kept there, the same on all ranks."""
        ranks = self._ranks
        free, sharers = memory.free_bytes("host", self._state.device), memory.sharers_of_host(ranks.size)
        reserved = memory.HostMemory.reserved()
        fits = memory.ring_that_fits(each, keep=self._options.keep, free=free, sharers=sharers, reserved=reserved)
        kept = ranks.lowest(fits)
        memory.HostMemory.reserve(self, each * (kept + 1) if kept else 0)
        return kept
