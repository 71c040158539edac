"""The measurement of a step: one float64 vector on the device, copied to the host in one piece.

    scale | votes of the ranks | flags of micro-batches | loss | buffers | gradients

From the loss on, an entry is finite if and only if its tensor is. The step is sound if all entries are finite. Kernels
write straight into their places.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch
from torch import Tensor, nn

from nanguard._compat_kernels import raise_if_nonfinite_
from nanguard._compat_modes import NoGrad
from nanguard.numerics.norm import NormWriter, are_alike, combine_, gradients_of, joint_norm, tensor_norms
from nanguard.state import sharding
from nanguard.step.optimizers import SkippableOptimizers
from nanguard.step.ranks import Ranks


class Group:
    """Parameters that have a gradient and share one norm, and their gradients."""

    __slots__ = ("alike", "grads", "params")

    def __init__(self, params: list[nn.Parameter], *, known_alike: bool) -> None:
        grads = gradients_of(params)
        self.params = params if len(grads) == len(params) else [p for p in params if p.grad is not None]
        self.grads = sharding.local(grads)
        self.alike = known_alike or are_alike(self.grads)
        if not self.alike:
            self._resolve()

    def _resolve(self) -> None:
        """Resolves lazy conjugation: gradients are written to later."""
        for place, param in enumerate(self.params):
            if self.grads[place].is_conj():
                param.grad = self.grads[place] = self.grads[place].resolve_conj()


def _are_all_alike(groups: Sequence[Group]) -> bool:
    """Whether one kernel can take the gradients of all groups."""
    if len(groups) == 1:
        return groups[0].alike
    return are_alike([group.grads[0] for group in groups if group.grads]) and all(group.alike for group in groups)


class ParamGroups:
    """Which parameters share a norm: a parameter group of an optimizer, or all of them in the model's order."""

    def __init__(self, model: nn.Module, skippable: SkippableOptimizers, *, together: bool) -> None:
        self._skippable = skippable
        self._together = together
        self.look_again(model)

    def look_again(self, model: nn.Module) -> None:
        self._order = {id(p): place for place, p in enumerate(model.parameters())}

    def quick_norms(self, known: Tensor | None) -> tuple[float, ...] | None:
        """The norm of each group in few calls, for a CPU; None if one is not finite, or not known to be.

        ``known`` are norms of all gradients, if there are any. Not for gradients that are spread over ranks.
        """
        grads = [gradients_of(params) for params in self._skippable.groups()]
        if self._together:
            grads = [list(chain.from_iterable(grads))]
        if known is not None and len(known) == sum(map(len, grads)):
            each = iter(known.tolist())
            norms = tuple([math.hypot(*islice(each, len(group))) for group in grads])
        else:
            norms = tuple(map(joint_norm, grads))
        return norms if all(map(math.isfinite, norms)) else None

    def current(self, *, known_alike: bool = False) -> list[Group]:
        """The groups as they are now: parameters may be frozen, unused or added during training.

        ``known_alike`` says that all gradients are known to be alike.
        """
        groups: Iterable[list[nn.Parameter]] = self._skippable.groups()
        if self._together:
            # torch sums in the order of model.parameters(), and rounding depends on the order.
            last = len(self._order)
            groups = [sorted(chain.from_iterable(groups), key=lambda p: self._order.get(id(p), last))]
        return [Group(params, known_alike=known_alike) for params in groups]


class MeasurementLayout:
    """Which entry of a measurement belongs to what. ``sizes`` are those of the parts, in order."""

    __slots__ = ("buffers", "checked_from", "flags", "groups", "loss_at", "params", "params_at", "sizes", "votes")

    def __init__(
        self, votes: int, flags: int, groups: list[int], buffers: tuple[str, ...], params: list[nn.Parameter]
    ) -> None:
        self.votes, self.flags, self.groups, self.buffers, self.params = votes, flags, groups, buffers, params
        self.sizes = [1, votes, flags, 1, len(buffers), *groups]
        self.loss_at = 1 + votes + flags
        self.params_at = self.loss_at + 1 + len(buffers)
        self.checked_from = self.loss_at

    def fits(self, flags: int, groups: list[int], buffers: tuple[str, ...], params: list[nn.Parameter]) -> bool:
        """Whether it is the layout of these."""
        if flags != self.flags or groups != self.groups or buffers != self.buffers:
            return False
        return all(map(operator.is_, params, self.params))


class NormsAndLoss(MeasurementLayout):
    """Of a vector with nothing but the norms of gradients and, behind them, the loss."""

    __slots__ = ()

    def __init__(self, groups: list[int], params: list[nn.Parameter]) -> None:
        super().__init__(0, 0, groups, (), params)
        self.params_at, self.loss_at, self.checked_from = 0, len(params), 0


EMPTY_LAYOUT = MeasurementLayout(0, 0, [], (), [])


class _Views:
    """Views of the parts of a measurement. Kept while their sizes stay: a view costs the host as much as a kernel."""

    def __init__(self, sizes: list[int], device: torch.device) -> None:
        self.sizes = sizes
        self.filled = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        self.scale, self.votes, self.flags, loss, self.buffers, *self.groups = torch.split(self.filled, sizes)
        self.loss = loss[0]
        start = sum(sizes[:3])
        self.measured = self.filled[start:]
        self.but_gradients = self.filled[start : start + 1 + sizes[4]]
        self.gradients = self.filled[start + 1 + sizes[4] :]
        self.norms = torch.zeros(len(self.groups), dtype=torch.float64, device=device)
        self.each_norm = self.norms.unbind()


class Measurement:
    """Filled once a step. Nothing here syncs."""

    def __init__(self, device: torch.device, ranks: Ranks) -> None:
        self._device = device
        self._ranks = ranks
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._norms = NormWriter()
        self.layout = EMPTY_LAYOUT
        self._views = _Views(EMPTY_LAYOUT.sizes, device)

    def fill_(
        self,
        *,
        loss: Tensor,
        scale: Tensor | None,
        flags: Sequence[Tensor],
        buffers: tuple[tuple[str, ...], list[Tensor]],
        groups: Sequence[Group],
        known: Tensor | None = None,
        sums_groups: bool = True,
    ) -> None:
        """``buffers`` are names, and vectors with one largest absolute value for each of them.

        ``known`` are norms that need not be computed again.
        Without ``sums_groups``, ``norms`` is not written: the host computes them itself from the norms of gradients.
        """
        names, peaks = buffers
        params, members = [], []
        for group in groups:
            params += group.params
            members.append(len(group.params))
        if self.layout.votes != self._ranks.votes or not self.layout.fits(len(flags), members, names, params):
            self.layout = MeasurementLayout(self._ranks.votes, len(flags), members, names, params)
        with NoGrad():
            if self.layout.sizes != self._views.sizes:
                self._views = _Views(self.layout.sizes, self._device)
            views = self._views
            views.loss.copy_(loss)
            if scale is not None:
                views.scale.copy_(scale)
            if flags:
                views.flags.copy_(torch.stack(list(flags)))
            if peaks:
                views.buffers.copy_(torch.cat([p.to(self._device) for p in peaks]))
                sharding.global_max_(views.buffers)
            if known is not None and len(known) == len(params):
                views.gradients.copy_(known)
            elif params:
                self._write_norms_(views.gradients, groups)
            if params:
                sharding.global_sum_(views.gradients, power=2)
            if sums_groups:
                combine_(views.norms, views.each_norm, views.groups, alike=_are_all_alike(groups))

    def fill_again_(self, loss: Tensor, grads: list[Tensor], known: Tensor | None) -> None:
        """As ``fill_``, if nothing but these has changed since the last time. ``known`` are norms of the gradients.

        They are alike, and on the device. Does not write ``norms``.
        """
        with NoGrad():
            views = self._views
            views.loss.copy_(loss)
            if known is not None:
                views.gradients.copy_(known)
            else:
                self._norms.write_(views.gradients, grads)
            sharding.global_sum_(views.gradients, power=2)

    def _write_norms_(self, out: Tensor, groups: Sequence[Group]) -> None:
        grads = [g for group in groups for g in group.grads]
        if _are_all_alike(groups) and grads[0].device == self._device:
            self._norms.write_(out, grads)
        else:
            torch.stack([norm.to(self._device) for norm in tensor_norms(grads)], out=out)

    @property
    def filled(self) -> Tensor:
        return self._views.filled

    @property
    def norms(self) -> Tensor:
        """The norm of the gradients of each group."""
        return self._views.norms

    def raise_flag_(self, flag: Tensor, values: Tensor | None = None) -> None:
        """Sets the 0-dim ``flag`` to 1 if loss, buffers or gradients are non-finite, or these ``values`` of them."""
        raise_if_nonfinite_(flag, self._views.measured if values is None else values, self._one)

    def raise_flag_but_for_gradients_(self, flag: Tensor) -> None:
        """Sets the 0-dim ``flag`` to 1 if loss or buffers are non-finite."""
        raise_if_nonfinite_(flag, self._views.but_gradients, self._one)

    def agree_(self) -> Tensor | None:
        """1 if any rank saw something non-finite, else 0; None if there is only one rank."""
        if not self._ranks.votes:
            return None
        views = self._views
        votes = self._ranks.vote(views.loss.reshape(1), views.buffers, views.gradients)
        views.votes.copy_(votes)
        return self._ranks.decision(votes)


@dataclass(frozen=True, slots=True)
class MeasuredValues:
    """A measurement as the host got it."""

    layout: MeasurementLayout
    values: list[float]

    @property
    def votes(self) -> list[float]:
        return self.values[1 : 1 + self.layout.votes]

    @property
    def is_finite(self) -> bool:
        """Whether everything on this rank is finite."""
        return all(map(math.isfinite, self.values[self.layout.checked_from :]))

    @property
    def scale(self) -> float:
        return self.values[0]

    @property
    def loss(self) -> float:
        return self.values[self.layout.loss_at]

    @property
    def norms(self) -> tuple[float, ...]:
        """The norm of each group, from the norms of its gradients."""
        norms, start = [], self.layout.params_at
        for size in self.layout.groups:
            norms.append(math.hypot(*self.values[start : start + size]))
            start += size
        return tuple(norms)

    @property
    def dropped(self) -> tuple[int, ...]:
        """Positions of the micro-batches that were left out."""
        if not self.layout.flags:
            return ()
        start = 1 + self.layout.votes
        return tuple(i for i, flag in enumerate(self.values[start : start + self.layout.flags]) if flag)

    @property
    def bad_buffers(self) -> tuple[str, ...]:
        start = self.layout.loss_at + 1
        norms = self.values[start : start + len(self.layout.buffers)]
        return tuple(name for name, norm in zip(self.layout.buffers, norms, strict=True) if not math.isfinite(norm))

    @property
    def bad_params(self) -> tuple[nn.Parameter, ...]:
        norms = self.values[self.layout.params_at : self.layout.params_at + len(self.layout.params)]
        return tuple(p for p, norm in zip(self.layout.params, norms, strict=True) if not math.isfinite(norm))
