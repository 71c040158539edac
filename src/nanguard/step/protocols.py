"""What the engine needs of others: someone who answers bad steps, and someone who follows steps to explain them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from nanguard.records.steps import Outcome, Reading, Verdict
from nanguard.step.pending import PendingStep


class Mode(Protocol):
    """How a step is protected.

    ``Eager`` asks the host before the optimizers step. ``Late`` and ``NextStep`` let the device decide.
    """

    def before(self) -> None:
        """Processes the readings that are due, before the next step begins."""

    def note(self, pending: PendingStep, *, are_buffers_noted: bool = False) -> None:
        """Notes what the step may change, so that it can be put back. With ``are_buffers_noted`` all but buffers."""

    def measure(self, pending: PendingStep) -> None:
        """Measures the step before ``finish``, for a host that clips in between."""

    def finish(self, pending: PendingStep) -> None:
        """Measures the step, and applies it or not."""

    def answer(self, pending: PendingStep) -> None:
        """Answers a step that was refused inside a backward pass, after it."""

    def settle(self) -> None:
        """Processes all readings. Waits for the device."""

    def is_verified(self) -> bool:
        """Whether all that was applied is known to be finite. Does not wait."""

    def drop_in_flight(self) -> None:
        """The run is at another state now: readings that have not been processed count no more."""


class StepTracer(Protocol):
    """Follows a step in a loop of the user's own as it runs, if there is a reason to."""

    is_on: bool
    """Whether the open step is followed."""

    def begin(self, batch: Any) -> None:
        """A step begins; ``batch`` is what ``guard.epoch`` gave last."""

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Around a part of the step."""

    def before_backward(self, loss: Tensor) -> Any:
        """What the graph of a bad loss still knows; None if the loss is fine, or looking would mean to wait."""

    def after_backward(self, loss: Tensor) -> Any:
        """What showed, while gradients are still there; None if the step was not traced."""


class Responder(Protocol):
    """Answers what the host has heard of a step. Called with the training state as the step found it."""

    @property
    def tracer(self) -> StepTracer: ...

    def watch(self, pending: PendingStep, verdict: Verdict) -> Outcome | None:
        """A healthy step. An outcome if the loss has diverged."""

    def answer(self, pending: PendingStep, verdict: Verdict) -> Outcome:
        """A step that was not finite, and did not change anything."""

    def look(self, pending: PendingStep) -> Outcome | None:
        """Between steps: an outcome if the state is damaged although every step was finite. Waits for the device."""

    def leave_out(self, pending: PendingStep, reading: Reading, did: str) -> Outcome:
        """A non-finite pass that never became a step, and what the program did instead."""

    def back_off(self, step: int) -> None:
        """A routine overflow of scaled fp16 gradients."""

    def fence(self) -> None:
        """Before the optimizers write: the device finishes reading what a snapshot copies. Does not sync."""

    @property
    def has_duties(self) -> bool:
        """Whether ``ease`` or ``heed`` may have something to do."""

    def ease(self, step: int, settle: Callable[[], None]) -> None:
        """Takes back mitigations that are due; calls ``settle`` first if there are any."""

    def heed(self, step: int, settle: Callable[[], None]) -> bool:
        """Answers warnings that are due; calls ``settle`` first if there are any. True if the run went back."""

    def give_memory_back(self) -> bool:
        """Frees memory that is only a convenience. True if there was any."""

    def letting_interrupts_out(self) -> contextlib.AbstractContextManager[None]:
        """Raises an interrupt that came during an examination, once its outcome has been recorded."""

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C, or an exit, came during an examination."""

    def prepare(self, facts: Mapping[str, Any]) -> None:
        """Before a snapshot of another process is put back."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
