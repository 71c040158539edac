"""Optimizers that step inside a backward pass, each as soon as the gradients of its own parameters are there.

A bad step is refused at once, and so are all later ones of the pass. It is examined after the pass, since inside one
nothing can be run again. Optimizers that came before it, with finite gradients, have stepped by then.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nanguard.hosted.optimizers import ProgramCall, ProgramOptimizers
from nanguard.records.steps import Outcome, Reading
from nanguard.recovery.recovery import Recovery
from nanguard.step.engine import StepEngine
from nanguard.step.parts import StepParts
from nanguard.step.pending import PendingStep

if TYPE_CHECKING:
    from nanguard.hosted.iteration import Iteration
    from nanguard.hosted.step import HostedStep

Gradients = list[tuple[Tensor, Tensor | None]]


class StepsInBackward:
    """The steps inside one backward pass. ``num_applied`` of them were let through."""

    def __init__(self) -> None:
        self.num_applied = 0
        self._stepped: dict[HostedStep, None] = {}
        self._bad: HostedStep | None = None
        self._skipped: dict[HostedStep, None] = {}

    @property
    def has_refused(self) -> bool:
        """Whether a bad step was refused, and so the rest of the pass."""
        return self._bad is not None

    def step(self, hosted: HostedStep, this: Iteration, call: ProgramCall, *, check_afterwards: bool) -> Any:
        """A call of ``step()`` of one optimizer."""
        self._stepped[hosted] = None
        hosted.forbid_tracing()  # a trace can neither begin nor end inside a backward pass
        hosted.parts.steps_in_backward = True
        if self.has_refused:
            self._skipped[hosted] = None
            hosted.skip_with_others(this, in_backward=True)
            return None
        if check_afterwards and not call.is_skipped:
            result = hosted.check_in_backward(call, this)
        else:
            result = hosted.step(call, this, in_backward=True)
        self.num_applied += hosted.was_applied
        if hosted.is_put_off:
            self._bad = hosted
            this.refused = True
        return result

    def end(self, this: Iteration, *, answers: bool = True) -> None:
        """The pass has ended: answers the bad step, and begins the next steps. Without ``answers`` it is dropped."""
        bad = self._bad
        try:
            if bad is not None:
                for each in (bad, *this.noted):
                    each.put_back()  # what checkpointing has run again since
                if answers:
                    self._answer(bad, this)
                for each in this.noted:
                    each.put_back()
        finally:
            for hosted in self._stepped:
                hosted.after_backward(this)

    def _answer(self, bad: HostedStep, this: Iteration) -> None:
        answer = bad.answer_put_off(this)
        if answer is not None:
            for other in self._skipped:
                if other is not bad:
                    other.follow(answer)


class PartialSteps(ABC):
    """The part of a hosted step that is for optimizers whose step is one of several that belong together."""

    engine: StepEngine
    parts: StepParts
    recovery: Recovery
    skippable: ProgramOptimizers
    sync: str
    was_applied: bool
    num_calls: int = 0
    _kept: Sequence[tuple[PendingStep, Gradients]] = ()
    """Steps of the backward pass under way that are needed after it, with their gradients, which are soon gone."""

    @abstractmethod
    def open(self) -> None: ...

    @abstractmethod
    def put_back(self) -> None: ...

    @abstractmethod
    def _pending(self, *, in_backward: bool = False) -> PendingStep: ...

    @property
    def is_put_off(self) -> bool:
        """Whether a step was refused inside the backward pass that is under way, and not answered yet."""
        return any(pending.is_put_off for pending, _ in self._kept)

    def skip_with_others(self, this: Iteration, *, in_backward: bool = False) -> None:
        """Another optimizer of the same iteration was refused, so this one is skipped too."""
        self.num_calls += 1
        self.was_applied = False
        self.put_back()
        loss = float(this.losses[-1]) if this.losses else math.nan
        parts, rates = self.parts, self.parts.state.schedule.known_rates
        step = self._pending(in_backward=in_backward).step
        parts.end(counts=True)
        parts.journal.record_skipped_with_others(Reading(step=step, epoch=0, batch=None, loss=loss, lrs=rates))
        if not in_backward:
            self.open()

    def keep(self, pending: PendingStep, gradients: Gradients) -> None:
        """A step inside a backward pass was made or refused: keeps what is needed of it after the pass."""
        if pending.is_put_off or self.sync == "late":
            self._kept = [*self._kept, (pending, gradients)]

    def answer_put_off(self, this: Iteration) -> Outcome | None:
        """Answers the step that was refused. What was done about it; None if the run had gone back for another reason.

        Weights are as the step found them, except those of optimizers that stepped before it.
        """
        before = self.parts.journal.last
        for pending, gradients in self._kept:
            if pending.is_put_off:
                pending.calls = [call for call in this.calls if call.is_part_of_step]
                with _held(gradients):
                    self.engine.mode.answer(pending)
        last = self.parts.journal.last
        return None if last is before else last

    def follow(self, answer: Outcome) -> None:
        """Does what was done about the bad step of another optimizer of the same pass."""
        self.recovery.follow(PendingStep(self.parts.num_steps - 1, 0, None, False, 1), answer)

    def after_backward(self, this: Iteration) -> None:
        """The pass has ended in which this optimizer has stepped."""
        for pending, _ in self._kept:
            pending.calls = [call for call in this.calls if call.is_part_of_step and self.sync == "late"]
        self._kept = ()
        self.engine.after_step()
        self.open()


@contextlib.contextmanager
def _held(gradients: Gradients) -> Iterator[None]:
    """Gives parameters the gradients that they had when the optimizer was to step."""
    now = [(param, param.grad) for param, _ in gradients]
    for param, grad in gradients:
        param.grad = grad
    try:
        yield
    finally:
        for param, grad in now:
            param.grad = grad
