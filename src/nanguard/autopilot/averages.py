"""Averaged models (``torch.optim.swa_utils``): no optimizer trains them, but they are what is used in the end."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from nanguard.state.nonfinite import nonfinite_names
from nanguard.state.undo import Undo

log = logging.getLogger("nanguard")


def without_bad_batches(loader: Iterable[Any], model: nn.Module) -> Iterator[Any]:
    """For ``update_bn``: a batch that makes a buffer of ``model`` non-finite is left out of its statistics."""
    device = next((tensor.device for tensor in (*model.buffers(), *model.parameters())), torch.device("cpu"))
    buffers = Undo(device)
    buffers.watch_buffers(model)
    left_out: list[int] = []
    for number, batch in enumerate(loader):
        before = _nonfinite(model)
        buffers.note_()
        yield batch
        if _nonfinite(model) - before:
            buffers.undo_()
            left_out.append(number)
    if left_out:
        batches = "batch" if len(left_out) == 1 else "batches"
        shown = ", ".join(map(str, left_out[:8])) + (", ..." if len(left_out) > 8 else "")
        log.warning("update_bn: %s %s left out of the statistics, which would have become non-finite", batches, shown)


def unsound_averages(modules: Iterable[nn.Module]) -> tuple[str, ...]:
    """Names of non-finite parameters and buffers of averaged models among ``modules``. Syncs."""
    averages = [module for module in modules if isinstance(module, AveragedModel)]
    names: list[str] = []
    for place, average in enumerate(averages):
        which = "average" if len(averages) == 1 else f"average {place}"
        tensors = {**dict(average.named_parameters()), **dict(average.named_buffers())}
        names += [f"{which}.{name.removeprefix('module.')}" for name in nonfinite_names(_floating(tensors))]
    return tuple(names)


def _nonfinite(model: nn.Module) -> set[str]:
    return set(nonfinite_names(_floating(dict(model.named_buffers()))))


def _floating(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
