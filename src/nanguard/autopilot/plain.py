"""Ordinary backward passes and steps of a program, in few calls. ``ProgramMonitor`` does the rest."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from nanguard import _compat_modes
from nanguard.autopilot.backward_passes import BackwardPasses
from nanguard.autopilot.own_work import Threads
from nanguard.autopilot.registry import hosted_step_of
from nanguard.autopilot.tracing import Tracer
from nanguard.errors import NonFiniteError

if TYPE_CHECKING:
    from nanguard.autopilot.monitor import ProgramMonitor

log = logging.getLogger("nanguard")

NOT_MADE: Any = object()
"""Instead of the result of a step that was not made."""


class PlainSteps:
    """What is unusual, or not finite, is left to ``monitor``."""

    def __init__(self, monitor: ProgramMonitor, threads: Threads, passes: BackwardPasses, tracer: Tracer) -> None:
        self._monitor, self._threads, self._passes, self._tracer = monitor, threads, passes, tracer
        self._registry, self._taper = monitor.registry, monitor.taper

    def backward(self, loss: Tensor, backward: Callable[[Tensor], None]) -> bool:
        """The program calls ``loss.backward()``. Notes the loss if it is an ordinary one, and runs the pass.

        False, and nothing has been done but to stop the tape, if ``monitor.after_forward`` has to be called.
        """
        here, taper, registry = self._threads.here, self._taper, self._registry
        if here.depth or self._monitor.is_closed or _compat_modes.current_pass() != -1 or _compat_modes.is_capturing():
            return False
        if taper.is_begun:
            taper.stop()  # before torch tells its modes of this call: inside it they cannot be left
        if registry.new or not registry.entries or self._tracer.is_used or self._monitor.is_manual:
            return False
        if _compat_modes.num_function_modes() or _compat_modes.is_watched():  # not for modes of the program to see
            return False
        if type(loss) is not Tensor or loss.ndim or not loss.is_floating_point() or vars(loss):
            return False
        coordinator, thread, passes = here.coordinator, threading.get_ident(), self._passes.under_way
        here.depth += 1
        try:
            coordinator.after_forward((loss,))
            taper.note_loss(loss)
        except Exception as error:
            if not self._monitor.stopped.hear(error):
                log.exception("nanguard: a loss could not be noted")
        finally:
            here.depth -= 1
        this = passes[thread] = coordinator.iteration
        here.loss = loss
        try:
            backward(loss)
        except BaseException as error:
            self._monitor.backward_raised(error)
            raise
        del passes[thread]
        if this.in_backward is not None or taper.goes_on_after_backward:
            self._monitor.after_backward(loss)
        return True

    @property
    def losses(self) -> Sequence[Tensor]:
        """Of the step under way, without their graphs."""
        this = self._threads.here.coordinator.iteration
        return () if this.stepped else this.losses

    def is_noted(self, tensors: Any) -> bool:
        """Whether ``backward`` has noted the pass that begins now."""
        here = self._threads.here
        loss, here.loss = here.loss, None
        return loss is not None and loss is tensors

    def step(self, optimizer: Optimizer, step: Callable[[Optimizer], Any]) -> Any:
        """The program calls ``step()``. Makes the step if it is sound, and nothing else is to be done.

        Returns what ``step`` returned; NOT_MADE if ``monitor.step`` has to be called.
        """
        here, hosted, registry = self._threads.here, hosted_step_of(optimizer), self._registry
        if hosted is None or not hosted.sound.is_on or here.depth or here.module is not None or registry.new:
            return NOT_MADE
        if self._monitor.is_closed or self._tracer.is_used or _compat_modes.current_pass() != -1:
            return NOT_MADE
        if _compat_modes.is_capturing():
            return NOT_MADE
        coordinator, taper, result, in_program = here.coordinator, self._taper, NOT_MADE, False
        if taper.is_begun:
            taper.stop()
        here.depth += 1
        try:
            measured = coordinator.measure_if_sound(hosted)
            if measured is not None:
                in_program = True
                result = hosted.sound.run(step)
                in_program = False
                hosted.was_sound(measured, coordinator.iteration)
        except NonFiniteError:
            raise
        except BaseException as error:
            if in_program and not self._monitor.stopped.hear(error):
                coordinator.sound_step_raised(hosted, error)
            if in_program or not isinstance(error, Exception):
                raise
            self._monitor.leave_to_program(hosted, error)
        finally:
            here.depth -= 1
        if result is not NOT_MADE:
            if len(registry.entries) > 1 or not coordinator.iteration.calls or not hosted.sound.is_on:
                self._monitor.after_step(coordinator)
            else:
                taper.end_sound_step(coordinator, is_over=hosted.sync == "eager")
        return result
