"""Runs one step of the program on any batch to see whether it is finite. Everything is put back afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanguard import _compat
from nanguard.diagnosis.blame import TraceFinding
from nanguard.diagnosis.causes import with_remedy
from nanguard.diagnosis.exam import Exam, Past
from nanguard.diagnosis.examiner import Examiner
from nanguard.diagnosis.look import look
from nanguard.diagnosis.replay import Replay
from nanguard.diagnosis.state_faults import state_fault
from nanguard.diagnosis.watched import WatchedRun
from nanguard.numerics.norm import gradients_of
from nanguard.preflight_checks.headroom import SpoiledTrace
from nanguard.records.diagnosis import Diagnosis
from nanguard.records.steps import Found, Reading
from nanguard.source.frames import runs_user_code
from nanguard.source.modules import Modules
from nanguard.standalone import parts_of_step, step_on
from nanguard.state.names import unwrapped
from nanguard.state.nonfinite import nonfinite_names
from nanguard.state.trees import mapped, named_tensors
from nanguard.state.undo import Undo
from nanguard.step.dry_run import DryRun
from nanguard.step.pending import LossFn, PendingStep
from nanguard.step.precision import LossScale, Scaler


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """``found`` is what was non-finite, empty if nothing was. ``error`` is what the program raised, None if nothing."""

    found: tuple[Found, ...] = ()
    error: Exception | None = None
    loss: float = 0.0


class StepRunner:
    """Steps of one program. Waits for the device."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, optimizer: Any, precision: str, loss_scale: LossScale | None
    ) -> None:
        self._inner = unwrapped(model)
        self.has_optimizer = optimizer is not None
        self._loss_fn = loss_fn
        self.parts = parts_of_step(self._inner, optimizer, precision, loss_scale)
        self._dry_run = DryRun(self.parts)
        self._examiner = Examiner(self.parts, self._dry_run)
        self.num_steps = 0

    @property
    def scale(self) -> float:
        """The loss scale; 1 if there is none."""
        scaler = self.parts.precision.scaler
        return 1.0 if scaler is None else float(scaler.scale.item())

    @property
    def parameters(self) -> list[Tensor]:
        """What training changes."""
        return [p for group in self.parts.skippable.groups() for p in group if p.requires_grad]

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        """Afterwards weights, optimizers, buffers, gradients, random states and modes are as before."""
        before, buffers = self.parts.state.capture_update(), Undo(self.parts.state.device)
        buffers.watch_buffers(self._inner)
        scaler = self.parts.precision.scaler
        scale = None if scaler is None else scaler.scale.clone()
        with self.parts.state.untouched(buffers):
            try:
                yield
            finally:
                before.put_back()
                if scaler is not None and scale is not None:
                    scaler.scale.copy_(scale)

    def pending(self, batch: Any) -> PendingStep:
        """A step on a copy of this batch, with the random states of now."""
        return step_on(self.parts, self._loss_fn, copied(batch))

    def result(self, batch: Any) -> StepResult:
        """Forward, backward and update on a copy of this batch. Gradients that only a loss scale overflows are fine."""
        result = self._run(batch)
        if result.found == ("gradients",) and self.parts.precision.scaler is not None:
            with self.at_lowest_scale():
                return self._run(batch)
        return result

    def _run(self, batch: Any) -> StepResult:
        pending = self.pending(batch)
        self.num_steps += 1
        with self._dry_run.stage(pending, alone=True):
            known = self._bad_buffers()
            try:
                (loss,) = self._dry_run.run(pending)
            except Exception as error:  # an input that the program does not accept, or a NaN that it noticed
                return StepResult(error=error)
            value = float(loss)
            if not look(loss).is_finite:
                return StepResult(found=("loss",), loss=value)
            if self._has_bad_gradients():
                return StepResult(found=("gradients",), loss=value)
            if self._bad_buffers() - known:
                return StepResult(found=("buffers",), loss=value)
            return StepResult(found=("update",) if self._is_update_bad() else (), loss=value)

    @contextlib.contextmanager
    def at_lowest_scale(self) -> Iterator[None]:
        """Inside, the loss scale is as low as it can get."""
        scaler = self.parts.precision.scaler
        before = None if scaler is None else scaler.scale.clone()
        try:
            if scaler is not None:
                scaler.scale.fill_(scaler.floor)
            yield
        finally:
            if scaler is not None and before is not None:
                scaler.scale.copy_(before)

    @contextlib.contextmanager
    def scaled(self, factor: float) -> Iterator[None]:
        """Inside, the loss is multiplied by a fixed number."""
        precision = self.parts.precision
        before = precision.scaler
        precision.use_scaler(Scaler(LossScale(initial=factor, floor=factor), self.parts.state.device))
        try:
            yield
        finally:
            precision.use_scaler(before)

    def _bad_buffers(self) -> set[str]:
        return {name for name, buffer in self.parts.state.buffers().items() if bool(torch.isnan(buffer).any())}

    def _has_bad_gradients(self) -> bool:
        grads = {str(place): p.grad for place, p in enumerate(self.parameters) if p.grad is not None}
        return bool(nonfinite_names(grads))

    @runs_user_code
    def _is_update_bad(self) -> bool:
        """Whether finite gradients make a non-finite update. It is taken back."""
        if not self.has_optimizer:
            return False
        self._unscale()
        before = self.parts.state.capture_update()
        try:
            self.update()
            return before.is_spoiled()
        finally:
            before.put_back()

    def _unscale(self) -> None:
        scaler = self.parts.precision.scaler
        grads = gradients_of(self.parameters)
        if scaler is not None and grads:
            scaler.unscale_(grads)

    @runs_user_code
    def draws(self, batch: Any) -> bool:
        """Whether the step draws random numbers from torch."""
        reader = self.parts.state.rng_reader
        self.num_steps += 1
        with self.untouched():
            before = reader.now()
            self._dry_run.forward(self.pending(batch), 0)
            after = reader.now()
        return not torch.equal(before.cpu, after.cpu) or before.cuda != after.cuda

    # ---- training a little ---------------------------------------------------------------------------------------

    @runs_user_code
    def train_on(self, batch: Any) -> bool:
        """One step of training. False if it is non-finite, and changed nothing. Call it inside ``untouched``.

        If its gradients overflow by the loss scale alone, the step is skipped and the scale is lowered.
        """
        self.num_steps += 1
        (loss,) = self._dry_run.run(self.pending(batch))
        scaler, is_bad = self.parts.precision.scaler, self._has_bad_gradients()
        is_finite = look(loss).is_finite and (not is_bad or scaler is not None)
        if is_finite and scaler is not None and is_bad:
            scaler.scale.mul_(scaler.options.backoff).clamp_(min=scaler.floor)
        elif is_finite:
            self._unscale()
            self.update()
        self.parts.skippable.zero_grad()
        return is_finite

    @contextlib.contextmanager
    def with_gradients(self, fill: Callable[[Tensor], Tensor]) -> Iterator[PendingStep]:
        """Inside, each weight has the gradient that ``fill`` makes of it, as a pending step that had them."""
        pending = PendingStep(0, 0, None, True, 1)
        grads = [(p, p.grad) for p in self.parameters]
        try:
            for param, _ in grads:
                param.grad = fill(param.detach())
            yield pending
        finally:
            for param, grad in grads:
                param.grad = grad

    def survives(self, fill: Callable[[Tensor], Tensor], times: int) -> bool:
        """Whether weights and optimizer state are finite after so many updates with such gradients."""
        known = set(self.parts.state.nonfinite())
        with self.untouched(), self.with_gradients(fill):
            try:
                for _ in range(times):
                    self.update()
            except RuntimeError:  # it takes only sparse gradients, for example
                return True
            return set(self.parts.state.nonfinite()) <= known

    def is_update_bad(self) -> bool:
        """Whether the gradients of now make a non-finite update."""
        self.num_steps += 1
        with self.parts.precision.unscaled():
            return self._is_update_bad()

    @runs_user_code
    def update(self) -> None:
        """An update that is kept. Call it inside ``untouched``."""
        for optimizer in self.parts.state.optimizers:
            optimizer.step()

    def diagnosis_of_update(self, pending: PendingStep) -> Diagnosis | None:
        """Where a non-finite update of the gradients of now comes from. None if it is finite."""
        reading = Reading(step=0, epoch=0, batch=None, loss=0.0, found=("update",))
        with self.parts.precision.unscaled():
            return self._examiner.examine_update(pending, reading, Past())

    # ---- examining -----------------------------------------------------------------------------------------------

    def watched(self, pending: PendingStep) -> WatchedRun:
        """A trace of every op."""
        self.num_steps += 1
        return Replay(self.parts, self._dry_run, pending).watched(update=False)

    def state_faults(self, pending: PendingStep, run: WatchedRun) -> Iterator[Diagnosis]:
        """What was non-finite before this step: parameters, optimizer state, buffers (Inf in those may be a mask)."""
        exam = Exam(self.parts, pending, run, Past(), None)
        for event in run.trace.events:
            kind = event.origin.partition(" ")[0]
            is_state = kind in ("parameter", "state") or (kind == "buffer" and event.has_nan)
            if event.kind == "outside" and is_state:
                fault = state_fault(exam, TraceFinding(event, (event,), ()))
                if fault is not None:
                    yield with_remedy(fault)

    def is_harmful(self, pending: PendingStep, number: int) -> bool:
        """Whether loss or gradients are non-finite if the result of this op of the trace is infinite."""
        self.num_steps += 1
        trace = SpoiledTrace(Modules(self.parts.state.own_model), number)
        with self._dry_run.stage(pending, alone=True), _compat.without_compilation():
            try:
                with trace:
                    (loss,) = self._dry_run.run(pending)
            except Exception:  # the program noticed it
                return True
            return not look(loss).is_finite or self._has_bad_gradients()

    def diagnosis(self, pending: PendingStep, past: Past, is_deep: Callable[[Diagnosis], bool]) -> Diagnosis | None:
        """Where it came from and why. None if the step is finite. Raises what the program raises."""
        self.num_steps += 1
        return self._examiner.examine(pending, None, past, is_deep, update=self.has_optimizer)

    def embedded(self, batch: Any) -> dict[str, tuple[int, int | None]]:
        """The tensors of the batch that are passed to an embedding: how many entries it has, and which is padding."""
        pending = self.pending(batch)
        own = {_compat.storage_key(t): name for name, t in named_tensors(pending.microbatches[0].batch)}
        found: dict[str, tuple[int, int | None]] = {}

        def note(module: nn.Module, args: Any) -> None:
            name = own.get(_compat.storage_key(args[0])) if args and isinstance(args[0], Tensor) else None
            if name is not None and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                size, padding = found.get(name, (module.num_embeddings, None))
                found[name] = min(size, module.num_embeddings), module.padding_idx if padding is None else padding

        kinds = (nn.Embedding, nn.EmbeddingBag)
        handles = [m.register_forward_pre_hook(note) for m in self.parts.modules if isinstance(m, kinds)]
        try:
            with self._dry_run.stage(pending, alone=True):
                self._dry_run.forward(pending, 0)
        finally:
            for handle in handles:
                handle.remove()
        return found

    @runs_user_code
    def loss_of(self, batch: Any) -> Tensor:
        """The loss with its graph. Call it inside ``untouched``."""
        pending = self.pending(batch)
        pending.microbatches[0].batch = batch
        self.num_steps += 1
        with self._dry_run.stage(pending, alone=True):
            return self._dry_run.forward(pending, 0)


def copied(batch: Any) -> Any:
    """The batch with copies of its tensors: loss functions may write to them."""
    return mapped(batch, lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else None)
