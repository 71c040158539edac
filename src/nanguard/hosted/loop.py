"""Guards a training loop that we do not own: a trainer class, a framework, an integration. Nothing is patched."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nanguard import _compat
from nanguard.diagnosis.scheduler import How
from nanguard.errors import ProtocolError
from nanguard.hosted.coordinator import StepCoordinator
from nanguard.hosted.joining import claim, disclaim, joined_program
from nanguard.hosted.optimizers import ProgramCall
from nanguard.hosted.saved import load_state, state_of
from nanguard.hosted.settings import Settings, patient_policy
from nanguard.hosted.shared import Shared
from nanguard.hosted.step import HostedStep
from nanguard.hosted.trained_modules import called_parts
from nanguard.incidents.bundle import CaptureLevel
from nanguard.policy.policy import Policy
from nanguard.records.steps import Incidents
from nanguard.records.summary import closing_line
from nanguard.run_folder import RunFolder
from nanguard.state.batch_indices import FetchedBatch
from nanguard.state.names import unwrapped
from nanguard.state.schedule import check_schedulers, moves
from nanguard.step.assembly import as_tuple, check_choice, choose_policy
from nanguard.step.calls import Call, CallRecorder
from nanguard.step.host_step import HostStep
from nanguard.step.observers import Observer
from nanguard.step.optimizers import check_optimizers
from nanguard.step.parts import check_loss
from nanguard.step.pending import Microbatch
from nanguard.step.tape_recorder import TapeRecorder
from nanguard.wiring import introduce

log = logging.getLogger("nanguard")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostedResult:
    """``applied``: whether the step had an effect. ``result``: what the call returned, None if it was not applied."""

    applied: bool
    result: Any = None


class HostedLoop:
    """The host calls these methods from its own loop, in this order, for each optimizer step::

        loop.before_forward(batch)          # once for each micro-batch
        loss = ...
        loop.after_forward(loss)            # the loss that backward() is called on, before any scaling
        loss.backward()
        loop.measure(optimizer)             # only if the host clips or changes gradients before the step
        done = loop.step(optimizer, optimizer.step)
        if loop.should_advance_schedule:
            scheduler.step()

    The host clears gradients, clips, scales the loss and advances schedulers. If the loss, a gradient or a buffer is
    non-finite, the step is skipped: ``call`` is not called, and buffers are put back. Each step costs one sync, since
    the host has to know whether it was applied.

    A host that can learn of a skipped step later passes ``was_skipped``. Then no step syncs, if there is one optimizer,
    which is fused and on a GPU, and one process. Each step counts as applied at first. If it is bad, the device skips
    it, and ``was_skipped`` is called before the next step is applied, or by ``settle``. By then schedulers have been
    put back. The host puts back the rest.

    Args:
        model: the module that trains; DDP and ``torch.compile`` wrappers are fine.
        optimizers: one optimizer or several. Those that step in the same iteration all step, or none does.
        schedulers: those that the host advances. A rollback puts them back too.
        policy: what to do about bad steps; None skips them as long as the run makes progress, and rolls damage back.
        run_dir: where to write the run log and bad steps; None writes nothing.
        observers: objects that are told what happens; with several optimizers, about the steps of each.
        diagnose: as for ``Guard``.
        capture: as for ``Guard``.
        first_step: the number of the first step; None reads it from the state of the optimizer.
        was_skipped: a function that is called for each step that counted as applied and was skipped.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        *,
        schedulers: LRScheduler | Sequence[LRScheduler] | None = None,
        policy: Policy | None = None,
        run_dir: str | Path | None = None,
        observers: Sequence[Observer] = (),
        diagnose: How = "auto",
        capture: CaptureLevel = "batch",
        first_step: int | None = None,
        was_skipped: Callable[[], None] | None = None,
    ) -> None:
        for name, value in (("diagnose", diagnose), ("capture", capture)):
            check_choice(name, value)
        if was_skipped is not None and not callable(was_skipped):
            raise ValueError(f"was_skipped must be a function without arguments, or None, got {was_skipped!r}")
        several: tuple[Optimizer, ...] = as_tuple(optimizers)
        to_hold: tuple[LRScheduler, ...] = as_tuple(schedulers)
        self._program = joined_program()
        settings = Settings(
            policy=choose_policy(policy, patient_policy),
            run_dir=None if run_dir is None else RunFolder(Path(run_dir).absolute()),
            sync="eager" if was_skipped is None else "auto",
            diagnose=diagnose,
            capture=capture,
            observers=tuple(observers),
        )
        shared = Shared()
        if self._program is not None:
            settings = replace(self._program.settings, sync=self._program.settings.sync if was_skipped else "eager")
            shared = self._program.shared
        check_optimizers(several, model)
        check_schedulers(to_hold, several)
        self._steps: list[HostedStep] = []
        for place, optimizer in enumerate(several):
            hosted = HostedStep(
                optimizer,
                unwrapped(model),
                called_parts(model),
                settings,
                name="" if len(several) == 1 else f"{type(optimizer).__name__} {place}",
                shares=len(several) > 1,
                shared=shared,
                schedulers=[each for each in to_hold if moves(each, optimizer)],
                can_trace=False,
                was_skipped=was_skipped,
            )
            if first_step is not None:
                hosted.count_from(first_step)
            if self._steps:
                hosted.share_buffers_of(self._steps[0])
            self._steps.append(hosted)
        is_first = self._program is None or self._program.adopt(self)
        program = settings.program()
        for place, hosted in enumerate(self._steps):
            joins = place > 0 or not is_first
            introduce(hosted.parts, asked_precision="the host's own", sync=hosted.sync, program=program, joins=joins)
            claim(hosted.optimizer)
            hosted.open()
        self._coordinator = StepCoordinator(lambda: self._steps)
        kind = self._steps[0].parts.state.device.type
        parts = self._steps[0].parts
        self._taper = TapeRecorder(lambda: parts.state.rng_reader.now(parts.num_steps), kind)
        self._recorder = CallRecorder(kind, self._taper, parts.state.rng_reader)
        self._is_taping = settings.diagnose != "off"
        if self._is_taping:
            self._recorder.listen(model, self._open_calls)
        self._is_closed = False
        self.num_forwards = 0  # that have begun, of the training

    # ---- what the host says --------------------------------------------------------------------------------------

    def before_forward(self, batch: Any = None, *, rerun: Callable[[Any], Tensor] | None = None) -> None:
        """A forward pass begins. Call it for each micro-batch; ``batch`` is saved if the step turns out to be bad.

        ``rerun(batch)`` computes the loss of this micro-batch again, with the step function of the host: the loss that
        ``after_forward`` is told. A bad step is then examined by running that. It must have no other effect: nothing is
        logged, and no method of the loop is called (see ``is_rerunning``). It is given ``batch``, or some of its
        samples.

        With gradients off (evaluation) it only puts back what a discarded forward pass has left in buffers.
        """
        self._check_open("before_forward")
        is_training = torch.is_grad_enabled()
        self._taper.stop()
        self.num_forwards += is_training
        for hosted in self._steps:
            if is_training:
                self._coordinator.before_forward(hosted)
            else:
                hosted.before_evaluation()
        if is_training and batch is not None:
            self._coordinator.iteration.add_batch(batch)
        if is_training and rerun is not None:
            self._coordinator.iteration.uses_every_loss = True  # it has a step function, which calls backward()
        if is_training and rerun is not None and self._is_taping:
            self._coordinator.iteration.add_rerun(self._microbatch(rerun, batch))
        elif is_training and self._is_taping:
            self._taper.begin(self._coordinator.iteration.tape, keeps_older=len(self._steps) > 1)

    def fetched(self, batch: FetchedBatch) -> None:
        """A loader gave a batch for a step to come: the diagnosis can then name records of the dataset."""
        self._coordinator.note_fetched(batch)

    def after_forward(self, loss: Tensor, *, is_used: bool = False) -> None:
        """The host is about to call ``backward()`` on this loss, or on the loss multiplied by a scale or a share.

        If a loss is bad, others of the same step are good, and so are the gradients, the host seems to have cleared the
        gradients of the bad one itself, and the step is made. ``is_used`` says that it never does that without
        ``discard()``: then one bad loss is enough to skip the step. Does not sync on a GPU.
        """
        self._check_open("after_forward")
        self._taper.stop()
        check_loss(loss)
        self._taper.note_losses([loss])
        self._coordinator.after_forward([loss])
        if is_used:
            self._coordinator.iteration.uses_every_loss = True

    def measure(self, optimizer: Optimizer, *, grad_scaler: Any = None) -> None:
        """Measures the gradients now. Call it before the host clips or changes them, and after ``unscale_``.

        ``step`` then decides by these values, and their norms are logged. Without this call ``step`` measures. Moves
        the sync of the step to here.
        """
        hosted = self._hosted(optimizer, "measure")
        if self._use_scaler(hosted, grad_scaler):
            raise ProtocolError(
                "loop.measure() was called before grad_scaler.unscale_(optimizer): gradients have to be in their true "
                "size when they are measured for clipping; call unscale_ first"
            )
        hosted.measure(self._coordinator.iteration)

    def step(
        self, optimizer: Optimizer, call: Callable[[], Any] | None = None, *, grad_scaler: Any = None
    ) -> HostedResult:
        """Calls ``call`` (by default ``optimizer.step``) if the step is good. One sync, or none after ``measure``.

        With a GradScaler, ``call`` is ``lambda: grad_scaler.step(optimizer)``, and the host calls
        ``grad_scaler.update()`` afterwards, as usual: it lowers the scale if there was an overflow.

        Raises ``NonFiniteError`` if the policy halts the run. Gradients of a skipped step are the host's to clear.
        """
        self._taper.stop()
        hosted = self._hosted(optimizer, "step")
        is_scaled = self._use_scaler(hosted, grad_scaler)
        result = self._coordinator.step(hosted, ProgramCall(optimizer.step if call is None else call))
        if is_scaled and not _compat.is_unscaled(grad_scaler, optimizer):
            grad_scaler.unscale_(optimizer)  # update() needs what it finds
        return HostedResult(applied=hosted.was_applied, result=result if hosted.was_applied else None)

    @property
    def answers_later(self) -> bool:
        """Whether a step counts as applied before that is known; see ``was_skipped``."""
        return any(hosted.sync == "late" for hosted in self._steps)

    def settle(self) -> None:
        """Between two steps: waits until it is known whether the last one was applied."""
        self._check_open("settle")
        for hosted in self._steps:
            hosted.settle()

    def discard(self) -> None:
        """The host has cleared the gradients without a step: what was told since the last step is forgotten.

        If it was non-finite, it is examined, and buffers are put back. Syncs.
        """
        self._check_open("discard")
        self._taper.stop()
        self._coordinator.end(None, self._taper)

    @property
    def should_advance_schedule(self) -> bool:
        """Whether the last step, of all optimizers that took part in it, was applied: advance schedulers only then."""
        iteration = self._coordinator.iteration
        return bool(iteration.stepped) and not iteration.unapplied

    @property
    def was_refused(self) -> bool:
        """Whether the last step was skipped for another reason than an overflow of scaled gradients (routine)."""
        return self._coordinator.iteration.refused

    @property
    def is_rerunning(self) -> bool:
        """Whether a bad step is being run again, to examine it."""
        return any(hosted.is_rerunning for hosted in self._steps)

    def resumed(self) -> None:
        """The host has loaded a checkpoint into model and optimizers: what was seen before is of another past."""
        self._check_open("resumed")
        for hosted in self._steps:
            hosted.resumed()
        self._coordinator.forget()

    def state_dict(self) -> dict[str, Any]:
        """What the recovery has changed and is still in force, to be saved with a checkpoint; empty if nothing is."""
        return state_of(self._steps)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts back what ``state_dict`` has returned, after the checkpoint was loaded. Logs what does not fit."""
        load_state(self._steps, state)

    def close(self) -> None:
        """Processes what is under way, ends the run log, and removes everything from the model."""
        if self._is_closed:
            return
        self._is_closed = True
        self._taper.close()
        self._recorder.stop()
        for hosted in self._steps:
            disclaim(hosted.optimizer)
            hosted.close()
        if self._program is not None:
            self._program.release(self)
        elif self.incidents and self._steps[0].parts.ranks.rank == 0:
            log.warning("end of the run: %s", self.summary())

    def __enter__(self) -> HostedLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_closed:
            self._coordinator.end(error, self._taper)
        self.close()

    # ---- what happened -------------------------------------------------------------------------------------------

    @property
    def incidents(self) -> Incidents:
        """Every bad step so far, of all optimizers, in order."""
        found = [incident for hosted in self._steps for incident in hosted.parts.journal.incidents]
        return Incidents(sorted(found, key=lambda incident: incident.number))

    @property
    def counts(self) -> dict[str, int]:
        """How many steps were applied, skipped, backed off, and so on, of all optimizers."""
        total: Counter[str] = Counter()
        for hosted in self._steps:
            total.update(hosted.parts.journal.counts)
        return dict(total)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        return tuple(hosted.optimizer for hosted in self._steps)

    @property
    def refused_in_a_row(self) -> int:
        """How many of the last steps in a row were not applied, of the optimizer with the most."""
        return max(hosted.parts.journal.refused_in_a_row for hosted in self._steps)

    @property
    def num_not_kept(self) -> int:
        """How many incidents were not saved to disk."""
        return sum(hosted.parts.journal.num_not_kept for hosted in self._steps)

    def unsound(self) -> tuple[str, ...]:
        """Names of weights, buffers and optimizer state that are not finite now. Syncs."""
        return tuple(dict.fromkeys(name for hosted in self._steps for name in hosted.unsound()))

    def summary(self) -> str:
        """The run in one line, for the end of it. Syncs."""
        return closing_line(
            Counter(self.counts),
            self.incidents,
            unsound=self.unsound(),
            refused_in_a_row=self.refused_in_a_row,
            num_not_kept=self.num_not_kept,
        )

    # ---- inside --------------------------------------------------------------------------------------------------

    def _hosted(self, optimizer: Optimizer, method: str) -> HostedStep:
        self._check_open(method)
        for hosted in self._steps:
            if hosted.optimizer is optimizer:
                return hosted
        raise ValueError(f"loop.{method}() got a {type(optimizer).__name__} that was not given to HostedLoop")

    def _check_open(self, method: str) -> None:
        if self._is_closed:
            raise ProtocolError(f"loop.{method}() was called after loop.close(): make a new HostedLoop")

    def _use_scaler(self, hosted: HostedStep, scaler: Any) -> bool:
        """Whether the gradients are still multiplied by the scale of this GradScaler."""
        if scaler is None or not scaler.is_enabled():
            return False
        is_scaled = not _compat.is_unscaled(scaler, hosted.optimizer)
        hosted.use_scaler(scaler, are_scaled=is_scaled)
        return is_scaled

    def _open_calls(self) -> list[Call] | None:
        if self._is_closed or not torch.is_grad_enabled() or self.is_rerunning:
            return None
        self._coordinator.begin_iteration()
        return self._coordinator.iteration.calls

    def _microbatch(self, rerun: Callable[[Any], Tensor], batch: Any) -> Microbatch:
        micro = Microbatch(HostStep(rerun, self._steps[0].roots[0]), batch, None, reduce_gradients=False)
        self._steps[0].parts.note_world(micro, self._steps[0].parts.num_steps)
        return micro
