"""Running a step again without a trace: to learn, not to train."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nanguard.numerics.finite import nonfinite
from nanguard.step.parts import StepParts, check_loss
from nanguard.step.pending import PendingStep


class DryRun:
    """Afterwards weights, gradients, buffers, random states and modes are as they were. Waits for the device.

    All ranks rehearse together, and their answers are the same.
    """

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts

    def loss_of(self, pending: PendingStep) -> float:
        """The mean loss of the step now, over its micro-batches and all ranks; no backward pass."""
        with self.stage(pending), torch.no_grad():
            losses = torch.stack([self.forward(pending, place).detach().double() for place in self._places(pending)])
        return self._parts.ranks.mean(losses.mean().item())

    def is_sound(self, pending: PendingStep) -> bool:
        """Whether loss and gradients of the step are finite now, gradients only as far as no loss scale is to blame."""
        parts = self._parts
        with self.stage(pending):
            losses = self.run(pending)
            grads = [p.grad for group in parts.skippable.groups() for p in group if p.grad is not None]
            bad = bool(nonfinite(losses, parts.device))
            if parts.scaler is None or parts.scaler.scale.item() <= parts.scaler.floor:
                bad = bad or bool(nonfinite(grads, parts.device))
        return not parts.ranks.any(bad)

    def run(self, pending: PendingStep) -> list[Tensor]:
        """Forward and backward of all micro-batches, inside ``stage``."""
        losses = []
        for place in self._places(pending):
            loss = self.forward(pending, place)
            losses.append(loss.detach())
            self.backward(pending, loss)
        return losses

    def backward(self, pending: PendingStep, loss: Tensor) -> None:
        """Of one micro-batch, inside ``stage``."""
        mean = loss / pending.divisor
        scaled = mean if self._parts.scaler is None else self._parts.scaler.scaled(mean)
        scaled.backward()  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def stage(self, pending: PendingStep, *, alone: bool = False) -> Iterator[None]:
        """Sets the scene as the step found it; afterwards it is as it was before.

        All ranks set it together, unless ``alone``: then calls go past DDP, which waits for other ranks at times.
        """
        parts = self._parts
        rng, training, open_window = parts.rng_reader.now(), [(m, m.training) for m in parts.modules], parts.pending
        parts.buffers.note_()
        parts.skippable.zero_grad()
        parts.pending = pending.afresh()
        try:
            for module, mode in pending.training:
                module.training = mode
            with torch.inference_mode(False), torch.enable_grad(), apart(parts.model, alone=alone), _warning_nobody():
                yield
        finally:
            parts.buffers.undo_()
            parts.skippable.zero_grad()
            parts.pending = open_window
            rng.restore(parts.device)
            for module, mode in training:
                module.training = mode

    def _places(self, pending: PendingStep) -> range:
        return range(len(pending.microbatches))

    def forward(self, pending: PendingStep, place: int) -> Tensor:
        """The loss of one micro-batch, inside ``stage``."""
        parts, micro = self._parts, pending.microbatches[place]
        if micro.rng is not None:
            micro.rng.restore(parts.device)
        enabled, dtype = micro.autocast
        with torch.autocast(parts.device.type, dtype=dtype, enabled=enabled), parts.precision.autocast():
            result = micro.loss_fn(parts.model, micro.fresh_batch())
        loss: Tensor = result[0] if isinstance(result, tuple) else result
        if torch.is_grad_enabled():
            check_loss(loss)
        return loss if loss.ndim == 0 else loss.reshape(())


@contextlib.contextmanager
def _warning_nobody() -> Iterator[None]:
    """What the step had to warn of it has said when it was run. ``catch_warnings`` would make it say so again later."""
    show, warnings.showwarning = warnings.showwarning, _show_nothing
    try:
        yield
    finally:
        warnings.showwarning = show


def _show_nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of ``warnings.showwarning``."""


@contextlib.contextmanager
def apart(model: nn.Module, *, alone: bool) -> Iterator[None]:
    """DDP averages no gradients; afterwards it sends buffers around before the next forward pass, or not, as before."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    sends = model.require_forward_param_sync
    if alone:
        vars(model)["forward"] = model.module
    try:
        with model.no_sync():
            yield
    finally:
        vars(model).pop("forward", None)
        model.require_forward_param_sync = sends
