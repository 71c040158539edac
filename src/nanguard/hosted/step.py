"""Guards one optimizer whose ``step()`` the host calls: each call is measured, and let through or not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nanguard.diagnosis.graph_probe import GraphFinding
from nanguard.hosted.clipping import ProgramClipping, are_ordinary
from nanguard.hosted.handshake import are_all_guarded
from nanguard.hosted.iteration import Iteration
from nanguard.hosted.last_loss import end_in_the_middle
from nanguard.hosted.losses import mean_that_counts, undivided
from nanguard.hosted.names import names_in_sight
from nanguard.hosted.optimizers import ProgramCall, ProgramOptimizers, makes_finite_updates, num_steps_made
from nanguard.hosted.scale import ScaledSteps
from nanguard.hosted.settings import Settings
from nanguard.hosted.shared import Shared
from nanguard.hosted.shared_buffers import SharedBuffers
from nanguard.hosted.sound import sound_steps_of
from nanguard.hosted.trained_modules import TrainedModules
from nanguard.monitor.observer import Monitor
from nanguard.numerics.finite import nonfinite
from nanguard.policy.rungs import Halt
from nanguard.state.names import layers
from nanguard.state.optimizer_traits import traits_of
from nanguard.state.training_modes import TrainingModes
from nanguard.step.assembly import assemble, choose_snapshots, choose_sync
from nanguard.step.calls import Call
from nanguard.step.optimizers import is_still_fused
from nanguard.step.parts import StepParts
from nanguard.step.pending import PendingStep
from nanguard.step.ranks import Ranks
from nanguard.step.tape_recorder import TapeRecorder
from nanguard.wiring import make_engine, make_journal

_LAST_ADVICE = "none known; nanguard run --trace follows every step as it runs, and may show it if it happens again"
_ADVICE = "none yet: some of the next steps are traced, to find it if it happens again; --trace does so from step 0 on"


class HostedStep(ScaledSteps):
    """``trained`` contains all that the optimizer trains; ``roots`` are the modules that the program calls.

    ``shares`` says that there are other optimizers, and ``shared`` is what all of them have in common.
    ``schedulers`` are those that the host advances: a rollback puts them back too. ``can_trace`` says whether the host
    can run a step under a trace; such a host leaves steps alone that are captured in a CUDA graph. With
    ``was_skipped``, a host that need not wait counts each step as applied, and ``was_skipped`` is called for one that
    was not, before the next one is applied.

    ``StepCoordinator`` calls ``before_forward``, ``after_forward``, ``measure`` and ``step`` for the host.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        trained: nn.Module,
        roots: Sequence[nn.Module],
        settings: Settings,
        *,
        name: str,
        shares: bool,
        shared: Shared,
        schedulers: Sequence[LRScheduler] = (),
        can_trace: bool = True,
        was_skipped: Callable[[], None] | None = None,
    ) -> None:
        self.optimizer, self.roots, self.name, self._settings = optimizer, roots, name, settings
        self.root_identities = frozenset(map(id, roots))
        device = optimizer.param_groups[0]["params"][0].device
        ddp = [each for root in roots for each in layers(root) if isinstance(each, DistributedDataParallel)]
        group = ddp[0].process_group if ddp else None
        is_mixed = bool(ddp) and not are_all_guarded(group)
        if is_mixed:
            self._settings = settings = settings.for_one_rank_alone()
        ranks = Ranks(trained, device, group, alone=not ddp, averaged=True, is_mixed=is_mixed)
        self.skippable = ProgramOptimizers(optimizer)
        observers = (*settings.observers, Monitor()) if settings.monitor else settings.observers
        self.parts: StepParts = assemble(
            trained,
            optimizer,
            scheduler=schedulers,
            schedule_per="epoch",  # the host advances them
            precision="fp32",
            max_norm=settings.max_norm,
            clip="group",
            policy=settings.policy,
            accumulate=1,
            drop_bad_microbatches=False,
            ema=None,
            loss_scale=None,
            process_group=group,
            skippable=self.skippable,
            ranks=ranks,
            make_journal=lambda is_first: make_journal(
                settings.run_dir, is_first=is_first, optimizer=name, observers=observers, repeats=shared.repeats
            ),
        )
        self.parts.fp32_fix, self.parts.may_be_captured = settings.fp32_fix, not can_trace
        settings.keep_in_fp32(self.parts.islands, logging.INFO if shares else logging.WARNING)
        self.parts.journal.share_numbers(shared.numbers)
        would_wait = was_skipped is not None and ranks.size > 1  # a rank that asks alone gets no answer
        is_asked = shares or traits_of(optimizer).needs_closure or would_wait
        self.sync = "eager" if is_asked else choose_sync(settings.sync, self.parts)
        self.engine, self.recovery = make_engine(
            self.parts,
            sync=self.sync,
            accumulate=1,
            snapshots=choose_snapshots("auto", settings.policy),
            diagnose=settings.diagnose,
            capture=settings.capture,
            run_dir=settings.run_dir,
            snapshot_dir=None,
            was_skipped=was_skipped,
            host_advances=bool(schedulers),
        )
        self.examinations = self.recovery.examinations
        self.examinations.advice = _ADVICE
        self.examinations.last_advice = _LAST_ADVICE if can_trace and not settings.trace else "none known"
        goes_on = any(not isinstance(rung, Halt) for rung in settings.policy.ladder)
        is_allowed = can_trace and (settings.trace or goes_on)
        self.examinations.live.configure(search=shared.search, is_always=settings.trace, is_allowed=is_allowed)
        if not makes_finite_updates(optimizer):
            self.parts.update_checks.turn_on_for_good()
        self._hears_late = was_skipped is not None
        self.was_applied = True
        """Whether the last call had an effect, as far as the host knows. With ``sync="late"`` it may learn later."""
        self.stepped_together: frozenset[int] | None = None
        """Identities of the hosted steps of the last iteration that this one was in; None if there was none yet."""
        self.thread: int | None = None  # that makes these steps, once it is known
        self.count_from(num_steps_made(optimizer))
        self.clipping = ProgramClipping(optimizer, device)
        self._num_params = sum(len(group) for group in self.skippable.groups())
        self.itself = frozenset({id(self)})
        self._may_be_sound = can_trace and not schedulers  # else the host does more between two steps
        self.sound = sound_steps_of(self, is_allowed=self._may_be_sound)
        self.has_called = False  # a module was called since the last step
        self._are_training: list[bool] = []  # the outermost modules, at their last call

    def count_from(self, step: int) -> None:
        """The next step has this number."""
        self.parts.first_step = self.parts.num_steps = step

    def settle(self) -> None:
        """Processes what the host has not heard of yet. Syncs if there is something."""
        self.engine.settle()
        self._pending()

    def resumed(self) -> None:
        """The host has loaded a checkpoint. Snapshots and readings of steps before are dropped."""
        self.engine.settle()
        self.parts.last_forward.forget()
        self.recovery.forget()
        self.engine.mode.drop_in_flight()
        self.count_from(num_steps_made(self.optimizer))
        self.open()

    def open(self, *, notes_later: bool = False) -> None:
        """Begins a step and notes what it may change. ``notes_later``: a module is called before it changes."""
        self.has_called = False
        self.sound.end()
        self.engine.open(rerunnable=False, divisor=1, notes_later=notes_later)

    def _pending(self, *, in_backward: bool = False) -> PendingStep:
        """The open step; a new one if an exception has ended the last one early, or one of the same backward pass."""
        pending = self.parts.pending
        if pending is None:
            is_noted = self.sound.end()
            pending = self.engine.open(rerunnable=False, divisor=1, in_backward=in_backward, are_buffers_noted=is_noted)
        return pending

    @property
    def is_rerunning(self) -> bool:
        """Whether a bad step is being run again, to examine it: calls of modules are not the host's."""
        return self.parts.pending is not None and self.parts.pending.rerunnable

    def share_buffers_of(self, other: HostedStep) -> None:
        """If another optimizer trains the same module, it is enough that one of them notes the buffers."""
        self.parts.buffers = SharedBuffers(other.parts.buffers, self.parts.state.device)

    def before_forward(self, *, is_first: bool) -> None:
        """A module is about to be called with gradients on; ``is_first`` says for the first time in this iteration.

        What was noted when the step was opened may have changed since: the program, or other optimizers, went on.
        """
        parts = self.parts
        pending = parts.pending or self._pending()
        pending.measured = pending.on_device = None  # the gradients change again
        if self.clipping.is_noted:
            self.clipping.forget()
        has_called, self.has_called = self.has_called, True
        were_training, self._are_training = self._are_training, [root.training for root in self.roots]
        has_buffers = parts.buffers.is_used
        if not is_first:
            if has_buffers:
                parts.last_forward.follow_()
            if self._are_training != were_training and not any(were_training):  # the first call was an evaluation
                pending.training = TrainingModes(parts.modules)
            return
        if parts.last_forward.is_on:
            parts.last_forward.mend_in_any_case_()
        self.engine.between_steps()
        is_noted = has_buffers and not has_called and parts.buffers.is_up_to_date()
        self.engine.mode.note(pending, are_buffers_noted=is_noted)
        if has_buffers:
            parts.last_forward.begin_(parts.buffers)

    def look_for_discarded(self, calls: list[Call], this: Iteration) -> None:
        """Examines those with NaN results that the program has thrown away, and removes them."""
        self.engine.look_for_discarded(replace(self._pending(), tape=this.tape, fetched=list(this.fetched)), calls)

    def end(self, this: Iteration, error: BaseException | None, taper: TapeRecorder, before: Sequence[Tensor]) -> None:
        """The host ends in the middle of this step, maybe because of ``error``. ``before``: older losses. Syncs."""
        pending = self._pending()  # first: to settle ends it, and its buffers are noted
        self.engine.settle()
        self.forbid_tracing()
        end_in_the_middle(pending, this, self.engine.discarded, error, taper, before)

    def end_outside(self, finding: GraphFinding, error: BaseException) -> None:
        """The host ends outside a step, because of ``error``, and of what ``finding`` describes. Syncs."""
        self.engine.settle()
        self.forbid_tracing()
        self.engine.discarded.end_outside(self._pending(), finding, error)

    def before_evaluation(self) -> None:
        """A module is about to be called with gradients off: a forward pass without a backward pass was discarded."""
        parts, self.has_called = self.parts, True
        parts.last_forward.mend_()  # statistics are written in training mode, as if eval() was forgotten
        if any(root.training for root in self.roots) and parts.buffers.has_statistics:
            parts.last_forward.follow_()

    def after_forward(self, losses: Sequence[Tensor]) -> None:
        """The host is about to call ``backward()`` on these."""
        if self.clipping.is_noted:
            self.clipping.forget()
        if self.parts.last_forward.is_on:
            self.parts.last_forward.was_used(losses)

    def measure(self, this: Iteration) -> None:
        """Measures the step now, before the host clips. ``step`` then decides by these values. One sync if any."""
        pending = self._pending()
        self._fill(pending, this)
        self.follow_scaler()
        self.engine.measure(pending)

    def has_bad_gradients(self) -> bool:
        """Syncs."""
        return bool(nonfinite(self.skippable.gradients(), self.parts.state.device))

    def has_grown(self) -> bool:
        """Whether the program has added parameters."""
        return sum([len(group["params"]) for group in self.optimizer.param_groups]) != self._num_params

    def take_over(self, other: HostedStep) -> None:
        """Continues the counts and the journal of one that knew fewer parameters."""
        self.parts.num_steps, self.parts.journal = other.parts.num_steps, other.parts.journal
        self.num_calls, self.grad_scaler = other.num_calls, other.grad_scaler
        self.runs_closure_first = other.runs_closure_first
        self.parts.precision.use_scaler(other.parts.precision.scaler)
        self.examinations.live.take_over(other.examinations.live)

    def look_again(self) -> None:
        """Takes in tensors that the program trains now instead of earlier ones."""
        trained, params = self.parts.state.model, [p for group in self.skippable.groups() for p in group]
        if isinstance(trained, TrainedModules) and {id(p) for p in trained.parameters()} != {id(p) for p in params}:
            trained.take(params, names_in_sight(params))
            self.parts.look_again()

    def ask_the_host(self, *, is_noted: bool = False) -> None:
        """From now on the host decides before each step. ``is_noted``: the step that is open has noted its buffers.

        Other optimizers may step in between, or the device cannot skip a step any more.
        """
        if self.sync == "late":
            self.sync = "eager"
            self.engine.ask_the_host()
            self.sound = sound_steps_of(self, is_allowed=self._may_be_sound)
            self.open(notes_later=is_noted)

    def forbid_tracing(self) -> None:
        """No step is traced as it runs from now on."""
        self.examinations.live.forbid()
        self.examinations.last_advice = "none known"

    def step(self, call: ProgramCall, this: Iteration, *, in_backward: bool = False) -> Any:
        """A call of ``step()``. Returns what it returned.

        One sync, or none if the optimizer is fused and the only one, on a GPU. ``in_backward``: while a backward pass
        is under way. ``after_backward`` is called when it has ended.
        """
        self.num_calls += 1
        if self.sync == "late" and not is_still_fused(self.optimizer):
            self.ask_the_host(is_noted=True)
        parts, skippable, is_eager = self.parts, self.skippable, self.sync == "eager"
        pending = parts.pending or self._pending(in_backward=in_backward)
        pending.is_in_backward = in_backward
        if pending.measured is None and pending.on_device is None:
            self._fill(pending, this)
        if parts.precision.scaler is not None:
            self.follow_scaler()
        before = parts.journal.last
        skippable.take(call)
        if in_backward or self._hears_late:  # an earlier step may be answered first
            skippable.hold_gradients()
        try:
            self.engine.finish(pending)
            if in_backward:
                self.keep(pending, skippable.held)
        finally:
            skippable.give_back()
        if is_eager:
            last = parts.journal.last
            self.was_applied = last is not None and last is not before and last.applied
            this.refused = this.refused or pending.is_put_off or (not self.was_applied and self.was_refused())
            if not pending.is_put_off:
                pending.let_go()
        else:
            self.was_applied = call.is_called
        if not in_backward:
            if self.was_applied:
                self.engine.mode.before()  # as ``open`` does: an earlier step may have to be answered
                self.sound.look(is_noted=self in this.noted)
            if self.sound.is_on:  # the next step is opened once something unusual happens
                self.has_called = False
            else:
                self.open(notes_later=self.has_called and not parts.buffers.is_used)
        return call.result

    def was_sound(self, measured: Any, this: Iteration) -> None:
        """The program has made a step that ``sound`` has measured."""
        self.num_calls += 1
        self.was_applied, self.has_called = True, False
        this.stepped.append(self)
        self.sound.made(measured)
        if not self.sound.is_on:
            self.open(notes_later=not self.parts.buffers.is_used)

    def put_back(self) -> None:
        """Puts buffers back to what they were before a step that was refused, or another one of the same iteration."""
        self.parts.buffers.undo_()
        self.parts.last_forward.forget()

    def unsound(self) -> tuple[str, ...]:
        """Names of what is not finite now. Syncs."""
        self.parts.last_forward.mend_in_any_case_()
        return self.parts.state.unsound()

    def close(self) -> None:
        """Processes what is under way and ends the run log."""
        self.engine.settle()
        self.engine.close()
        self.parts.journal.close(steps=self.parts.num_steps)

    def _fill(self, pending: PendingStep, this: Iteration) -> None:
        losses = list(this.losses)
        if len(losses) > 1:
            losses = undivided(self._losses_that_count(this), this.divisors, len(this.losses))
        if self.clipping.is_noted:
            pending.known_norms, pending.before_clipping = self.clipping.take(may_know=self._has_ordinary_norms())
        else:
            pending.known_norms = pending.before_clipping = None
        pending.knows_loss = bool(losses)
        pending.losses = losses or [torch.zeros((), dtype=torch.float32, device=self.parts.state.device)]
        pending.num_stepped_before = 0 if this.in_backward is None else this.in_backward.num_applied
        pending.evidence = this

    def _has_ordinary_norms(self) -> bool:
        last = self.parts.journal.last
        return self.parts.precision.scaler is None and last is not None and are_ordinary(last.verdict.reading.norms)

    def _losses_that_count(self, this: Iteration) -> list[Tensor]:
        """Without bad ones whose gradients the program has discarded itself before it went on with another batch."""
        losses = list(this.losses)
        if this.most_cleared == 0:
            return losses
        if self.sync == "late":
            return [mean_that_counts(losses, self.skippable.gradients(), self.parts.state.device, this.most_cleared)]
        flags = torch.isfinite(torch.stack([loss.double().to(self.parts.state.device) for loss in losses])).tolist()
        good = [loss for loss, is_finite in zip(losses, flags, strict=True) if is_finite]
        if len(good) in (0, len(losses)) or not all(flags[this.most_cleared :]) or self.has_bad_gradients():
            return losses
        self.engine.discarded.left_out(self._pending(), this.calls, losses, is_part=len(good) > 1)
        return good

    def was_refused(self) -> bool:
        """Whether the last step was bad, and so not let through, as far as the host knows."""
        last = self.parts.journal.last
        return self.sync == "eager" and last is not None and not last.applied and last.action.response != "back_off"
