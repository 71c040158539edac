"""Is told what the program does, and hands each optimizer's step to its hosted step."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanguard import _compat_modes
from nanguard.autopilot.backward_passes import BackwardPasses
from nanguard.autopilot.children import Children
from nanguard.autopilot.listener import CallListener
from nanguard.autopilot.manual_programs import ManualPrograms
from nanguard.autopilot.manual_update import leaves_of, losses_in
from nanguard.autopilot.own_work import AtWork, Busy, Threads
from nanguard.autopilot.plain import PlainSteps
from nanguard.autopilot.registry import Registry, hosted_step_of, use_scaler
from nanguard.autopilot.stopped_device import StoppedDevice
from nanguard.autopilot.taping import ProgramTape
from nanguard.autopilot.tracing import Tracer
from nanguard.errors import NonFiniteError
from nanguard.hosted.closures import WatchedClosure
from nanguard.hosted.coordinator import ProgramCoordinator, StepCoordinator
from nanguard.hosted.given import raised_by_nonfinite
from nanguard.hosted.iteration import Iteration
from nanguard.hosted.optimizers import ProgramCall
from nanguard.hosted.settings import Settings
from nanguard.hosted.step import HostedStep
from nanguard.state.batch_indices import NotedSampler
from nanguard.state.rng import RngReader, RngState, reader_now
from nanguard.step.calls import Call, CallRecorder

log = logging.getLogger("nanguard")


class ProgramMonitor(ManualPrograms):
    """One for a process. ``patches`` calls it whenever the program does something that matters here.

    Several threads may train, each its own networks. Each thread has its own step under way. Only one thread at a time
    writes a tape or is traced.
    """

    def __init__(self, settings: Settings) -> None:
        self.registry = Registry(settings)
        self._threads = Threads(lambda: ProgramCoordinator(lambda: self.registry.hosted_steps))
        self._passes = BackwardPasses()
        self.stopped = StoppedDevice(self.registry, lambda: self._iteration, self._leave_alone)
        self.is_closed, self._num_forwards = False, 0
        self._rng_reader: RngReader | None = None
        self._begin_manual(is_examined=settings.diagnose != "off")
        self._tracer = Tracer(in_step=lambda: self._iteration.has_begun, is_nested=lambda: self.is_nested)
        self.taper = ProgramTape(self._random_states, is_wanted=settings.diagnose != "off")
        self._busy, self._making = Busy(self._threads, self.taper), threading.RLock()
        self._noting_losses = self._at_work("a loss could not be noted")
        self._recorder = CallRecorder("cpu", self.taper)
        self._listener = CallListener(self.before_forward, self._recorder, self._threads)
        self.children = Children(self._leave_alone, settings)
        self.plain = PlainSteps(self, self._threads, self._passes, self._tracer)

    # ---- what the program does -----------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether to ignore what happens now: our own work, a worker process, a CUDA graph that is being captured."""
        return self._threads.here.depth > 0 or self.is_closed or _compat_modes.is_capturing()

    @property
    def is_nested(self) -> bool:
        """Whether a backward pass is under way. What checkpointing does inside it is not a pass of the program."""
        return _compat_modes.is_in_backward()

    @property
    def is_running_again(self) -> bool:
        """Whether a backward pass of our own is under way. What hooks of the program do to optimizers has no effect."""
        return self.is_nested and not self._passes.is_in_one and any(h.is_rerunning for h in self.registry.hosted_steps)

    @property
    def is_aside(self) -> bool:
        """Whether nothing is recorded now: it is idle, or a backward pass is under way."""
        return self.is_idle or _compat_modes.is_in_backward()

    @contextlib.contextmanager
    def standing_aside(self) -> Iterator[None]:
        """While torch traces modules of the program: nothing is recorded, and no op is followed."""
        with self._tracer.suspended(lambda: self.registry.hosted_steps), self._busy:
            yield

    def made(self, optimizer: Optimizer) -> None:
        """The program has made an optimizer. Its ``__init__`` may not be finished yet."""
        with self._at_work("a new optimizer could not be examined"):
            roots = self.registry.expect(optimizer)
            self.taper.leave_out(optimizer)
            self._listener.listen(roots)
            if not self.registry.hosted_steps:  # what comes before the first call of a module is of the first step
                self.taper.follow(self._coordinator, is_alone=True)

    def guard_new_optimizers(self, *, in_call: bool = False) -> None:
        """Before the program computes anything with them, the optimizers that it has made get their hosted steps."""
        if self.registry.new and not (self.is_idle or (in_call and self.registry.misses_parameters())):
            with self._making:  # another thread may be at it
                while self.registry.new:
                    with self._at_work("an optimizer could not be guarded"):
                        self._attach(self.registry.guard_next())

    def fetched(self, noted: NotedSampler, batch: Any) -> None:
        """A loader has given a batch, for training as far as can be told."""
        if self.is_idle or not torch.is_grad_enabled():
            noted.pass_over(1)
            return
        with self._at_work("the indices of a batch could not be noted"):
            self._coordinator.note_fetched(noted.fetched(batch, self._num_forwards))
        if not self._num_forwards:
            self.taper.begin_anew()
        self.begin_taping()

    def before_forward(self, root: int) -> tuple[list[Call] | None, bool]:
        """A module is about to be called, inside the outermost one of this identity: its buffers are noted.

        Returns the list that the call is recorded in, None if it is not, and whether the tape was paused for it.
        """
        registry, here, taper = self.registry, self._threads.here, self.taper
        registry.used.add(root)
        if registry.new:
            self.guard_new_optimizers(in_call=True)
        if here.depth or self.is_closed or _compat_modes.current_pass() != -1 or _compat_modes.is_capturing():
            return None, False
        coordinator, hosted_steps = here.coordinator, registry.hosted_steps
        is_training = torch.is_grad_enabled()
        if is_training:
            self._num_forwards += 1
            if self._tracer.is_used:
                self._tracer.resume()
            if not taper.is_on:
                self._begin_tape(coordinator, hosted_steps)
        elif not coordinator.iteration.has_begun:
            taper.before_evaluation(root)
        was_taping = taper.pause()
        if was_taping and is_training:
            taper.before_call()
        here.depth += 1
        try:
            for hosted in hosted_steps:
                if root in hosted.root_identities:
                    if is_training:
                        coordinator.before_forward(hosted)
                    else:
                        hosted.before_evaluation()
        except NonFiniteError:
            raise
        except Exception as error:
            if not self.stopped.hear(error):
                log.exception("nanguard: what a step may change could not be noted")
        finally:
            here.depth -= 1
        if not is_training:
            return None, was_taping
        if coordinator.iteration.stepped:
            coordinator.begin_iteration()
        return coordinator.iteration.calls, was_taping

    def _attach(self, hosted: HostedStep | None) -> None:
        """Listens to the modules that a new hosted step trains."""
        if hosted is not None:
            self._listener.listen(hosted.roots)
            self._recorder.device = self.taper.device = hosted.parts.state.device.type
            self._recorder.rng_reader = self._rng_reader = hosted.parts.state.rng_reader
            self._tracer.start(self.registry.hosted_steps)

    def after_forward(self, tensors: Any, gradients: Any = None) -> None:
        """The program is about to compute gradients of these; ``gradients`` are those that it begins with."""
        if self.taper.is_begun:
            self.taper.stop()
        if self.registry.new:
            self.guard_new_optimizers()
        if self._tracer.is_used:
            self._tracer.resume()
        coordinator = self._coordinator
        with self._noting_losses, _compat_modes.unwatched():
            self._note_losses(coordinator, tensors, gradients)
        self._passes.begin(coordinator.iteration)

    def _note_losses(self, coordinator: StepCoordinator, tensors: Any, gradients: Any) -> None:
        losses, is_manual = losses_in(tensors), self._has_no_optimizer
        coordinator.after_forward(losses)
        leaves = leaves_of(losses) if is_manual else []
        self.taper.note_backward(tensors, gradients, leaves)
        if is_manual and losses:
            self._expect(losses, leaves)

    def after_backward(self, tensors: Any) -> None:
        """The gradients are there."""
        self._end_backward()
        losses = losses_in(tensors) if self._tracer.is_used or self._manual is not None else ()
        if losses:
            self._examine_trace(losses[-1])
        if losses and self._manual is not None and not self._with_optimizer:
            self._coordinator.note_finding(self.first_pass.finding(leaf.grad for leaf in self._manual.leaves))
            self._step_manually(self._manual)
        elif self.taper.goes_on_after_backward:
            self.begin_taping()

    def backward_raised(self, error: BaseException) -> None:
        with contextlib.suppress(NonFiniteError):
            self._end_backward(answers=isinstance(error, Exception) and not isinstance(error, NonFiniteError))

    def _end_backward(self, *, answers: bool = True) -> None:
        self._passes.end()
        if self._iteration.in_backward is not None:
            with self._at_work("a step inside a backward pass could not be examined"):
                self._coordinator.end_backward(answers=answers)
            self.after_step(self._coordinator)

    def before_scaler_step(self, optimizer: Optimizer, scaler: Any) -> int:
        """The program's GradScaler is about to step this optimizer, or to skip it. Returns ``num_calls``."""
        self.guard_new_optimizers()
        with self._busy:
            return use_scaler(optimizer, scaler)

    def _examine_trace(self, loss: Tensor | None) -> None:
        """While the gradients are there; without a loss if there was no backward pass, but gradients made by hand."""
        if (live := self._tracer.live) is None or (loss is None and self._iteration.losses):
            return
        with self._at_work("the trace of a step could not be examined"):
            if self._manual is not None and self._manual.hosted is not None:
                self._manual.hosted.look_again()
            self._iteration.live = live.after_backward(loss) or self._iteration.live

    def step(
        self,
        optimizer: Optimizer,
        call: ProgramCall,
        *,
        check_afterwards: bool = False,
        otherwise: Any = None,
        watched: WatchedClosure | None = None,
    ) -> Any:
        """The program calls ``step()``; ``call`` does nothing if its GradScaler has skipped the step.

        With ``check_afterwards`` the step computes gradients itself, in the closure ``watched`` if there is one. A step
        that is refused returns ``otherwise``.
        """
        taper, here = self.taper, self._threads.here
        if taper.is_begun:
            taper.stop()
        if not here.coordinator.iteration.losses:
            taper.note_gradients(optimizer)
        if self.registry.new:
            self.guard_new_optimizers()
        hosted = hosted_step_of(optimizer)
        if hosted is None:
            return call()
        is_nested, is_left, result = _compat_modes.is_in_backward(), False, None
        if hosted.has_grown() and not is_nested:
            self._tracer.stop()
            with self._busy:
                hosted.engine.settle()
                hosted = self.registry.renew(hosted)
        try:
            if is_nested:
                with self._busy:
                    result = self._passes.step(here.coordinator, hosted, call, check_afterwards=check_afterwards)
            elif check_afterwards:
                result = self._step_and_check(hosted, call, watched)
            else:
                if self._tracer.is_used:
                    self._examine_trace(None)
                    self._tracer.stop()
                if here.module is not None:
                    self._listener.look_inside(here.module)
                here.depth += 1  # the tape is off already
                try:
                    result = here.coordinator.step(hosted, call)
                finally:
                    here.depth -= 1
        except NonFiniteError:
            raise
        except Exception as error:
            if call.has_raised:  # an error of the program
                raise
            self.leave_to_program(hosted, error)
            is_left = True
        if is_left:  # not inside the handler: an error of the program would have ours as its context
            return call.result if call.is_called else call()
        if not is_nested:
            self.after_step(here.coordinator)
        return result if call.is_called else otherwise

    def leave_to_program(self, hosted: HostedStep, error: Exception) -> None:
        """After an error of ours: logs it, and the program goes on without us."""
        if not self.stopped.hear(error):
            name = type(hosted.optimizer).__name__
            log.exception("nanguard failed at a step of %s, which is not guarded from now on", name)
            self.registry.remove(hosted)

    def _step_and_check(self, hosted: HostedStep, call: ProgramCall, watched: WatchedClosure | None) -> Any:
        """The step itself calls forward and backward, which are recorded, and traced if necessary, as usual."""
        with self._busy, _compat_modes.unwatched():
            backup = hosted.before_unchecked_step()
            if watched is not None:
                watched.before = backup
        self._coordinator.begin_iteration()
        result = call()
        self.taper.stop()
        self._tracer.stop()
        with self._busy:
            self._iteration.stepped.append(hosted)
            hosted.after_unchecked_step(backup, self._iteration)
            hosted.learn_from(watched)
        return result

    @property
    def _coordinator(self) -> StepCoordinator:
        """Of this thread."""
        return self._threads.here.coordinator

    @property
    def _iteration(self) -> Iteration:
        return self._threads.here.coordinator.iteration

    def note_cleared(self) -> None:
        """The program has set gradients to zero: what losses gave before is gone."""
        this = self._threads.here.coordinator.iteration
        if not this.stepped:
            this.num_cleared = len(this.losses)

    # ---- what is recorded ----------------------------------------------------------------------------------------

    def _random_states(self) -> RngState | None:
        """None while a graph is captured: then they cannot be read."""
        return None if _compat_modes.is_capturing() else (self._rng_reader or reader_now()).now(self._num_forwards)

    def begin_taping(self) -> None:
        """The forward pass of a step comes next, if the program has an optimizer."""
        if not self.is_aside:
            self._begin_tape(self._coordinator, self.registry.hosted_steps)

    def _begin_tape(self, coordinator: StepCoordinator, hosted_steps: list[HostedStep]) -> None:
        if (hosted_steps or self.registry.new) and not (self._tracer.is_used and self._tracer.live is not None):
            self.taper.follow(coordinator, is_alone=len(hosted_steps) == 1)

    def after_step(self, coordinator: StepCoordinator) -> None:
        hosted_steps, this = self.registry.hosted_steps, coordinator.iteration
        is_over = len(hosted_steps) == 1 and hosted_steps[0].sync == "eager"  # else it may have to be examined
        if not this.calls:
            self._listener.listen_closer()
        elif is_over:
            this.calls.clear()  # they hold a batch
        for hosted in hosted_steps:
            if hosted.examinations.live.is_on:
                self._tracer.start(hosted_steps)
                break
        if self.taper.end_step(coordinator, is_over=is_over) and not self.is_aside:
            self._begin_tape(coordinator, hosted_steps)

    # ---- the end -------------------------------------------------------------------------------------------------

    def unsound(self) -> tuple[str, ...] | None:
        """Names of what is not finite now, None if the GPU has stopped. Syncs."""
        with self._busy, _compat_modes.unwatched():
            return None if self.stopped.words else self.registry.unsound()

    def end(self, error: BaseException | None) -> None:
        """The program ends now, because of ``error`` if there is one, maybe in the middle of a step that is bad."""
        if not self.stopped.hear(error) and not self.is_idle and self.children.is_parent:
            if self.taper.has_raised or raised_by_nonfinite(error, is_in_model=True):
                self.guard_new_optimizers()
            self._tracer.stop()
            with self._at_work("the last pass could not be examined"), _compat_modes.unwatched():
                self._coordinator.end(error, self.taper)

    def close(self) -> None:
        """Processes what is under way and ends the run log. Afterwards the program is not guarded."""
        if self.is_closed or not self.children.is_parent:
            return
        self.end(sys.exc_info()[1] or getattr(sys, "last_value", None))  # atexit comes after the traceback
        self._leave_alone()
        self._threads.here.depth += 1  # for good
        self.registry.close()
        self._listener.stop()

    def detach(self) -> None:
        """In a forked process that gets its own autopilot: removes everything of this one."""
        self._listener.stop()
        self.children.is_guarded()

    def _leave_alone(self) -> None:
        """Nothing is recorded from now on: at the end, or in a forked process, such as a worker of a DataLoader."""
        self._tracer.stop()
        self.taper.forget()
        self.is_closed = True

    def _at_work(self, failure: str) -> AtWork:
        return AtWork(self._threads, self.taper, failure, self.stopped.hear)
