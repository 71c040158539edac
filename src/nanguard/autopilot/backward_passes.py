"""The backward passes of a program that are under way."""

from __future__ import annotations

import threading
from typing import Any

from nanguard.hosted.coordinator import StepCoordinator
from nanguard.hosted.iteration import Iteration
from nanguard.hosted.optimizers import ProgramCall
from nanguard.hosted.step import HostedStep


class BackwardPasses:
    """Outermost ones only, one for each thread, with the iteration that it belongs to.

    On a GPU, autograd runs the hooks of parameters in a thread of its own.
    """

    def __init__(self) -> None:
        self.under_way: dict[int, Iteration] = {}

    @property
    def is_in_one(self) -> bool:
        """Whether this thread is."""
        return threading.get_ident() in self.under_way

    def begin(self, iteration: Iteration) -> None:
        self.under_way[threading.get_ident()] = iteration

    def end(self) -> None:
        self.under_way.pop(threading.get_ident(), None)

    def step(
        self, coordinator: StepCoordinator, hosted: HostedStep, call: ProgramCall, *, check_afterwards: bool
    ) -> Any:
        """A call of ``step()`` inside a pass. A bad step is refused now and examined when the pass has ended."""
        this = self._iteration_of(hosted)
        if this is not None:
            return coordinator.step_in_backward(hosted, this, call, check_afterwards=check_afterwards)
        coordinator.iteration.calls.clear()  # its end will not be noticed, and inside it nothing can be run again
        coordinator.iteration.tape.losses.clear()
        hosted.forbid_tracing()
        return coordinator.step(hosted, call)

    def _iteration_of(self, hosted: HostedStep) -> Iteration | None:
        """Of the pass inside which this optimizer steps; None if it is not known."""
        passes = self.under_way
        for thread in (threading.get_ident(), hosted.thread):
            if thread in passes:
                return passes[thread]
        return next(iter(passes.values())) if len(passes) == 1 else None
