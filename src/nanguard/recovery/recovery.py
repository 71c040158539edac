"""Climbs the ladder: gathers evidence of the cause, asks the policy, does what the rung says.

Called with the training state as the failing step found it. All ranks come here together and decide by the same
records.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanguard.diagnosis.scheduler import DiagnosisScheduler, How
from nanguard.incidents.bundle import Bundles
from nanguard.policy.divergence import Divergence, Trend
from nanguard.policy.rungs import Halt, Rollback
from nanguard.records.alert import Alert
from nanguard.records.diagnosis import Diagnosis
from nanguard.records.steps import Action, Cause, Means, Outcome, Reading, Verdict
from nanguard.recovery.alerts import StandingAlerts
from nanguard.recovery.context import StepContext
from nanguard.recovery.incident_recorder import IncidentRecorder
from nanguard.recovery.mitigations import ActiveMitigations
from nanguard.recovery.proof import by_rehearsal, holds_what_is_new
from nanguard.recovery.rollbacks import Rollbacks
from nanguard.state.data import Data
from nanguard.state.snapshots.ring import SnapshotRing
from nanguard.state.warned import as_warned_before
from nanguard.step.dry_run import DryRun
from nanguard.step.parts import StepParts
from nanguard.step.pending import PendingStep
from nanguard.step.protocols import StepTracer

log = logging.getLogger("nanguard")


class Recovery:
    """``ring`` is None if no snapshots are taken, ``bundles`` if bad steps are not saved to disk."""

    def __init__(
        self, parts: StepParts, data: Data, ring: SnapshotRing | None, *, diagnose: How, bundles: Bundles | None
    ) -> None:
        self._parts, self.ring = parts, ring
        self._state = parts.state
        self._rule = parts.policy.answers_divergence
        self.mitigations = ActiveMitigations(parts)
        self.alerts = StandingAlerts(parts.policy)
        self._rollbacks = Rollbacks(parts, data, ring, self.mitigations)
        self._dry_run = DryRun(parts)
        self.examinations = DiagnosisScheduler(parts, self._dry_run, diagnose)
        self.recorder = IncidentRecorder(parts, self.examinations, ring, bundles)
        self._witness: PendingStep | None = None
        self._last_good: PendingStep | None = None
        self._from_the_start = frozenset(self._state.nonfinite())
        worth_a_word = sorted(self._state.unsound()) if self._from_the_start else []  # an Inf in a buffer is a mask
        if worth_a_word:
            log.warning("non-finite before training begins: %s", ", ".join(worth_a_word[:5]))

    # ---- what the two ways of guarding call ----------------------------------------------------------------------

    def watch(self, pending: PendingStep, verdict: Verdict) -> Outcome | None:
        """A healthy step: lets snapshots and the trend of the loss know. An outcome if the loss has diverged."""
        journal, rule, reading = self._parts.journal, self._rule, verdict.reading
        journal.add_recent(reading)
        if rule is not None:
            journal.trend = journal.trend.after(reading.mean_loss, rule)
        if self.ring is not None and self.ring.candidate is not None:
            self.ring.heard(reading.step)
        if reading.batch is not None:
            self._rollbacks.note(reading.step, (reading.epoch, reading.batch))
        if rule is None or not journal.trend.beyond:
            if pending.rerunnable:
                self._witness = self._last_good = pending
            return None
        if not journal.trend.has_diverged(rule):
            return None
        if self.ring is not None:
            self.ring.agree()
        cause = self._cause_of_divergence(pending, rule)
        answer = self._climb(pending, replace(verdict, kind="divergence", cause=cause, means=self._means(pending)))
        if not answer.went_back:
            acted = answer.action.rung is not None
            journal.trend = replace(journal.trend, undecided=(), beyond=0) if acted else Trend()
        if answer.action.response == "apply":
            log.info("step %d: the loss is far above its past, but the weights are not to blame", reading.step)
            return None
        return replace(answer, applied=True)

    def answer(self, pending: PendingStep, verdict: Verdict) -> Outcome:
        """A step that was not finite, and did not change anything."""
        if self.ring is not None:
            self.ring.agree()
            self.ring.trouble(verdict.reading.step)
        damaged = self.damaged()
        is_damaged = self._parts.ranks.any(bool(damaged))
        reading = replace(verdict.reading, damaged=damaged)
        verdict = replace(verdict, reading=reading, means=self._means(pending), progress=self._parts.journal.progress)
        if is_damaged:
            verdict = replace(verdict, kind="damage", cause="weights")
        is_last = self._will_halt(verdict)
        diagnosis = self.recorder.examine(pending, reading, is_last=is_last)
        if is_damaged:
            self._parts.update_checks.turn_on(self._parts.num_steps)
        verdict = replace(verdict, means=self._means(pending, diagnosis))
        kept = self.recorder.gather(pending, reading, diagnosis, is_last=is_last)
        answer = replace(self._climb(pending, verdict, diagnosis), diagnosis=diagnosis)
        answer = replace(answer, bundle=self.recorder.write(answer, kept))
        behind = self._parts.num_steps - reading.step - 1
        return replace(answer, lost=behind) if answer.went_back else answer

    def follow(self, pending: PendingStep, answer: Outcome) -> None:
        """Another optimizer of the same backward pass was answered: does here what was done there.

        Precision is that of modules, which the optimizers share, and is raised already.
        """
        if answer.action.response in ("lower_lr", "roll_back", "act"):
            if self.ring is not None:
                self.ring.agree()
                self.ring.trouble(pending.step)
            reading = replace(answer.verdict.reading, step=pending.step)
            self._act(pending, replace(answer.verdict, reading=reading), answer.action, answer.diagnosis)

    def leave_out(self, pending: PendingStep, reading: Reading, did: str) -> Outcome:
        """A non-finite pass that never became a step: it is examined and saved. Nothing has to be done about it."""
        diagnosis = self.recorder.examine(pending, reading)
        kept = self.recorder.gather(pending, reading, diagnosis)
        verdict = replace(self._parts.judge(reading), means=self._means(pending), progress=self._parts.journal.progress)
        action = Action(response="skip")
        outcome = Outcome(verdict=verdict, action=action, applied=False, did=did, diagnosis=diagnosis)
        return replace(outcome, bundle=self.recorder.write(outcome, kept))

    def look(self, pending: PendingStep) -> Outcome | None:
        """Between steps: an outcome if the state is damaged although every step was finite. Waits for the device."""
        if self.ring is not None:
            self.ring.agree()
        damaged = self.damaged()
        if not self._parts.ranks.any(bool(damaged)):
            return None
        reading = Reading(step=pending.step, epoch=pending.epoch, batch=pending.batch, loss=math.nan, damaged=damaged)
        self._parts.update_checks.turn_on(self._parts.num_steps)
        verdict = Verdict(kind="damage", reading=reading, cause="weights", means=self._means(pending))
        return self._climb(pending, verdict)

    @property
    def tracer(self) -> StepTracer:
        return self.examinations.live

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C, or an exit, came while the step was examined."""
        return self.recorder.is_interrupted

    def letting_interrupts_out(self) -> contextlib.AbstractContextManager[None]:
        """Around answering and recording a step."""
        return self.recorder.letting_interrupts_out()

    def prepare(self, facts: Mapping[str, Any]) -> None:
        """Before a snapshot of another process is put back: weights that had been cast to fp32 are to be so again."""
        if facts["measures"]["cast"]:
            self.mitigations.cast()

    def state_dict(self) -> dict[str, Any]:
        return {**self.mitigations.state_dict(), "alerts": self.alerts.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mitigations.load_state_dict(state)
        if "alerts" in state:  # older versions did not answer warnings
            self.alerts.load_state_dict(state["alerts"])

    def fence(self) -> None:
        """Before anything is written that a snapshot may still be read from. Does not sync.

        A step that is being captured waits for nothing: whoever replays it does.
        """
        if self.ring is not None and self.ring.is_being_read and not self._parts.is_capturing:
            self.ring.fence()

    def back_off(self, step: int) -> None:
        """After a routine overflow: a snapshot taken after that step is dropped, since the schedule changes."""
        if self.ring is not None:
            self.ring.trouble(step, routine=True)

    def damaged(self) -> tuple[str, ...]:
        """Names of weights, buffers and optimizer state that are non-finite and were not always so. Syncs."""
        bad = [name for name in self._state.nonfinite() if name not in self._from_the_start]
        if not bad:
            return ()
        live, buffers = self._state.tensors(), self._state.buffer_names()
        return tuple(name for name in bad if self._was_finite(name, live[name], is_buffer=name in buffers))

    def _was_finite(self, name: str, now: Tensor, *, is_buffer: bool) -> bool:
        """Whether something is non-finite that was finite in the last good snapshot.

        If there is none, weights and optimizer state count as finite then; a buffer may be a mask.
        """
        then = None if self.ring is None else self.ring.saved(name)
        if then is None or then.shape != now.shape:
            return not is_buffer
        now = now.detach().to(then.device)  # to the copy, not the other way: the device may have no memory to spare
        return bool((~torch.isfinite(now) & torch.isfinite(then)).any())

    def forget(self) -> None:
        """The run is elsewhere now."""
        self._witness = self._last_good = None
        self._rollbacks.forget()
        self.alerts.forget()
        if self.ring is not None:
            self.ring.forget()

    def give_memory_back(self) -> bool:
        """Training has run out of memory: drops what is held of the device's. True if there was anything."""
        held, self._witness = self._witness is not None, None
        return (self.ring is not None and self.ring.give_back()) or held

    @property
    def last_trouble(self) -> int:
        history = self._parts.journal.history
        return history[-1].verdict.reading.step if history else -1

    @property
    def has_duties(self) -> bool:
        return bool(self.mitigations.active or self.alerts.has_any)

    def ease(self, step: int, settle: Callable[[], None]) -> None:
        """Takes back mitigations that have been in force without trouble for long enough, with nothing in flight."""
        if not self.mitigations.active or not self.mitigations.are_due(step, self.last_trouble):
            return
        settle()
        for what in self.mitigations.ease(step, self.last_trouble):
            self._parts.journal.ease(step, what)

    def heed(self, step: int, settle: Callable[[], None]) -> bool:
        """Puts warnings that are due to the policy, with nothing in flight. True if the run is at an earlier state now.

        Warnings are the same on all ranks, and so is the answer.
        """
        if not self.alerts.are_due(step):
            return False
        settle()
        last, went_back = self._parts.journal.last, False
        if last is None:  # the run was just resumed, and no step has been heard of
            return False
        for alert in self.alerts.take_due(step):
            answer = self._answer_alert(alert, step, last.verdict.reading)
            if answer is not None:
                self.alerts.history.append(answer)
                self._parts.journal.answer(step, answer)
                went_back = went_back or answer.went_back
        return went_back

    def go_back(self, step: int, rung: Rollback) -> str:
        """Rolls back as the rung says, from ``step``; returns what that did, in words."""
        did = self._rollbacks.go_back(step, rung)
        self._witness = None
        return did

    # ---- deciding ------------------------------------------------------------------------------------------------

    def _climb(self, pending: PendingStep, verdict: Verdict, diagnosis: Diagnosis | None = None) -> Outcome:
        policy, history = self._parts.policy, self._parts.journal.history
        action = policy.decide(history, verdict)
        if verdict.kind == "nonfinite" and action.response != "skip":
            with as_warned_before():
                verdict = self._with_cause(pending, verdict)
            action = policy.decide(history, verdict)
        attempts: list[Outcome] = []
        while True:
            with contextlib.nullcontext() if action.response == "skip" else as_warned_before():
                answer = self._act(pending, verdict, action, diagnosis)
            if answer is not None:
                return answer
            attempts.append(Outcome(verdict=verdict, action=action, applied=False, worked=False))
            action = policy.decide([*history, *attempts], verdict)

    def _answer_alert(self, alert: Alert, step: int, reading: Reading) -> Outcome | None:
        """None if no rung answers the warning."""
        pending = PendingStep(step, reading.epoch, reading.batch, False, 1)
        means, progress = self._means(pending), self._parts.journal.progress
        if alert.form in ("fp16", "bf16"):  # whoever chose it: the guard, the program, or an autocast in a module
            means = replace(means, lower_precision=not self._parts.is_captured)
        reading = replace(reading, step=step)
        verdict = Verdict(kind="alert", reading=reading, means=means, progress=progress, alert=alert)
        attempts: list[Outcome] = []
        while True:
            action = self._parts.policy.decide([*self.alerts.history, *attempts], verdict)
            if action.rung is None:
                return None
            answer = self._act(pending, verdict, action, None)
            if answer is not None:
                return replace(answer, applied=True)
            attempts.append(Outcome(verdict=verdict, action=action, applied=False, worked=False))

    def _will_halt(self, verdict: Verdict) -> bool:
        """Whether the run seems to end here, for the first time: a program may go on after a halt."""
        history = self._parts.journal.history
        was_halted = bool(history) and history[-1].action.response == "halt"
        return not was_halted and self._parts.policy.decide(history, verdict).response == "halt"

    def _means(self, pending: PendingStep, diagnosis: Diagnosis | None = None) -> Means:
        names_modules = diagnosis is not None and bool(diagnosis.modules_to_keep)
        runs_low = self.mitigations.can_raise_precision or any(call.autocast[0] for call in pending.calls)
        runs_low = runs_low or names_modules  # these helped in fp32
        return Means(
            lower_precision=runs_low and not self._parts.is_captured,
            can_run_again=(pending.rerunnable and bool(pending.microbatches)) or names_modules,
            holds_schedule=self._parts.state.schedule.is_ours,
            snapshots=() if self.ring is None else self.ring.steps,
        )

    def _with_cause(self, pending: PendingStep, verdict: Verdict) -> Verdict:
        """Looks at the batch; then at whether the weights still work on one that was good."""
        try:
            if holds_what_is_new(self._parts, pending, self._last_good):
                return replace(verdict, cause="input")
            if self._witness is None:
                return verdict
            return by_rehearsal(self._parts, self._dry_run, pending, self._witness, verdict)
        except Exception:
            log.warning("step %d: cannot tell if data or weights are at fault", verdict.reading.step, exc_info=True)
            return verdict

    def _cause_of_divergence(self, pending: PendingStep, rule: Divergence) -> Cause:
        """Whether older good weights do better on this batch; if not, the data have become harder.

        If none are in memory: whether the current weights still do well on a good batch.
        """
        limit, witness = self._parts.journal.trend.limit(rule), self._witness
        if not pending.rerunnable or self.ring is None:
            return "unknown"
        try:
            with self.ring.weights_of_oldest() as there_are:  # the newest may have been on its way already
                if there_are:
                    return "weights" if self._dry_run.loss_of(pending) <= limit else "batch"
            if witness is not None:
                return "batch" if self._dry_run.loss_of(witness) <= limit else "weights"
        except Exception:
            log.warning("cannot tell if data or weights are at fault in the divergence", exc_info=True)
        return "unknown"

    # ---- acting --------------------------------------------------------------------------------------------------

    def _act(
        self, pending: PendingStep, verdict: Verdict, action: Action, diagnosis: Diagnosis | None
    ) -> Outcome | None:
        """Lets the rung act; None if that turned out to be of no use and was taken back.

        What a rung raises is not caught: it may have left its work half done, and the run must not go on from there.
        """
        if action.rung is None:
            return Outcome(verdict=verdict, action=action, applied=False)
        parts, tools = self._parts, (self._dry_run, self.mitigations, self._rollbacks, self.examinations)
        context = StepContext(parts, *tools, pending, verdict, diagnosis, action.count)
        self.fence()  # the rung may write to what a snapshot is still read from
        did = (*parts.policy.ladder, Halt())[action.rung].act(context)
        if context.went_back:
            self._witness = None
        elif did is None:
            return None
        return Outcome(verdict=verdict, action=action, applied=False, did=did or "", went_back=context.went_back)
