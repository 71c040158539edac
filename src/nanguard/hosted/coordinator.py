"""Optimizers that step in the same iteration: all of them step, or none does."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from nanguard import _compat, _compat_modes
from nanguard.diagnosis.graph_probe import examine_if_bad
from nanguard.hosted.given import given_nan, made_by_exploded_weights
from nanguard.hosted.in_backward import StepsInBackward
from nanguard.hosted.iteration import Iteration
from nanguard.hosted.optimizers import ProgramCall
from nanguard.hosted.step import HostedStep
from nanguard.state.batch_indices import FetchedBatch
from nanguard.step.calls import Call
from nanguard.step.tape import CallTape, Outside, Row
from nanguard.step.tape_recorder import TapeRecorder

_FEW = 8
_MOST_LOSSES = 256
_MOST_FETCHED = 64
_MOST_REFUSED = 16


class StepCoordinator:
    """Knows the current iteration, and all hosted steps: ``hosted_steps`` returns those that exist now.

    ``hears_of_clearing`` says that ``num_cleared`` of the iteration is set whenever gradients are cleared.
    """

    hears_of_clearing = False

    def __init__(self, hosted_steps: Callable[[], list[HostedStep]]) -> None:
        self._hosted_steps = hosted_steps
        self._num_cleared = 0 if self.hears_of_clearing else None
        self.iteration = self._new_iteration()
        self.next_tape: CallTape | None = None
        """For the next iteration, if its first torch calls are made before it begins."""
        self._fetched_next: list[FetchedBatch] = []
        self._losses_before: list[Tensor] = []
        self._refused_losses: deque[Tensor] = deque(maxlen=_MOST_REFUSED)
        self._accumulates = False  # there was a step with several losses: it is of interest what they are divided by
        self._has_told = False  # of an error that ends the host

    def _new_iteration(self) -> Iteration:
        return Iteration(self._num_cleared, CallTape(), [])

    def begin_iteration(self) -> None:
        """If an optimizer has stepped, what happens from now on belongs to the next step."""
        this = self.iteration
        if this.stepped:
            if len(this.stepped) == 1:
                this.stepped[0].stepped_together = this.stepped[0].itself
            else:
                together = frozenset(map(id, this.stepped))
                for hosted in this.stepped:
                    hosted.stepped_together = together
            self._losses_before = this.losses
            if this.refused:
                self._refused_losses += this.losses
            fetched, self._fetched_next = self._fetched_next, []
            if this.fetched:
                fetched = [batch for batch in this.fetched[-_FEW:] if batch.is_ahead] + fetched  # not used yet
            tape, self.next_tape = self.next_tape or CallTape(), None
            self.iteration = Iteration(self._num_cleared, tape, fetched)

    def tape_to_write(self) -> CallTape:
        """Of the current iteration; of the next one if an optimizer has stepped."""
        if self.iteration.stepped and self.next_tape is None:
            self.next_tape = CallTape()
        return self.next_tape or self.iteration.tape

    def note_fetched(self, batch: FetchedBatch) -> None:
        """A loader of the program gave a batch. After a step it is for the next one."""
        fetched = self._fetched_next if self.iteration.stepped else self.iteration.fetched
        fetched.append(batch)
        del fetched[:-_MOST_FETCHED]

    def before_forward(self, hosted: HostedStep) -> None:
        """A module that ``hosted`` trains is about to be called, with gradients on."""
        if self.iteration.stepped:
            self.begin_iteration()
        this = self.iteration
        is_first = hosted not in this.noted
        hosted.thread = threading.get_ident()
        if is_first:
            this.noted.append(hosted)
        if this.calls:
            self._look_for_discarded()
        if hosted.sound.is_on and hosted.sound.before_forward(is_first=is_first):
            hosted.has_called = True
        else:
            hosted.before_forward(is_first=is_first)

    def _look_for_discarded(self) -> None:
        """Each looks at the passes of its own modules. Those that it has examined are no part of the step."""
        this = self.iteration
        gone = [call for call in this.calls if call.outputs and call.is_discarded]
        for hosted in this.noted if gone else ():
            own = [call for call in gone if len(this.noted) == 1 or _is_of(call, hosted)]
            seen = set(map(id, own))
            hosted.look_for_discarded(own, this)
            examined = seen - set(map(id, own))
            this.calls[:] = [call for call in this.calls if id(call) not in examined]

    def after_forward(self, losses: Sequence[Tensor]) -> None:
        """The host is about to call ``backward()`` on these. Does not sync on a GPU."""
        seen = self.note_losses(losses)
        this = self.iteration
        for call in this.calls:
            if call.outputs and not call.is_discarded:
                call.outputs.clear()
        for hosted in this.noted:
            if hosted.clipping.is_noted or hosted.parts.last_forward.is_on:
                hosted.after_forward(seen)
        finding = examine_if_bad(losses)
        if finding is not None:
            self.note_finding(finding)

    def note_losses(self, losses: Sequence[Tensor]) -> list[Tensor]:
        """The losses of this iteration, without their graphs. A scaled one is noted as it was before scaling."""
        if self.iteration.stepped:
            self.begin_iteration()
        this = self.iteration
        if len(this.losses) + len(losses) > 1:
            self._accumulates = True
        seen = []
        for scaled in losses:
            loss = vars(scaled).get("_nanguard_loss", scaled)
            seen.append(_alone(loss))
            if self._accumulates:
                this.divisors.append(_divisor_of(loss) if _compat.is_divided(loss) else 1.0)
        this.losses += seen
        if len(this.losses) > _MOST_LOSSES:  # a program may differentiate for ever without a step
            del this.losses[:-_MOST_LOSSES], this.divisors[:-_MOST_LOSSES]
        return seen

    def examine_graph(self, losses: Sequence[Tensor]) -> None:
        """Before the graph is freed."""
        finding = examine_if_bad(losses)
        if finding is not None:
            self.note_finding(finding)

    def note_finding(self, finding: Any) -> None:
        """What the graph of a loss has shown; None if nothing."""
        self.iteration.graph_finding = finding or self.iteration.graph_finding

    def step(self, hosted: HostedStep, call: ProgramCall) -> Any:
        """A call of ``step()``. Returns what it returned."""
        if hosted in self.iteration.stepped:  # without a backward pass: the program sets gradients itself
            self.begin_iteration()
        this = self.iteration
        if this.calls:
            self._look_for_discarded()
        hosted.thread = threading.get_ident()
        is_first = not this.stepped
        this.stepped.append(hosted)
        skips_all = this.refused or (is_first and self._is_another_bad(hosted))
        was_answered = this.in_backward is not None and this.in_backward.has_refused
        # One with bad gradients is an incident of its own, but not if one of the same backward pass was.
        if skips_all and not call.is_skipped and (was_answered or not hosted.has_bad_gradients()):
            this.refused = True
            hosted.skip_with_others(this)
            result = None
        else:
            result = hosted.step(call, this)
        if not hosted.was_applied:
            this.was_not_applied(hosted)
        if this.refused:
            for other in this.noted:
                if other is not hosted:
                    other.put_back()
        return result

    def measure_if_sound(self, hosted: HostedStep) -> Any:
        """Before ``hosted`` steps: what was measured, if the step is sound and all that this one is asked for.

        None if ``step`` has to be called. Otherwise the program may step, and then ``hosted.was_sound`` is called.
        """
        this = self.iteration
        if len(this.losses) != 1 or this.stepped or this.refused or hosted.stepped_together is not hosted.itself:
            return None
        for call in this.calls:
            if call.outputs:  # there was no backward pass since
                return None
        if this.in_backward is not None or not hosted.sound.has_sound_buffers():
            return None
        return hosted.sound.measure(this)

    def sound_step_raised(self, hosted: HostedStep, error: BaseException) -> None:
        """The program's own ``step()`` has raised after ``measure_if_sound``. What comes next is another iteration."""
        self.iteration.stepped.append(hosted)
        hosted.sound.raised(error)

    def step_in_backward(
        self, hosted: HostedStep, this: Iteration, call: ProgramCall, *, check_afterwards: bool = False
    ) -> Any:
        """As ``step``, inside the backward pass of an iteration. ``end_backward`` examines it if it is bad."""
        this.in_backward = this.in_backward or StepsInBackward()
        this.stepped.append(hosted)
        result = this.in_backward.step(hosted, this, call, check_afterwards=check_afterwards)
        if not hosted.was_applied:
            this.was_not_applied(hosted)
        return result

    def end_backward(self, *, answers: bool = True) -> None:
        """A backward pass has ended. Without ``answers`` no step inside it is examined."""
        if self.iteration.in_backward is not None:
            self.iteration.in_backward.end(self.iteration, answers=answers)

    def forget(self) -> None:
        """What has happened since the last step is not part of the run any more."""
        self.iteration = self._new_iteration()

    def end(self, error: BaseException | None, taper: TapeRecorder) -> None:
        """The host ends: if it is in the middle of a step that is not finite, that one is examined. Syncs.

        Else an error is examined that came of NaN outside a step.
        """
        if error is not None and self.next_tape is not None:
            self.begin_iteration()
        this, self.iteration = self.iteration, self._new_iteration()
        if this.noted and not this.stepped:
            hosted: HostedStep | None = this.noted[0]
        else:
            hosted = None if this.stepped or error is None else self._trained_by(this.tape)
        if hosted is not None:
            num_incidents = len(hosted.parts.journal.incidents)
            hosted.end(this, error, taper, [*self._losses_before, *self._refused_losses])
            self._has_told = self._has_told or len(hosted.parts.journal.incidents) > num_incidents
        elif error is not None and not self._has_told:
            guarded = self._hosted_steps()
            finding = given_nan(error) or made_by_exploded_weights(error, [each.parts for each in guarded])
            if finding is not None and guarded:
                self._has_told = True
                guarded[0].end_outside(finding, error)

    def _trained_by(self, tape: CallTape) -> HostedStep | None:
        """The one whose parameters are used without a module; of several, the one that has stepped least."""
        given = [token for raw in tape.rows.values() for token in Row(*raw).tokens]
        used = {id(token.tensor) for token in given if isinstance(token, Outside)}
        users = [
            hosted
            for hosted in self._hosted_steps()
            if any(id(param) in used for group in hosted.skippable.groups() for param in group)
        ]
        return min(users, key=lambda hosted: hosted.parts.num_steps, default=None)

    def _is_another_bad(self, hosted: HostedStep) -> bool:
        """Whether one that steps right after this one will be refused: half an update is worse than none."""
        others = self._hosted_steps()
        if len(others) == 1:
            return False
        others = [each for each in others if each is not hosted]
        if any(each.thread not in (None, hosted.thread) for each in others):  # autograd may be writing to theirs
            others = [each for each in others if each.thread == hosted.thread]
        others = [each for each in others if each.stepped_together is None or id(hosted) in each.stepped_together]
        if hosted.stepped_together is not None:
            others = [each for each in others if id(each) in hosted.stepped_together]
        elif len(others) > _FEW:  # not known yet: those whose modules were called as well
            others = [each for each in others if each in self.iteration.noted]
        return any(other.has_bad_gradients() and not other.is_checked_afterwards for other in others)


class ProgramCoordinator(StepCoordinator):
    """Of one thread of a program."""

    hears_of_clearing = True


def _is_of(call: Call, hosted: HostedStep) -> bool:
    called = call.called
    return called is None or any(called is each for root in hosted.roots for each in root.modules())


def _divisor_of(loss: Tensor) -> float:
    with _compat_modes.unwatched():
        return _compat.divisor_of(loss)


def _alone(loss: Tensor) -> Tensor:
    """Without its graph, and without the storage that it may be a small part of."""
    number = loss.detach() if loss.ndim == 0 else loss.detach().reshape(())
    return number.clone() if _compat.is_part(loss) else number
