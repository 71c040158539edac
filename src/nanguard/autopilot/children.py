"""Processes that the program starts. They are not guarded, which the closing line mentions.

A forked process reports whether it computes gradients, through a shared byte of memory. Nothing is known about a
spawned one, so it counts, unless it is a worker of a DataLoader or a server of ``multiprocessing``.
"""

from __future__ import annotations

import mmap
import multiprocessing
import multiprocessing.process
import os
import weakref
from collections.abc import Callable
from typing import Any

_MOST = 4096
_TRAINS, _GUARDED = 1, 2


class Children:
    """The child processes of this process. ``when_forked`` is called in forked processes when they begin."""

    def __init__(self, when_forked: Callable[[], None]) -> None:
        self._pid = os.getpid()
        self._states = mmap.mmap(-1, _MOST)
        self._num_forked = 0
        self._number: int | None = None
        self.num_spawned = 0
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
        method = getattr(process, "_start_method", None) or multiprocessing.get_start_method()
        return method != "fork" and self.is_parent and not _is_helper(process)

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


def _is_helper(process: multiprocessing.process.BaseProcess) -> bool:
    """A worker of a DataLoader, or the server of a ``multiprocessing.Manager``."""
    target: Any = getattr(process, "_target", None)
    is_server = getattr(target, "__name__", "") == "_run_server"
    return is_server or getattr(target, "__module__", "").startswith("torch.utils.data.")


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
