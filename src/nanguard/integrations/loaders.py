"""Which records of the dataset the batches of a framework hold: its loaders are followed, whatever it wraps them in."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from nanguard import _compat_data
from nanguard.hosted.loop import HostedLoop
from nanguard.state.batch_indices import FetchedBatch, note_of, noted_iterator

log = logging.getLogger("nanguard")

_WRAPPED = ("base_dataloader", "_dataloader")
"""Where Accelerate and Fabric keep the loader that they have wrapped."""
_MOST_WAITING = 64


class FollowedLoaders:
    """Tells a loop of each batch that a loader gives with gradients on. Only objects are changed, until ``stop``.

    Batches that come before the loop is known are told when it is.
    """

    def __init__(self, loop: HostedLoop | None = None) -> None:
        self._loop = loop
        self._waiting: list[FetchedBatch] = []
        self._loaders: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()
        self._iterators: weakref.WeakKeyDictionary[Iterator[Any], type] = weakref.WeakKeyDictionary()
        self._kinds: dict[type, type] = {}

    def tell(self, loop: HostedLoop | None) -> None:
        """From now on this loop is told; None if there is none yet."""
        self._loop = loop
        waiting, self._waiting = self._waiting, []
        if loop is not None:
            for batch in waiting:
                loop.fetched(batch)

    def follow(self, loader: Any) -> Any:
        """Returns ``loader``. One that is not made of torch's DataLoader is left alone."""
        inside = _inside(loader)
        if isinstance(inside, DataLoader) and inside not in self._loaders:
            begin = functools.partial(self._begin, weakref.ref(inside))  # a reference to itself would keep it alive
            setattr(inside, _compat_data.MAKES_ITERATOR, begin)
            self._loaders.add(inside)
        return loader

    def stop(self) -> None:
        """Restores everything."""
        for loader in self._loaders:
            vars(loader).pop(_compat_data.MAKES_ITERATOR, None)
        for iterator, kind in self._iterators.items():
            iterator.__class__ = kind
        self._loaders.clear()
        self._iterators.clear()
        self.tell(None)

    def _begin(self, ref: weakref.ref[DataLoader[Any]]) -> Iterator[Any]:
        loader = ref()
        assert loader is not None, "it is being iterated over"
        make = getattr(type(loader), _compat_data.MAKES_ITERATOR)
        iterator = noted_iterator(loader, functools.partial(make, loader))
        if note_of(iterator) is not None:
            kind = type(iterator)
            self._iterators[iterator] = kind
            iterator.__class__ = self._telling(kind)
        return iterator

    def _telling(self, kind: type) -> type:
        """A class of iterators that tells of each batch: ``__next__`` is looked up in the class."""
        if kind not in self._kinds:

            def fetch(iterator: Any) -> Any:
                try:
                    batch = kind.__next__(iterator)  # type: ignore[attr-defined]
                except Exception as error:
                    if not isinstance(error, StopIteration):
                        self._fetched(iterator, None)  # a record that could not be read: the next batch is another
                    raise
                self._fetched(iterator, batch)
                return batch

            same = {key: getattr(kind, key) for key in ("__module__", "__qualname__", "__doc__")}
            self._kinds[kind] = type(kind.__name__, (kind,), {**same, "__next__": fetch})
        return self._kinds[kind]

    def _fetched(self, iterator: Iterator[Any], batch: Any) -> None:
        try:
            self._tell_of(iterator, batch)
        except Exception:  # of ours: the loop of the program goes on
            log.exception("batches of a loader could not be noted: their records are not named from now on")
            self.stop()

    def _tell_of(self, iterator: Iterator[Any], batch: Any) -> None:
        noted = note_of(iterator)
        if noted is None:
            return
        if batch is None or not torch.is_grad_enabled():
            noted.pass_over(1)
            return
        fetched = noted.fetched(batch, 0 if self._loop is None else self._loop.num_forwards, is_marked=True)
        if self._loop is not None:
            self._loop.fetched(fetched)
        else:
            self._waiting = [*self._waiting[1 - _MOST_WAITING :], fetched]


def _inside(loader: Any) -> Any:
    for name in _WRAPPED:
        loader = vars(loader).get(name, loader) if hasattr(loader, "__dict__") else loader
    return loader
