"""The tape of a program: from the batch of a step, or from the end of the step before, to its last backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanguard.hosted.coordinator import StepCoordinator
from nanguard.state.rng import RngState
from nanguard.step.calls import Call
from nanguard.step.tape import CallTape, Made, TapedLoss, Unseen
from nanguard.step.tape_recorder import TapeRecorder

_MOST_EVALUATIONS, _MOST_IN_ALL = 4, 16
"""So many calls of one module, and of all, without gradients may be part of a step. What they are given is held."""


_NO_TAPE = CallTape()
"""Of a step that is over. Nothing is written to it."""


class ProgramTape(TapeRecorder):
    """``is_alone`` says that there is only one optimizer. Others may use what was computed before one steps."""

    def __init__(self, note: Callable[[], RngState | None], *, is_wanted: bool) -> None:
        super().__init__(note, "cpu")
        self._is_wanted, self._is_alone = is_wanted, True
        self.goes_on_after_backward = False
        """Whether the program computes something between two backward passes of a step: a loss, or a micro-batch."""

    def follow(self, coordinator: StepCoordinator, *, is_alone: bool) -> None:
        """Writes to the tape of the current iteration, or of the next one if that has begun already.

        After a step that was refused, the next may fail by what was computed before it: epochs of PPO share advantages.
        """
        self._is_alone = is_alone
        if self._is_wanted:
            is_refused = coordinator.iteration.refused
            self.begin(coordinator.tape_to_write(), keeps_older=not is_alone, is_refused=is_refused)

    def leave_out(self, optimizer: Optimizer) -> None:
        """What an optimizer trains from now on is not made again, although the program has made it in this step."""
        marks = [self._marks, *([] if self._older is None else [self._older[1]])]
        for param in [param for group in optimizer.param_groups for param in group["params"]]:
            for each in marks:
                each.pop(id(param), None)

    @property
    def has_raised(self) -> bool:
        """Whether a torch call outside modules has raised, and was given NaN or Inf."""
        return self.tape is not None and self.tape.raised is not None

    def before_call(self) -> None:
        """The model is about to be called to train, with the tape paused for it.

        What cannot be made again of what came before counts as data.
        """
        tape = self.tape
        if tape is None:
            return
        if tape.losses:  # the program accumulates gradients
            self.goes_on_after_backward = True
        if tape.is_settled:
            return
        tape.is_settled = True
        gone = tape.unrepeatable() if tape.rows else ()
        if gone:
            for number in gone:
                del tape.rows[number]
            self._marks = {key: mark for key, mark in self._marks.items() if mark[1].number not in gone}

    def before_evaluation(self, module: int) -> None:
        """The model, or the module of it with this identity, is about to be called without gradients.

        A few such calls may be for this step, as in ``target = reward + gamma * model(following)``. More are an
        evaluation, or an agent that plays: what came before was for this, and is not held. What comes after the last of
        them may be for this step again, as the advantages in PPO.
        """
        tape = self.tape
        if tape is None or tape.is_settled or tape.losses or not self.is_own():
            return
        tape.note_evaluation(module)
        if _has_evaluated(tape):
            self.begin_anew()

    def after_module(self, call: Call, made: list[Tensor]) -> None:
        tape = self.tape
        if tape is None or tape.is_settled or torch.is_grad_enabled() or not _has_evaluated(tape):
            super().after_module(call, made)
        else:
            self.begin_anew()

    def begin_anew(self) -> None:
        """What was computed before is no part of the step, and is not held."""
        if self.tape is not None and self.is_own():
            self.tape.rows.clear()
            self._marks, self._outside = {}, {}

    def note_backward(self, tensors: Any, gradients: Any = None, trained: Sequence[Tensor] = ()) -> None:
        """A backward pass begins at these tensors, with these gradients."""
        if self.tape is None or not self.is_own():
            return
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        given = [gradients] if gradients is None or isinstance(gradients, Tensor) else list(gradients)
        self.note_losses(roots, given if len(given) == len(roots) else (), trained)
        losses = self.tape.losses
        if len(losses) > 1 and any(isinstance(root, Unseen) for root in losses[-1].roots):
            self.goes_on_after_backward = True

    def note_loss(self, loss: Tensor) -> None:
        """As ``note_backward``, of one tensor, with no gradients given."""
        tape = self.tape
        if tape is None or not self.is_own():
            return
        root = self._token(loss)
        if tape.losses and type(root) is Unseen:
            self.goes_on_after_backward = True
        tape.losses.append(TapedLoss((root,), (None,), self._next - 1))

    def note_gradients(self, optimizer: Optimizer) -> None:
        """A step without a backward pass: the program has computed the gradients itself, maybe by ``autograd.grad``."""
        if self.tape is None or self.tape.losses or not self.is_own():
            return
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if params and all(isinstance(self._token(p.grad), Made) for p in params):
            self.note_losses(params, [p.grad for p in params])

    def end_step(self, coordinator: StepCoordinator, *, is_over: bool) -> bool:
        """After a step. True if the tape goes on at once: no loader gave a batch for it, or no module was called.

        Otherwise it goes on with the next batch, or with the first call of a module. Loading data costs nothing. If
        there are several optimizers, the next one may have a loss of the same batch. If the step ``is_over``, nothing
        needs its tape.
        """
        this = coordinator.iteration
        goes_on = not (this.noted and this.fetched and self._is_alone)
        if is_over:
            this.tape = _NO_TAPE  # it holds a batch
            if not goes_on:
                self.forget()
        if goes_on:
            coordinator.next_tape = CallTape()
        return goes_on

    def end_sound_step(self, coordinator: StepCoordinator, *, is_over: bool) -> None:
        """After a sound step of the only optimizer: as ``end_step``, and goes on at once if it is to."""
        this = coordinator.iteration
        goes_on = not (this.noted and this.fetched)
        if is_over:
            this.tape = _NO_TAPE
            this.calls.clear()
            if not goes_on:
                self.forget()
        if goes_on:
            tape = coordinator.next_tape = CallTape()
            if self._is_wanted:
                self.begin(tape)


def _has_evaluated(tape: CallTape) -> bool:
    """Whether there were too many calls without gradients to be for this step."""
    nums = tape.evaluations.values()
    return max(nums, default=0) > _MOST_EVALUATIONS or sum(nums) > _MOST_IN_ALL
