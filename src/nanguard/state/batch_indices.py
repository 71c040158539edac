"""Which records of a dataset a batch holds: what the sampler of a DataLoader gave for it."""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate, default_convert

from nanguard import _compat, _compat_data
from nanguard.state.batches import num_samples
from nanguard.state.trees import tensors

_MOST_PARTS = 32
_MOST_VALUES = 64


@dataclass(frozen=True, slots=True)
class FetchedBatch:
    """``given`` is what the sampler gave, ``storages`` and ``nums`` identify the tensors of the batch and their sizes.

    ``is_ahead`` says that the program fetches batches before it uses those that it has, or may have changed their
    order. ``source`` identifies the loader, ``dataset`` is what it reads. ``marks`` has shape and a few values of each
    tensor, for a host that copies the batch to a device. If it ``is_collated`` by a function of the program, the
    samples may have another order.
    """

    given: Any
    storages: tuple[Any, ...] = ()
    nums: tuple[int, ...] = ()
    is_ahead: bool = False
    source: int = 0
    marks: tuple[tuple[torch.Size, Tensor], ...] = ()
    dataset: Any = None
    is_collated: bool = False

    def shares_memory(self, keys: set[int]) -> bool:
        """True if one of these storages is one of this batch."""
        return any(each.cdata in keys for each in self.storages)

    def may_be_copied(self, keys: set[int], num: int) -> bool:
        """True if a tensor of this batch with ``num`` elements is not among these storages: it was copied or cast."""
        pairs = zip(self.storages, self.nums, strict=True)
        return any(each.cdata not in keys and size == num for each, size in pairs)


class NotedSampler:
    """A sampler that notes what it gives. Batches come in the same order, however many workers prepare in advance."""

    def __init__(self, sampler: Any, loader: DataLoader[Any], *, tells: bool, is_ahead: bool = False) -> None:
        self._sampler, self._dataset, self.tells, self.is_ahead = sampler, loader.dataset, tells, is_ahead
        self._is_collated = not any(loader.collate_fn is each for each in (default_collate, default_convert))
        self._given: deque[Any] = deque()
        self.num_forwards: int | None = None

    def __iter__(self) -> Iterator[Any]:
        self._given = deque()
        return _Noting(iter(self._sampler), self._given)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def next(self) -> Any:
        """What was given for the batch that comes next; None if nothing is known."""
        return self._given.popleft() if self._given else None

    def pass_over(self, number: int) -> None:
        """Skips batches that were not used."""
        for _ in range(number):
            self.next()

    def fetched(self, batch: Any, num_forwards: int, *, is_marked: bool = False) -> FetchedBatch:
        """The batch that came now. ``num_forwards`` counts the forward passes of the training so far."""
        self.is_ahead = self.is_ahead or self.num_forwards == num_forwards
        self.num_forwards = num_forwards
        parts = list(_few_parts(batch, depth=2))
        marked = [part for part in parts if part.device.type == "cpu" and part.is_contiguous()] if is_marked else []
        marks = tuple([(part.shape, _few_values(part)) for part in marked])
        storages = tuple([_compat.weak_storage(part) for part in parts])
        nums = tuple([part.numel() for part in parts])
        of_loader = self.is_ahead, id(self), marks, self._dataset, self._is_collated
        return FetchedBatch(self.next(), storages, nums, *of_loader)


class _Noting(Iterator[Any]):
    def __init__(self, indices: Iterator[Any], given: deque[Any]) -> None:
        self._indices, self._into = indices, given

    def __next__(self) -> Any:
        given = next(self._indices)
        self._into.append(given)
        return given


def begin_noted(
    loader: Any, begin: Callable[[Any], Iterator[Any]] = iter, *, tells: bool = False
) -> tuple[Iterator[Any], NotedSampler | None]:
    """An iterator over a loader, and the sampler that notes its indices; None if they cannot be known.

    They are known of torch's own DataLoader over a dataset with indices. ``begin`` makes the iterator; with ``tells``,
    whoever fetches a batch reports it.
    """
    if not _has_indices(loader):
        return begin(loader), None
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = vars(loader)[name]
    if isinstance(sampler, NotedSampler):
        return begin(loader), None
    vars(loader)[name] = NotedSampler(sampler, loader, tells=tells)  # setattr is refused
    try:
        iterator = begin(loader)
    finally:
        vars(loader)[name] = sampler
    noted = _compat_data.index_sampler(iterator)  # an earlier one if workers are kept
    return iterator, noted if isinstance(noted, NotedSampler) else None


def noted_iterator(loader: DataLoader[Any], make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """``make()``, which makes the iterator of a loader, with a sampler that notes its indices. See ``note_of``.

    If the class of the loader has its own ``__iter__``, it may do anything to the batches, also change their order.
    """
    if not _gives_indices(loader):
        return make()
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = vars(loader)[name]
    inside = sampler._sampler if isinstance(sampler, NotedSampler) else sampler
    vars(loader)[name] = NotedSampler(inside, loader, tells=False, is_ahead=not _iterates_as_torch(loader))
    try:
        return make()
    finally:
        vars(loader)[name] = sampler


def note_of(iterator: Iterator[Any]) -> NotedSampler | None:
    """The sampler that notes the indices of an iterator; None if they cannot be known."""
    sampler = _compat_data.index_sampler(iterator)
    return sampler if isinstance(sampler, NotedSampler) else None


def _has_indices(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and _iterates_as_torch(loader) and _gives_indices(loader)


def _iterates_as_torch(loader: Any) -> bool:
    return type(loader).__iter__ is DataLoader.__iter__


def _gives_indices(loader: Any) -> bool:
    return not isinstance(loader.dataset, IterableDataset) and getattr(loader, "in_order", True)


def indices_of(batch: Any, fetched: Sequence[FetchedBatch], place: int, num_parts: int) -> tuple[int, ...]:
    """The dataset indices of the samples of a batch, one of ``num_parts`` of a step. Empty if they are not known.

    Of a ``Subset``, those in the dataset that it is a part of.
    ``fetched`` are the batches that came for this step. The right one is found by shared memory, or else by order.
    """
    keys = {_compat.storage_key(tensor) for tensor in tensors(batch)}
    same = [each for each in fetched if each.shares_memory(keys)]
    same = same or _with_same_marks(batch, fetched)
    if not same and (len(fetched) != num_parts or any(each.is_ahead for each in fetched)):
        return ()
    if len({each.source for each in same}) > 1:  # samples of several datasets
        return ()
    one = same[-1] if same else fetched[place]
    given, dataset = one.given, one.dataset
    try:
        indices = tuple(map(operator.index, given if isinstance(given, (list, tuple, Tensor)) else [given]))
        while isinstance(dataset, Subset):  # of random_split, say: what a user can look up is the whole
            indices, dataset = tuple(operator.index(dataset.indices[each]) for each in indices), dataset.dataset
    except (TypeError, LookupError):  # keys of another kind
        return ()
    return indices if len(indices) == num_samples_of(batch, fetched) else ()


def whole_dataset(fetched: Sequence[FetchedBatch]) -> Any:
    """The dataset that the indices of ``indices_of`` are of; None if these batches are of several datasets."""
    found: dict[int, Any] = {}
    for each in fetched:
        dataset = each.dataset
        while isinstance(dataset, Subset):
            dataset = dataset.dataset
        found[id(dataset)] = dataset
    return next(iter(found.values())) if len(found) == 1 else None


def _with_same_marks(batch: Any, fetched: Sequence[FetchedBatch]) -> list[FetchedBatch]:
    """The one of which the batch is a copy; empty if that could be said of several. Syncs."""
    if not any(each.marks for each in fetched):
        return []
    parts = [part for part in _few_parts(batch, depth=4) if part.is_contiguous()]
    known = {_readable(part.shape, _few_values(part)) for part in parts}
    found = [each for each in fetched if each.marks and known.issuperset(_readable(*mark) for mark in each.marks)]
    return found if len(found) == 1 else []


def _few_values(tensor: Tensor) -> Tensor:
    """A copy of some values of a contiguous tensor, equal for copies of the tensor."""
    number = tensor.numel()
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.as_strided((min(number, _MOST_VALUES),), (max(1, number // _MOST_VALUES),)).clone()


def _readable(shape: torch.Size, values: Tensor) -> tuple[Any, ...]:
    """NaN are equal here."""
    return shape, values.dtype, repr(values.tolist())


def num_samples_of(batch: Any, fetched: Sequence[FetchedBatch]) -> int | None:
    """How many samples a batch holds. Tensors that a loader gave count alone: others may be tables of the program.

    If it gave none of these, but others for the same step, they have to be as many as those. More rows than samples
    that were fetched are parts of samples, such as the nodes of graphs that were put into one.
    """
    given = [t for t in tensors(batch) if any(each.shares_memory({_compat.storage_key(t)}) for each in fetched)]
    num = num_samples(given or batch)
    fetches = [len(each.given) for each in fetched if isinstance(each.given, (list, tuple, Tensor))]
    if given and fetches and num is not None:
        return num if num <= max(fetches) else None
    return num if given or not fetches or num in fetches else None


def _few_parts(batch: Any, depth: int) -> Iterator[Tensor]:
    """The tensors near the top of a batch, which may hold millions of numbers below."""
    if isinstance(batch, Tensor):
        if batch.layout is torch.strided and not (batch.is_meta or batch.is_nested):
            yield batch
    elif depth and isinstance(batch, (list, tuple, Mapping)):
        parts = batch.values() if isinstance(batch, Mapping) else batch
        for part in itertools.islice(parts, _MOST_PARTS):
            yield from _few_parts(part, depth - 1)
