"""What happens to our memory if the program runs out of its own."""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from nanguard.step.parts import StepParts
from nanguard.step.pending import Microbatch, PendingStep
from nanguard.step.protocols import Mode, Responder

log = logging.getLogger("nanguard")


class GivingMemoryBack:
    """Frees our memory if the block runs out of it, and lets the error pass: the program may try again."""

    def __init__(self, recovery: Responder) -> None:
        self._recovery = recovery

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.give_back(error)

    def give_back(self, error: BaseException | None) -> None:
        """The block has ended with this error, if any."""
        if isinstance(error, torch.OutOfMemoryError):
            self._recovery.give_memory_back()

    def forward_backward(
        self, parts: StepParts, mode: Mode, pending: PendingStep, micro: Microbatch
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Runs one micro-batch. If memory runs out, frees what is held for recovery and runs the step again, once."""
        try:
            return parts.forward_backward(pending, micro)
        except torch.OutOfMemoryError:
            if not (self._recovery.give_memory_back() and _can_run_alone(parts, micro)):
                raise
        # Not inside the handler: the error holds all that the failed pass had computed.
        log.warning("step %d ran out of memory: nanguard gave back what it held, and runs it again", pending.step)
        gc.collect()
        if parts.state.device.type == "cuda":
            torch.cuda.empty_cache()
        return _from_its_beginning(parts, mode, pending, micro)


def _can_run_alone(parts: StepParts, micro: Microbatch) -> bool:
    """Whether the step can be run again here: not with several ranks, under DDP, or in a CUDA graph."""
    ddp = isinstance(parts.state.model, DistributedDataParallel)
    return micro.rng is not None and parts.ranks.size == 1 and not ddp


def _from_its_beginning(
    parts: StepParts, mode: Mode, pending: PendingStep, last: Microbatch
) -> tuple[Tensor, tuple[Any, ...]]:
    """Runs all micro-batches of a step again."""
    pending.training.restore()
    pending.losses.clear()
    pending.flags.clear()
    pending.in_microbatch = False
    parts.begin(pending)
    mode.note(pending)
    parts.ranks.forget_()
    for micro in pending.microbatches:
        parts.forward_backward_again(pending, micro)
    return parts.forward_backward_again(pending, last)
