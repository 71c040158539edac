"""Steps of optimizers that compute gradients inside ``step()``: they are checked afterwards, and taken back if bad."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

from nanguard.hosted.closures import WatchedClosure
from nanguard.hosted.in_backward import PartialSteps
from nanguard.hosted.iteration import Iteration
from nanguard.hosted.optimizers import ProgramCall
from nanguard.records.steps import Action, Found, Outcome, Reading, Verdict
from nanguard.state.training_state import CapturedUpdate
from nanguard.step.pending import PendingStep

log = logging.getLogger("nanguard")


class UncheckedSteps(PartialSteps):
    """The part of a hosted step that is for such optimizers."""

    optimizer: Optimizer
    is_checked_afterwards: bool = False
    """Whether the optimizer computes gradients inside ``step()``, so that it can only be checked afterwards."""
    runs_closure_first: bool = False
    """Whether it was seen to call its closure once, before anything else: its steps can be checked before."""

    @abstractmethod
    def has_bad_gradients(self) -> bool: ...

    @abstractmethod
    def _fill(self, pending: PendingStep, this: Iteration) -> None: ...

    def before_unchecked_step(self, *, in_backward: bool = False) -> CapturedUpdate:
        """For an optimizer that computes gradients inside ``step()``, so that nothing is known before."""
        self.num_calls += 1
        self._pending(in_backward=in_backward).is_in_backward = in_backward
        return self.parts.state.capture_update()

    def after_unchecked_step(self, before: CapturedUpdate, this: Iteration) -> None:
        """Takes the step back if it has made something non-finite."""
        parts, pending = self.parts, self.parts.pending
        assert pending is not None
        parts.end(counts=True)
        self.was_applied = False
        try:
            self._fill(pending, this)
            pending.complete()
            reading = self._read_unchecked_step(pending, this, is_spoiled=before.is_spoiled())
            if reading.found:
                before.put_back()
                self.put_back()
        except (KeyboardInterrupt, SystemExit):  # it is not known whether the step was good, or half of it is put back
            before.put_back()
            self.put_back()
            raise
        if reading.found:
            pending.verdict = parts.judge(reading)
            if pending.is_put_off:
                self.keep(pending, [(param, param.grad) for group in parts.skippable.groups() for param in group])
            else:
                with self.recovery.letting_interrupts_out():
                    parts.journal.record(self.recovery.answer(pending, pending.verdict))
        else:
            self.was_applied = True
            parts.last_forward.mend_()
            verdict = Verdict(kind="healthy", reading=reading)
            parts.journal.record(Outcome(verdict=verdict, action=Action(response="apply"), applied=True))
        if not pending.is_in_backward:
            self.open()

    def check_in_backward(self, call: ProgramCall, this: Iteration) -> Any:
        """A whole step inside a backward pass. Returns what the call returned."""
        before = self.before_unchecked_step(in_backward=True)
        result = call()
        self.after_unchecked_step(before, this)
        return result

    def learn_from(self, watched: WatchedClosure | None) -> None:
        """After an unchecked step: whether those to come can be checked before, as ``watched`` has seen."""
        self.runs_closure_first = watched is not None and watched.ran_once_and_first
        if not self.runs_closure_first and not self.is_checked_afterwards:
            self.is_checked_afterwards = True
            log.warning(
                "%s computes or changes gradients inside step(), so its steps cannot be checked before: each is "
                "checked afterwards, and taken back if it made something non-finite",
                type(self.optimizer).__name__,
            )

    def _read_unchecked_step(self, pending: PendingStep, this: Iteration, *, is_spoiled: bool) -> Reading:
        losses = [float(loss) for loss in this.losses]
        loss = next((each for each in losses if not math.isfinite(each)), losses[0] if losses else math.nan)
        found: tuple[Found, ...] = ()
        if is_spoiled:
            found = ("loss" if not math.isfinite(loss) else "gradients" if self.has_bad_gradients() else "update",)
        rates = self.parts.state.schedule.known_rates
        others = pending.num_stepped_before
        reading = Reading(step=pending.step, epoch=0, batch=None, loss=loss, mean_loss=loss, lrs=rates, found=found)
        return replace(reading, num_stepped_before=others)
