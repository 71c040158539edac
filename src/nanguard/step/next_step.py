"""The device decides, and the host learns of a step when the next one has been computed, before it is applied.

By then the device has a whole step of work queued, so it never runs empty while the host waits. Unlike with ``Late``,
the latch of a bad step is cleared before the next step reads it, so nothing has to be run again. This is for loops of
frameworks. Until the host knows, they count the step as applied. What they did for it (the schedule, sums of losses) is
put back before it is used.
"""

from __future__ import annotations

from collections.abc import Callable

from nanguard.step.late import Late, can_be_judged
from nanguard.step.parts import StepParts
from nanguard.step.pending import PendingStep
from nanguard.step.protocols import Responder


class NextStep(Late):
    """A healthy step never syncs. ``was_skipped`` is called for each step that turns out to have changed nothing."""

    def __init__(self, parts: StepParts, recovery: Responder, was_skipped: Callable[[], None]) -> None:
        super().__init__(parts, recovery)
        self._was_skipped = was_skipped

    def _note_schedule(self, pending: PendingStep) -> None:
        """Not when the step begins, but when it is finished: the host advances schedulers after that."""

    def before(self) -> None:
        """Nothing is due yet: the host asks when the step is about to be applied."""

    def measure(self, pending: PendingStep) -> None:
        """Measures on the device. While it is busy, readings of earlier steps that have arrived are judged."""
        super().measure(pending)
        for earlier in self._in_flight:
            if can_be_judged(earlier):
                self._judge(earlier)

    def finish(self, pending: PendingStep) -> None:
        is_latched = False
        while self._in_flight:
            is_latched = is_latched or self._holds_latch(self._in_flight[0])
            is_elsewhere = self._hear()
            if is_elsewhere:  # a rollback: the gradients of this step belong to weights that are gone
                self._parts.journal.lose(1)
                return
        if is_latched and pending.on_device is not None:  # clearing the latch has cleared its flag for this step too
            pending.on_device = pending.on_device._replace(skip=self._raise_latch_(pending))
        super()._note_schedule(pending)
        super().finish(pending)

    def _hear(self) -> bool:
        if not self._holds_latch(self._in_flight[0]):
            return super()._hear()
        # The next step has been computed. The bad one is examined with the buffers that both of them began with.
        parts = self._parts
        noted, computed = parts.buffers, parts.noted_buffers()
        gradients = [(param, param.grad) for group in parts.skippable.groups() for param in group]
        noted.undo_()
        parts.buffers = parts.noted_buffers()
        try:
            is_elsewhere = super()._hear()
        finally:
            parts.buffers = noted
            self._was_skipped()
        if not is_elsewhere:
            computed.undo_()
            for param, gradient in gradients:
                param.grad = gradient
        return is_elsewhere
