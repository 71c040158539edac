"""Drops a bad micro-batch and keeps the rest of the step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nanguard import _compat_kernels
from nanguard.numerics.finite import nonfinite, zero_if_
from nanguard.numerics.norm import gradients_of
from nanguard.state.undo import Undo


class MicrobatchFilter:
    """Keeps the sum of good gradients apart while a micro-batch runs: a NaN cannot be taken out of it again.

    Buffers that a dropped micro-batch wrote to are put back too. Syncs only if the host has to do that.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._aside: list[tuple[nn.Parameter, Tensor]] = []
        self.buffers = Undo(device)
        self.buffers.watch_buffers(model)

    def set_aside(self, params: Sequence[nn.Parameter]) -> None:
        """Before backward: sets the gradients so far aside."""
        self._aside = [(p, p.grad) for p in params if p.grad is not None]
        for param, _ in self._aside:
            param.grad = None

    def join(self, params: Sequence[nn.Parameter], loss: Tensor, *, judge_gradients: bool) -> Tensor:
        """After backward: adds the new gradients, or nothing if they are non-finite. Returns that flag."""
        for param in params:
            if param.grad is not None and param.grad.is_conj():
                param.grad = param.grad.resolve_conj()
        brought = gradients_of(params)
        flag = nonfinite([loss, *brought] if judge_gradients else [loss], self._device)
        zero_if_(brought, flag)
        self.buffers.undo_where_(flag)
        if self.buffers.needs_host and bool(flag):  # the one sync here, and only for models with such buffers
            self.buffers.undo_()
        sums: list[Tensor] = []
        added: list[Tensor] = []
        for param, so_far in self._aside:
            if param.grad is None:
                param.grad = so_far
            elif so_far.layout is not torch.strided:
                param.grad = param.grad + so_far
            elif param.grad.layout is not torch.strided:
                param.grad = so_far + param.grad
            else:
                sums.append(so_far)
                added.append(param.grad)
                param.grad = so_far
        if sums:
            _compat_kernels.foreach_add_(sums, added)
        self._aside = []
        return flag
