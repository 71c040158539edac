"""Processes that the program starts.

Functions that run in a ``multiprocessing.Process``, forked or spawned, are guarded there. Others are not, which the
closing line mentions: a forked process reports whether it computes gradients, through a shared byte of memory. Nothing
is known about a spawned one, so it counts, unless it is a worker of a DataLoader or a server of ``multiprocessing``.
Most pools prepare data, so spawned workers of a pool count only if the program itself computes no gradients.
"""

from __future__ import annotations

import logging
import mmap
import multiprocessing
import multiprocessing.process
import os
import pickle
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanguard.autopilot.child import ChildResults, GuardedTarget, read_results
from nanguard.hosted.settings import Settings

log = logging.getLogger("nanguard")

_MOST = 4096
_TRAINS, _GUARDED = 1, 2


class Children:
    """The child processes of this process. ``when_forked`` is called in forked processes when they begin."""

    def __init__(self, when_forked: Callable[[], None], settings: Settings) -> None:
        self._settings = settings
        self._results: tempfile.TemporaryDirectory[str] | None = None
        self._pid = os.getpid()
        self._states = mmap.mmap(-1, _MOST)
        self._num_forked = 0
        self._number: int | None = None
        self.num_spawned = 0
        self.num_in_pools = 0
        _watch_forks(self, when_forked)

    @property
    def is_parent(self) -> bool:
        return os.getpid() == self._pid

    @property
    def count(self) -> int:
        """How many were started that may have trained without a guard."""
        return self.num_spawned + self._states[: self._num_forked].count(_TRAINS)

    def may_train(self, process: multiprocessing.process.BaseProcess) -> bool:
        """Whether a process that is about to be started counts. Forked ones are counted if they compute gradients."""
        is_spawned = self.is_parent and not _is_forked(process)
        self.num_in_pools += is_spawned and _is_in_pool(process)
        return is_spawned and not _is_helper(process)

    def guard(self, process: multiprocessing.process.BaseProcess) -> bool:
        """Lets the function of a process that is about to be started run guarded. False if it has none, or cannot."""
        known: Any = process
        target = getattr(known, "_target", None)
        if target is None or not self.is_parent or _is_helper(process):
            return False
        try:
            pickle.dumps(self._settings)  # a rung of the user's own may not be fit for it
            if self._results is None:
                self._results = tempfile.TemporaryDirectory(prefix="nanguard-", ignore_cleanup_errors=True)
        except Exception as error:
            log.warning("a child process is not guarded: %s", error)
            return False
        known._target = GuardedTarget(target, self._settings, self._results.name)
        return True

    @property
    def results(self) -> ChildResults:
        """Of the guarded ones that have trained and ended."""
        return ChildResults(counts=Counter()) if self._results is None else read_results(Path(self._results.name))

    def trains(self) -> None:
        """In a forked process: it computes gradients."""
        self._tell(_TRAINS)

    def is_guarded(self) -> None:
        """In a forked process: it has called ``nanguard.install()``."""
        self._tell(_GUARDED)

    def _tell(self, state: int) -> None:
        if self._number is not None:
            self._states[self._number] = max(state, self._states[self._number])

    def before_fork(self) -> None:
        self._num_forked = min(self._num_forked + 1, _MOST)

    def after_fork(self) -> None:
        self._number = self._num_forked - 1


def _is_forked(process: multiprocessing.process.BaseProcess) -> bool:
    return (getattr(process, "_start_method", None) or multiprocessing.get_start_method()) == "fork"


def _is_helper(process: multiprocessing.process.BaseProcess) -> bool:
    """A worker of a DataLoader or of a pool, or the server of a ``multiprocessing.Manager``."""
    return _module_of(process).startswith(("torch.utils.data.", "multiprocessing.", "concurrent."))


def _is_in_pool(process: multiprocessing.process.BaseProcess) -> bool:
    return _module_of(process).startswith(("multiprocessing.pool", "concurrent.futures"))


def _module_of(process: multiprocessing.process.BaseProcess) -> str:
    """Of the function that it runs."""
    target: Any = getattr(process, "_target", None)
    return getattr(target, "__module__", None) or ""


def _watch_forks(children: Children, when_forked: Callable[[], None]) -> None:
    """Python never removes such functions, so they must not keep anything alive."""
    ref, method = weakref.ref(children), weakref.WeakMethod(when_forked)

    def before() -> None:
        known = ref()
        if known is not None and known.is_parent:
            known.before_fork()

    def after() -> None:
        known, then = ref(), method()
        if known is not None and then is not None:
            known.after_fork()
            then()

    os.register_at_fork(before=before, after_in_child=after)
