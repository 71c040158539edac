"""Passes that never become a step: the program raises, ends, or leaves a bad batch out. They are examined too.

``state/discarded.py`` puts buffers back after such a pass. Nothing else has changed, so nothing else is done about it.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from nanguard import _compat
from nanguard.errors import NanguardError
from nanguard.numerics.finite import nonfinite
from nanguard.numerics.norm import gradients_of
from nanguard.records.steps import Found, Reading
from nanguard.state.readback import AsyncReadback, PendingCopy
from nanguard.step.calls import Call
from nanguard.step.parts import StepParts
from nanguard.step.pending import Microbatch, PendingStep
from nanguard.step.protocols import Responder
from nanguard.step.tape import CallTape, Made, Row, TapedLoss, is_readable

log = logging.getLogger("nanguard")

_OF_ANOMALY_MODE = "returned nan values in its"
"""How ``detect_anomaly`` puts it. It raises before the gradient has reached anything that can be looked at."""

_NOT_USED = "the program did not train on this pass"
_LONGEST = 160

_MOST_IN_VAIN = 3
"""``loss_fn`` is run again after an error at most so many times without a result: it may raise for other reasons."""

_MOST_ASKED = 16
"""So many passes wait for the device's answer; each holds a batch."""

_NOT_BY_NAN = (torch.OutOfMemoryError, OSError, ImportError, NameError, StopIteration)


class DiscardedPasses:
    """Looks at what the program has thrown away, once for each pass. Logs its own errors and never raises them."""

    def __init__(self, parts: StepParts, recovery: Responder) -> None:
        self._parts, self._recovery = parts, recovery
        self._num_vain = 0
        self._readbacks = AsyncReadback(parts.state.device)
        self._asked: deque[tuple[PendingCopy, PendingStep, Call]] = deque()

    @property
    def is_asking(self) -> bool:
        """Whether the device has not told of a pass yet."""
        return bool(self._asked)

    def look_for(self, pending: PendingStep, calls: list[Call]) -> None:
        """Examines those of ``calls`` that the program has thrown away, with NaN in their results, and removes them.

        A mask may make an Inf, so Inf does not count, except in a loss that the program has made of the results. Nor
        does an evaluation without no_grad(). Such a pass is no step: an agent may only have chosen an action. Call it
        before a forward pass, or before the optimizers step. Syncs if a pass was thrown away, else not.
        """
        gone = [call for call in calls if call.is_discarded]
        if not gone:
            return
        trained = [call for call in gone if not call.is_evaluation]
        bad = {}
        for call in trained:
            is_nan = any(bool(torch.isnan(output).any()) for output in _readable(call))
            loss = None if is_nan else _bad_loss(call)
            if is_nan or loss is not None:
                bad[id(call)] = call, loss, _ending_at(call, loss, pending.tape)
        for call in gone:
            call.outputs.clear()
        calls[:] = [call for call in calls if id(call) not in bad]
        for call, loss, taped in bad.values():
            self._examine_left_out(replace(pending, tape=taped), call, loss)

    def look_for_later(self, pending: PendingStep, calls: list[Call]) -> None:
        """As ``look_for``, for a host that must not wait: a pass is examined once the device has told of it.

        Syncs only if there was NaN.
        """
        device = self._parts.state.device
        for call in calls:
            if call.is_discarded and not call.is_evaluation and len(self._asked) < _MOST_ASKED:
                bad = [torch.isnan(output).any() for output in _readable(call) if output.device == device]
                losses = [~torch.isfinite(loss).all() for _, loss, _ in call.losses if loss.device == device]
                call.outputs.clear()
                if bad or losses:
                    nums = [torch.stack(each).double().sum() if each else _zero(device) for each in (bad, losses)]
                    answer = self._readbacks.post(torch.stack(nums))
                    tape = pending.tape if losses else None
                    self._asked.append((answer, replace(pending, calls=[], last_seen=None, tape=tape), call))
        while self._asked and self._asked[0][0].has_arrived():
            self._hear()

    def settle(self) -> None:
        """Processes what the device has not told of yet. Syncs if there is something."""
        while self._asked:
            self._hear()

    def _hear(self) -> None:
        answer, noted, call = self._asked.popleft()
        num_outputs, num_losses = answer.read()
        loss = _bad_loss(call) if num_losses else None
        if num_outputs or loss is not None:
            taped = None if loss is None else _ending_at(call, loss, noted.tape)
            self._examine_left_out(replace(noted, tape=taped), call, loss)

    def _examine_left_out(self, pending: PendingStep, call: Call, loss: tuple[Made, Tensor] | None) -> None:
        """A pass that the program has thrown away, because of what it returned, or of its ``loss``."""
        found: tuple[Found, ...] = ("output",) if loss is None else ("loss",)
        value = math.nan if loss is None else float(loss[1])
        self._examine(pending, [call], found, value, _NOT_USED, is_part=True)

    def left_out(self, pending: PendingStep, calls: list[Call], losses: Sequence[Tensor], *, is_part: bool) -> None:
        """The program has called ``backward()`` on ``losses``, some of them bad, and cleared the gradients itself."""
        bad = [call for call in calls if nonfinite(call.known_gradients, self._parts.state.device)]
        calls[:] = [call for call in calls if all(call is not each for each in bad)]
        loss = next((value for value in map(float, losses) if not math.isfinite(value)), math.nan)
        self._examine(pending, bad or list(calls), ("loss",), loss, _NOT_USED, is_part=is_part)

    def end(
        self,
        pending: PendingStep,
        calls: list[Call],
        losses: Sequence[Tensor],
        error: BaseException | None,
        *,
        is_suspect: bool = False,
    ) -> None:
        """The program has ended, or left its loop, in the middle of a step, because of ``error`` if there is one.

        ``is_suspect``: what raised was looking at something non-finite.
        """
        has_raised = pending.tape is not None and pending.tape.raised is not None
        if _compat.stops_device(error):  # nothing can be looked at
            return
        if isinstance(error, KeyboardInterrupt) or not (calls or losses or has_raised or is_suspect):
            return
        if error is None and calls and all(call.is_evaluation for call in calls):
            return  # an evaluation ends without a step
        found, loss = self._found(calls, losses, error, pending.tape)
        if not found and is_suspect:
            found = ("input",)
        if found:
            self._parts.buffers.undo_()
            self._parts.last_forward.forget()
            self._examine(pending, calls, found, loss, _in_words(error), is_part=True)

    def end_outside(self, pending: PendingStep, finding: object, error: BaseException | None) -> None:
        """The program has ended outside a step, because of what ``finding`` describes."""
        empty = replace(
            pending, calls=[], microbatches=[], tape=None, live=None, graph_finding=finding, is_outside=True
        )
        self._examine(empty, [], ("input",), math.nan, _in_words(error), is_part=True)

    def raised(self, pending: PendingStep, micro: Microbatch, error: Exception) -> None:
        """``loss_fn`` of ``guard.step`` has raised. If something is non-finite when it runs again, that is why."""
        if self._num_vain >= _MOST_IN_VAIN or micro.rng is None or _compat.stops_device(error):
            return
        if isinstance(error, (NanguardError, *_NOT_BY_NAN)):
            return
        before = len(self._parts.journal.history)
        again = replace(pending, microbatches=[*pending.microbatches, micro])
        self._examine(again, [], ("output",), math.nan, _in_words(error), is_part=False, if_explained=True)
        self._num_vain += len(self._parts.journal.history) == before

    def _found(
        self, calls: list[Call], losses: Sequence[Tensor], error: BaseException | None, tape: CallTape | None
    ) -> tuple[tuple[Found, ...], float]:
        values = [float(loss) for loss in losses]
        bad = next((value for value in values if not math.isfinite(value)), None)
        if bad is not None:
            return ("loss",), bad
        loss = values[-1] if values else math.nan
        groups = self._parts.skippable.groups() if losses else ()  # else they are those of a step that was refused
        grads = gradients_of(chain.from_iterable(groups))
        if nonfinite(grads, self._parts.state.device) or _OF_ANOMALY_MODE in str(error):
            return ("gradients",), loss
        counts = torch.isnan if error is None else _is_nonfinite
        outputs = [output for call in calls for output in _readable(call)]
        if any(bool(counts(output).any()) for output in outputs):
            return ("output",), loss
        if self._was_given_bad(calls, error):
            return (("output",) if calls[-1].has_returned else ("input",)), loss
        if error is not None and tape is not None and tape.raised is not None:
            return ("input",), loss
        return (), loss

    def _was_given_bad(self, calls: list[Call], error: BaseException | None) -> bool:
        """Whether the model raised, or its results were too large to be kept, and what it was given is non-finite."""
        unseen = [call for call in calls if not call.outputs]
        return error is not None and any(nonfinite(call.inputs, self._parts.state.device) for call in unseen)

    def _examine(
        self,
        pending: PendingStep,
        calls: list[Call],
        found: tuple[Found, ...],
        loss: float,
        did: str,
        *,
        is_part: bool,
        if_explained: bool = False,
    ) -> None:
        parts = self._parts
        if parts.ranks.has_others:  # they know nothing of it, and would wait for us or we for them
            log.warning(
                "step %d: the program threw away a non-finite pass; it is not examined on one rank", pending.step
            )
            return
        try:
            parts.last_forward.mend_in_any_case_()
            seen = [(call.args, dict(call.kwargs)) for call in calls]
            alone = replace(pending, calls=calls, last_seen=pending.last_seen or seen)
            rates = parts.state.schedule.known_rates
            names = self._bad_gradients() if "gradients" in found else ()
            reading = Reading(
                step=pending.step,
                epoch=pending.epoch,
                batch=pending.batch,
                loss=loss,
                mean_loss=loss,
                lrs=rates,
                found=found,
                gradients=names,
            )
            with self._recovery.letting_interrupts_out():
                outcome = self._recovery.leave_out(alone, reading, did)
                if if_explained and outcome.diagnosis is None:
                    return
                if is_part:
                    parts.journal.counts["left_out"] += 1
                    parts.journal.remember(outcome)
                else:
                    parts.num_steps += 1
                    pending.step += 1
                    parts.journal.record(outcome)
        except Exception:
            log.exception("step %d: a pass that the program threw away could not be examined", pending.step)

    def _bad_gradients(self) -> tuple[str, ...]:
        parts = self._parts
        grads = [(p, p.grad) for group in parts.skippable.groups() for p in group if p.grad is not None]
        return tuple(parts.state.name_of(p) for p, grad in grads if nonfinite([grad], parts.state.device))


def _bad_loss(call: Call) -> tuple[Made, Tensor] | None:
    """The first non-finite number that the program has made of the results of a call. None if there is none.

    One that has been written to since does not count, such as a sum of losses. Nor does an infinity beside a finite
    number, which may be the loss: a perplexity may be too large.
    """
    unchanged = [(made, loss) for made, loss, version in call.losses if _compat.version(loss) == version]
    bad = [(made, loss) for made, loss in unchanged if not bool(torch.isfinite(loss).all())]
    is_told = len(bad) == len(unchanged) or any(bool(torch.isnan(loss).any()) for _, loss in bad)
    return bad[0] if bad and is_told else None


def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)


def _ending_at(call: Call, loss: tuple[Made, Tensor] | None, tape: CallTape | None) -> CallTape | None:
    """The tape up to this loss, or up to this call as if its results were losses; None if the call is not on it."""
    if tape is None:
        return None
    number = next((number for number in reversed(tape.rows) if Row(*tape.rows[number]).call is call), None)
    if number is None:
        return None
    roots = tuple(Made(number, place) for place in range(len(call.outputs))) if loss is None else (loss[0],)
    ended = copy(tape)
    ended.losses = [TapedLoss(roots, (), roots[0].number if roots else number)]
    return ended


def _readable(call: Call) -> list[Tensor]:
    """The results of a call, without those that torch cannot be asked about, such as sparse ones."""
    return [output for output in call.outputs if is_readable(output)]


def _is_nonfinite(tensor: Tensor) -> Tensor:
    return ~torch.isfinite(tensor)


def _in_words(error: BaseException | None) -> str:
    if error is None or isinstance(error, SystemExit):
        return "the program ended before its optimizer stepped"
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return f"the program raised {text if len(text) <= _LONGEST else text[:_LONGEST] + '...'}"
