"""Guards one optimizer of the program: each call of its ``step()`` is measured, and let through or not."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nanguard import _compat
from nanguard.diagnosis.live import FOREVER
from nanguard.diagnosis.search import Search
from nanguard.hosted.handshake import are_all_guarded
from nanguard.hosted.names import names_in_sight
from nanguard.hosted.optimizers import ProgramOptimizers, Step
from nanguard.hosted.scale import ProgramScaler
from nanguard.hosted.settings import Settings
from nanguard.hosted.trained_modules import TrainedModules
from nanguard.numerics.clip import scale_
from nanguard.numerics.finite import nonfinite
from nanguard.policy.rungs import Halt
from nanguard.records.steps import Action, Found, Outcome, Reading, Verdict
from nanguard.state.optimizer_traits import traits_of
from nanguard.state.training_state import CapturedUpdate
from nanguard.state.undo import Undo
from nanguard.step.assembly import assemble, choose_snapshots, choose_sync
from nanguard.step.calls import Call
from nanguard.step.parts import StepParts
from nanguard.step.pending import PendingStep
from nanguard.step.ranks import Ranks
from nanguard.wiring import make_engine, make_journal

log = logging.getLogger("nanguard")

_LARGEST_COPY = 256 << 20
"""In bytes."""

_ADVICE = "none yet: some of the next steps are traced, to find it if it comes again; --trace does so from the first on"


@dataclass(slots=True)
class Iteration:
    """What happened since an optimizer last stepped; those that step now, without another backward pass, share it.

    ``live`` says how it ran, where it was traced; ``refused`` that a step of it was not let through;
    ``remains`` is what the graph of a bad loss still knew.
    """

    losses: list[Tensor] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    stepped: list[HostedStep] = field(default_factory=list)
    noted: list[HostedStep] = field(default_factory=list)
    refused: bool = False
    live: Any = None
    graph_finding: Any = None


def _is_trusted(optimizer: Optimizer) -> bool:
    """Whether finite gradients make a finite update: so do torch's own optimizers, unless they divide by zero.

    Of all others each update is looked at, which takes a copy of what they train; not of more than a moderate model.
    """
    size = sum(p.numel() * p.element_size() for group in optimizer.param_groups for p in group["params"])
    traits = traits_of(optimizer)
    divides_by_zero = any(_is_zero(group.get(traits.eps or "")) for group in optimizer.param_groups)
    return size > _LARGEST_COPY or (traits.update_is_finite and not divides_by_zero)


def _is_zero(eps: Any) -> bool:
    """Of a number, or a tensor with one; an optimizer of the program's may keep anything under this name."""
    if isinstance(eps, Tensor):
        return eps.numel() == 1 and float(eps) == 0.0
    return isinstance(eps, Real) and eps == 0


class _Borrowed(Undo):
    """What another pilot has noted, to be put back."""

    def __init__(self, owner: Undo, device: torch.device) -> None:
        super().__init__(device)
        self._owner = owner

    def undo_(self) -> None:
        self._owner.undo_()


class HostedStep:
    """``crew`` holds all that the optimizer trains; ``roots`` are the modules that the program calls."""

    def __init__(
        self,
        optimizer: Optimizer,
        trained: nn.Module,
        roots: Sequence[nn.Module],
        settings: Settings,
        *,
        name: str,
        shares: bool,
        search: Search,
    ) -> None:
        self.optimizer, self.roots, self.name, self._settings = optimizer, roots, name, settings
        device = optimizer.param_groups[0]["params"][0].device
        ddp = [root for root in roots if isinstance(root, DistributedDataParallel)]
        group = ddp[0].process_group if ddp else None
        is_mixed = bool(ddp) and not are_all_guarded(group)
        if is_mixed:
            self._settings = settings = settings.for_one_rank_alone()
        ranks = Ranks(trained, device, group, alone=not ddp, averaged=True, is_mixed=is_mixed)
        self.skippable = ProgramOptimizers(optimizer)
        self.parts: StepParts = assemble(
            trained,
            optimizer,
            scheduler=None,
            schedule_per="step",
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
            make_journal=lambda is_first: make_journal(settings.run_dir, is_first=is_first, optimizer=name),
        )
        asks = shares or traits_of(optimizer).needs_closure
        self.sync = "eager" if asks else choose_sync(settings.sync, self.parts)
        self.engine, self.recovery = make_engine(
            self.parts,
            sync=self.sync,
            accumulate=1,
            snapshots=choose_snapshots("auto", settings.policy, device),
            diagnose=settings.diagnose,
            capture=settings.capture,
            run_dir=settings.run_dir,
            snapshot_dir=None,
        )
        self.examinations = self.recovery.examinations
        self.examinations.advice = _ADVICE
        goes_on = any(not isinstance(rung, Halt) for rung in settings.policy.ladder)
        live = self.examinations.live
        live.search, live.is_always, live.is_allowed = search, settings.trace, settings.trace or goes_on
        if not _is_trusted(optimizer):
            self.parts.careful_until = FOREVER
        self.num_calls = 0
        self.is_blind = False
        self.stepped_together: frozenset[int] | None = None
        """Identities of the pilots that stepped in the same round, when that was last seen."""
        self._num_params = sum(len(group) for group in self.skippable.groups())
        self.grad_scaler: Any = None

    def open(self) -> None:
        """A step begins; what it may change is noted."""
        self.engine.open(rerunnable=False, divisor=1)

    def leave_buffers_to(self, other: HostedStep) -> None:
        """Where another optimizer trains the same module, one of them is enough to note them."""
        self.parts.buffers = _Borrowed(other.parts.buffers, self.parts.state.device)

    def note_again(self) -> None:
        """What was noted before is no longer what this step begins with: the program, or others, went on."""
        if self.parts.pending is not None:
            self.parts.last_forward.mend_in_any_case_()
            self.engine.mode.note(self.parts.pending)
            self.parts.last_forward.begin_(self.parts.buffers)

    def has_bad_gradients(self) -> bool:
        """Waits for the device."""
        grads = [p.grad for group in self.skippable.groups() for p in group if p.grad is not None]
        return bool(nonfinite(grads, self.parts.state.device))

    @property
    def has_grown(self) -> bool:
        """Whether the program has added parameters since."""
        return sum(len(group) for group in self.skippable.groups()) != self._num_params

    def take_over(self, other: HostedStep) -> None:
        """From one that knew fewer parameters."""
        self.parts.num_steps, self.parts.journal = other.parts.num_steps, other.parts.journal
        self.num_calls, self.grad_scaler = other.num_calls, other.grad_scaler
        self.parts.precision.use_scaler(other.parts.precision.scaler)
        self.examinations.live.take_over(other.examinations.live)

    def look_again(self) -> None:
        """The program may have put other tensors in the place of those that it trains."""
        trained, params = self.parts.state.model, [p for group in self.skippable.groups() for p in group]
        if isinstance(trained, TrainedModules) and {id(p) for p in trained.parameters()} != {id(p) for p in params}:
            trained.take(params, names_in_sight(params))
            self.parts.look_again()

    def use_scaler(self, scaler: Any) -> None:
        """The program's GradScaler steps this optimizer: it may find an overflow, which is routine."""
        self.grad_scaler = scaler
        if self.parts.precision.scaler is None:
            self.ask_the_host()
            self.parts.precision.use_scaler(ProgramScaler(self.parts.state.device))

    def ask_the_host(self) -> None:
        """From now on before each step: what other optimizers do must not come in between."""
        if self.sync == "late":
            self.sync = "eager"
            self.engine.ask_the_host()
            self.open()

    def step(self, call: Step | None, this: Iteration) -> Any:
        """A call of ``step()``, None where the program's GradScaler has left it out; gives back what the program gets.

        Syncs as the guard does: not at all where the optimizer is fused and alone on a GPU.
        """
        self.num_calls += 1
        if self.parts.pending is None:
            self.open()
        pending = self.parts.pending
        assert pending is not None
        self._fill(pending, this)
        self._follow()
        self.skippable.take(call)
        try:
            self.engine.finish(pending)
        finally:
            self.skippable.give_back()
        if self.sync == "eager":
            pending.calls, pending.last_seen = [], None  # it is over, and they hold a batch
        this.refused = this.refused or self._was_refused()
        self.open()
        return self.skippable.result

    def before_blind_step(self) -> CapturedUpdate:
        """Of an optimizer that computes gradients inside ``step()``, so that nothing can be known before."""
        if not self.is_blind:
            self.is_blind = True
            log.warning(
                "%s computes or changes gradients inside step(), so its steps cannot be checked before: each is looked "
                "at afterwards, and taken back where it made something non-finite",
                type(self.optimizer).__name__,
            )
        self.num_calls += 1
        if self.parts.pending is None:
            self.open()
        return self.parts.state.capture_update()

    def after_blind_step(self, before: CapturedUpdate, this: Iteration) -> None:
        """Takes the step back where it has made something non-finite."""
        parts, pending = self.parts, self.parts.pending
        assert pending is not None
        parts.pending = None
        parts.num_steps += 1
        try:
            self._fill(pending, this)
            reading = self._read_blind_step(pending, this, is_spoiled=before.is_spoiled())
            if reading.found:
                before.put_back()
                self.put_back()
        except (KeyboardInterrupt, SystemExit):  # it is not known whether the step was good, or half of it is put back
            before.put_back()
            self.put_back()
            raise
        if reading.found:
            with self.recovery.letting_interrupts_out():
                parts.journal.record(self.recovery.answer(pending, reading))
        else:
            parts.last_forward.mend_()
            verdict = Verdict(kind="healthy", reading=reading)
            parts.journal.record(Outcome(verdict=verdict, action=Action(response="apply"), applied=True))
        self.open()

    def _read_blind_step(self, pending: PendingStep, this: Iteration, *, is_spoiled: bool) -> Reading:
        losses = [float(loss) for loss in this.losses]
        loss = next((each for each in losses if not math.isfinite(each)), losses[0] if losses else math.nan)
        found: tuple[Found, ...] = ()
        if is_spoiled:
            found = ("loss" if not math.isfinite(loss) else "gradients" if self.has_bad_gradients() else "update",)
        rates = self.parts.state.schedule.known_rates
        return Reading(step=pending.step, epoch=0, batch=None, loss=loss, mean_loss=loss, lrs=rates, found=found)

    def sit_out(self, this: Iteration) -> None:
        """Another optimizer of the same round has been refused: all of them step, or none does."""
        self.num_calls += 1
        pending, parts = self.parts.pending, self.parts
        self.put_back()
        loss = float(this.losses[-1]) if this.losses else math.nan
        step = parts.num_steps if pending is None else pending.step
        parts.num_steps += 1
        parts.journal.sit_out(Reading(step=step, epoch=0, batch=None, loss=loss, lrs=parts.state.schedule.known_rates))
        self.open()

    def put_back(self) -> None:
        """Buffers as they were before a step that was refused, or another optimizer's in the same round."""
        self.parts.buffers.undo_()
        self.parts.last_forward.forget()

    def close(self) -> None:
        self.engine.settle()
        if self.engine.ring is not None:
            self.engine.ring.close()
        self.parts.journal.close(steps=self.parts.num_steps)

    def _fill(self, pending: PendingStep, this: Iteration) -> None:
        losses = self._losses_that_count(this)
        pending.knows_loss = bool(losses)
        pending.losses = losses or [torch.zeros((), dtype=torch.float32, device=self.parts.state.device)]
        pending.calls = [call for call in this.calls if call.misses_gradients or call.has_gradients]
        pending.last_seen = [(call.args, dict(call.kwargs)) for call in this.calls]
        pending.live, pending.graph_finding = this.live, this.graph_finding

    def _losses_that_count(self, this: Iteration) -> list[Tensor]:
        """Not a bad one whose gradients the program has thrown away itself, and gone on with another batch."""
        losses = list(this.losses)
        if len(losses) < 2:
            return losses
        if self.sync == "late":
            return [self._mean_that_counts(losses)]
        flags = torch.isfinite(torch.stack([loss.double().to(self.parts.state.device) for loss in losses])).tolist()
        good = [loss for loss, is_finite in zip(losses, flags, strict=True) if is_finite]
        return losses if len(good) in (0, len(losses)) or self.has_bad_gradients() else good

    def _mean_that_counts(self, losses: list[Tensor]) -> Tensor:
        """The same without waiting for the device."""
        values = torch.stack([loss.double().to(self.parts.state.device) for loss in losses])
        is_good = torch.isfinite(values)
        grads = [p.grad for group in self.skippable.groups() for p in group if p.grad is not None]
        all_count = (nonfinite(grads, self.parts.state.device) != 0) | ~is_good.any()
        good = torch.where(is_good, values, 0.0).sum() / is_good.sum()
        return torch.where(all_count, values.mean(), good)

    def _follow(self) -> None:
        """What the program's GradScaler has done to the gradients."""
        ours = self.parts.precision.scaler
        if not isinstance(ours, ProgramScaler):
            return
        grad_scale = getattr(self.optimizer, "grad_scale", None)
        if grad_scale is not None and self._settings.max_norm is not None:  # clipping needs them in their true size
            grads = [p.grad for group in self.skippable.groups() for p in group if p.grad is not None]
            scale_(grads, grad_scale.double().reciprocal().float())
            self.optimizer.grad_scale = grad_scale = None  # type: ignore[attr-defined]
        ours.follow(_compat.scale_of(self.grad_scaler), are_scaled=grad_scale is not None)

    def _was_refused(self) -> bool:
        last = self.parts.journal.last
        return self.sync == "eager" and last is not None and not last.applied and last.action.response != "back_off"
