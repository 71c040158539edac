"""The device decides by the latch, and the host learns later: nothing waits.

The latch is a flag on the device. A bad step raises it, every optimizer step reads it, and only the host clears it. As
long as it is up, later steps change nothing either, so the host finds the training state exactly as the bad batch found
it. The steps in between are the wake: they are run again, and the run equals, bit for bit, one that asks the host at
every step. In a user's own loop they cannot be run again and count as lost.

The host processes the reading of a step when the second step after it begins. That moment is fixed, so that all ranks
learn at the same point and a run can be repeated. By then the copy has arrived, or the device has a full step of work
queued, so waiting for the copy leaves no gap.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nanguard.errors import ProtocolError
from nanguard.records.healthy import SoundStep, applied
from nanguard.records.steps import Action, Outcome, Verdict
from nanguard.state.readback import AsyncReadback
from nanguard.state.training_modes import TrainingModes
from nanguard.state.undo import Undo
from nanguard.step.measurement import MeasuredValues
from nanguard.step.parts import StepParts
from nanguard.step.pending import LAG, OnDevice, PendingStep
from nanguard.step.protocols import Responder


class Late:
    """A healthy step never syncs."""

    def __init__(self, parts: StepParts, recovery: Responder) -> None:
        self._parts, self._recovery = parts, recovery
        self._averages = Undo(parts.state.device)
        if parts.state.ema is not None:
            self._averages.watch_all(parts.state.ema)
        self._readbacks = AsyncReadback(parts.state.device)
        self._in_flight: deque[PendingStep] = deque()
        self.latch = torch.zeros((), dtype=torch.float32, device=parts.state.device)

    def before(self) -> None:
        """Processes the readings that are due, before the next step begins."""
        while len(self._in_flight) >= LAG:
            self._hear()

    def settle(self) -> None:
        pending = self._parts.pending
        if pending is not None and pending.losses and self._in_flight:
            raise ProtocolError(
                f"guard.settle() was called in the middle of a step, after {len(pending.losses)} backward passes and "
                "before its update: steps in flight may have to run again first. Call it between steps"
            )
        if self._in_flight:
            self._parts.end()  # a step that has only begun begins again
        while self._in_flight:
            self._hear()

    def put_in_flight(self, pending: PendingStep, values: Tensor) -> int:
        """A step was made without ``finish``, and measured: starts the copy to the host.

        Returns of how many steps the host is to hear now, by ``take_sound``.
        """
        pending.readback = self._readbacks.post(values)
        self._in_flight.append(pending)
        return len(self._in_flight) - LAG + 1

    def take_sound(self) -> SoundStep | None:
        """The oldest step in flight, which the host has now heard of, if it was sound; else ``before`` is to follow.

        For steps without a loss scale, flags, votes of ranks or clipping that has to be accounted for.
        """
        pending = self._in_flight[0]
        if pending.verdict is None and pending.readback is not None and pending.before_clipping is None:
            reply = MeasuredValues(pending.layout, pending.readback.read())
            if reply.is_finite:
                self._in_flight.popleft()
                return pending.step, reply.loss if pending.knows_loss else math.nan, reply.norms, pending.lrs
            pending.verdict = self._parts.judge(self._parts.read(pending, reply))
        return None

    @property
    def in_flight(self) -> Sequence[PendingStep]:
        """The steps that the host has not heard of, the oldest first."""
        return tuple(self._in_flight)

    @property
    def is_settled(self) -> bool:
        return not self._in_flight

    def is_verified(self) -> bool:
        """Whether all steps so far are known to be finite. Does not wait."""
        return all(map(can_be_judged, self._in_flight)) and not any(map(self._holds_latch, self._in_flight))

    def drop_in_flight(self) -> None:
        """The run is at another state now: the steps in flight count no more."""
        self._in_flight.clear()
        self.latch.zero_()

    def note(self, pending: PendingStep, *, are_buffers_noted: bool = False) -> None:
        parts = self._parts
        if not are_buffers_noted and (parts.buffers.is_used or self._averages.is_used):
            noted = [undo for undo in (parts.buffers, self._averages) if undo.is_used]
            pending.elsewhere = [(undo, undo.note_()) for undo in noted]
        self._note_schedule(pending)
        pending.num_states = parts.skippable.num_states()
        pending.training = TrainingModes(parts.modules)

    def _note_schedule(self, pending: PendingStep) -> None:
        schedule = self._parts.state.schedule
        if pending.rerunnable or schedule.is_ours:  # else it is never put back
            pending.schedule = schedule.note()

    def finish(self, pending: PendingStep) -> None:
        if not pending.num_states:  # the host was to note it before a module is called, and none was
            self.note(pending, are_buffers_noted=True)
        try:
            self.protect(pending)
        except BaseException:
            self._averages.undo_()
            self.take_back_latch()
            raise
        self.post(pending, self._parts.measurement.filled)

    def take_back_latch(self) -> None:
        """A step has raised: no reading of it will arrive to clear a latch that it has raised. Syncs."""
        self.latch.fill_(float(any(map(self._holds_latch, self._in_flight))))

    def answer(self, pending: PendingStep) -> None:
        """Nothing is put off here: the host learns of a step later anyway."""

    def _holds_latch(self, pending: PendingStep) -> bool:
        kind = self._judge(pending).kind
        return kind == "nonfinite" or (kind == "overflow" and pending.latches)

    def _judge(self, pending: PendingStep) -> Verdict:
        """Judges a step once. Waits for its reading if that has not arrived."""
        if pending.verdict is None:
            assert pending.readback is not None
            reading = self._parts.read(pending, MeasuredValues(pending.layout, pending.readback.read()))
            if pending.is_spoiled:
                reading = replace(reading, found=(*reading.found, "update"))
            pending.verdict = self._parts.judge(reading)
        return pending.verdict

    def measure(self, pending: PendingStep) -> None:
        """Measures on the device before ``finish``, for a host that clips in between."""
        parts = self._parts
        groups = parts.gather(pending)
        parts.measure(pending, groups)
        latched_before = self.latch.clone() if parts.precision.scaler is not None else None
        pending.on_device = OnDevice(groups, self._raise_latch_(pending), latched_before)

    def protect(self, pending: PendingStep) -> None:
        """The part of a step on the device: measure, agree, latch, clip, step, put back what must not change."""
        parts = self._parts
        if pending.on_device is None:
            self.measure(pending)
        assert pending.on_device is not None
        (groups, skip, latched_before), pending.on_device = pending.on_device, None
        if not parts.clipper.is_off:
            parts.clipper.clip_(groups, parts.measurement.norms)
        self._recovery.fence()
        if parts.update_checks.are_due(parts.num_steps):
            self._step_carefully(pending, skip)
        else:
            parts.skippable.step_unless(skip)
        if parts.buffers.is_used:
            parts.buffers.undo_where_(skip)
        if parts.state.ema is not None:
            parts.update_average()
            self._averages.undo_where_(skip)
        if not parts.clipper.is_off:
            parts.clipper.remember_(skip)
        if parts.precision.scaler is not None:
            parts.precision.scaler.update_(skip, frozen=latched_before)
        parts.skippable.end_step()

    def _step_carefully(self, pending: PendingStep, skip: Tensor) -> None:
        parts = self._parts
        with parts.update_checks.around_update(parts.num_steps) as spoiled:
            parts.skippable.step_unless(skip)
        if spoiled:
            pending.is_spoiled = True
            skip.fill_(1.0)
            self.latch.fill_(1.0)

    def post(self, pending: PendingStep, values: Tensor) -> None:
        """Starts the copy to the host. The step counts as applied until the host has read it."""
        pending.readback = self._readbacks.post(values)
        schedule = self._parts.state.schedule
        pending.lrs = schedule.known_rates
        self._in_flight.append(pending)
        if schedule.is_ours:
            schedule.tick()

    def _raise_latch_(self, pending: PendingStep) -> Tensor:
        """Raises the latch if the step is bad. Returns the flag that says whether to skip this step."""
        parts = self._parts
        measurement, scaler = parts.measurement, parts.precision.scaler
        agreed = measurement.agree_()
        # A routine overflow in the user's own loop skips its own step only, as a GradScaler does: what is in
        # flight behind it could not be run again. But optimizer state that the step makes must be removed.
        pending.latches = pending.rerunnable or scaler is None or agreed is not None or parts.skippable.lacks_state()
        if agreed is not None:
            torch.maximum(self.latch, agreed, out=self.latch)
            return self.latch
        if pending.latches or scaler is None:
            measurement.raise_flag_(self.latch)
            return self.latch
        skip = self.latch.clone()
        measurement.raise_flag_(skip)
        measurement.raise_flag_but_for_gradients_(self.latch)
        torch.maximum(self.latch, skip * (scaler.scale <= scaler.floor), out=self.latch)
        return skip

    def _hear(self) -> bool:
        """Processes the oldest reading in flight; waits for it if it has not arrived. True if it led to a rollback."""
        parts, pending = self._parts, self._in_flight.popleft()
        verdict = self._judge(pending)
        if verdict.kind == "healthy":
            parts.journal.record(applied(verdict))
            answer = self._recovery.watch(pending, verdict)
            if answer is not None:
                if answer.went_back:
                    self.drop_in_flight()
                parts.journal.remember(answer)
            return answer is not None and answer.went_back
        overflow = Outcome(verdict=verdict, action=Action(response="back_off"), applied=False)
        if verdict.kind == "overflow":
            self._recovery.back_off(verdict.reading.step)
        if verdict.kind == "overflow" and not pending.latches:
            self._take_back_tick(pending)
            parts.journal.record(overflow)
            return False
        wake = self._put_back(pending)
        if verdict.kind == "overflow":
            self._go_on(overflow, wake)
            return False
        pending.complete()
        with self._recovery.letting_interrupts_out():
            answer = self._recovery.answer(pending, verdict)
            if answer.went_back:
                parts.journal.record(answer)
            else:
                self._go_on(answer, wake)
        return answer.went_back

    def _take_back_tick(self, pending: PendingStep) -> None:
        """Corrects the schedule: this step did not advance it, and the steps in flight behind it did."""
        schedule = self._parts.state.schedule
        if schedule.is_ours and pending.schedule is not None:
            schedule.restore(pending.schedule)
            for later in self._in_flight:
                later.schedule = schedule.note()
                schedule.tick()

    def _put_back(self, pending: PendingStep) -> list[PendingStep]:
        """Puts back what only the host can put back, and clears the latch. Returns the wake."""
        parts, wake = self._parts, list(self._in_flight)
        self._in_flight.clear()
        parts.skippable.forget_states_after(pending.num_states)
        if parts.state.schedule.is_ours and pending.schedule is not None:
            parts.state.schedule.restore(pending.schedule)
        for undo, copies in pending.elsewhere:
            undo.put_back(copies)
        self.latch.zero_()
        return wake

    def _go_on(self, outcome: Outcome, wake: list[PendingStep]) -> None:
        """Records the outcome and runs the wake again."""
        goes_on = outcome.action.response != "halt" and not self._recovery.is_interrupted
        rerun = [each for each in wake if each.rerunnable] if goes_on else []
        self._parts.journal.record(replace(outcome, rerun=len(rerun), lost=len(wake) - len(rerun)))
        if rerun:
            self._run_again(rerun)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def _run_again(self, wake: list[PendingStep]) -> None:
        """Runs the steps of the wake in order, each with the random state, schedule and modes that it had."""
        parts, waiting = self._parts, deque(wake)
        rng, schedule = parts.state.rng_reader.now(), parts.state.schedule.note()
        training = TrainingModes(parts.modules)
        try:
            while waiting:
                self._run_one_again(waiting[0])
                waiting.popleft()
        finally:
            rng.restore(parts.state.device)
            training.restore()
            if not parts.state.schedule.is_ours:
                parts.state.schedule.restore(schedule)
            parts.journal.lose_reruns(len(waiting))

    def _run_one_again(self, pending: PendingStep) -> None:
        parts = self._parts
        if not parts.state.schedule.is_ours and pending.schedule is not None:
            parts.state.schedule.restore(pending.schedule)
        pending.training.restore()
        with parts.again(pending) as again:
            self.note(again)
            parts.ranks.forget_()
            for micro in again.microbatches:
                parts.forward_backward_again(again, micro)
            again.show_mean()
        self.finish(again)


def can_be_judged(pending: PendingStep) -> bool:
    """Whether its reading is on the host."""
    return pending.verdict is not None or (pending.readback is not None and pending.readback.has_arrived())
