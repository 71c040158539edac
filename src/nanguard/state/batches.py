"""How many samples a batch has, and batches of some of its samples."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nanguard.state.trees import PLAIN, named_tensors


def num_samples(batch: Any) -> int | None:
    """How many samples a batch holds: the first size that most of its tensors share; None if that is unclear.

    If all differ, that of the first tensor counts, but a mapping has no first one: it may be time that comes first.
    """
    sizes = [tensor.shape[0] for _, tensor in named_tensors(batch) if tensor.ndim]
    if not sizes:
        return None
    (size, count), *others = Counter(sizes).most_common()
    if others and others[0][1] == count and count == 1:
        size = 0 if isinstance(batch, Mapping) else sizes[0]
    return size if size > 0 else None


def take(batch: Any, samples: Sequence[int], num: int) -> Any:
    """The same batch with these samples only: everything with ``num`` entries is cut, the rest is unchanged."""
    if isinstance(batch, Tensor):
        if batch.ndim and batch.shape[0] == num:
            return batch[torch.tensor(samples, device=batch.device)]
        return batch
    if isinstance(batch, Mapping):
        cut = {key: take(child, samples, num) for key, child in batch.items()}
        return cut if type(batch) is dict else _rebuilt(batch, cut)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = {f.name: take(getattr(batch, f.name), samples, num) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **values)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(take(child, samples, num) for child in batch))
    if isinstance(batch, (list, tuple)):
        if len(batch) == num and not any(isinstance(child, (Tensor, Mapping, list, tuple)) for child in batch):
            return type(batch)(batch[i] for i in samples)
        return type(batch)(child if type(child) in PLAIN else take(child, samples, num) for child in batch)
    return batch


def filled(samples: Sequence[int], num: int) -> list[int]:
    """These samples over and over, ``num`` in all.

    On a GPU, an index out of range ends the program. In a batch of the same size, valid indices stay valid.
    """
    return [samples[place % len(samples)] for place in range(num)]


def _rebuilt(batch: Any, cut: dict[Any, Any]) -> Any:
    try:
        return type(batch)(cut)
    except TypeError:
        return cut
