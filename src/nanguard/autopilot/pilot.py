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
from nanguard.agree import Ranks
from nanguard.assembly import assemble, choose_bundles, choose_snapshots, choose_sync
from nanguard.autopilot.crew import Crew
from nanguard.autopilot.handshake import are_all_guarded
from nanguard.autopilot.names import names_in_sight
from nanguard.autopilot.scale import ProgramScaler
from nanguard.autopilot.settings import Settings
from nanguard.autopilot.shield import HandedShield, Step
from nanguard.backup import Backup
from nanguard.bench import Bench
from nanguard.capture import Call
from nanguard.diagnosis.live import FOREVER
from nanguard.diagnosis.search import Search
from nanguard.journal import Journal
from nanguard.ladder import Halt
from nanguard.numerics.clip import scale_
from nanguard.numerics.finite import nonfinite
from nanguard.records import Action, Found, Outcome, Reading, Verdict
from nanguard.shield import is_torchs, needs_closure
from nanguard.steps import Steps
from nanguard.undo import Undo
from nanguard.window import Window

log = logging.getLogger("nanguard")

_LARGEST_COPY = 256 << 20
"""In bytes."""

_ADVICE = "none yet: some of the next steps are traced, to find it if it comes again; --trace does so from the first on"


@dataclass(slots=True)
class Round:
    """What happened since an optimizer last stepped; those that step now, without another backward pass, share it.

    ``live`` says how it ran, where it was traced; ``refused`` that a step of it was not let through;
    ``remains`` is what the graph of a bad loss still knew.
    """

    losses: list[Tensor] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    stepped: list[Pilot] = field(default_factory=list)
    noted: list[Pilot] = field(default_factory=list)
    refused: bool = False
    live: Any = None
    remains: Any = None


def _is_trusted(optimizer: Optimizer) -> bool:
    """Whether finite gradients make a finite update: so do torch's own optimizers, unless they divide by zero.

    Of all others each update is looked at, which takes a copy of what they train; not of more than a moderate model.
    """
    size = sum(p.numel() * p.element_size() for group in optimizer.param_groups for p in group["params"])
    divides_by_zero = any(_is_zero(group.get("eps")) for group in optimizer.param_groups)
    return size > _LARGEST_COPY or (is_torchs(optimizer) and not divides_by_zero)


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


class Pilot:
    """``crew`` holds all that the optimizer trains; ``roots`` are the modules that the program calls."""

    def __init__(
        self,
        optimizer: Optimizer,
        crew: nn.Module,
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
        ranks = Ranks(crew, device, group, alone=not ddp, averaged=True, is_mixed=is_mixed)
        is_first = ranks.rank == 0
        self.shield = HandedShield(optimizer)
        self.bench: Bench = assemble(
            crew,
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
            run_dir=None,
            process_group=group,
            shield=self.shield,
            ranks=ranks,
            journal=Journal(settings.run_dir if is_first else None, speaks=is_first, optimizer=name),
        )
        asks = shares or needs_closure(optimizer)
        self.sync = "eager" if asks else choose_sync(settings.sync, self.bench)
        self.steps = Steps(
            self.bench,
            sync=self.sync,
            accumulate=1,
            snapshots=choose_snapshots("auto", settings.policy, device),
            diagnose=settings.diagnose,
            bundles=choose_bundles(settings.capture, settings.run_dir, self.bench),
            run_dir=None,  # only snapshots on disk would need it
        )
        self.clinic = self.steps.climber.clinic
        self.clinic.advice = _ADVICE
        goes_on = any(not isinstance(rung, Halt) for rung in settings.policy.ladder)
        live = self.clinic.live
        live.search, live.is_always, live.is_allowed = search, settings.trace, settings.trace or goes_on
        if not _is_trusted(optimizer):
            self.bench.careful_until = FOREVER
        self.num_calls = 0
        self.is_blind = False
        self.companions: frozenset[int] | None = None
        """Identities of the pilots that stepped in the same round, when that was last seen."""
        self._num_params = sum(len(group) for group in self.shield.groups())
        self.grad_scaler: Any = None

    def open(self) -> None:
        """A step begins; what it may change is noted."""
        self.steps.open(rerunnable=False, divisor=1)

    def leave_buffers_to(self, other: Pilot) -> None:
        """Where another optimizer trains the same module, one of them is enough to note them."""
        self.bench.buffers = _Borrowed(other.bench.buffers, self.bench.device)

    def note_again(self) -> None:
        """What was noted before is no longer what this step begins with: the program, or others, went on."""
        if self.bench.window is not None:
            self.bench.last_forward.mend_in_any_case_()
            self.steps.mode.note(self.bench.window)
            self.bench.last_forward.begin_(self.bench.buffers)

    def has_bad_gradients(self) -> bool:
        """Waits for the device."""
        grads = [p.grad for group in self.shield.groups() for p in group if p.grad is not None]
        return bool(nonfinite(grads, self.bench.device))

    @property
    def has_grown(self) -> bool:
        """Whether the program has added parameters since."""
        return sum(len(group) for group in self.shield.groups()) != self._num_params

    def take_over(self, other: Pilot) -> None:
        """From one that knew fewer parameters."""
        self.bench.num_steps, self.bench.journal = other.bench.num_steps, other.bench.journal
        self.num_calls, self.grad_scaler, self.bench.scaler = other.num_calls, other.grad_scaler, other.bench.scaler
        self.clinic.live.take_over(other.clinic.live)

    def look_again(self) -> None:
        """The program may have put other tensors in the place of those that it trains."""
        crew, params = self.bench.model, [p for group in self.shield.groups() for p in group]
        if isinstance(crew, Crew) and {id(p) for p in crew.parameters()} != {id(p) for p in params}:
            crew.take(params, names_in_sight(params))
            self.bench.look_again()

    def use_scaler(self, scaler: Any) -> None:
        """The program's GradScaler steps this optimizer: it may find an overflow, which is routine."""
        self.grad_scaler = scaler
        if self.bench.scaler is None:
            self.ask_the_host()
            self.bench.scaler = ProgramScaler(self.bench.device)

    def ask_the_host(self) -> None:
        """From now on before each step: what other optimizers do must not come in between."""
        if self.sync == "late":
            self.sync = "eager"
            self.steps.ask_the_host()
            self.open()

    def step(self, call: Step | None, this: Round) -> Any:
        """A call of ``step()``, None where the program's GradScaler has left it out; gives back what the program gets.

        Syncs as the guard does: not at all where the optimizer is fused and alone on a GPU.
        """
        self.num_calls += 1
        if self.bench.window is None:
            self.open()
        window = self.bench.window
        assert window is not None
        self._fill(window, this)
        self._follow()
        self.shield.take(call)
        try:
            self.steps.finish(window)
        finally:
            self.shield.give_back()
        if self.sync == "eager":
            window.calls, window.last_seen = [], None  # it is over, and they hold a batch
        this.refused = this.refused or self._was_refused()
        self.open()
        return self.shield.result

    def before_blind_step(self) -> Backup:
        """Of an optimizer that computes gradients inside ``step()``, so that nothing can be known before."""
        if not self.is_blind:
            self.is_blind = True
            log.warning(
                "%s computes or changes gradients inside step(), so its steps cannot be checked before: each is looked "
                "at afterwards, and taken back where it made something non-finite",
                type(self.optimizer).__name__,
            )
        self.num_calls += 1
        if self.bench.window is None:
            self.open()
        return Backup([self.optimizer])

    def after_blind_step(self, backup: Backup, this: Round) -> None:
        """Takes the step back where it has made something non-finite."""
        bench, window = self.bench, self.bench.window
        assert window is not None
        bench.window = None
        bench.num_steps += 1
        try:
            self._fill(window, this)
            reading = self._read_blind_step(window, this, is_spoiled=backup.is_spoiled())
            if reading.found:
                backup.put_back()
                self.put_back()
        except (KeyboardInterrupt, SystemExit):  # it is not known whether the step was good, or half of it is put back
            backup.put_back()
            self.put_back()
            raise
        if reading.found:
            with self.steps.climber.casebook.letting_interrupts_out():
                answer = self.steps.climber.answer(window, reading)
                bench.journal.record(answer.outcome(applied=False))
        else:
            bench.last_forward.mend_()
            verdict = Verdict(kind="healthy", reading=reading)
            bench.journal.record(Outcome(verdict=verdict, action=Action(response="apply"), applied=True))
        self.open()

    def _read_blind_step(self, window: Window, this: Round, *, is_spoiled: bool) -> Reading:
        losses = [float(loss) for loss in this.losses]
        loss = next((each for each in losses if not math.isfinite(each)), losses[0] if losses else math.nan)
        found: tuple[Found, ...] = ()
        if is_spoiled:
            found = ("loss" if not math.isfinite(loss) else "gradients" if self.has_bad_gradients() else "update",)
        rates = self.bench.schedule.known_rates
        return Reading(step=window.step, epoch=0, batch=None, loss=loss, mean_loss=loss, lrs=rates, found=found)

    def sit_out(self, this: Round) -> None:
        """Another optimizer of the same round has been refused: all of them step, or none does."""
        self.num_calls += 1
        window, bench = self.bench.window, self.bench
        self.put_back()
        loss = float(this.losses[-1]) if this.losses else math.nan
        step = bench.num_steps if window is None else window.step
        bench.num_steps += 1
        bench.journal.sit_out(Reading(step=step, epoch=0, batch=None, loss=loss, lrs=bench.schedule.known_rates))
        self.open()

    def put_back(self) -> None:
        """Buffers as they were before a step that was refused, or another optimizer's in the same round."""
        self.bench.buffers.undo_()
        self.bench.last_forward.forget()

    def close(self) -> None:
        self.steps.settle()
        if self.steps.keeper is not None:
            self.steps.keeper.close()
        self.bench.journal.close(steps=self.bench.num_steps)

    def _fill(self, window: Window, this: Round) -> None:
        losses = self._losses_that_count(this)
        window.knows_loss = bool(losses)
        window.losses = losses or [torch.zeros((), dtype=torch.float32, device=self.bench.device)]
        window.calls = [call for call in this.calls if call.misses_gradients or call.has_gradients]
        window.last_seen = [(call.args, dict(call.kwargs)) for call in this.calls]
        window.live, window.remains = this.live, this.remains

    def _losses_that_count(self, this: Round) -> list[Tensor]:
        """Not a bad one whose gradients the program has thrown away itself, and gone on with another batch."""
        losses = list(this.losses)
        if len(losses) < 2:
            return losses
        if self.sync == "late":
            return [self._mean_that_counts(losses)]
        flags = torch.isfinite(torch.stack([loss.double().to(self.bench.device) for loss in losses])).tolist()
        good = [loss for loss, is_finite in zip(losses, flags, strict=True) if is_finite]
        return losses if len(good) in (0, len(losses)) or self.has_bad_gradients() else good

    def _mean_that_counts(self, losses: list[Tensor]) -> Tensor:
        """The same without waiting for the device."""
        values = torch.stack([loss.double().to(self.bench.device) for loss in losses])
        is_good = torch.isfinite(values)
        grads = [p.grad for group in self.shield.groups() for p in group if p.grad is not None]
        all_count = (nonfinite(grads, self.bench.device) != 0) | ~is_good.any()
        good = torch.where(is_good, values, 0.0).sum() / is_good.sum()
        return torch.where(all_count, values.mean(), good)

    def _follow(self) -> None:
        """What the program's GradScaler has done to the gradients."""
        ours = self.bench.scaler
        if not isinstance(ours, ProgramScaler):
            return
        grad_scale = getattr(self.optimizer, "grad_scale", None)
        if grad_scale is not None and self._settings.max_norm is not None:  # clipping needs them in their true size
            grads = [p.grad for group in self.shield.groups() for p in group if p.grad is not None]
            scale_(grads, grad_scale.double().reciprocal().float())
            self.optimizer.grad_scale = grad_scale = None  # type: ignore[attr-defined]
        ours.follow(_compat.scale_of(self.grad_scaler), are_scaled=grad_scale is not None)

    def _was_refused(self) -> bool:
        last = self.bench.journal.last
        return self.sync == "eager" and last is not None and not last.applied and last.action.response != "back_off"
