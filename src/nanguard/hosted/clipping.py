"""Clipping that the program does itself. Norms are logged as they were before it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanguard import _compat_kernels, _compat_modes
from nanguard.hosted.known_norms import KnownIndices, KnownNorms
from nanguard.numerics.norm import are_alike, gradients_of, tensor_norms
from nanguard.state.readback import AsyncReadback, PendingCopy

if TYPE_CHECKING:
    from nanguard.hosted.step import HostedStep

_TINY = 1e-6
"""``clip_grad_norm_`` adds it to the norm that it divides by."""

_ORDINARY_NORM = 1e12


def are_ordinary(norms: Iterable[float]) -> bool:
    """Whether the next norms may be computed in fp32, as clipping does, where they overflow before gradients do."""
    return max(norms, default=0.0) < _ORDINARY_NORM


class ProgramClipping:
    """What the program's clipping has done to the gradients since the last step. Nothing here syncs.

    If it was ordinary, the norms of all gradients before it are known. Otherwise there is a divisor for each parameter
    group, by which its gradients were divided.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._readbacks = AsyncReadback(device)
        self._indices = KnownIndices()
        self.is_noted = False
        """Whether there was any."""
        self._divisors: list[Tensor | None] = []
        self._first: tuple[KnownNorms, Callable[[], None]] | None = None

    def note_norms(self, known: KnownNorms, divide: Callable[[], None]) -> bool:
        """The program has clipped gradients for the first time in this step; ``divide`` notes it as a divisor."""
        is_first = not self.is_noted
        if is_first:
            self._first, self.is_noted = (known, divide), True
        return is_first

    def note(self, clipped: set[int], divisor: Tensor) -> None:
        """``clipped`` are the identities of parameters. A group that is clipped in part is left as it is."""
        self.is_noted = True
        self._use_divisor()
        groups = self._optimizer.param_groups
        if len(self._divisors) != len(groups):
            self._divisors = [None] * len(groups)
        for place, group in enumerate(groups):
            with_gradient = {id(param) for param in group["params"] if param.grad is not None}
            if with_gradient and with_gradient <= clipped:
                before = self._divisors[place]
                self._divisors[place] = divisor if before is None else before * divisor

    def _use_divisor(self) -> None:
        if self._first is not None:
            (_, divide), self._first = self._first, None
            divide()

    def forget(self) -> None:
        """The gradients are new."""
        self._divisors, self._first, self.is_noted = [], None, False

    def known_norms(self, grads: Sequence[Tensor]) -> Tensor | None:
        """Of these gradients before the program has clipped them, if it has done so once, in an ordinary way."""
        return None if self._first is None else self._first[0].of(grads, self._indices)

    def known_with_loss(self, grads: Sequence[Tensor], loss: Tensor) -> Tensor | None:
        """``known_norms``, and after them this loss, in one tensor. None if that is not there already."""
        return None if self._first is None else self._first[0].with_loss(grads, loss)

    def take(self, *, may_know: bool) -> tuple[Tensor | None, PendingCopy | None]:
        """The norms of all gradients, or one divisor for each group on its way to the host, or neither."""
        self.is_noted = False
        if may_know and self._first is not None:
            groups = self._optimizer.param_groups
            params = chain.from_iterable([group["params"] for group in groups])
            norms = self._first[0].of(gradients_of(params), self._indices)
            if norms is not None:
                self._first = None
                return norms, None
        self._use_divisor()
        divisors, self._divisors = self._divisors, []
        if not any(divisor is not None for divisor in divisors):
            return None, None
        one = torch.ones((), dtype=torch.float64, device=self._device)
        return None, self._readbacks.post(torch.stack([one if each is None else each.to(one) for each in divisors]))


def clip_to_norm(
    hosted_steps: Sequence[HostedStep], params: Any, max_norm: Any, losses: Sequence[Tensor]
) -> Tensor | None:
    """Does what ``clip_grad_norm_`` does, and notes the norms that it computes: they need not be measured again.

    If the step has a single loss, which stays on the device, it is put into the same tensor as the norms. This saves
    two kernels, which take time if the GPU waits for its host.

    Returns the norm of all; None, and does nothing, if gradients are not all of one ordinary kind.
    """
    grads = gradients_of(_listed(params))
    is_ordinary = hosted_steps and isinstance(max_norm, (int, float)) and set(map(type, grads)) == {Tensor}
    if not is_ordinary or not are_alike(grads) or grads[0].dtype is not torch.float32:
        return None
    beside = losses if len(hosted_steps) == len(losses) == 1 and _goes_beside(losses[0], hosted_steps[0], grads) else ()
    with _compat_modes.NoGrad():
        if _compat_modes.is_watched():
            with _compat_modes.unwatched():
                values, total = _compat_kernels.clip_grad_norm(grads, float(max_norm), *beside)
        else:
            values, total = _compat_kernels.clip_grad_norm(grads, float(max_norm), *beside)
        known = KnownNorms(grads, values, beside[0] if beside else None)
    for hosted in hosted_steps:
        divide = functools.partial(clipped_to_norm, [hosted], params, total, max_norm)
        if not hosted.clipping.note_norms(known, divide):
            divide()
    return total


def _goes_beside(loss: Tensor, hosted: HostedStep, grads: list[Tensor]) -> bool:
    is_ordinary = type(loss) is Tensor and loss.dtype is torch.float32 and loss.device == grads[0].device
    return is_ordinary and hosted.sync == "late"


def clipped_to_norm(hosted_steps: Iterable[HostedStep], params: Any, norm: Any, max_norm: Any) -> None:
    """The program has called ``clip_grad_norm_``, which returned ``norm``."""
    if isinstance(norm, Tensor) and isinstance(max_norm, (int, float)) and max_norm > 0:
        with _compat_modes.unwatched(), torch.no_grad():
            divisor = ((norm.detach().double() + _TINY) / max_norm).clamp_(min=1.0)
            _note(hosted_steps, params, divisor)


def clipped_by_value(hosted_steps: Iterable[HostedStep], params: Any, before: Tensor | None) -> None:
    """The program has called ``clip_grad_value_``; the norm of these gradients was ``before``."""
    after = total_norm(params)
    if before is not None and after is not None:
        with _compat_modes.unwatched(), torch.no_grad():
            _note(hosted_steps, params, torch.where(after > 0, before / after, 1.0))


def total_norm(params: Any) -> Tensor | None:
    """Of the gradients together; None if there are none. Does not sync."""
    with _compat_modes.unwatched(), torch.no_grad():
        norms = tensor_norms(gradients_of(_listed(params)))
        return torch.stack([norm.to(norms[0]) for norm in norms]).norm() if len(norms) else None


def _note(hosted_steps: Iterable[HostedStep], params: Any, divisor: Tensor) -> None:
    clipped = {id(param) for param in _listed(params)}
    for hosted in hosted_steps:
        hosted.clipping.note(clipped, divisor)


def _listed(params: Any) -> Sequence[Any]:
    return [params] if isinstance(params, Tensor) else params
