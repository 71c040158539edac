"""Running a step again without a trace: to learn, not to train."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nanguard.bench import Bench, check_loss
from nanguard.numerics.finite import nonfinite
from nanguard.window import Window


class Rehearsal:
    """Afterwards weights, gradients, buffers, random states and modes are as they were. Waits for the device.

    All ranks rehearse together, and their answers are the same.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def loss_of(self, window: Window) -> float:
        """The mean loss of the step now, over its micro-batches and all ranks; no backward pass."""
        with self.stage(window), torch.no_grad():
            losses = torch.stack([self.forward(window, place).detach().double() for place in self._places(window)])
        return self._bench.ranks.mean(losses.mean().item())

    def is_sound(self, window: Window) -> bool:
        """Whether loss and gradients of the step are finite now, gradients only as far as no loss scale is to blame."""
        bench = self._bench
        with self.stage(window):
            losses = self.run(window)
            grads = [p.grad for group in bench.shield.groups() for p in group if p.grad is not None]
            bad = bool(nonfinite(losses, bench.device))
            if bench.scaler is None or bench.scaler.scale.item() <= bench.scaler.floor:
                bad = bad or bool(nonfinite(grads, bench.device))
        return not bench.ranks.any(bad)

    def run(self, window: Window) -> list[Tensor]:
        """Forward and backward of all micro-batches, inside ``stage``."""
        losses = []
        for place in self._places(window):
            loss = self.forward(window, place)
            losses.append(loss.detach())
            self.backward(window, loss)
        return losses

    def backward(self, window: Window, loss: Tensor) -> None:
        """Of one micro-batch, inside ``stage``."""
        mean = loss / window.divisor
        scaled = mean if self._bench.scaler is None else self._bench.scaler.scaled(mean)
        scaled.backward()  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def stage(self, window: Window, *, alone: bool = False) -> Iterator[None]:
        """Sets the scene as the step found it; afterwards it is as it was before.

        All ranks set it together, unless ``alone``: then calls go past DDP, which waits for other ranks at times.
        """
        bench = self._bench
        rng, training, open_window = bench.dice.now(), [(m, m.training) for m in bench.modules], bench.window
        bench.buffers.note_()
        bench.shield.zero_grad()
        bench.window = window.afresh()
        try:
            for module, mode in window.training:
                module.training = mode
            with torch.inference_mode(False), torch.enable_grad(), apart(bench.model, alone=alone), _warning_nobody():
                yield
        finally:
            bench.buffers.undo_()
            bench.shield.zero_grad()
            bench.window = open_window
            rng.restore(bench.device)
            for module, mode in training:
                module.training = mode

    def _places(self, window: Window) -> range:
        return range(len(window.microbatches))

    def forward(self, window: Window, place: int) -> Tensor:
        """The loss of one micro-batch, inside ``stage``."""
        bench, micro = self._bench, window.microbatches[place]
        if micro.rng is not None:
            micro.rng.restore(bench.device)
        enabled, dtype = micro.autocast
        with torch.autocast(bench.device.type, dtype=dtype, enabled=enabled), bench.precision.autocast():
            result = micro.loss_fn(bench.model, micro.fresh_batch())
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
