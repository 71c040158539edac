"""Sound steps in few calls: whole steps of a program in which nothing else has to be looked after.

Most programs have no loss scale, no mitigation in force and no step that is being traced, and nearly all steps are
finite. The engine asks for each of these things at each step. Here they are asked for once, after a step that was made
the usual way (``look``). From then on a step is measured (``measure``), made by the program (``run``), and recorded
(``made``). Whatever is unusual about a step, and every step that is not finite, is left to the engine.

The host of a small model spends more time on finding our code in memory than on running it, so there is one function
for each moment, and it touches little.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from nanguard import _compat
from nanguard.hosted.clipping import are_ordinary
from nanguard.hosted.shared_buffers import SharedBuffers
from nanguard.hosted.spoiled import SpoiledStatistics
from nanguard.numerics.norm import are_alike, gradients_of, joint_norm
from nanguard.records.healthy import SoundStep
from nanguard.state.optimizer_traits import traits_of
from nanguard.state.readback import AsyncReadback, PendingCopy
from nanguard.state.training_modes import TrainingModes
from nanguard.step.late import Late
from nanguard.step.measurement import NormsAndLoss
from nanguard.step.pending import LAG, PendingStep

if TYPE_CHECKING:
    from nanguard.hosted.iteration import Iteration
    from nanguard.hosted.step import HostedStep


_COMPARES_EVERY = 32
"""So many steps lie between two comparisons of buffers that seem to be constant, if the host learns of a step late."""


class SoundSteps(ABC):
    """Of one optimizer. ``is_allowed`` is False if the host does more between its steps than we know of."""

    def __init__(self, hosted: HostedStep, *, is_allowed: bool) -> None:
        self._parts, self._engine, self._recovery = hosted.parts, hosted.engine, hosted.recovery
        self._optimizer, self._clipping, self._ring = hosted.optimizer, hosted.clipping, hosted.engine.ring
        state, policy = self._parts.state, self._parts.policy
        is_ours = state.schedule.is_ours or state.ema is not None or policy.answers_divergence is not None
        self._is_allowed = is_allowed and not (is_ours or traits_of(self._optimizer).needs_closure)
        self._are_noted, self._spoiled = False, SpoiledStatistics(self._parts)
        self.is_on = False
        """Whether the next step may be made here. Then no step is open."""

    def look(self, *, is_noted: bool) -> None:
        """After a step that was made the usual way. ``is_noted``: a module was called to train, which notes buffers."""
        parts, recovery = self._parts, self._recovery
        self._spoiled.look()
        observers = parts.journal.observers
        self.is_on = (
            self._is_allowed
            and parts.clipper.is_off
            and parts.precision.scaler is None
            and not (parts.ranks.votes or parts.islands.names or recovery.has_duties)
            and not (observers.measuring or observers.opening)
            and recovery.examinations.live.is_idle
            and not parts.update_checks.are_due(parts.num_steps)
            and (not parts.buffers.is_used or (is_noted and self._can_follow_buffers()))
            and self._can_measure()
        )

    def end(self) -> bool:
        """The step under way is made the usual way. True if buffers were noted, and a module has been called since."""
        is_noted, self._are_noted, self.is_on = self._are_noted, False, False
        return is_noted

    @abstractmethod
    def before_forward(self, *, is_first: bool) -> bool:
        """Before a module is called: notes buffers, if necessary. False if it has to be done the usual way."""

    @abstractmethod
    def has_sound_buffers(self) -> bool:
        """After the last backward pass: whether buffers are finite, or are what they were."""

    @abstractmethod
    def _can_follow_buffers(self) -> bool:
        """Whether there are only buffers that ``before_forward`` is made for."""

    @abstractmethod
    def _can_measure(self) -> bool:
        """Whether ``measure`` is made for such a step as the last one."""

    @abstractmethod
    def measure(self, this: Iteration) -> Any:
        """What ``made`` is to be given. None if the step is not sound, or has to be made the usual way."""

    def run(self, step: Callable[[Optimizer], Any]) -> Any:
        """Has the program make the step that was measured."""
        return step(self._optimizer)

    @abstractmethod
    def made(self, measured: Any) -> None:
        """The program has made the step: records it, and takes a snapshot if one is due."""

    def raised(self, error: BaseException) -> None:
        """The program's own ``step()`` has raised. It counts as a step."""
        self.is_on = self._are_noted = False
        self._parts.last_forward.forget()
        self._parts.num_steps += 1
        self._engine.raised(error)


def sound_steps_of(hosted: HostedStep, *, is_allowed: bool) -> SoundSteps:
    """For the way in which ``hosted`` makes its steps now."""
    late = hosted.engine.late
    if late is None:
        return AskedSteps(hosted, is_allowed=is_allowed)
    return LateSteps(hosted, late, is_allowed=is_allowed and type(late) is Late)


class AskedSteps(SoundSteps):
    """The host asks before each step, on a CPU."""

    def __init__(self, hosted: HostedStep, *, is_allowed: bool) -> None:
        super().__init__(hosted, is_allowed=is_allowed)
        self._num_params = sum(len(group["params"]) for group in self._optimizer.param_groups)

    def end(self) -> bool:
        """What steps have made non-finite without calling a module, which would have noted buffers, is put back."""
        if self.is_on and not self._are_noted:
            self._parts.buffers.mend_()
        return super().end()

    def before_forward(self, *, is_first: bool) -> bool:
        """Buffers are noted at each step, also those that seem to be constant: torch does not count all writes."""
        parts = self._parts
        buffers, last_forward = parts.buffers, parts.last_forward
        if not buffers.is_used:
            return True
        if is_first:
            if last_forward.is_on:
                last_forward.mend_in_any_case_()
            buffers.note_()
            self._are_noted = True
        elif not (self._are_noted and buffers.are_as_noted()):
            return False
        last_forward.begin_(buffers)
        return True

    def has_sound_buffers(self) -> bool:
        buffers = self._parts.buffers
        if not buffers.is_used:
            return True
        if not self._are_noted:
            self._is_allowed = False  # the program calls its module in some steps only
            return False
        return buffers.are_sound()

    def _can_follow_buffers(self) -> bool:
        return True

    def _can_measure(self) -> bool:
        if self._parts.can_read_quickly:
            self._engine.mode.settle()
        return self._parts.can_read_quickly

    def measure(self, this: Iteration) -> SoundStep | None:
        loss = this.losses[0].item()
        if self._clipping.is_noted or not math.isfinite(loss) or _compat.has_step_pre_hooks(self._optimizer):
            return None
        norms, rates, num_params = [], [], 0
        for group in self._optimizer.param_groups:
            params, rate = group["params"], group.get("lr")
            norm = joint_norm(gradients_of(params))
            if type(rate) is not float or not math.isfinite(norm):
                return None
            num_params += len(params)
            norms.append(norm)
            rates.append(rate)
        if num_params != self._num_params:
            return None
        return self._parts.num_steps, loss, tuple(norms), tuple(rates)

    def made(self, measured: SoundStep) -> None:
        parts, ring = self._parts, self._ring
        number = parts.num_steps = measured[0] + 1
        parts.journal.add_sound(measured)
        if self._are_noted:
            self._are_noted = False
            if parts.last_forward.is_on:
                parts.last_forward.mend_unused_()
                parts.last_forward.forget()
        if ring is not None:
            if number >= ring.next_step:
                ring.after_step(number)
            if ring.candidate is not None:
                ring.heard(number - LAG)


class LateSteps(SoundSteps):
    """The device decides, and the host learns of a step later. Nothing here syncs."""

    def __init__(self, hosted: HostedStep, mode: Late, *, is_allowed: bool) -> None:
        super().__init__(hosted, is_allowed=is_allowed)
        self._mode, self._is_ordinary, self._may_be_read = mode, False, True
        self._values = self._parts.measurement.filled
        self._known_layout = NormsAndLoss([], [])
        self._readbacks = AsyncReadback(self._parts.state.device)
        self._differ: PendingCopy | None = None

    def end(self) -> bool:
        """Buffers that torch has counted no write to are noted anew: the program may write to them by other means."""
        return super().end() and not self._parts.buffers.is_noted()

    def before_forward(self, *, is_first: bool) -> bool:
        parts = self._parts
        if not parts.buffers.is_used:
            return True
        if parts.buffers.is_noted():
            self._are_noted = True
            return True
        if self._are_noted:  # the last pass of this step has written to them
            parts.last_forward.begin_(parts.buffers)
        return False

    def has_sound_buffers(self) -> bool:
        return not self._parts.buffers.is_used or self._parts.buffers.is_noted()

    def _can_follow_buffers(self) -> bool:
        """Whether the steps write to no buffer, as far as is known: masks and tables. They are noted then.

        Torch does not count all writes, so the values are compared. On a GPU the answer arrives some steps later.
        After a step that was skipped nothing is known: buffers were put back.
        """
        buffers, was_lost = self._parts.buffers, self._mode.is_settled
        if was_lost or isinstance(buffers, SharedBuffers) or buffers.has_statistics or not buffers.is_noted():
            self._differ = None
            return False
        if self._differ is None:
            self._compare_buffers()
        return bool(self._are_constant())

    def _compare_buffers(self) -> None:
        """With the values that they were noted with. If the device has skipped the step, they count as different."""
        differ = torch.maximum(self._parts.buffers.differ(), self._mode.latch)
        self._differ = self._readbacks.post(differ)

    def _are_constant(self) -> bool | None:
        """What the last comparison has shown; None if the device has not told of it yet."""
        if self._differ is None or not self._differ.has_arrived():
            return None
        (differs,), self._differ = self._differ.read(), None
        return not differs

    def _have_begun_to_change(self, step: int) -> bool:
        """Whether steps write to buffers after all, in a way that torch does not count. Looks only now and then."""
        if self._differ is None and step % _COMPARES_EVERY == 0:
            self._compare_buffers()
        return self._are_constant() is False

    def _can_measure(self) -> bool:
        measurement, device = self._parts.measurement, self._parts.state.device
        grads = gradients_of(measurement.layout.params)
        is_plain = are_alike(grads) and bool(grads) and grads[0].device == device and not measurement.layout.flags
        last, self._may_be_read = self._parts.journal.last, True
        self._is_ordinary = last is not None and are_ordinary(last.verdict.reading.norms)
        self._known_layout = NormsAndLoss(measurement.layout.groups, measurement.layout.params)
        return self._engine.late is self._mode and is_plain and len(grads) == len(measurement.layout.params)

    def measure(self, this: Iteration) -> PendingStep | None:
        parts, clipping, groups = self._parts, self._clipping, self._optimizer.param_groups
        measurement, (loss,) = parts.measurement, this.losses
        layout, known, values, rates = measurement.layout, None, None, []
        params = list(chain.from_iterable([group["params"] for group in groups]))
        grads = gradients_of(params)
        if len(grads) != len(params) or len(params) != len(layout.params):
            return None
        if not all(map(operator.is_, params, layout.params)) or _compat.has_step_pre_hooks(self._optimizer):
            return None
        for group in groups:
            rate = group.get("lr")
            if type(rate) is not float or not group.get("fused", True):
                return None
            rates.append(rate)
        if clipping.is_noted:
            if not self._is_ordinary:
                return None
            values = clipping.known_with_loss(grads, loss)
            if values is None:
                known = clipping.known_norms(grads)
                if known is None:
                    return None
            clipping.forget()
        elif not are_alike(grads):
            return None
        pending = PendingStep(parts.num_steps, 0, None, False, 1)
        pending.losses, pending.evidence = this.losses, this
        pending.lrs, pending.num_states = tuple(rates), (len(self._optimizer.state),)
        pending.training = TrainingModes(parts.modules)
        if values is None:
            measurement.fill_again_(loss, grads, known)
            pending.layout, self._values = layout, measurement.filled
            measurement.raise_flag_(self._mode.latch)
        else:
            pending.layout, self._values = self._known_layout, values
            measurement.raise_flag_(self._mode.latch, values)
        return pending

    def run(self, step: Callable[[Optimizer], Any]) -> Any:
        """The device skips the step if the latch is up."""
        if self._may_be_read:  # by a snapshot
            self._may_be_read = False
            self._recovery.fence()
        options = vars(self._optimizer)
        has_scale = "grad_scale" in options
        options["found_inf"] = self._mode.latch
        if not has_scale:
            options["grad_scale"] = None
        try:
            return step(self._optimizer)
        finally:
            del options["found_inf"]
            if not has_scale:
                del options["grad_scale"]

    def made(self, measured: PendingStep) -> None:
        parts, ring, mode = self._parts, self._ring, self._mode
        parts.num_steps = measured.step + 1
        num_due = mode.put_in_flight(measured, self._values)
        if ring is not None and measured.step + 1 >= ring.next_step:
            ring.after_step(measured.step + 1)
            self._may_be_read = True
        for _ in range(num_due):
            sound = mode.take_sound()
            if sound is None:
                self.is_on = False  # the usual way to open the next step is to answer this one first
                return
            self._is_ordinary = are_ordinary(sound[2])
            parts.journal.add_sound(sound)
            if ring is not None and ring.candidate is not None:
                ring.heard(sound[0])
        if parts.buffers.is_used:
            self._are_noted = False
            if self._have_begun_to_change(measured.step):
                self.is_on = False

    def raised(self, error: BaseException) -> None:
        self._mode.take_back_latch()
        super().raised(error)
