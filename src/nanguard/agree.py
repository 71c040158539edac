"""The one reduction between ranks: all of them decide alike, and each knows who saw what.

Every rank fills its own row of a small table of flags; the maximum over ranks is then the whole table on all of
them. Under DDP a NaN gradient spreads to every rank as gradients are averaged, so each rank also notes its own
gradients just before, in the buckets DDP is about to reduce.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nanguard.numerics.finite import raise_flag_
from nanguard.numerics.norm import tensor_norms
from nanguard.records import Flags

log = logging.getLogger("nanguard")

_LOSS, _OWN, _ALL, _COLUMNS = 0, 1, 2, 3


class Ranks:
    """The ranks that train together; a table with no rows where there is only one. Nothing here syncs.

    (On gloo the reduction itself waits for the other ranks, as every gloo collective does.)
    """

    def __init__(self, model: nn.Module, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
        self._group = group
        self.size = dist.get_world_size(group) if together else 1
        self.rank = dist.get_rank(group) if together else 0
        self.votes = _COLUMNS * self.size if together else 0
        self._own = torch.zeros((), device=device)
        self._sees_own = together and isinstance(model, DistributedDataParallel) and self._watch_buckets(model)

    def vote(self, measured: Tensor) -> Tensor:
        """The table of all ranks, from this rank's measurements, of which the first is the loss."""
        votes = torch.zeros(self.votes, device=measured.device)
        row = votes[_COLUMNS * self.rank : _COLUMNS * (self.rank + 1)]
        raise_flag_(row[_LOSS], measured[:1])
        raise_flag_(row[_ALL], measured)
        row[_OWN].copy_(self._own if self._sees_own else row[_ALL])
        self._own.zero_()
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group)
        return votes

    def read(self, votes: Sequence[float]) -> tuple[Flags, ...]:
        """The ranks with something of their own to report, from the table as the host got it."""
        rows = [votes[i : i + _COLUMNS] for i in range(0, len(votes), _COLUMNS)]
        return tuple(
            Flags(rank=rank, loss=bool(row[_LOSS]), gradients=bool(row[_OWN]))
            for rank, row in enumerate(rows)
            if row[_LOSS] or row[_OWN]
        )

    def _watch_buckets(self, model: DistributedDataParallel) -> bool:
        try:
            model.register_comm_hook(self, _note_and_average)
        except RuntimeError as error:  # DDP takes one hook, and the program has its own
            log.info(
                "ranks cannot tell whose gradient was non-finite: DDP has a communication hook already (%s)",
                error,
            )
            return False
        return True

    def see_bucket(self, bucket: Tensor) -> None:
        """Notes whether this rank's own gradients, not yet averaged, are finite. Does not sync."""
        raise_flag_(self._own, tensor_norms([bucket])[0].reshape(1))


def _note_and_average(ranks: Ranks, bucket: Any) -> torch.futures.Future[Tensor]:
    """DDP's own averaging, to the bit: multiply by the inverse of the world size, then sum."""
    buffer = bucket.buffer()
    ranks.see_bucket(buffer)
    group = ranks._group or dist.group.WORLD
    buffer.mul_(1.0 / dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future
