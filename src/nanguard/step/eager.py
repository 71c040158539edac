"""The host reads every measurement before the optimizers step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from nanguard.records.healthy import applied, healthy_verdict
from nanguard.records.steps import APPLY, Action, Means, Outcome, Verdict
from nanguard.state.training_modes import TrainingModes
from nanguard.step.measurement import Group, MeasuredValues
from nanguard.step.parts import StepParts
from nanguard.step.pending import LAG, PendingStep
from nanguard.step.protocols import Responder


class Eager:
    """One sync a step; none on a CPU."""

    def __init__(self, parts: StepParts, recovery: Responder) -> None:
        self._parts, self._recovery = parts, recovery
        self._good = torch.zeros((), dtype=torch.float32, device=parts.state.device)
        self._bad = torch.ones_like(self._good)
        self._unwatched: deque[tuple[PendingStep, Verdict]] = deque()

    def before(self) -> None:
        """Processes readings as late as ``Late`` does, so that both modes do the same."""
        while len(self._unwatched) >= LAG:
            self._watch()

    def settle(self) -> None:
        """Processes all pending readings; not in the middle of a step, which a rollback would tear apart."""
        pending = self._parts.pending
        if pending is None or not pending.losses:
            self._catch_up()

    def is_verified(self) -> bool:
        return True

    def drop_in_flight(self) -> None:
        self._unwatched.clear()

    def note(self, pending: PendingStep, *, are_buffers_noted: bool = False) -> None:
        parts = self._parts
        if parts.buffers.is_used and not are_buffers_noted:
            parts.buffers.note_()
        pending.training = TrainingModes(parts.modules)

    def measure(self, pending: PendingStep) -> None:
        """Measures before ``finish``, for a host that clips in between. One sync; ``finish`` then makes none."""
        pending.measured = self._ask(pending, self._parts.gather(pending))

    def finish(self, pending: PendingStep) -> None:
        parts = self._parts
        pending.lrs = parts.state.schedule.known_rates
        reading = None if pending.measured is not None else parts.read_quickly(pending)
        if reading is not None:
            self._apply(pending, healthy_verdict(reading), APPLY)
            return
        pending.complete()
        parts.skippable.hold_gradients()
        groups = parts.gather(pending)
        reply = pending.measured or self._ask(pending, groups)
        verdict = parts.judge(parts.read(pending, reply))
        action = APPLY
        if verdict.kind == "nonfinite" and pending.measured is None and parts.drops_gradients:
            could = replace(verdict, means=Means(can_drop_gradients=True))
            action = parts.policy.decide(parts.journal.history, could)
        if action.response == "drop_gradients":
            # All ranks measure again, whatever each of them has dropped: they must decide alike.
            _drop_gradients(groups, reply.bad_params)
            groups = parts.param_groups.current()
            left = parts.read(pending, self._ask(pending, groups))
            verdict = parts.judge(replace(left, dropped_gradients=verdict.reading.gradients))
        if verdict.kind == "healthy":
            parts.clipper.clip_(groups, parts.measurement.norms)
            self._apply(pending, verdict, action)
        else:
            self._refuse(pending, verdict)

    def _apply(self, pending: PendingStep, verdict: Verdict, action: Action) -> None:
        parts = self._parts
        if parts.state.device.type != "cpu":
            self._recovery.fence()
        is_checked = parts.update_checks.are_due(parts.num_steps)
        if not is_checked:
            parts.skippable.step()
        elif self._step_is_spoiled():
            reading = replace(verdict.reading, found=("update",))
            self._refuse(pending, replace(verdict, kind="nonfinite", reading=reading))
            return
        if parts.state.ema is not None:
            parts.update_average()
        if not parts.clipper.is_off:
            parts.clipper.remember_()
        if parts.state.schedule.is_ours:
            parts.state.schedule.tick()
        if parts.precision.scaler is not None:
            parts.precision.scaler.update_(self._good)
        parts.skippable.end_step()
        self._unwatched.append((pending, verdict))
        outcome = applied(verdict)
        parts.journal.record(outcome if action is APPLY else replace(outcome, action=action))

    def _step_is_spoiled(self) -> bool:
        """Steps. True if the update was looked at, and taken back."""
        parts = self._parts
        with parts.update_checks.around_update(parts.num_steps) as spoiled:
            parts.skippable.step()
        return bool(spoiled)

    def _refuse(self, pending: PendingStep, verdict: Verdict) -> None:
        parts = self._parts
        self._recovery.fence()
        is_routine = verdict.kind == "overflow" and not verdict.reading.buffers
        if not (is_routine and parts.precision.scaler is not None and parts.precision.scaler.keeps_buffers):
            parts.buffers.undo_()
        if parts.precision.scaler is not None:
            parts.precision.scaler.update_(self._bad)
        parts.skippable.end_step()
        if verdict.kind == "overflow":
            self._recovery.back_off(verdict.reading.step)
            parts.journal.record(Outcome(verdict=verdict, action=Action(response="back_off"), applied=False))
            return
        pending.verdict = verdict
        for other in pending.others:
            other.put_back()
        if not pending.is_put_off:
            self.answer(pending)

    def answer(self, pending: PendingStep) -> None:
        verdict = pending.verdict
        if verdict is not None and not self._catch_up():
            with self._recovery.letting_interrupts_out():
                self._parts.journal.record(self._recovery.answer(pending, verdict))

    def _catch_up(self) -> bool:
        """Processes all pending readings. True if one triggered a rollback."""
        return any(iter(self._watch, None))

    def _watch(self) -> bool | None:
        """Processes the oldest pending reading. True if it triggered a rollback, None if there is no reading."""
        if not self._unwatched:
            return None
        answer = self._recovery.watch(*self._unwatched.popleft())
        if answer is None:
            return False
        if answer.went_back:
            self.drop_in_flight()
        self._parts.journal.remember(answer)
        return answer.went_back

    def _ask(self, pending: PendingStep, groups: list[Group]) -> MeasuredValues:
        """Measures the step and waits for the values: the one sync."""
        self._parts.measure(pending, groups)
        self._parts.measurement.agree_()
        measured = MeasuredValues(pending.layout, self._parts.measurement.filled.tolist())
        if pending.known_norms is None or measured.is_finite or self._parts.ranks.votes:
            return measured
        # The norms of the program's clipping are of fp32, and overflow before the gradients do.
        pending.known_norms = None
        again = self._ask(pending, groups)
        return again if again.is_finite else measured


def _drop_gradients(groups: list[Group], bad: Sequence[nn.Parameter]) -> None:
    """Sets bad gradients to None before clipping, so that no momentum or decay moves these parameters.

    If all gradients are bad there is no step to save, and they stay.
    """
    if len(bad) < sum(len(group.params) for group in groups):
        for param in bad:
            param.grad = None
