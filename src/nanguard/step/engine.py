"""The engine of a guarded run. Each step goes through it from top to bottom:

    open -> forward, backward -> measure -> agree -> protect -> (host) judge -> decide -> act -> record

``open`` processes what the host has heard and notes what the step may change. ``Eager`` and ``Late`` do the rest of a
step: they differ in when the host learns of it. The engine does not know who calls it: ``Guard``, or a hosted step.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from nanguard.errors import ProtocolError
from nanguard.state.data import Data
from nanguard.state.snapshots.ring import SnapshotRing
from nanguard.step.calls import Call, CallRecorder
from nanguard.step.discarded import DiscardedPasses
from nanguard.step.eager import Eager
from nanguard.step.late import Late
from nanguard.step.measurement import MeasurementLayout
from nanguard.step.next_step import NextStep
from nanguard.step.out_of_memory import GivingMemoryBack
from nanguard.step.own_forward import OwnForward
from nanguard.step.parts import StepParts
from nanguard.step.pending import LossFn, Microbatch, PendingStep
from nanguard.step.protocols import Mode, Responder
from nanguard.step.tape import CallTape
from nanguard.step.tape_recorder import TapeRecorder

log = logging.getLogger("nanguard")


class StepEngine:
    """One step at a time. ``late`` is None if the host is asked before each step; ``ring`` if there are no snapshots.

    With ``was_skipped``, ``sync="late"`` means until the next step is about to be applied: see ``NextStep``. If
    ``host_advances`` schedulers that belong to the state, after a step, snapshots are taken ``between_steps``.
    ``records_calls``: in a loop of the user's own, what the model is given is noted, so that it can be called again.
    """

    def __init__(
        self,
        parts: StepParts,
        data: Data,
        ring: SnapshotRing | None,
        recovery: Responder,
        *,
        sync: str,
        accumulate: int,
        records_calls: bool,
        was_skipped: Callable[[], None] | None = None,
        host_advances: bool = False,
    ) -> None:
        self.parts, self.data, self.ring, self.recovery = parts, data, ring, recovery
        self._tracer = recovery.tracer
        self.accumulate = accumulate
        self._host_advances = host_advances
        self.num_epochs = 0
        self.late: Late | None = None
        if sync == "late":
            self.late = Late(parts, recovery) if was_skipped is None else NextStep(parts, recovery, was_skipped)
        self.mode: Mode = self.late or Eager(parts, recovery)
        self._memory = GivingMemoryBack(recovery)
        self._captured: tuple[MeasurementLayout, Tensor] | None = None
        self._left_early = False
        kind = parts.state.device.type
        self._taper = TapeRecorder(lambda: parts.state.rng_reader.now(parts.num_steps), kind)
        self._recorder = CallRecorder(kind, self._taper, parts.state.rng_reader)
        self._records_calls = self._is_taping = records_calls
        self.discarded = DiscardedPasses(parts, recovery)

    # ---- one step ------------------------------------------------------------------------------------------------

    def on_one(self, loss_fn: LossFn, batch: Any) -> Any:
        """Runs one micro-batch. The last one of a step finishes the step."""
        pending = self.parts.pending
        if pending is None or not pending.rerunnable:
            pending = self.open(rerunnable=True, divisor=self.accumulate)
            self.parts.skippable.zero_grad()  # another loss, or another guard, may have left gradients
        ends = len(pending.losses) + 1 == pending.divisor
        # If the loader has no length, any batch may be the last one, so DDP averages after each.
        micro = self._microbatch(loss_fn, batch, is_last=ends or self._may_end_epoch)
        loss, aux = self._run(pending, micro)
        micro.shown = loss
        if ends:
            self.finish(pending)
        return (loss, *aux) if aux else loss

    def on_many(self, loss_fn: LossFn, batches: Sequence[Any]) -> Any:
        """Runs a whole step of several micro-batches."""
        if not batches or self.accumulate != 1:
            raise ValueError(
                f"microbatches needs at least one batch and accumulate=1, got {len(batches)} batches and "
                f"accumulate={self.accumulate}"
            )
        pending = self.open(rerunnable=True, divisor=len(batches))
        self.parts.skippable.zero_grad()
        auxes = []
        for place, batch in enumerate(batches, start=1):
            micro = self._microbatch(loss_fn, batch, is_last=place == len(batches))
            _, aux = self._run(pending, micro)
            auxes.append(aux)
        pending.shown = pending.mean_loss().clone()
        self.finish(pending)
        # By how many values came back, never by what they are: an array has no single truth value.
        if not any(len(aux) for aux in auxes):
            return pending.shown
        return pending.shown, [aux[0] if len(aux) == 1 else aux for aux in auxes]

    def open(
        self,
        *,
        rerunnable: bool,
        divisor: int,
        in_backward: bool = False,
        notes_later: bool = False,
        are_buffers_noted: bool = False,
    ) -> PendingStep:
        """Begins a step: processes the readings that are due, then notes what the step may change.

        Inside a backward pass (``in_backward``) readings wait: nothing can be run again there. With ``notes_later`` the
        host calls ``mode.note`` before the model is called. ``are_buffers_noted``: it has been called since.
        """
        parts = self.parts
        if self._taper.tape is not None:
            self._taper.forget()
        is_capturing = parts.is_capturing
        if not (is_capturing or in_backward):
            if parts.last_forward.is_on and not are_buffers_noted:
                parts.last_forward.mend_in_any_case_()
            self.mode.before()
            if self.recovery.has_duties:
                self.recovery.ease(parts.num_steps, self.mode.settle)
                if self.recovery.heed(parts.num_steps, self.mode.settle):
                    self.mode.drop_in_flight()
            if parts.num_steps == parts.first_step:
                self._before_the_first_step()
        elif is_capturing and (self.late is None or not self.late.is_settled):
            raise ProtocolError(
                "a guarded step was captured in a CUDA graph with sync='eager' or with other steps in flight: use "
                "fused, capturable optimizers, and call guard.settle() before the capture"
            )
        position = None if self.data.current is None else self._position
        pending = PendingStep(parts.num_steps, self.num_epochs, position, rerunnable, divisor)
        pending.last_seen = self.data.last
        parts.islands.put_back()
        if not notes_later:
            self.mode.note(pending, are_buffers_noted=are_buffers_noted or in_backward)  # has changed them by then
        parts.ranks.forget_()
        parts.begin(pending)
        if not rerunnable:
            self._tracer.begin(pending.last_seen)
        if parts.journal.observers.opening:
            parts.journal.observers.on_open(pending.step)
        return pending

    def stop_taping(self) -> PendingStep | None:
        """Before work of our own between the user's calls. Returns the open step."""
        self._taper.stop()
        return self.parts.pending

    def in_own_loop(self) -> contextlib.AbstractContextManager[None]:
        """Wraps the forward pass of the user's own loop. Records what the model is given."""
        if self._records_calls:
            self._records_calls = False
            self._recorder.listen(self.parts.state.model, self._open_calls)
        return OwnForward(self._begin_own_forward, self._memory, self._tracer, self.parts.precision)

    def _begin_own_forward(self) -> None:
        pending = self.parts.pending
        if self._is_taping and pending is not None and not self.parts.is_capturing:
            pending.tape = pending.tape or CallTape()
            self._taper.begin(pending.tape)

    def backward(self, pending: PendingStep, loss: Tensor) -> None:
        """Runs one backward pass of the user's own loop."""
        tracer = self._tracer
        self._taper.stop()
        for call in pending.calls:
            if call.outputs and not call.is_discarded:
                call.outputs.clear()
        if isinstance(loss, Tensor):
            self._taper.note_losses([loss])
            pending.graph_finding = tracer.before_backward(loss) or pending.graph_finding
        if not tracer.is_on:
            with self._memory:
                self.parts.backward(pending, loss)
            return
        with self._memory, tracer.watching():
            self.parts.backward(pending, loss)
        pending.live = tracer.after_backward(loss) or pending.live

    def before_own_forward(self, pending: PendingStep) -> None:
        """Before a forward pass of the user's own loop, who may have thrown away the one before it."""
        self.look_for_discarded(pending, pending.calls)
        self.parts.begin_microbatch(pending)
        self.parts.begin_own_forward(pending)

    def update(self, pending: PendingStep) -> None:
        """Ends a step of the user's own loop."""
        self.look_for_discarded(pending, pending.calls)
        self.finish(pending)

    def look_for_discarded(self, pending: PendingStep, calls: list[Call]) -> None:
        """Before a pass or a step: examines passes with NaN results that the program has thrown away."""
        if self.late is None:
            self.discarded.look_for(pending, calls)
        elif (calls or self.discarded.is_asking) and not self.parts.is_capturing:
            self.discarded.look_for_later(pending, calls)

    def close(self) -> None:
        """Waits for what is being written to disk. Nothing of ours is left in torch or on the model."""
        if self.ring is not None:
            self.ring.close()
        self._taper.close()
        self._recorder.stop()
        self._records_calls = self._is_taping  # if the run goes on all the same

    def end(self, error: BaseException | None) -> None:
        """The user's own loop was left, because of ``error`` if there is one. Syncs if that was in the middle."""
        pending = self.parts.pending
        if pending is not None and not pending.rerunnable and pending.has_begun:
            self.discarded.end(pending, pending.calls, pending.losses, error)

    def _open_calls(self) -> list[Call] | None:
        pending = self.parts.pending
        return None if pending is None or pending.rerunnable or self.parts.is_capturing else pending.calls

    def measure(self, pending: PendingStep) -> None:
        """Measures before ``finish``, for a host that clips in between."""
        self.mode.measure(pending)

    def finish(self, pending: PendingStep) -> None:
        self.parts.end()
        if self._taper.tape is not None:
            self._taper.forget()
        if self.data.current is not None:
            pending.last_batch = self._position
            pending.fetched = self.data.take_fetched() or pending.fetched
        if self.late is not None and self.parts.is_capturing:
            self.late.protect(pending)
            self.parts.is_captured = True
            self._captured = pending.layout, self.parts.measurement.filled  # a graph goes on writing to this memory
            return
        if self.parts.last_forward.is_on:
            self.parts.last_forward.mend_unused_()
            self.parts.last_forward.forget()
        self.parts.num_steps += 1
        if self.data.is_going_back:  # the rest of the loop body of a batch that will come again
            self.parts.clear()
            self.parts.journal.lose(1)
            return
        try:
            self.mode.finish(pending)
        except BaseException as error:
            self.raised(error)
            raise
        if not pending.is_in_backward:
            self.after_step()

    def raised(self, error: BaseException) -> None:
        """A step was not finished, because of this error."""
        self._memory.give_back(error)
        self.parts.leave_no_trace(error)

    def replay(self, graph: Any) -> None:
        """Replays a captured step."""
        if self.late is None or self._captured is None:
            raise ProtocolError("guard.replay() was called before a guarded step was captured in torch.cuda.graph()")
        layout, values = self._captured
        pending = self.open(rerunnable=False, divisor=1)
        pending.layout = layout
        self.parts.end(counts=True)
        self.recovery.fence()
        graph.replay()
        self.late.post(pending, values)
        self.after_step()

    def _before_the_first_step(self) -> None:
        if self.ring is not None:
            self.ring.take_first(self.parts.first_step)

    def after_step(self) -> None:
        """Takes a snapshot if one is due. Inside ``guard.epoch`` this happens between two batches instead."""
        if self.ring is not None and self.data.current is None and not self._host_advances:
            self.ring.after_step(self.parts.num_steps)

    def between_steps(self) -> None:
        """The host has done all that belongs to the last step, and begins the next one."""
        if self.ring is not None and self._host_advances:
            self.ring.after_step(self.parts.num_steps)

    def _microbatch(self, loss_fn: LossFn, batch: Any, *, is_last: bool) -> Microbatch:
        averages_ranks = isinstance(self.parts.state.model, DistributedDataParallel)
        micro = Microbatch(loss_fn, batch, None, reduce_gradients=is_last or not averages_ranks)
        if not self.parts.is_capturing:
            pending = self.parts.pending
            self.parts.note_world(micro, self.parts.num_steps if pending is None else pending.step)
        return micro

    def _run(self, pending: PendingStep, micro: Microbatch) -> tuple[Tensor, tuple[Any, ...]]:
        try:
            loss, aux = self._memory.forward_backward(self.parts, self.mode, pending, micro)
        except Exception as error:
            self.discarded.raised(pending, micro, error)
            raise
        pending.microbatches.append(micro)
        self.parts.look_back(micro)
        return loss, aux

    # ---- the course of an epoch ----------------------------------------------------------------------------------

    @property
    def _position(self) -> int | None:
        """The position of the current batch in its epoch; None outside ``guard.epoch``."""
        return None if self.data.current is None else self.data.current.position - 1

    @property
    def _may_end_epoch(self) -> bool:
        walk = self.data.current
        return walk is not None and not self._left_early and (walk.length is None or walk.position == walk.length)

    def begin_epoch(self, loader: Iterable[Any]) -> int:
        self.parts.drop_unfinished()
        self.settle()
        if self.data.current is not None:  # the last epoch was left early
            self.data.abandon()
            self.parts.state.schedule.tick_epoch()
        if self.ring is None:  # the run never goes back to an earlier pass
            self.data.passes.clear()
        self.num_epochs += 1
        self._left_early = False
        self.num_epochs = self.data.begin(loader, self.num_epochs).number
        self.parts.look_again()
        if self.parts.num_steps == self.parts.first_step:
            self._before_the_first_step()
        self.parts.journal.observers.on_epoch(self.num_epochs)
        return self.num_epochs

    def hear(self) -> None:
        between_steps = self.parts.pending is None or not self.parts.pending.losses
        if between_steps:
            self.parts.last_forward.mend_()  # a snapshot may be taken now
            self.mode.before()
        self._follow()
        if between_steps and self.ring is not None:
            self.ring.after_step(self.parts.num_steps)

    def leave_epoch(self, number: int) -> None:
        if number == self.num_epochs:  # a generator may be closed long after its loop was left
            self.end(sys.exc_info()[1])
            self.parts.drop_unfinished()
            self._left_early = True

    def end_epoch(self) -> bool:
        pending = self.parts.pending
        if pending is not None and pending.rerunnable and self._may_end_epoch:
            self.finish(pending)
        self.parts.drop_unfinished()
        self.settle()
        if not self.data.is_going_back:
            self._look_at_what_is_left()
        if self.data.is_going_back:
            self._follow()
            return True
        self.parts.state.schedule.tick_epoch()
        goes_on = self.data.end()
        self._follow()
        return goes_on

    def _look_at_what_is_left(self) -> None:
        """Checks the state after the last step: a bad update of finite gradients shows only in the next step."""
        answer = self.recovery.look(PendingStep(self.parts.num_steps, self.num_epochs, self._position, False, 1))
        if answer is not None:
            self.mode.drop_in_flight()
            self.parts.journal.remember(answer)

    def settle(self) -> None:
        if self.parts.pending is None or not self.parts.pending.losses:
            self.parts.last_forward.mend_()
        self.mode.settle()
        self.discarded.settle()

    def ask_the_host(self) -> None:
        """From now on the host decides before each step."""
        self.settle()
        self.late, self.mode = None, Eager(self.parts, self.recovery)

    def _follow(self) -> None:
        """Moves the data to where a rollback has put them, and takes the epoch number from there."""
        self.data.settle()
        if self.data.current is not None:
            self.num_epochs = self.data.current.number
