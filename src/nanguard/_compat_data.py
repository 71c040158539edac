"""Private names of torch that have to do with loaders of data and with schedules."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset


def index_sampler(iterator: Any) -> Any:
    """What an iterator of torch's DataLoader takes its indices from; None for another iterator."""
    return getattr(iterator, "_index_sampler", None)


def loader_iterator() -> type:
    """The class of the iterators of torch's DataLoader."""
    return torch.utils.data.dataloader._BaseDataLoaderIter


MAKES_ITERATOR = "_get_iterator"
"""The method of torch's DataLoader that makes an iterator, of the loader and of all classes made of it."""


def skip_batches(iterator: Any, loader: Any, number: int) -> bool:
    """Moves an iterator of torch's DataLoader on by ``number`` batches without reading them; False if it cannot.

    Not with workers: they draw random numbers for each batch they read. Not over an iterable dataset.
    """
    if type(loader) is not DataLoader or loader.num_workers or isinstance(loader.dataset, IterableDataset):
        return False
    indices = getattr(iterator, "_sampler_iter", None)
    if indices is None:
        return False
    for _ in range(number):
        next(indices, None)
    return True


def is_being_made(scheduler: LRScheduler) -> bool:
    """Whether this call of ``scheduler.step()`` is the one that its constructor makes, to set the first rates."""
    return vars(scheduler).get("_step_count") == 0
