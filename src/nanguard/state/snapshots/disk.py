"""The store of snapshots on disk: each is there whole, or not at all.

A snapshot is a folder, ``step-000012000``. It is written under a passing name, flushed to the disk, and only then given
its own with ``.unconfirmed`` behind it; ``confirm`` takes that off. Every change of what a name means is one rename, so
the process may be killed at any moment. A step that is written again gets a number, ``step-000012000.1``: the first is
there until the second is confirmed.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from nanguard.records.words import reason
from nanguard.state.snapshots.files import Draft, Stored, changed_at, read, sync

log = logging.getLogger("nanguard")

_DAY_S = 86_400.0
_NAME = re.compile(r"step-([0-9]{9,})(?:\.([0-9]+))?(\.unconfirmed)?")
_PASSING = re.compile(r"(?:writing|trash)-[0-9]+-[0-9a-f]{8}")
# All that reading a damaged snapshot may raise. Running out of memory is no fault of the snapshot's.
_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)


@dataclass(frozen=True, slots=True, order=True)
class _Entry:
    step: int
    turn: int  # how often this step had been written before
    confirmed: bool

    @property
    def name(self) -> str:
        turn = f".{self.turn}" if self.turn else ""
        return f"step-{self.step:09d}{turn}{'' if self.confirmed else '.unconfirmed'}"

    @classmethod
    def parse(cls, name: str) -> _Entry | None:
        if match := _NAME.fullmatch(name):
            entry = cls(int(match[1]), int(match[2] or 0), match[3] is None)
            return entry if entry.name == name else None
        return None


class DiskStore:
    """Snapshots in one folder, by step. One process writes to a folder, and one thread at a time.

    Opening it removes what a process that died left unfinished, unless another store of this folder is open: then
    everything stays. Names that are not the store's own are never touched. POSIX only.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._ours: set[str] = set()  # unconfirmed ones that this store wrote
        self._refused: set[str] = set()  # confirmed ones that this store could not read
        self._lock = _Lock(self.folder / ".lock")
        self._tidy()

    def write(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Writes a snapshot, unconfirmed. When this returns it is on the disk.

        Nothing may write to the tensors meanwhile. They are not copied, but for one at a time that is not contiguous
        or not on the CPU. ``facts`` may hold all that ``codec.encode`` takes. Raises ``OSError`` if the disk fails;
        then nothing of it is left, and other snapshots are unchanged.
        """
        if type(step) is not int or step < 0:
            raise ValueError(f"step must be an integer from 0 on, got {step!r}")
        draft = Draft.of(tensors, facts)
        self._tidy()
        earlier = [entry for entry in self._entries() if entry.step == step]
        entry = _Entry(step, max((e.turn + 1 for e in earlier), default=0), confirmed=False)
        path = self._passing("writing")
        try:
            draft.write(path, step)
            self._ours.add(entry.name)
            os.rename(path, self.folder / entry.name)
            path = self.folder / entry.name
            sync(self.folder)
        except BaseException:
            self._ours.discard(entry.name)
            _delete(path)
            raise
        for old in earlier:
            if not old.confirmed:
                self._remove(old)

    def confirm(self, step: int) -> None:
        """Marks what was written for ``step`` as good; from then on it is what this step has."""
        entries = [entry for entry in self._entries() if entry.step == step]
        new = max((entry for entry in entries if not entry.confirmed), default=None)
        if new is None:
            raise FileNotFoundError(f"no unconfirmed snapshot of step {step:,} in {self.folder}")
        os.rename(self.folder / new.name, self.folder / replace(new, confirmed=True).name)
        sync(self.folder)
        self._ours.discard(new.name)
        for old in entries:
            if old.turn < new.turn:
                self._remove(old)

    def discard(self, step: int) -> None:
        """Removes what was written for ``step`` and not confirmed. A confirmed one stays."""
        for entry in self._entries():
            if entry.step == step and not entry.confirmed:
                self._remove(entry)

    def rewind(self, step: int) -> None:
        """Removes all that is newer than ``step``, the newest first: training goes another way from there."""
        for entry in reversed(self._entries()):
            if entry.step > step:
                self._remove(entry)

    def prune(self, keep: int) -> None:
        """Removes the oldest confirmed ones until ``keep`` are left.

        One that ``load`` refused does not count as kept, and stays to be looked at.
        """
        if keep < 1:
            raise ValueError(f"keep must be 1 or more, got {keep!r}: the newest snapshot is never removed")
        sound = [entry for entry in self._entries() if entry.confirmed and entry.name not in self._refused]
        kept = {entry.step: entry for entry in sound}  # the last of a step is the one that counts
        newest = list(kept.values())[-keep:]
        for entry in sound:
            if entry not in newest:
                self._remove(entry)

    def steps(self) -> list[int]:
        """Steps that have a confirmed snapshot, oldest first. By name alone: nothing is opened."""
        return sorted({entry.step for entry in self._entries() if entry.confirmed})

    def load(self, step: int | None = None) -> Stored:
        """The newest confirmed snapshot that is not newer than ``step``, verified byte by byte.

        A damaged one is skipped with a warning. Raises ``FileNotFoundError`` that says what was tried if none is left.
        """
        refused: list[tuple[_Entry, str]] = []
        for entry in reversed(self._entries()):
            if not entry.confirmed or (step is not None and entry.step > step):
                continue
            try:
                stored = read(self.folder / entry.name, entry.step)
            except _DAMAGE as error:
                refused.append((entry, _reason(error)))
                self._refused.add(entry.name)
                continue
            self._refused.discard(entry.name)
            for bad, why in refused:
                log.warning(
                    "snapshot of step %s is damaged and not used (%s): %s; step %s is used instead",
                    f"{bad.step:,}",
                    self.folder / bad.name,
                    why,
                    f"{stored.step:,}",
                )
            return stored
        what = "no snapshot" if step is None else f"no snapshot of step {step:,} or before"
        found = "; ".join(f"step {bad.step:,}: {why}" for bad, why in refused) or "there is no confirmed one"
        raise FileNotFoundError(f"{what} in {self.folder} can be loaded ({found})")

    def _entries(self) -> list[_Entry]:
        return sorted(entry for name in os.listdir(self.folder) if (entry := _Entry.parse(name)))

    def _passing(self, purpose: str) -> Path:
        return self.folder / f"{purpose}-{os.getpid()}-{secrets.token_hex(4)}"

    def _remove(self, entry: _Entry) -> None:
        # Half a snapshot must never have the name of a whole one, not even after a power failure.
        trash = self._passing("trash")
        os.rename(self.folder / entry.name, trash)
        sync(self.folder)
        self._ours.discard(entry.name)
        self._refused.discard(entry.name)
        _delete(trash)

    @property
    def is_alone(self) -> bool:
        """Whether no other store, of this process or another, has the folder open."""
        return self._lock.held

    def _tidy(self) -> None:
        """Removes unfinished files of other processes, if no other process has the folder open."""
        if self._lock.held:
            return
        alone = self._lock.take()
        if alone is False:
            return
        for name in os.listdir(self.folder):
            entry = _Entry.parse(name)
            is_unfinished = not entry.confirmed and name not in self._ours if entry else _PASSING.fullmatch(name)
            # A file system that cannot lock does not say who lives: what is a day old has no owner.
            if is_unfinished and (alone or time.time() - changed_at(self.folder / name) > _DAY_S):
                _delete(self.folder / name)


class _Lock:
    """Held as long as its store lives. The kernel takes it back from a process that dies, whichever way."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._release: weakref.finalize[[int], _Lock] | None = None
        _locks.add(self)

    @property
    def held(self) -> bool:
        return self._release is not None and self._release.alive

    def take(self) -> bool | None:
        """Whether it is ours now; None if that is not known."""
        try:
            import fcntl

            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        except (ImportError, OSError):  # a folder to be read only, for one
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            return False if isinstance(error, BlockingIOError) else None
        self._release = weakref.finalize(self, os.close, file)
        return True

    def leave(self) -> None:
        if self._release is not None:
            self._release()


_locks: weakref.WeakSet[_Lock] = weakref.WeakSet()


def _leave_locks() -> None:
    for lock in list(_locks):
        lock.leave()


if hasattr(os, "register_at_fork"):
    # A worker of a data loader would hold its parent's lock, and may outlive it.
    os.register_at_fork(after_in_child=_leave_locks)


def _delete(path: Path) -> None:
    """Deletes what is no snapshot any more. What cannot be deleted stays until a store is opened, and is no error."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.exists() or path.is_symlink():
            path.unlink()
    except OSError as error:
        # As text: whoever keeps the record would keep the error, its frames, and with them a whole state.
        log.warning("cannot remove %s, which takes up room and is of no use (%s)", path, str(error))


def _reason(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{Path(error.filename).name} is missing"
    return reason(error)
