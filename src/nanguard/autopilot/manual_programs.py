"""The part of the monitor that is for programs that update their tensors themselves, without an optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanguard import _compat_modes
from nanguard.autopilot.first_pass import FirstPass
from nanguard.autopilot.manual_update import ManualUpdate, holding, is_trained, losses_in
from nanguard.autopilot.own_work import AtWork
from nanguard.autopilot.registry import Registry
from nanguard.autopilot.taping import ProgramTape
from nanguard.autopilot.tracing import Tracer
from nanguard.hosted.coordinator import StepCoordinator
from nanguard.hosted.iteration import Iteration
from nanguard.hosted.names import names_of_leaves
from nanguard.hosted.step import HostedStep
from nanguard.state.trees import tensors


class ManualPrograms(ABC):
    """Each backward pass of such a program is a step."""

    registry: Registry
    taper: ProgramTape
    _tracer: Tracer

    def _begin_manual(self, *, is_examined: bool) -> None:
        self._manual: ManualUpdate | None = None
        self.first_pass = FirstPass(is_wanted=is_examined)

    @property
    def is_manual(self) -> bool:
        """Whether the program was seen to update tensors itself."""
        return self._manual is not None

    def before_grad(self, outputs: Any, inputs: Any) -> None:
        """The program is about to call ``torch.autograd.grad``, which frees the graph."""
        if not self._with_optimizer:
            self.taper.stop()
            with self._at_work("a loss could not be examined"), _compat_modes.unwatched():
                self._coordinator.begin_iteration()
                self._iteration.graph_finding = None
                self._coordinator.examine_graph(losses_in(outputs))
                if self._has_no_optimizer:
                    self._coordinator.note_finding(self.first_pass.expect(losses_in(outputs)))
                self.taper.note_backward(outputs, None, list(tensors(inputs)))

    def after_grad(self, outputs: Any, inputs: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        """What ``torch.autograd.grad`` returns to a program without an optimizer: zeros instead of bad gradients."""
        self.guard_new_optimizers()
        finding = self.first_pass.finding(grads)
        losses, leaves = losses_in(outputs), list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
        pairs = list(zip(leaves, grads, strict=False))
        if not self._has_no_optimizer or not losses or not all(is_trained(*pair) for pair in pairs):
            return grads
        refused = False
        with self._at_work("gradients could not be examined"):
            self._coordinator.note_losses(losses)
            self._coordinator.note_finding(finding)
            manual = self._manual = self._manual or ManualUpdate()
            manual.expect(leaves)
            with holding(pairs):
                self._examine_trace(losses[-1])
                self._step_manually(manual)
            refused = self._iteration.refused
        if self._coordinator.next_tape is not None:
            self.begin_taping()  # not while we are at work
        return tuple(torch.zeros_like(grad) for grad in grads) if refused else grads

    def _expect(self, losses: Sequence[Tensor], leaves: list[Tensor]) -> None:
        """A backward pass of these losses will fill the gradients of ``leaves``."""
        self._coordinator.note_finding(self.first_pass.expect(losses))
        self._manual = self._manual or ManualUpdate()
        self._manual.expect(leaves)

    def _step_manually(self, manual: ManualUpdate) -> None:
        """A program without an optimizer: each backward pass is a step, and bad gradients become zeros."""
        with self._at_work("a step could not be examined"):
            self._tracer.stop()
            if manual.hosted is None:
                manual.attach(self.registry.guard(manual.optimizer, "", names_of_leaves(manual.leaves)))
                self._attach(manual.hosted)
                self._tracer.stop()
            manual.step(self._iteration)
        self.after_step(self._coordinator)

    @property
    def _has_no_optimizer(self) -> bool:
        """Whether the program updates its tensors itself; False if it has optimizers that are not guarded here."""
        if self._manual is None and self.registry.has_hosted_steps:
            return False
        return not (self._with_optimizer or self.registry.has_guard or self.registry.unguarded)

    @property
    def _with_optimizer(self) -> list[HostedStep]:
        """The hosted steps of optimizers that the program has made."""
        manual = None if self._manual is None else self._manual.hosted
        return [hosted for hosted in self.registry.hosted_steps if hosted is not manual]

    @property
    @abstractmethod
    def _coordinator(self) -> StepCoordinator: ...

    @property
    @abstractmethod
    def _iteration(self) -> Iteration: ...

    @abstractmethod
    def guard_new_optimizers(self, *, in_call: bool = False) -> None: ...

    @abstractmethod
    def begin_taping(self) -> None: ...

    @abstractmethod
    def _attach(self, hosted: HostedStep | None) -> None: ...

    @abstractmethod
    def _examine_trace(self, loss: Tensor | None) -> None: ...

    @abstractmethod
    def after_step(self, coordinator: StepCoordinator) -> None: ...

    @abstractmethod
    def _at_work(self, failure: str) -> AtWork: ...
