"""Running a step again without a trace: to learn, not to train."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nanguard import _compat, _compat_modes
from nanguard.numerics.finite import nonfinite
from nanguard.source.frames import runs_user_code
from nanguard.step.parts import StepParts, check_loss
from nanguard.step.pending import PendingStep


class DryRun:
    """Afterwards weights, gradients, buffers, random states and modes are as they were. Waits for the device.

    All ranks do it together and get the same answer.
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
            grads = parts.skippable.gradients()
            bad = bool(nonfinite(losses, parts.state.device))
            if parts.precision.scaler is None or parts.precision.scaler.scale.item() <= parts.precision.scaler.floor:
                bad = bad or bool(nonfinite(grads, parts.state.device))
        return not parts.ranks.any(bad)

    def run(self, pending: PendingStep) -> list[Tensor]:
        """Forward and backward of all micro-batches, inside ``stage``."""
        losses = []
        for place in self._places(pending):
            loss = self.forward(pending, place)
            losses.append(loss.detach())
            self.backward(pending, loss)
        return losses

    @runs_user_code
    def backward(self, pending: PendingStep, loss: Tensor) -> None:
        """Of one micro-batch, inside ``stage``."""
        self._parts.precision.scaled(loss / pending.divisor).backward()  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def in_fp32(self, pending: PendingStep, names: Sequence[str]) -> Iterator[None]:
        """These modules run in fp32; for ``[""]`` the whole step, with autocast and loss scale off. Casts nothing."""
        parts = self._parts
        wanted = parts.islands.outermost() if "" in names else names
        kept = parts.islands.keep(*(name for name in wanted if name not in parts.islands.names))
        modes = [micro.autocast for micro in pending.microbatches]
        try:
            with contextlib.ExitStack() as stack:
                if "" in names:
                    stack.enter_context(parts.precision.in_fp32())
                    stack.enter_context(_compat_modes.without_autocast())
                    for micro in pending.microbatches:
                        micro.autocast = (False, micro.autocast[1])
                yield
        finally:
            for micro, mode in zip(pending.microbatches, modes, strict=True):
                micro.autocast = mode
            if kept:
                parts.islands.release(*kept)

    @contextlib.contextmanager
    def stage(self, pending: PendingStep, *, alone: bool = False) -> Iterator[None]:
        """Sets the scene as the step found it; afterwards it is as it was before.

        All ranks set it together, unless ``alone``: then calls go past DDP, which waits for other ranks at times.
        """
        parts = self._parts
        parts.skippable.zero_grad()  # frees their memory, which the run needs
        with parts.again(pending), _without_effect_on_others(parts), parts.state.untouched(parts.buffers):
            pending.training.restore()
            for state in () if pending.tape is None else chain.from_iterable(pending.tape.states.values()):
                state.put_back(parts.state.model.modules())
            with (
                torch.inference_mode(False),
                torch.enable_grad(),
                torch.autograd.set_detect_anomaly(False),  # it raises where a NaN is about to be looked at
                apart(parts.state.model, alone=alone),
                _warning_nobody(),
            ):
                yield

    def _places(self, pending: PendingStep) -> range:
        return range(len(pending.microbatches))

    def forward(self, pending: PendingStep, place: int) -> Tensor:
        """The loss of one micro-batch, inside ``stage``."""
        parts, micro = self._parts, pending.microbatches[place]
        if micro.rng is not None:
            micro.rng.restore(parts.state.device)
        enabled, dtype = micro.autocast
        with torch.autocast(parts.state.device.type, dtype=dtype, enabled=enabled):
            loss, _ = parts.forward(micro)
        if torch.is_grad_enabled():
            check_loss(loss)
        return loss if loss.ndim == 0 else loss.reshape(())


@contextlib.contextmanager
def _without_effect_on_others(parts: StepParts) -> Iterator[None]:
    """Afterwards parameters of other optimizers have the gradients that they had.

    If the program's hooks make steps inside a backward pass, no hook of that kind runs.
    """
    others = parts.parameters_of_all()
    grads = [(param, param.grad) for param in others]
    with _compat.without_post_accumulate_hooks(others if parts.steps_in_backward else ()):
        for param in others:
            param.grad = None
        try:
            yield
        finally:
            for param, grad in grads:
                param.grad = grad


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
    """DDP averages no gradients, in the model or in parts of it; with ``alone`` calls go past it.

    Afterwards it sends buffers around before the next forward pass, or not, as before.
    """
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(_apart(module, alone=alone))
        yield


@contextlib.contextmanager
def _apart(model: DistributedDataParallel, *, alone: bool) -> Iterator[None]:
    sends = model.require_forward_param_sync
    if alone:
        vars(model)["forward"] = model.module
    try:
        with model.no_sync():
            yield
    finally:
        vars(model).pop("forward", None)
        model.require_forward_param_sync = sends
