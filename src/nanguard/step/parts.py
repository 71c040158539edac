"""The parts of a guarded step, and the stages that both modes share: forward and backward, gather, measure, judge.

Nothing here waits for the device. What follows the measurement depends on when the host learns of it: ``Eager`` asks
before the optimizers step, ``Late`` lets the device decide.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nanguard import _compat, _compat_modes
from nanguard.errors import NonFiniteError
from nanguard.numerics.clip import scale_
from nanguard.policy.policy import Policy, judge
from nanguard.records.healthy import healthy_reading
from nanguard.records.steps import Found, Reading, Verdict
from nanguard.source.frames import Place, runs_user_code
from nanguard.state.discarded import LastForward
from nanguard.state.islands import Islands
from nanguard.state.names import unwrapped
from nanguard.state.parameter_sizes import ParameterSizes
from nanguard.state.training_state import TrainingState
from nanguard.state.undo import Undo
from nanguard.step.clipping import Clipper
from nanguard.step.journal import Journal
from nanguard.step.measurement import Group, MeasuredValues, Measurement, ParamGroups
from nanguard.step.microbatches import MicrobatchFilter
from nanguard.step.optimizers import SkippableOptimizers
from nanguard.step.pending import Microbatch, PendingStep
from nanguard.step.precision import MixedPrecision
from nanguard.step.ranks import Ranks
from nanguard.step.update_checks import UpdateChecks

log = logging.getLogger("nanguard")


_NO_BUFFERS: tuple[tuple[str, ...], list[Tensor]] = ((), [])


def _fp32_fix(modules: Sequence[str]) -> str:
    """In a loop with a ``Guard``; the whole model if there are no modules."""
    return f"guard.keep_fp32({', '.join(map(repr, modules))})" if modules else 'Guard(..., precision="fp32")'


@dataclass(slots=True)
class StepParts:
    """What a step works with.

    ``microbatch_filter`` is None unless bad micro-batches are dropped. ``pending`` is the open step; ``begin``, ``end``
    and ``again`` change it. ``num_steps`` have been made. ``is_captured``: a step is in a CUDA graph, which cannot be
    changed any more. ``fp32_fix`` is the code with which the user can keep modules in fp32. If a program trains several
    networks, ``network`` names this one, and ``other_parts`` are those of the others, which its steps may call too.
    ``steps_in_backward`` says that the program's own hooks make the steps, while a backward pass is under way.
    ``first_sizes`` are those of the parameters at the beginning.
    """

    state: TrainingState
    precision: MixedPrecision
    policy: Policy
    skippable: SkippableOptimizers
    clipper: Clipper
    microbatch_filter: MicrobatchFilter | None
    param_groups: ParamGroups
    ranks: Ranks
    update_checks: UpdateChecks
    measurement: Measurement
    buffers: Undo
    last_forward: LastForward
    islands: Islands
    journal: Journal
    modules: list[nn.Module]
    pending: PendingStep | None = None
    num_steps: int = 0
    first_step: int = 0
    """The number of the first step that this process makes."""
    is_captured: bool = False
    fp32_fix: Callable[[Sequence[str]], str] = _fp32_fix
    network: str = ""
    other_parts: Callable[[], Sequence[StepParts]] = tuple
    optimizer_made_at: Place | None = None
    """The line, if this was seen, and if there is one optimizer."""
    steps_in_backward: bool = False
    first_sizes: ParameterSizes | None = None
    may_be_captured: bool = True
    """Whether a step may be inside a CUDA graph. To ask torch takes as long as ten calls."""
    can_read_quickly: bool = False
    """Whether nothing needs the whole measurement of a sound step, as far as that never changes."""

    def __post_init__(self) -> None:
        self.can_read_quickly = self.state.device.type == "cpu" and not self.ranks.votes and self.clipper.is_off

    def other_networks(self) -> list[nn.Module]:
        """Networks that other optimizers train."""
        return [each.own_model for each in self.other_states()]

    def other_states(self) -> list[TrainingState]:
        """What other optimizers train."""
        return [each.state for each in self.other_parts()]

    def parameters_of_all(self) -> list[Tensor]:
        """Of this network and of those that other optimizers train."""
        states = {id(parts.state.own_model): parts.state for parts in (self, *self.other_parts())}
        return list({id(p): p for state in states.values() for p in state.parameters().values()}.values())

    def noted_buffers(self) -> Undo:
        """All buffers as they are now."""
        buffers = Undo(self.state.device)
        buffers.watch_buffers(unwrapped(self.state.model))
        buffers.note_()
        return buffers

    def begin(self, pending: PendingStep) -> None:
        """This step is open from now on."""
        self.pending = pending

    def end(self, *, counts: bool = False) -> None:
        """No step is open. ``counts``: the one that was open counts as made."""
        self.pending = None
        self.num_steps += counts

    @contextlib.contextmanager
    def again(self, pending: PendingStep) -> Iterator[PendingStep]:
        """Opens a step that has run before, as not yet run. Afterwards the step that was open is open again."""
        open_step, self.pending = self.pending, pending.afresh()
        try:
            yield self.pending
        finally:
            self.pending = open_step

    @property
    def drops_gradients(self) -> bool:
        """Whether single bad gradients are left out; not where they are scaled."""
        return self.policy.drops_gradients and self.precision.scaler is None

    def forward_backward(self, pending: PendingStep, micro: Microbatch) -> tuple[Tensor, tuple[Any, ...]]:
        """Runs one micro-batch of a step; the detached loss, and what else the loss function returned."""
        ddp: Any = self.state.model
        try:
            with contextlib.nullcontext() if micro.reduce_gradients else ddp.no_sync():
                self.begin_microbatch(pending)
                loss, aux = self.forward(micro)
                loss = self.backward(pending, loss)
        except BaseException as error:
            self.leave_no_trace(error)
            raise
        return loss, aux

    def forward_backward_again(self, pending: PendingStep, micro: Microbatch) -> tuple[Tensor, tuple[Any, ...]]:
        """The same with the random state and the autocast mode that the micro-batch had."""
        if micro.rng is not None:
            micro.rng.restore(self.state.device)
        enabled, dtype = micro.autocast
        with torch.autocast(self.state.device.type, dtype=dtype, enabled=enabled):
            loss, aux = self.forward_backward(pending, micro)
        micro.show(loss)
        return loss, aux

    @runs_user_code
    def forward(self, micro: Microbatch) -> tuple[Tensor, tuple[Any, ...]]:
        """Calls the loss function in the precision of the run: the loss, and what else it returned."""
        with self.precision.autocast():
            result = micro.loss_fn(self.state.model, micro.fresh_batch())
        loss, *aux = result if isinstance(result, tuple) else (result,)
        return loss, tuple(aux)

    def note_world(self, micro: Microbatch, step: int) -> None:
        """Before a forward pass that may have to be made again."""
        kind = self.state.device.type
        micro.rng = self.state.rng_reader.now(step)
        micro.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def look_back(self, micro: Microbatch) -> None:
        """After it: learns from which generators such passes draw."""
        if micro.rng is not None:
            self.state.rng_reader.compare(micro.rng)

    def begin_microbatch(self, pending: PendingStep) -> None:
        """Before the forward pass, or each part of it."""
        if self.microbatch_filter is not None and not pending.in_microbatch:
            self.microbatch_filter.buffers.note_()
        pending.in_microbatch = True

    def begin_own_forward(self, pending: PendingStep) -> None:
        """Before a forward pass in a loop of the user's own, who may have thrown away the one before it."""
        if self.is_capturing:
            return
        if pending.has_begun:
            self.last_forward.follow_()
        else:
            pending.has_begun = True
            self.last_forward.begin_(self.buffers)

    def backward(self, pending: PendingStep, loss: Tensor) -> Tensor:
        """Adds the gradients of one loss, or none of them where it is non-finite and such are dropped.

        Returns the loss, detached and 0-dim.
        """
        check_loss(loss)
        loss = loss if loss.ndim == 0 else loss.reshape(())
        seen = loss.detach()
        pending.losses.append(seen)
        self.last_forward.was_used([seen])
        pending.in_microbatch = False
        scaled = self.precision.scaled(loss if pending.divisor == 1 else loss / pending.divisor)
        if self.microbatch_filter is None:
            scaled.backward()  # type: ignore[no-untyped-call]
            return seen
        params = [p for group in self.skippable.groups() for p in group]
        self.microbatch_filter.set_aside(params)
        scaled.backward()  # type: ignore[no-untyped-call]
        # Scaled fp16 gradients may overflow by their scale alone: then the whole step backs off together.
        pending.flags.append(self.microbatch_filter.join(params, seen, judge_gradients=self.precision.scaler is None))
        return seen

    def gather(self, pending: PendingStep) -> list[Group]:
        """The gradients of a step, unscaled, and the mean over its micro-batches."""
        groups = self.param_groups.current(known_alike=pending.known_norms is not None)
        scaler, correction = self.precision.scaler, pending.correction()
        if scaler is not None or correction is not None:
            grads = [g for group in groups for g in group.grads]
            if scaler is not None and grads:
                scaler.unscale_(grads)
            if correction is not None and grads:
                scale_(grads, correction)
        return groups

    def read_quickly(self, pending: PendingStep) -> Reading | None:
        """The reading of a sound step on a CPU, in few calls; None if the step has to be measured.

        It has to be if something is non-finite, or may be, and if the vector of all values is wanted: to clip, by other
        ranks, by an observer.
        """
        observers, losses = self.journal.observers, pending.losses
        if not self.can_read_quickly or pending.flags or self.precision.scaler is not None:
            return None
        if observers.measuring and observers.wants_measurement:
            return None
        if pending.rerunnable and pending.correction() is not None:
            return None
        loss = (losses[0] if len(losses) == 1 else pending.mean_loss()).item()
        if not math.isfinite(loss) or (self.buffers.is_used and not self.buffers.are_sound()):
            return None
        norms = self.param_groups.quick_norms(pending.known_norms)
        if norms is None:
            return None
        return _sound_reading(pending, loss, norms)

    def measure(self, pending: PendingStep, groups: list[Group]) -> None:
        """Writes all that the step has to say onto the board."""
        self.measurement.fill_(
            loss=pending.mean_loss(),
            scale=None if self.precision.scaler is None else self.precision.scaler.scale,
            flags=pending.flags,
            buffers=self.buffers.peaks() if self.buffers.is_used else _NO_BUFFERS,
            groups=groups,
            known=None if self.clipper.needs_norms else pending.known_norms,  # we clip what is left of them
            sums_groups=self.clipper.needs_norms,
        )
        pending.layout = self.measurement.layout
        if self.journal.observers.measuring:
            self.journal.observers.on_measured(pending.step, self.measurement.filled)

    def read(self, pending: PendingStep, reply: MeasuredValues) -> Reading:
        """A measurement as the host got it, in words."""
        layout = reply.layout
        if not (layout.votes or layout.flags) and self.precision.scaler is None and reply.is_finite:
            return _sound_reading(pending, reply.loss, reply.norms)
        loss, votes = reply.loss, reply.votes
        reading = Reading(
            step=pending.step,
            epoch=pending.epoch,
            batch=pending.batch,
            loss=loss if pending.knows_loss else math.nan,
            mean_loss=self.ranks.mean_loss(votes) if votes else loss,
            norms=self._norms(pending, reply),
            lrs=pending.lrs,
            scale=None if self.precision.scaler is None else reply.scale,
            dropped_microbatches=reply.dropped,
            num_stepped_before=pending.num_stepped_before,
        )
        if reply.is_finite and (not votes or self.ranks.all_clear(votes)):
            return reading
        gradients, buffers = tuple(self.state.name_of(p) for p in reply.bad_params), reply.bad_buffers
        if self.ranks.is_mixed and not gradients:  # the other ranks apply this step, so skipping it would part us
            return reading
        seen: dict[Found, bool] = {
            "loss": not math.isfinite(loss),
            "gradients": bool(gradients),
            "buffers": bool(buffers),
        }
        return replace(
            reading,
            found=self.ranks.found(votes) if votes else tuple(name for name in seen if seen[name]),
            gradients=gradients,
            buffers=buffers,
            ranks=self.ranks.culprits(votes),
        )

    def _norms(self, pending: PendingStep, reply: MeasuredValues) -> tuple[float, ...]:
        """Of each group, in true size, before any clipping."""
        norms = reply.norms
        if self.precision.scaler is not None:
            norms = self.precision.scaler.in_true_size(norms, reply.scale)
        return _before_clipping(pending, norms)

    def judge(self, reading: Reading) -> Verdict:
        """What the reading says by itself."""
        return judge(reading, scale_floor=None if self.precision.scaler is None else self.precision.scaler.floor)

    def update_average(self) -> None:
        if self.state.ema is not None:
            self.state.ema.update_parameters(self.state.model)

    def look_again(self) -> None:
        """Takes in buffers and parameters that the model has got since."""
        self.buffers.watch_buffers(unwrapped(self.state.model))
        if self.microbatch_filter is not None:
            self.microbatch_filter.buffers.watch_buffers(unwrapped(self.state.model))
        self.last_forward.look_again()
        self.param_groups.look_again(self.state.model)
        self.state.look_again()
        self.modules = list(self.state.model.modules())

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return self.may_be_captured and _compat_modes.is_capturing()

    def leave_no_trace(self, error: BaseException) -> None:
        """What raises before the optimizers step, an interrupt too, leaves nothing; a halt sees to that itself."""
        if not (isinstance(error, NonFiniteError) or _compat.stops_device(error)):
            self.clear()

    def drop_unfinished(self) -> None:
        """Lets go of a step that was begun and will not be finished."""
        if self.pending is not None and self.pending.losses:
            passes = len(self.pending.losses)
            log.warning("step %d was left in the middle: its %d backward passes are dropped", self.pending.step, passes)
            self.clear()
        self.last_forward.mend_in_any_case_()
        self.end()

    def clear(self) -> None:
        """Leaves nothing of a step that was not finished, but what belongs to a program that has caught its error."""
        if self.skippable.are_programs:
            self.buffers.mend_()
        else:
            self.buffers.undo_()
        self.last_forward.forget()
        self.skippable.end_step()
        self.end()


def _sound_reading(pending: PendingStep, loss: float, norms: tuple[float, ...]) -> Reading:
    """Of a step in which all is finite."""
    if pending.before_clipping is not None:
        norms = _before_clipping(pending, norms)
    known = loss if pending.knows_loss else math.nan
    others = pending.num_stepped_before
    return healthy_reading(pending.step, pending.epoch, pending.batch, known, loss, norms, pending.lrs, others)


def _before_clipping(pending: PendingStep, norms: tuple[float, ...]) -> tuple[float, ...]:
    """As they were before the program clipped the gradients itself, if it has."""
    if pending.before_clipping is None:
        return norms
    divisors, pending.before_clipping = pending.before_clipping.read(), None
    if len(divisors) != len(norms):
        return norms
    return tuple(d if math.isinf(d) else norm * d for norm, d in zip(norms, divisors, strict=True))


def check_loss(loss: Any) -> None:
    """Raises ``ValueError`` for what has no backward pass."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss).__name__}"
        raise ValueError(f"the loss must be a tensor with one element, got {what}: return the loss, or (loss, aux)")
    if not loss.requires_grad:
        raise ValueError(
            "the loss does not depend on any trainable parameter (requires_grad is False): was it detached, made with "
            ".item(), or computed under torch.no_grad()?"
        )
