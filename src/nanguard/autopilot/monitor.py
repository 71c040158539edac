"""Hears what the program does, and hands each optimizer's step to its pilot. The one place that knows all of them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanguard import _compat
from nanguard.autopilot.children import Children
from nanguard.autopilot.listener import CallListener
from nanguard.autopilot.manual_update import ManualUpdate, holding, leaves_of
from nanguard.autopilot.registry import Registry, hosted_step_of
from nanguard.autopilot.tracing import Tracer
from nanguard.diagnosis.graph_probe import examine_graph
from nanguard.errors import NonFiniteError
from nanguard.hosted.names import names_of_leaves
from nanguard.hosted.optimizers import Once, Step
from nanguard.hosted.settings import Settings
from nanguard.hosted.step import HostedStep, Iteration
from nanguard.source.frames import calling_line
from nanguard.state.rng import RngState
from nanguard.step.calls import Call, CallRecorder

log = logging.getLogger("nanguard")

_FEW = 8
_MOST_LOSSES = 256


class ProgramMonitor:
    """One for a process. ``patches`` calls it whenever the program does what concerns us."""

    def __init__(self, settings: Settings) -> None:
        self.registry = Registry(settings)
        self._hand: ManualUpdate | None = None
        self._round = Iteration()
        self._is_busy = False
        self._is_closed = False
        self._is_in_backward = False
        self._tracer = Tracer(in_step=self._has_begun_step, is_nested=lambda: self.is_nested)
        self._recorder = CallRecorder(self._open_calls, self._random_states, "cpu")
        self._listener = CallListener(self.heard, self._open_calls, self._recorder)
        self.children = Children(self._leave_alone)

    # ---- what the program does -----------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether what happens now is none of our business: our own work, a worker process, a graph being captured."""
        return self._is_busy or self._is_closed or _is_capturing()

    @property
    def is_nested(self) -> bool:
        """Whether a backward pass is under way already: what checkpointing does inside it is no pass of the program."""
        return self._is_in_backward

    @contextlib.contextmanager
    def standing_aside(self) -> Iterator[None]:
        """While the program has its modules traced: nothing is heard, and no op is followed."""
        was_tracing = self._tracer.live is not None and not self.is_nested
        self._tracer.stop()
        try:
            with self._busy():
                yield
        finally:
            if was_tracing:
                self._tracer.start(self.hosted_steps)

    def made(self, optimizer: Optimizer) -> None:
        """The program has made an optimizer; it may not be quite finished yet."""
        with self._at_work("an optimizer could not be looked at"):
            self._listener.listen(self.registry.expect(optimizer))

    def take_in(self) -> None:
        """Before the program computes anything with them, the optimizers that it has made get their pilots."""
        while self.registry.expects_somebody and not self.is_idle:
            with self._at_work("an optimizer could not be taken in"):
                self._welcome(self.registry.seat_next())

    def heard(self, root: int) -> None:
        """A module is about to be called, inside the outermost one of this identity: its buffers are noted."""
        self.registry.used.add(root)
        self.take_in()
        if self.is_idle or self.is_nested:
            return
        is_training = self._open_calls() is not None
        if is_training:
            self._tracer.resume()
        with self._at_work("what a step may change could not be noted"):
            for hosted in self.hosted_steps:
                if not any(id(each) == root for each in hosted.roots):
                    continue
                if not is_training:
                    hosted.parts.last_forward.mend_()
                elif hosted in self._round.noted:
                    hosted.parts.last_forward.follow_()
                else:
                    self._round.noted.append(hosted)
                    hosted.note_again()

    def _welcome(self, hosted: HostedStep | None) -> None:
        if hosted is not None:
            self._listener.listen(hosted.roots)
            self._recorder.device = hosted.parts.state.device.type
            self._tracer.start(self.hosted_steps)

    def backward(self, tensors: Any) -> None:
        """The program is about to compute gradients of these."""
        self.take_in()
        self._tracer.resume()
        with self._at_work("a loss could not be noted"), _compat.unwatched():
            losses = _losses(tensors)
            self._begin_round()
            seen = [_alone(getattr(loss, "_nanguard_loss", loss)) for loss in losses]
            for hosted in self._round.noted:
                hosted.parts.last_forward.was_used(seen)
            self._round.losses += seen
            del self._round.losses[:-_MOST_LOSSES]  # a program may differentiate for ever without a step
            if all(loss.device.type == "cpu" for loss in losses):  # elsewhere looking would mean waiting
                self._round.graph_finding = examine_graph(losses, calling_line()) or self._round.graph_finding
            if not self._seated and not self._is_left_alone and losses:
                self._hand = self._hand or ManualUpdate()
                self._hand.expect(leaves_of(losses))

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """Around the pass itself."""
        self._is_in_backward = True
        try:
            yield
        finally:
            self._is_in_backward = False

    def after_backward(self, tensors: Any) -> None:
        """The gradients are there."""
        losses = _losses(tensors)
        if losses:
            self._look_at_trace(losses[-1])
        if self._hand is not None and not self._seated and losses:
            self._step_by_hand(self._hand)

    def scaled_by(self, optimizer: Optimizer, scaler: Any) -> int:
        """The program's GradScaler is about to step this optimizer, or not; how often that has come to pass so far."""
        self.take_in()
        hosted = hosted_step_of(optimizer)
        if hosted is None:
            return 0
        with self._busy():
            hosted.use_scaler(scaler)
        return hosted.num_calls

    def _look_at_trace(self, loss: Tensor) -> None:
        """As long as the gradients are there."""
        live = self._tracer.live
        if live is None:
            return
        with self._at_work("what was traced could not be looked at"):
            if self._hand is not None and self._hand.hosted is not None:
                self._hand.hosted.look_again()
            self._round.live = live.after_backward(loss) or self._round.live

    def before_grad(self, outputs: Any) -> None:
        """The program is about to call ``torch.autograd.grad``, after which the graph is gone."""
        losses = _losses(outputs)
        if not self._seated and all(loss.device.type == "cpu" for loss in losses):
            with self._at_work("a loss could not be looked at"), _compat.unwatched():
                self._begin_round()
                self._round.graph_finding = examine_graph(losses, calling_line())

    def by_hand(self, outputs: Any, inputs: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        """What ``torch.autograd.grad`` gives a program without an optimizer: zeros where it is not finite."""
        self.take_in()
        losses = _losses(outputs)
        leaves = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
        pairs = list(zip(leaves, grads, strict=False))
        if self._seated or self._is_left_alone or not losses or not all(_is_trained(*pair) for pair in pairs):
            return grads
        with self._at_work("gradients could not be looked at"):
            self._begin_round()
            self._round.losses += [_alone(loss) for loss in losses]
            self._hand = self._hand or ManualUpdate()
            self._hand.expect(leaves)
            with holding(pairs):
                self._look_at_trace(losses[-1])
                self._step_by_hand(self._hand)
            if self._round.refused:
                return tuple(torch.zeros_like(grad) for grad in grads)
        return grads

    def step(self, optimizer: Optimizer, call: Step | None, *, is_blind: bool = False, otherwise: Any = None) -> Any:
        """The program calls ``step()``; with None its GradScaler has left the step out.

        An ``is_blind`` one computes gradients itself. ``otherwise`` is what comes back of a step that is refused.
        """
        self.take_in()
        hosted = hosted_step_of(optimizer)
        if hosted is None:
            return None if call is None else call()
        once = Once(call)
        if hosted.has_grown and not self.is_nested:
            self._tracer.stop()
            with self._busy():
                hosted.engine.settle()
                hosted = self.registry.renew(hosted)
        try:
            if is_blind:
                result = self._step_blindly(hosted, once)
            else:
                self._tracer.stop()
                with self._busy():
                    result = self._step(hosted, None if call is None else once)
        except NonFiniteError:
            raise
        except Exception:
            if once.has_raised:  # the program's own
                raise
            log.exception("nanguard failed at a step of %s, which is not guarded from now on", type(optimizer).__name__)
            self.registry.dismiss(hosted)
            return once.result if once.is_called else once()
        self._tracer.start(self.hosted_steps)
        return result if once.is_called else otherwise

    def num_calls(self, optimizer: Optimizer) -> int:
        """How often its ``step()`` has come by here."""
        hosted = hosted_step_of(optimizer)
        return 0 if hosted is None else hosted.num_calls

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _step(self, hosted: HostedStep, call: Step | None) -> Any:
        if hosted in self._round.stepped:  # without a backward pass: the program sets gradients itself
            self._begin_round()
        this = self._round
        is_first = not this.stepped
        if self.is_nested:  # in the middle of a backward pass nothing can be run again, nor a trace begin or end
            this.calls.clear()
            hosted.examinations.live.is_allowed = False
        this.stepped.append(hosted)
        is_torn = this.refused or (is_first and self._has_bad_companion(hosted))
        if call is not None and is_torn and not hosted.has_bad_gradients():  # who has bad ones says so
            this.refused = True
            hosted.sit_out(this)
            result = None
        else:
            result = hosted.step(call, this)
        if this.refused:
            for other in this.noted:
                if other is not hosted:
                    other.put_back()
        if not this.calls:
            self._listener.listen_closer()
        if len(self.hosted_steps) == 1:
            this.calls.clear()  # nobody else will ask for them, and they hold a batch
        return result

    def _step_blindly(self, hosted: HostedStep, call: Step) -> Any:
        """The step itself calls forward and backward, which are heard, and traced if need be, as at any other time."""
        with self._busy(), _compat.unwatched():
            backup = hosted.before_blind_step()
        self._begin_round()
        result = call()
        self._tracer.stop()
        with self._busy():
            self._round.stepped.append(hosted)
            hosted.after_blind_step(backup, self._round)
        return result

    def _begin_round(self) -> None:
        """Where an optimizer has stepped, what happens now belongs to the next steps."""
        if self._round.stepped:
            together = frozenset(map(id, self._round.stepped))
            for hosted in self._round.stepped:
                hosted.stepped_together = together
            self._round = Iteration()

    def _has_bad_companion(self, hosted: HostedStep) -> bool:
        """Whether one that steps right after this one will be refused: an update by halves is worse than none."""
        others = [each for each in self.hosted_steps if each is not hosted]
        if hosted.stepped_together is not None:
            others = [each for each in others if id(each) in hosted.stepped_together]
        elif len(others) > _FEW:  # not known yet: those whose modules were called as well
            others = [each for each in others if each in self._round.noted]
        return any(other.has_bad_gradients() and not other.is_blind for other in others)

    def _step_by_hand(self, hand: ManualUpdate) -> None:
        """A program without an optimizer: each backward pass is a step, and bad gradients become zeros."""
        with self._at_work("a step could not be looked at"):
            self._tracer.stop()
            if hand.hosted is None:
                hand.hosted = self.registry.enroll(hand.optimizer, "", names_of_leaves(hand.leaves))
                self._welcome(hand.hosted)
                self._tracer.stop()
            if hand.hosted is not None:
                self._round.stepped.append(hand.hosted)
                hand.hosted.look_again()
                hand.hosted.step(lambda: None, self._round)
                if self._round.refused:
                    hand.clear_gradients()
        self._tracer.start(self.hosted_steps)

    @property
    def hosted_steps(self) -> list[HostedStep]:
        return self.registry.hosted_steps

    @property
    def _is_left_alone(self) -> bool:
        """Whether the program has optimizers that are not ours to look after."""
        return self.registry.has_guard or bool(self.registry.unguarded)

    @property
    def _seated(self) -> list[HostedStep]:
        return [hosted for hosted in self.hosted_steps if self._hand is None or hosted is not self._hand.hosted]

    # ---- what is noted -------------------------------------------------------------------------------------------

    def _open_calls(self) -> list[Call] | None:
        if self.is_idle or self.is_nested or not torch.is_grad_enabled():
            return None
        self._begin_round()
        return self._round.calls

    def _random_states(self) -> RngState | None:
        hosted_steps = self.hosted_steps
        return hosted_steps[0].parts.state.rng_reader.now(hosted_steps[0].parts.num_steps) if hosted_steps else None

    def _has_begun_step(self) -> bool:
        """Whether a module was called with gradients since an optimizer last stepped."""
        return bool(self._round.calls) and not self._round.stepped

    # ---- the end -------------------------------------------------------------------------------------------------

    def unsound(self) -> tuple[str, ...]:
        """Names of what is not finite now. Syncs."""
        with self._busy(), _compat.unwatched():
            return self.registry.unsound()

    def close(self) -> None:
        """Hears of what is under way, and ends the run log. Afterwards the program is on its own."""
        if self._is_closed or not self.children.is_parent:
            return
        self._tracer.stop()
        self._is_busy = True
        self.registry.close()
        self._listener.hang_up()
        self._is_closed = True

    def hang_up(self) -> None:
        """In a forked process that gets a guard of its own: nothing of this one is left."""
        self._listener.hang_up()
        self.children.is_guarded()

    def _leave_alone(self) -> None:
        """In a forked process, such as a worker of a DataLoader."""
        self._tracer.stop()
        self._is_closed = True

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        before, self._is_busy = self._is_busy, True
        try:
            yield
        finally:
            self._is_busy = before

    @contextlib.contextmanager
    def _at_work(self, failure: str) -> Iterator[None]:
        """A fault of our own is said, and never the program's end."""
        try:
            with self._busy():
                yield
        except NonFiniteError:
            raise
        except Exception:
            log.exception("nanguard: %s", failure)


def _losses(tensors: Any) -> list[Tensor]:
    """Of what is differentiated, the numbers."""
    several = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    return [t for t in several if isinstance(t, Tensor) and t.numel() == 1 and t.is_floating_point()]


def _alone(loss: Tensor) -> Tensor:
    """Without its graph, and without the storage that it may be a small part of."""
    number = loss.detach().reshape(())
    return number if _compat.storage_size(number) <= number.element_size() else number.clone()


def _is_trained(leaf: Any, grad: Any) -> bool:
    return isinstance(leaf, Tensor) and isinstance(grad, Tensor) and leaf.is_leaf and leaf.requires_grad


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
