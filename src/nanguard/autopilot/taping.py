"""The tape of a program: from the first call of a module in a step, or from the end of the step before, to backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from nanguard.hosted.coordinator import StepCoordinator
from nanguard.state.rng import RngState
from nanguard.step.tape import CallTape
from nanguard.step.tape_recorder import TapeRecorder


class ProgramTape(TapeRecorder):
    """``is_alone`` says that there is only one optimizer. Others may use what was computed before one steps."""

    def __init__(self, note: Callable[[], RngState | None], *, is_wanted: bool) -> None:
        super().__init__(note, "cpu")
        self._is_wanted = is_wanted

    def follow(self, coordinator: StepCoordinator, *, is_alone: bool) -> None:
        """Writes to the tape of the current iteration, or of the next one if that has begun already."""
        if self._is_wanted:
            self.begin(coordinator.next_tape or coordinator.iteration.tape, keeps_older=not is_alone)

    def note_backward(self, tensors: Any, gradients: Any = None, trained: Sequence[Tensor] = ()) -> None:
        """A backward pass begins at these tensors, with these gradients."""
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        given = [gradients] if gradients is None or isinstance(gradients, Tensor) else list(gradients)
        self.note_losses(roots, given if len(given) == len(roots) else (), trained)

    def end_step(self, coordinator: StepCoordinator, *, is_alone: bool) -> bool:
        """After a step. True if the tape goes on at once: the program has called no module in it.

        Otherwise it goes on with the first call of a module. What comes before, such as loading data, costs nothing.
        """
        if is_alone:
            self.forget()
            coordinator.iteration.tape = CallTape()  # it holds a batch
        if coordinator.iteration.noted:
            return False
        coordinator.next_tape = CallTape()
        return True
