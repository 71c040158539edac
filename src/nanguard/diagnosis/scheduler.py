"""Decide when to examine a step, how deeply, and from which captured data.

An error in the diagnosis itself is logged. It never stops the run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn

from nanguard.diagnosis import graph_probe, lines_in_place, taped
from nanguard.diagnosis.causes import titled
from nanguard.diagnosis.exam import Exam, NotRepeatable, Past
from nanguard.diagnosis.examiner import Examiner
from nanguard.diagnosis.live import Live
from nanguard.diagnosis.look import look
from nanguard.diagnosis.search import BURST, SHARE
from nanguard.diagnosis.trials import with_shown_samples
from nanguard.records.diagnosis import Diagnosis, Fix, Source
from nanguard.records.steps import Reading
from nanguard.source.frames import source_of
from nanguard.state.warned import as_warned_before
from nanguard.step.dry_run import DryRun
from nanguard.step.parts import StepParts
from nanguard.step.pending import Microbatch, PendingStep

log = logging.getLogger("nanguard")

How = Literal["auto", "full", "brief", "off"]
Kind = tuple[str, ...]

_SEARCHES = f"up to {BURST} of the next steps are traced as they run, then at most {SHARE:.0%} of the time"
_FINITE_AGAIN = "all torch calls of the step were made again, in the model and around it, and gave finite values"
_NOT_CAPTURED = "nothing of this step was captured that could be run again"
_NO_STATE = Fix(words="register such tensors as buffers, or let forward() take and return them")
_COMPUTED = "the model was given something non-finite that the program had computed, so it is not data"
_GIVEN_UP = "steps were traced for this kind of incident before, without result: they are not traced again"

_MOST_REPEATS = 8
"""After this many examinations with the same result, similar incidents are assumed to be the same."""

_LOOK_AGAIN_EVERY = 20
"""One in this many of those is still examined: another fault may look similar."""

_SHARE_OF_REPEATS = 0.05
"""After so many with the same result, examinations of similar ones take at most this share of the time. One rank only:
several ranks could not agree on it."""

_LONG_WHILE = 100
"""In steps. After so many without an incident the next one is examined whatever that costs."""

_LONGEST_PAUSE = 1
"""After more steps than this without an incident, the next one is examined again: it may be another fault."""


class DiagnosisScheduler:
    """Schedules examinations. ``"auto"`` examines the first step of each kind fully and repeats briefly."""

    def __init__(self, parts: StepParts, dry_run: DryRun, how: How) -> None:
        self._parts, self._how = parts, how
        self._examiner = Examiner(parts, dry_run)
        self.live = Live(parts)
        self.advice = self.last_advice = ""
        """What the user can do to get a better diagnosis if the loop is not theirs: while steps are traced to find the
        cause, and if they are not."""
        self._seen: Counter[Kind] = Counter()
        self._modules: dict[Kind, tuple[str, ...]] = {}
        self._traced: dict[tuple[str, ...], Diagnosis] = {}
        """The diagnoses of traced steps, by what was found non-finite."""
        self._last: Diagnosis | None = None
        self.interrupt: KeyboardInterrupt | SystemExit | None = None
        self._in_a_row = 0
        self._num_alike = 0
        self._num_taken = 0
        self._seconds, self._began = 0.0, time.monotonic()
        self._showed: tuple[int, tuple[str, ...]] = (0, ())

    # ---- after a bad step ----------------------------------------------------------------------------------------

    def examine(
        self, pending: PendingStep, reading: Reading, past: Past, *, update: bool = False, is_last: bool = False
    ) -> Diagnosis | None:
        """The diagnosis of a bad step; the training state must be the one before it. None if off or without a result.

        The last step of a run (``is_last``) is always examined, never assumed to be a repeat.
        """
        if self._how == "off":
            return None
        looks_the_same = self._showed[1] == reading.found and reading.step - self._showed[0] < _LONG_WHILE
        if not self._is_alike(reading):
            self._in_a_row = 0
        may_take = self._how == "auto" and not is_last
        taken = may_take and (self._takes_for_the_same() or (looks_the_same and self._is_over_budget()))
        if taken and self._last is not None:
            note = f"not examined: the {self._num_alike} before it all had the same result"
            return _taken_for(self._last, reading, note)
        diagnosis, began = None, time.monotonic()
        if self._is_concerned(reading):
            try:
                with as_warned_before():
                    diagnosis = self._by_what_was_captured(pending, reading, past, update)
            except Exception as error:
                if not _was_raised_before(error):
                    log.warning("step %d could not be examined", reading.step, exc_info=True)
            except (KeyboardInterrupt, SystemExit) as interrupt:  # raised again when the step has been counted
                self.interrupt = interrupt
        self._seconds += time.monotonic() - began
        diagnosis = self._shared(diagnosis)
        if diagnosis is not None:
            network = "" if pending.is_outside else self._parts.network
            diagnosis = replace(self._with_known_modules(diagnosis), network=network)
            self._remember(diagnosis)
        return diagnosis

    def modules_that_help(self, pending: PendingStep, reading: Reading) -> tuple[str, ...]:
        """The fewest modules that make the step finite in fp32, for a rung that no diagnosis has told. Empty if none.

        The same on all ranks. Waits for the device.
        """
        found = None
        if self._is_concerned(reading):
            with contextlib.suppress(NotRepeatable):
                found = self._examiner.examine(pending, reading, Past(), lambda diagnosis: True)
        found = self._shared(found)
        return () if found is None else found.modules_to_keep

    def _with_known_modules(self, diagnosis: Diagnosis) -> Diagnosis:
        """Add the modules that helped when a step of this kind was examined fully, if this one was not."""
        known = self._modules.get(_kind(diagnosis), ())
        if diagnosis.modules_to_keep or diagnosis.depth == "full" or not known:
            return diagnosis
        return replace(diagnosis, modules_to_keep=known)

    def _takes_for_the_same(self) -> bool:
        self._num_taken = self._num_taken + 1 if self._in_a_row >= _MOST_REPEATS else 0
        return self._num_taken % _LOOK_AGAIN_EVERY > 0

    def _is_over_budget(self) -> bool:
        is_known = self._num_alike >= _MOST_REPEATS and self._parts.ranks.size == 1
        return is_known and self._seconds > _SHARE_OF_REPEATS * (time.monotonic() - self._began)

    def _is_alike(self, reading: Reading) -> bool:
        """True if the last incident was recent and found the same. All ranks get the same answer."""
        (step, found), self._showed = self._showed, (reading.step, reading.found)
        return found == reading.found and abs(reading.step - step) <= _LONGEST_PAUSE

    def _is_concerned(self, reading: Reading) -> bool:
        """True if this rank saw something non-finite. If no rank is known, all ranks examine."""
        ranks = [flags.rank for flags in reading.ranks]
        return not ranks or self._parts.ranks.rank in ranks

    def _shared(self, diagnosis: Diagnosis | None) -> Diagnosis | None:
        """The diagnosis of the first rank that has one, so that all ranks use the same.

        A rank on which the fault does not repeat gives way: it came there from another one.
        """
        ranks, source, text = self._parts.ranks, 0, ""
        if ranks.size == 1:
            return diagnosis
        for is_good in (diagnosis is not None and diagnosis.repeats, True):
            source, text = ranks.share(diagnosis.as_json() if diagnosis is not None and is_good else "")
            if text:
                break
        if source == ranks.rank:
            return diagnosis
        return Diagnosis.from_dict(json.loads(text)) if text else None

    def _by_what_was_captured(
        self, pending: PendingStep, reading: Reading, past: Past, update: bool
    ) -> Diagnosis | None:
        """Replay the whole step if possible; else use the live trace; else replay the model from its inputs."""
        if self._parts.ranks.has_others and any(isinstance(m, nn.SyncBatchNorm) for m in self._parts.modules):
            return None  # its forward pass waits for the other ranks, which may not examine the step
        if pending.rerunnable and pending.microbatches:
            try:
                return self._examiner.examine(pending, reading, past, self._is_deep, update=update)
            except NotRepeatable as reason:
                return replace(_of_nothing(reading, f"the step could not be run again: {reason}"), fix=_NO_STATE)
        if pending.live is not None and not pending.live.is_finite:
            if reading.found not in self._traced:
                self.live.search.found()
            exam = Exam(self._parts, pending, pending.live, past, None)
            seen = with_shown_samples(self._examiner.read(exam))
            traced = replace(self._examiner.located(seen, exam, reading), capture="live")
            self._traced[reading.found] = traced
            return traced
        diagnosis = self._examiner.examine_update(pending, reading, past) if update else None
        if diagnosis is not None:
            return diagnosis
        diagnosis, notes = self._of_host(pending, reading, past)
        if diagnosis is not None:
            return diagnosis
        diagnosis, more = self._of_tape(pending, reading, past)
        notes = (*notes, *more)
        if diagnosis is not None:
            return diagnosis
        if pending.calls:
            try:
                diagnosis = self._of_calls(pending, reading, past)
            except Exception as error:
                log.info("the model could not be called again as in step %d: %s", reading.step, error)
        if diagnosis is None or diagnosis.cause == "unknown":
            told = None if pending.graph_finding is None else self._by_its_graph(pending, reading, past)
            diagnosis = self._by_tracing(told or diagnosis or _of_nothing(reading, *notes[:1]), reading)
        return replace(diagnosis, notes=(*diagnosis.notes, *(note for note in notes if note != diagnosis.because)))

    def _of_host(self, pending: PendingStep, reading: Reading, past: Past) -> tuple[Diagnosis | None, tuple[str, ...]]:
        """Run the step function of the host again. Without a result, the notes say why."""
        if not pending.microbatches:
            return None, ()
        again = replace(pending, rerunnable=True, divisor=len(pending.microbatches))
        try:
            diagnosis = self._examiner.examine(again, reading, past, self._is_deep)
        except Exception as error:
            log.info("step %d could not be run again", reading.step, exc_info=True)
            return None, (f"the step function could not be run again: {error!s:.160}",)
        if diagnosis is not None and not diagnosis.repeats and "loss" not in reading.found:
            return _of_code_after(diagnosis, ()), ()  # unlike ``Guard.step`` the host may change gradients
        return diagnosis, ()

    def _of_tape(self, pending: PendingStep, reading: Reading, past: Past) -> tuple[Diagnosis | None, tuple[str, ...]]:
        """Make all calls of the step again. Without a result, the notes say why."""
        if pending.tape is None:
            return None, ()
        try:
            state = self._parts.state
            trained = (*state.parameters().values(), *state.buffers().values())
            micros, obstacles = taped.microbatches(pending.tape, trained, state.device)
            if not micros:
                return None, obstacles
            again = replace(pending, rerunnable=True, microbatches=micros)
            diagnosis = self._examiner.examine(again, reading, past, self._is_deep)
        except Exception as error:
            log.info("the calls of step %d could not be made again", reading.step, exc_info=True)
            return None, (f"the torch calls of the step could not be made again: {error!s:.160}",)
        if diagnosis is not None and not diagnosis.repeats and not obstacles and reading.found == ("gradients",):
            lines = lines_in_place.lines_that_change_gradients(pending.tape.functions)
            return replace(_of_code_after(diagnosis, lines), capture="tape"), ()
        if diagnosis is None or not diagnosis.repeats:
            return None, (*obstacles, *(() if obstacles else (_FINITE_AGAIN,)))
        return replace(diagnosis, capture="tape"), ()

    def _by_its_graph(self, pending: PendingStep, reading: Reading, past: Past) -> Diagnosis | None:
        diagnosis = graph_probe.read(pending.graph_finding, self._parts, self._examiner, pending, reading, past)
        return None if diagnosis.cause == "unknown" else diagnosis

    def _by_tracing(self, diagnosis: Diagnosis, reading: Reading) -> Diagnosis:
        """Nothing could be replayed: use the diagnosis of a traced step, or trace some of the next steps."""
        known = self._traced.get(reading.found)
        if known is not None:
            return _taken_for(known, reading, f"not traced: taken for the same as in step {known.step:,}")
        if not self.live.is_allowed or self.live.is_always:
            return self._advised(diagnosis, self.last_advice)
        if not self.live.arm((*reading.found, *_kind(diagnosis)), reading.step):
            return self._advised(replace(diagnosis, notes=(*diagnosis.notes, _GIVEN_UP)), self.last_advice)
        return self._advised(replace(diagnosis, notes=(*diagnosis.notes, _SEARCHES)), self.advice)

    def _advised(self, diagnosis: Diagnosis, advice: str) -> Diagnosis:
        """With what can be done where the guard is not the user's own; a known cause has its own fix."""
        is_known = diagnosis.cause != "unknown" or not advice
        return diagnosis if is_known else replace(diagnosis, fix=Fix(words=advice))

    def _of_calls(self, pending: PendingStep, reading: Reading, past: Past) -> Diagnosis | None:
        """Replay the model from its captured inputs and the gradient of its output."""
        micros = [
            Microbatch(_call_again, call, call.rng, reduce_gradients=False, autocast=call.autocast)
            for call in pending.calls
            if call.gradients or not call.has_returned  # a call without gradients has no part in the loss
        ]
        if not micros:
            return None
        if reading.damaged:  # the captured gradients belong to the damaged weights, not to older ones
            past = replace(past, older_weights=None)
        again = replace(pending, rerunnable=True, divisor=1, microbatches=micros)
        with self._parts.precision.unscaled():  # the captured gradients are scaled already
            diagnosis = self._examiner.examine(again, reading, past, self._is_deep)
        if diagnosis is None:
            return None
        call = micros[diagnosis.microbatch or 0].batch
        computed = [tensor for tensor in call.inputs if tensor.grad_fn is not None]
        if diagnosis.phase == "data" and not all(look(tensor).is_finite for tensor in computed):
            return replace(_of_nothing(reading, _COMPUTED), capture="module")
        from_outside = diagnosis.phase == "data" and ".gradients" in diagnosis.because
        if not diagnosis.repeats or from_outside:
            missed = any(call.misses_gradients for call in pending.calls)
            return _of_code_around(diagnosis, missed=missed, gradient_is_bad=from_outside)
        is_each_a_microbatch = len(pending.calls) == len(pending.losses)
        microbatch = diagnosis.microbatch if is_each_a_microbatch else None
        source = diagnosis.source or source_of(call.place)  # a model of torch modules only has no other line
        return replace(diagnosis, capture="module", microbatch=microbatch, source=source)

    def _is_deep(self, diagnosis: Diagnosis) -> bool:
        """True if experiments should follow."""
        return self._how == "full" or (self._how == "auto" and not self._seen[_kind(diagnosis)])

    def _remember(self, diagnosis: Diagnosis) -> None:
        kind = _kind(diagnosis)
        same = self._last is not None and _kind(self._last) == kind
        self._in_a_row = self._in_a_row + 1 if same else 1
        self._num_alike = self._num_alike + 1 if same else 1
        self._seen[kind] += 1
        if diagnosis.modules_to_keep:
            self._modules[kind] = diagnosis.modules_to_keep
        self._last = diagnosis


def _taken_for(known: Diagnosis, reading: Reading, note: str) -> Diagnosis:
    """An earlier diagnosis, without the facts that hold for its step alone."""
    because = f"probably as in step {known.step or 0:,} ({note.partition(':')[0]})"
    guess = replace(known, because=because, confidence="guess", notes=(note,), evidence=(), operands=())
    guess = replace(guess, samples=(), dataset_indices=(), element=None, chain=(), harmless=(), trail=(), tried=())
    return replace(guess, step=reading.step, epoch=reading.epoch, batch=reading.batch)


def _kind(diagnosis: Diagnosis) -> Kind:
    return diagnosis.phase, diagnosis.cause, diagnosis.op, diagnosis.module


def _was_raised_before(error: BaseException) -> bool:
    """Whether this is the error of the program itself, raised once more: the user gets it anyway."""
    return repr(error) == repr(error.__context__)


def _call_again(model: Any, call: Any) -> Tensor:
    loss: Tensor = call.again(model)
    return loss


def _of_code_around(diagnosis: Diagnosis, *, missed: bool, gradient_is_bad: bool) -> Diagnosis:
    """The model is finite on its inputs, so the fault is in the code around it."""
    if gradient_is_bad:
        because = (
            "run again, the model is finite, and its gradient was not: the fault is in the loss, or the model changed"
        )
    elif missed:
        because = "the model's forward pass is finite; the gradient of its output was too large to be kept"
    else:
        because = "the model is finite on its inputs, forward and backward: the fault is in the code around it"
    found = Diagnosis(
        phase="backward" if gradient_is_bad else diagnosis.phase,
        cause="unknown",
        because=because,
        tried=diagnosis.tried,
        fix=Fix(words="use guard.step(loss_fn, batch), so that the loss can be examined too"),
        capture="module",
        step=diagnosis.step,
        epoch=diagnosis.epoch,
        batch=diagnosis.batch,
        rank=diagnosis.rank,
        device=diagnosis.device,
        num_replays=diagnosis.num_replays,
        seconds=diagnosis.seconds,
    )
    return titled(found)


def _of_code_after(diagnosis: Diagnosis, lines: Sequence[Source]) -> Diagnosis:
    """Loss and gradients are finite when the step runs again. ``lines`` change gradients."""
    because = "loss and gradients are finite when the step runs again: it comes after backward(), or does not repeat"
    line, *others = lines or (None,)
    if others:
        line, because = None, because + lines_in_place.in_words(lines, "changes gradients")
    what = "a division by a count or a norm that is 0, clipping by hand, hooks, callbacks, communication"
    unknown = replace(
        diagnosis,
        cause="unknown",
        op="",
        module="",
        source=line,
        is_line_traced=False,
        because=because,
        evidence=(),
        fix=Fix(words=f"look at what changes gradients between backward() and optimizer.step(): {what}"),
        confidence="guess",
        remedies=(),
    )
    return titled(unknown)


def _of_nothing(reading: Reading, because: str = _NOT_CAPTURED) -> Diagnosis:
    diagnosis = Diagnosis(
        phase="forward" if "loss" in reading.found else "backward",
        cause="unknown",
        because=because,
        fix=Fix(words="call the model inside `with guard.autocast():`, or use guard.step(loss_fn, batch)"),
        step=reading.step,
        epoch=reading.epoch,
        batch=reading.batch,
    )
    return titled(diagnosis)
