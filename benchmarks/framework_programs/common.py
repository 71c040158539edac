"""What the programs have in common: the model, the data, and what is looked at when they have ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

Batch = tuple[Tensor, Tensor]
Epochs = Sequence[Sequence[Batch]]

NUM_EPOCHS, NUM_BATCHES, BAD = 3, 8, 3


@dataclass
class Facts:
    """Empty if the program has no such thing. ``best`` is the lowest loss by which it keeps its best checkpoint."""

    weights: list[Tensor] = field(default_factory=list)
    optimizer: list[Tensor] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    average: list[Tensor] = field(default_factory=list)
    schedule: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)


def facts(model: nn.Module, optimizer: Optimizer, average: nn.Module | None = None) -> Facts:
    """Of the model, as it is now."""
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return Facts(
        weights=[param.detach().clone() for param in model.parameters()],
        optimizer=[value.clone() for value in states],
        buffers=[buffer.clone() for buffer in model.buffers()],
        average=[] if average is None else [value.clone() for value in average.state_dict().values()],
        schedule=[group["lr"] for group in optimizer.param_groups],
    )


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))


def make_epochs() -> list[list[Batch]]:
    g = torch.Generator().manual_seed(0)
    return [
        [(torch.randn(8, 6, generator=g), torch.randint(0, 3, (8,), generator=g)) for _ in range(NUM_BATCHES)]
        for _ in range(NUM_EPOCHS)
    ]


def with_nan(epochs: Epochs) -> list[list[Batch]]:
    """One NaN in one batch of the first epoch."""
    spoiled = [list(batches) for batches in epochs]
    x, y = spoiled[0][BAD]
    x = x.clone()
    x[2, 0] = float("nan")
    spoiled[0][BAD] = x, y
    return spoiled


def without_batch(epochs: Epochs) -> list[list[Batch]]:
    """The run that never had it."""
    kept = [list(batches) for batches in epochs]
    del kept[0][BAD]
    return kept


class EpochData(IterableDataset[Any]):
    """Each pass over it gives the batches of the next epoch."""

    def __init__(self, epochs: Epochs) -> None:
        self._epochs, self._next = epochs, 0

    def __iter__(self) -> Iterator[Any]:
        batches = self._epochs[self._next]
        self._next += 1
        return iter(batches)


def loader(epochs: Epochs) -> DataLoader[Any]:
    return DataLoader(EpochData(epochs), batch_size=None)


def lower(mean: float, best: list[float]) -> list[float]:
    """As people write it: ``if mean < best``."""
    return [mean] if not best or mean < best[0] else best
