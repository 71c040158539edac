"""The board: one float64 vector on the device that holds all that a step has to say, copied to the host in one piece.

    scale | votes of the ranks | flags of micro-batches | loss | buffers | gradients

From the loss on, each entry is finite exactly when its tensor is: the step is sound when all of them are. Kernels write
straight into their places.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from nanguard.agree import Ranks
from nanguard.numerics.finite import raise_flag_
from nanguard.numerics.norm import are_alike, combine, tensor_norms
from nanguard.shield import Shield

_SCALE, _VOTES = 0, 1


class Group:
    """Parameters that have a gradient and share one norm, with these gradients."""

    __slots__ = ("alike", "grads", "params")

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = [p for p in params if p.grad is not None]
        self.grads: list[Tensor] = [p.grad for p in self.params]  # type: ignore[misc]
        self.alike = are_alike(self.grads)
        if not self.alike:
            self._resolve()

    def _resolve(self) -> None:
        """Carries out conjugations that torch has put off: gradients are to be written to."""
        for place, param in enumerate(self.params):
            if self.grads[place].is_conj():
                param.grad = self.grads[place] = self.grads[place].resolve_conj()


class Roll:
    """Which parameters share a norm: a parameter group of an optimizer, or all of them in the model's order."""

    def __init__(self, model: nn.Module, shield: Shield, *, together: bool) -> None:
        self._shield = shield
        self._together = together
        self.look_again(model)

    def look_again(self, model: nn.Module) -> None:
        self._order = {id(p): place for place, p in enumerate(model.parameters())}

    def call(self) -> list[Group]:
        """The groups as they are now; parameters may be frozen, unused or added while training goes on."""
        groups: Iterable[list[nn.Parameter]] = self._shield.groups()
        if self._together:
            # torch sums in the order of model.parameters(), and rounding depends on the order.
            last = len(self._order)
            groups = [sorted(chain.from_iterable(groups), key=lambda p: self._order.get(id(p), last))]
        return [Group(params) for params in groups]


@dataclass(frozen=True, slots=True)
class Layout:
    """What stands where on a filled board, and whose it is."""

    votes: int
    flags: int
    groups: list[int]
    buffers: tuple[str, ...]
    params: tuple[nn.Parameter, ...]

    @property
    def loss_at(self) -> int:
        return _VOTES + self.votes + self.flags

    @property
    def params_at(self) -> int:
        return self.loss_at + 1 + len(self.buffers)

    @property
    def size(self) -> int:
        return self.params_at + len(self.params)


NO_LAYOUT = Layout(0, 0, [], (), ())


class Board:
    """Filled once a step. Nothing here syncs."""

    def __init__(self, device: torch.device, ranks: Ranks) -> None:
        self._device = device
        self._ranks = ranks
        self._one = torch.ones((), device=device)
        self._values = torch.zeros(64, dtype=torch.float64, device=device)
        self.layout = NO_LAYOUT
        self.norms = self._values[:0]

    def fill_(
        self,
        *,
        loss: Tensor,
        scale: Tensor | None,
        flags: Sequence[Tensor],
        buffers: tuple[tuple[str, ...], list[Tensor]],
        groups: Sequence[Group],
    ) -> None:
        """``buffers`` are names, and vectors with one largest absolute value for each of them."""
        names, peaks = buffers
        params = tuple(chain.from_iterable(group.params for group in groups))
        sizes = [len(group.params) for group in groups]
        at = self.layout = Layout(self._ranks.votes, len(flags), sizes, names, params)
        if at.size > len(self._values):
            self._values = torch.zeros(2 * at.size, dtype=torch.float64, device=self._device)
        if scale is not None:
            self._values[_SCALE].copy_(scale)
        if flags:
            start = _VOTES + at.votes
            self._values[start : start + at.flags].copy_(torch.stack(list(flags)))
        self.loss.copy_(loss)
        if peaks:
            self._values[at.loss_at + 1 : at.params_at].copy_(torch.cat([p.to(self._device) for p in peaks]))
        norms = self._gradient_norms(groups)
        if norms:
            torch.stack(norms, out=self._values[at.params_at : at.size])
        parts = torch.split(self._values[at.params_at : at.size], sizes)
        self.norms = combine(parts, alike=all(group.alike for group in groups))

    def _gradient_norms(self, groups: Sequence[Group]) -> list[Tensor]:
        if all(group.alike for group in groups):
            # One call for all groups, as long as they are of one kind.
            grads = list(chain.from_iterable(group.grads for group in groups))
            return list(tensor_norms(grads, alike=are_alike([group.grads[0] for group in groups if group.grads])))
        norms = chain.from_iterable(tensor_norms(group.grads) for group in groups)
        return [norm.to(self._device) for norm in norms]

    @property
    def filled(self) -> Tensor:
        return self._values[: self.layout.size]

    def raise_flag_(self, flag: Tensor) -> None:
        """Sets the 0-dim ``flag`` to 1 where loss, buffers or gradients are non-finite."""
        raise_flag_(flag, self._values[self.layout.loss_at : self.layout.size], self._one)

    def raise_flag_but_for_gradients_(self, flag: Tensor) -> None:
        """Sets the 0-dim ``flag`` to 1 where loss or buffers are non-finite."""
        raise_flag_(flag, self._values[self.layout.loss_at : self.layout.params_at], self._one)

    @property
    def loss(self) -> Tensor:
        return self._values[self.layout.loss_at]

    def agree_(self) -> Tensor | None:
        """1 where any rank saw something non-finite, else 0; None where there is only one rank."""
        if not self._ranks.votes:
            return None
        at = self.layout
        loss, buffers, gradients = torch.split(self._values[at.loss_at : at.size], [1, len(at.buffers), len(at.params)])
        votes = self._ranks.vote(loss, buffers, gradients)
        self._values[_VOTES : _VOTES + self._ranks.votes].copy_(votes)
        return self._ranks.any(votes)


@dataclass(frozen=True, slots=True)
class Reply:
    """A board as the host got it."""

    layout: Layout
    values: list[float]

    @property
    def votes(self) -> list[float]:
        return self.values[_VOTES : _VOTES + self.layout.votes]

    @property
    def is_finite(self) -> bool:
        """Of this rank."""
        return all(map(math.isfinite, self.values[self.layout.loss_at :]))

    @property
    def scale(self) -> float:
        return self.values[_SCALE]

    @property
    def loss(self) -> float:
        return self.values[self.layout.loss_at]

    @property
    def norms(self) -> tuple[float, ...]:
        """Of each group, from the norms of its gradients."""
        norms, start = [], self.layout.params_at
        for size in self.layout.groups:
            norms.append(math.hypot(*self.values[start : start + size]))
            start += size
        return tuple(norms)

    @property
    def dropped(self) -> tuple[int, ...]:
        """Places of the micro-batches that were left out."""
        start = _VOTES + self.layout.votes
        return tuple(i for i, flag in enumerate(self.values[start : start + self.layout.flags]) if flag)

    @property
    def bad_buffers(self) -> tuple[str, ...]:
        start = self.layout.loss_at + 1
        norms = self.values[start : start + len(self.layout.buffers)]
        return tuple(name for name, norm in zip(self.layout.buffers, norms, strict=True) if not math.isfinite(norm))

    @property
    def bad_params(self) -> tuple[nn.Parameter, ...]:
        norms = self.values[self.layout.size - len(self.layout.params) :]
        return tuple(p for p, norm in zip(self.layout.params, norms, strict=True) if not math.isfinite(norm))
