"""Clipping that the program does itself. Norms are logged as they were before it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanguard import _compat_modes
from nanguard.numerics.norm import tensor_norms
from nanguard.state.readback import AsyncReadback, PendingCopy

if TYPE_CHECKING:
    from nanguard.hosted.step import HostedStep

_TINY = 1e-6
"""``clip_grad_norm_`` adds it to the norm that it divides by."""


class ProgramClipping:
    """By what the gradients of each parameter group were divided since the last step. Nothing here syncs."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._readbacks = AsyncReadback(device)
        self._divisors: list[Tensor | None] = []

    def note(self, clipped: set[int], divisor: Tensor) -> None:
        """``clipped`` are the identities of parameters. A group that is clipped in part is left as it is."""
        groups = self._optimizer.param_groups
        if len(self._divisors) != len(groups):
            self._divisors = [None] * len(groups)
        for place, group in enumerate(groups):
            with_gradient = {id(param) for param in group["params"] if param.grad is not None}
            if with_gradient and with_gradient <= clipped:
                before = self._divisors[place]
                self._divisors[place] = divisor if before is None else before * divisor

    def forget(self) -> None:
        """The gradients are new."""
        self._divisors = []

    def take(self) -> PendingCopy | None:
        """One divisor for each group, on its way to the host; None if nothing was clipped."""
        divisors, self._divisors = self._divisors, []
        if not any(divisor is not None for divisor in divisors):
            return None
        one = torch.ones((), dtype=torch.float64, device=self._device)
        return self._readbacks.post(torch.stack([one if each is None else each.to(one) for each in divisors]))


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
        norms = tensor_norms([param.grad for param in _listed(params) if param.grad is not None])
        return torch.stack([norm.to(norms[0]) for norm in norms]).norm() if len(norms) else None


def _note(hosted_steps: Iterable[HostedStep], params: Any, divisor: Tensor) -> None:
    clipped = {id(param) for param in _listed(params)}
    for hosted in hosted_steps:
        hosted.clipping.note(clipped, divisor)


def _listed(params: Any) -> Sequence[Any]:
    return [params] if isinstance(params, Tensor) else params
