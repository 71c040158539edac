"""The one reduction between ranks. All ranks decide alike, and each knows which rank saw what.

Every rank fills its own row of a small table: flags for non-finite loss, gradients, buffers, and the loss itself. The
maximum over ranks is then the whole table on all of them, and it alone decides. Under DDP a NaN gradient spreads to
every rank as gradients are averaged, so each rank also notes its own gradients just before, in the buckets DDP is about
to reduce.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nanguard.numerics.finite import raise_flag_
from nanguard.numerics.norm import tensor_norms
from nanguard.records.steps import Flags, Found

log = logging.getLogger("nanguard")

_LOSS, _GRADIENTS, _BUFFERS, _OWN, _VALUE, _COLUMNS = 0, 1, 2, 3, 4, 5


class Ranks:
    """The ranks that train together; the table has no rows if there is only one. Nothing here syncs.

    (On gloo the reduction itself waits for the other ranks, as every gloo collective does.)
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        *,
        alone: bool = False,
        averaged: bool = False,
        is_mixed: bool = False,
    ) -> None:
        """``alone`` asks no other rank; ``averaged`` says that gradients come here as all ranks have them.

        With ``is_mixed``, which implies ``alone``, other ranks apply every step: only what they have as well, the
        averaged gradients, may keep this rank from it.
        """
        is_distributed = dist.is_available() and dist.is_initialized()
        self.has_others = is_distributed and dist.get_world_size(group) > 1
        self.is_mixed = is_mixed
        together = self.has_others and not alone and not is_mixed
        self._group = group
        self.size = dist.get_world_size(group) if together else 1
        self.rank = dist.get_rank(group) if together else 0
        self.votes = _COLUMNS * self.size if together else 0
        self._own = torch.zeros((), dtype=torch.float32, device=device)
        self._joined: Tensor | None = None
        self._maxima: Tensor | None = None
        self._shows_own = _LOSS if averaged else _GRADIENTS
        self._sees_own = together and isinstance(model, DistributedDataParallel) and self._watch_buckets(model)

    def vote(self, loss: Tensor, buffers: Tensor, gradients: Tensor) -> Tensor:
        """The table of all ranks, from vectors of this rank's measurements."""
        votes = torch.zeros(self.votes, dtype=torch.float32, device=loss.device)
        votes[_VALUE::_COLUMNS] = -math.inf
        row = votes[_COLUMNS * self.rank : _COLUMNS * (self.rank + 1)]
        for column, measured in ((_LOSS, loss), (_GRADIENTS, gradients), (_BUFFERS, buffers)):
            if len(measured):
                raise_flag_(row[column], measured)
        row[_OWN].copy_(self._own if self._sees_own else row[self._shows_own])
        row[_VALUE].copy_(torch.nan_to_num(loss[0], posinf=math.inf, neginf=-math.inf))
        joined, self._joined = self._joined, None
        together = votes if joined is None else torch.cat([votes, joined])
        dist.all_reduce(together, op=dist.ReduceOp.MAX, group=self._group)
        self._maxima = None if joined is None else together[self.votes :]
        return together[: self.votes]

    def join(self, values: Tensor) -> None:
        """Takes the maximum of these over ranks together with the next vote. All ranks must join as many values."""
        self._joined = values

    def take_maxima(self) -> Tensor | None:
        """The maxima of what was joined last; None if the last vote was without."""
        maxima, self._maxima = self._maxima, None
        return maxima

    @staticmethod
    def decision(votes: Tensor) -> Tensor:
        """1 if any rank has anything non-finite, else 0. Gradients that no guarded optimizer owns do not count."""
        return votes.view(-1, _COLUMNS)[:, :_OWN].amax()

    def found(self, votes: Sequence[float]) -> tuple[Found, ...]:
        """What was non-finite on any rank, from the table as the host got it."""
        columns: tuple[tuple[Found, int], ...] = (("loss", _LOSS), ("gradients", _GRADIENTS), ("buffers", _BUFFERS))
        return tuple(name for name, column in columns if any(votes[column::_COLUMNS]))

    def mean_loss(self, votes: Sequence[float]) -> float:
        """The mean over all ranks; meaningless if one is non-finite, which the flags say."""
        return sum(votes[_VALUE::_COLUMNS]) / self.size

    def all_clear(self, votes: Sequence[float]) -> bool:
        """Whether no rank has flagged anything."""
        return not any(vote for column, vote in enumerate(votes) if column % _COLUMNS != _VALUE)

    def mean(self, here: float) -> float:
        """The mean of all ranks' numbers. Waits for all of them."""
        if not self.votes:
            return here
        number = torch.tensor(here, dtype=torch.float64, device=self._own.device)
        dist.all_reduce(number, group=self._group)
        return float(number) / self.size

    def any(self, here: bool) -> bool:
        """Whether ``here`` is True on any rank. Waits for all of them."""
        return self.lowest(-int(here)) < 0

    def lowest(self, here: int) -> int:
        """The smallest of all ranks' numbers. Waits for all of them."""
        if not self.votes:
            return here
        number = torch.tensor(here, dtype=torch.int64, device=self._own.device)
        dist.all_reduce(number, op=dist.ReduceOp.MIN, group=self._group)
        return int(number)

    def share(self, text: str) -> tuple[int, str]:
        """The text of the first rank that has one, and which rank that is. Waits for all of them."""
        if not self.votes:
            return self.rank, text
        source = self.lowest(self.rank if text else self.size)
        if source == self.size:
            return self.rank, ""
        here = text.encode() if self.rank == source else b""
        size = -self.lowest(-len(here))
        letters = torch.zeros(size, dtype=torch.uint8, device=self._own.device)
        if self.rank == source:
            letters.copy_(torch.frombuffer(bytearray(here), dtype=torch.uint8))
        dist.all_reduce(letters, op=dist.ReduceOp.MAX, group=self._group)
        return source, bytes(letters.tolist()).decode()

    def culprits(self, votes: Sequence[float]) -> tuple[Flags, ...]:
        """The ranks that saw something non-finite before gradients were averaged."""
        rows = [votes[i : i + _COLUMNS] for i in range(0, len(votes), _COLUMNS)]
        return tuple(
            Flags(rank=rank, loss=bool(row[_LOSS]), gradients=bool(row[_OWN]), buffers=bool(row[_BUFFERS]))
            for rank, row in enumerate(rows)
            if row[_LOSS] or row[_OWN] or row[_BUFFERS]
        )

    def forget_(self) -> None:
        """Before a step: forgets what a backward pass outside any step has left."""
        if self._sees_own:
            self._own.zero_()

    def _watch_buckets(self, model: DistributedDataParallel) -> bool:
        group = model.process_group
        share = 1.0 / dist.get_world_size(group)

        # DDP wants its own private types as annotations, or none at all.
        def note_and_average(_, bucket):  # type: ignore[no-untyped-def]
            """Notes this rank's own gradients; then DDP's averaging, to the bit: multiply by its share, and sum."""
            buffer = bucket.buffer()
            raise_flag_(self._own, tensor_norms([buffer])[0].reshape(1))
            buffer.div_(1 / share) if buffer.is_sparse else buffer.mul_(share)
            return dist.all_reduce(buffer, group=group, async_op=True).get_future().then(lambda done: done.value()[0])

        try:
            model.register_comm_hook(None, note_and_average)
        except RuntimeError as error:  # DDP takes one hook, and the program has its own
            log.info(
                "ranks cannot tell whose gradient was non-finite: DDP has a communication hook already (%s)", error
            )
            return False
        return True
