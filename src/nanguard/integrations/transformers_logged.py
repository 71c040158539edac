"""What a Hugging Face Trainer has collected for its log, so that a skipped step can be left out of it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanguard.hosted.loop import HostedLoop

_COLLECTED = ("_metrics", "_stored_metrics")
"""Attributes in which the trainers of TRL collect numbers until they are logged."""

_SAVED = "nanguard"


class Logged(NamedTuple):
    """The sum of the losses since the last log, None if there was no step yet, and the last norm."""

    loss_sum: Tensor | None = None
    norm: Any = None

    def plus(self, losses: Sequence[Tensor], norm: Any) -> Logged:
        """After another step, added up as the Trainer does."""
        loss_sum = torch.zeros_like(losses[0]) if self.loss_sum is None else self.loss_sum.clone()
        for loss in losses:
            loss_sum += loss
        return Logged(loss_sum, norm)


def is_asked_for(control: Any) -> bool:
    """Whether the Trainer is about to log, save, evaluate or stop."""
    names = ("should_log", "should_save", "should_evaluate", "should_epoch_stop", "should_training_stop")
    return any(getattr(control, name, False) for name in names)


def note_state(state: Any, loop: HostedLoop) -> None:
    """What the recovery has changed is saved with the state of the Trainer: ``trainer_state.json``."""
    held = state.stateful_callbacks
    held.pop(_SAVED, None)
    if saved := loop.state_dict():
        held[_SAVED] = saved


def put_back_state(state: Any, loop: HostedLoop) -> None:
    """Of the checkpoint that training goes on from, if there is one."""
    loop.load_state_dict(state.stateful_callbacks.get(_SAVED, {}))


def collected(trainer: Any) -> dict[str, Any]:
    held = vars(trainer)
    return {name: copy.deepcopy(held[name]) for name in _COLLECTED if name in held}


@contextlib.contextmanager
def counting_nothing(trainer: Any) -> Iterator[None]:
    """Numbers that the program counts or collects in the trainer are put back."""
    numbers = {name: value for name, value in vars(trainer).items() if isinstance(value, (int, float))}
    before = {**numbers, **collected(trainer)}
    try:
        yield
    finally:
        vars(trainer).update(before)
