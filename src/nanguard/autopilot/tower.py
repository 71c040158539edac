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
from nanguard.autopilot.byhand import Hand, holding, leaves_of
from nanguard.autopilot.children import Children
from nanguard.autopilot.listening import Switchboard
from nanguard.autopilot.names import names_of_leaves
from nanguard.autopilot.pilot import Pilot, Round
from nanguard.autopilot.roster import Roster, pilot_of
from nanguard.autopilot.settings import Settings
from nanguard.autopilot.shield import Once, Step
from nanguard.autopilot.tracing import Tracer
from nanguard.capture import Call, Ear
from nanguard.diagnosis.autopsy import examine_graph
from nanguard.diagnosis.source import calling_line
from nanguard.errors import NonFiniteError
from nanguard.rng import RngState

log = logging.getLogger("nanguard")

_FEW = 8
_MOST_LOSSES = 256


class Tower:
    """One for a process. ``patches`` calls it whenever the program does what concerns us."""

    def __init__(self, settings: Settings) -> None:
        self.roster = Roster(settings)
        self._hand: Hand | None = None
        self._round = Round()
        self._is_busy = False
        self._is_closed = False
        self._is_in_backward = False
        self._tracer = Tracer(in_step=self._has_begun_step, is_nested=lambda: self.is_nested)
        self._ear = Ear(self._open_calls, self._random_states, "cpu")
        self._switchboard = Switchboard(self.heard, self._open_calls, self._ear)
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
                self._tracer.start(self.pilots)

    def made(self, optimizer: Optimizer) -> None:
        """The program has made an optimizer; it may not be quite finished yet."""
        with self._at_work("an optimizer could not be looked at"):
            self._switchboard.listen(self.roster.expect(optimizer))

    def take_in(self) -> None:
        """Before the program computes anything with them, the optimizers that it has made get their pilots."""
        while self.roster.expects_somebody and not self.is_idle:
            with self._at_work("an optimizer could not be taken in"):
                self._welcome(self.roster.seat_next())

    def heard(self, root: int) -> None:
        """A module is about to be called, inside the outermost one of this identity: its buffers are noted."""
        self.roster.used.add(root)
        self.take_in()
        if self.is_idle or self.is_nested:
            return
        is_training = self._open_calls() is not None
        if is_training:
            self._tracer.resume()
        with self._at_work("what a step may change could not be noted"):
            for pilot in self.pilots:
                if not any(id(each) == root for each in pilot.roots):
                    continue
                if not is_training:
                    pilot.bench.last_forward.mend_()
                elif pilot in self._round.noted:
                    pilot.bench.last_forward.follow_()
                else:
                    self._round.noted.append(pilot)
                    pilot.note_again()

    def _welcome(self, pilot: Pilot | None) -> None:
        if pilot is not None:
            self._switchboard.listen(pilot.roots)
            self._ear.device = pilot.bench.device.type
            self._tracer.start(self.pilots)

    def backward(self, tensors: Any) -> None:
        """The program is about to compute gradients of these."""
        self.take_in()
        self._tracer.resume()
        with self._at_work("a loss could not be noted"), _compat.unwatched():
            losses = _losses(tensors)
            self._begin_round()
            seen = [_alone(getattr(loss, "_nanguard_loss", loss)) for loss in losses]
            for pilot in self._round.noted:
                pilot.bench.last_forward.was_used(seen)
            self._round.losses += seen
            del self._round.losses[:-_MOST_LOSSES]  # a program may differentiate for ever without a step
            if all(loss.device.type == "cpu" for loss in losses):  # elsewhere looking would mean waiting
                self._round.remains = examine_graph(losses, calling_line()) or self._round.remains
            if not self._seated and not self._is_left_alone and losses:
                self._hand = self._hand or Hand()
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
        pilot = pilot_of(optimizer)
        if pilot is None:
            return 0
        with self._busy():
            pilot.use_scaler(scaler)
        return pilot.num_calls

    def _look_at_trace(self, loss: Tensor) -> None:
        """As long as the gradients are there."""
        live = self._tracer.live
        if live is None:
            return
        with self._at_work("what was traced could not be looked at"):
            if self._hand is not None and self._hand.pilot is not None:
                self._hand.pilot.look_again()
            self._round.live = live.after_backward(loss) or self._round.live

    def before_grad(self, outputs: Any) -> None:
        """The program is about to call ``torch.autograd.grad``, after which the graph is gone."""
        losses = _losses(outputs)
        if not self._seated and all(loss.device.type == "cpu" for loss in losses):
            with self._at_work("a loss could not be looked at"), _compat.unwatched():
                self._begin_round()
                self._round.remains = examine_graph(losses, calling_line())

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
            self._hand = self._hand or Hand()
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
        pilot = pilot_of(optimizer)
        if pilot is None:
            return None if call is None else call()
        once = Once(call)
        if pilot.has_grown and not self.is_nested:
            self._tracer.stop()
            with self._busy():
                pilot.steps.settle()
                pilot = self.roster.renew(pilot)
        try:
            if is_blind:
                result = self._step_blindly(pilot, once)
            else:
                self._tracer.stop()
                with self._busy():
                    result = self._step(pilot, None if call is None else once)
        except NonFiniteError:
            raise
        except Exception:
            if once.has_raised:  # the program's own
                raise
            log.exception("nanguard failed at a step of %s, which is not guarded from now on", type(optimizer).__name__)
            self.roster.dismiss(pilot)
            return once.result if once.is_called else once()
        self._tracer.start(self.pilots)
        return result if once.is_called else otherwise

    def num_calls(self, optimizer: Optimizer) -> int:
        """How often its ``step()`` has come by here."""
        pilot = pilot_of(optimizer)
        return 0 if pilot is None else pilot.num_calls

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _step(self, pilot: Pilot, call: Step | None) -> Any:
        if pilot in self._round.stepped:  # without a backward pass: the program sets gradients itself
            self._begin_round()
        this = self._round
        is_first = not this.stepped
        if self.is_nested:  # in the middle of a backward pass nothing can be run again, nor a trace begin or end
            this.calls.clear()
            pilot.clinic.live.is_allowed = False
        this.stepped.append(pilot)
        is_torn = this.refused or (is_first and self._has_bad_companion(pilot))
        if call is not None and is_torn and not pilot.has_bad_gradients():  # who has bad ones says so
            this.refused = True
            pilot.sit_out(this)
            result = None
        else:
            result = pilot.step(call, this)
        if this.refused:
            for other in this.noted:
                if other is not pilot:
                    other.put_back()
        if not this.calls:
            self._switchboard.listen_closer()
        if len(self.pilots) == 1:
            this.calls.clear()  # nobody else will ask for them, and they hold a batch
        return result

    def _step_blindly(self, pilot: Pilot, call: Step) -> Any:
        """The step itself calls forward and backward, which are heard, and traced if need be, as at any other time."""
        with self._busy(), _compat.unwatched():
            backup = pilot.before_blind_step()
        self._begin_round()
        result = call()
        self._tracer.stop()
        with self._busy():
            self._round.stepped.append(pilot)
            pilot.after_blind_step(backup, self._round)
        return result

    def _begin_round(self) -> None:
        """Where an optimizer has stepped, what happens now belongs to the next steps."""
        if self._round.stepped:
            together = frozenset(map(id, self._round.stepped))
            for pilot in self._round.stepped:
                pilot.companions = together
            self._round = Round()

    def _has_bad_companion(self, pilot: Pilot) -> bool:
        """Whether one that steps right after this one will be refused: an update by halves is worse than none."""
        others = [each for each in self.pilots if each is not pilot]
        if pilot.companions is not None:
            others = [each for each in others if id(each) in pilot.companions]
        elif len(others) > _FEW:  # not known yet: those whose modules were called as well
            others = [each for each in others if each in self._round.noted]
        return any(other.has_bad_gradients() and not other.is_blind for other in others)

    def _step_by_hand(self, hand: Hand) -> None:
        """A program without an optimizer: each backward pass is a step, and bad gradients become zeros."""
        with self._at_work("a step could not be looked at"):
            self._tracer.stop()
            if hand.pilot is None:
                hand.pilot = self.roster.enroll(hand.optimizer, "", names_of_leaves(hand.leaves))
                self._welcome(hand.pilot)
                self._tracer.stop()
            if hand.pilot is not None:
                self._round.stepped.append(hand.pilot)
                hand.pilot.look_again()
                hand.pilot.step(lambda: None, self._round)
                if self._round.refused:
                    hand.clear_gradients()
        self._tracer.start(self.pilots)

    @property
    def pilots(self) -> list[Pilot]:
        return self.roster.pilots

    @property
    def _is_left_alone(self) -> bool:
        """Whether the program has optimizers that are not ours to look after."""
        return self.roster.has_guard or bool(self.roster.unguarded)

    @property
    def _seated(self) -> list[Pilot]:
        return [pilot for pilot in self.pilots if self._hand is None or pilot is not self._hand.pilot]

    # ---- what is noted -------------------------------------------------------------------------------------------

    def _open_calls(self) -> list[Call] | None:
        if self.is_idle or self.is_nested or not torch.is_grad_enabled():
            return None
        self._begin_round()
        return self._round.calls

    def _random_states(self) -> RngState | None:
        pilots = self.pilots
        return pilots[0].bench.dice.now(pilots[0].bench.num_steps) if pilots else None

    def _has_begun_step(self) -> bool:
        """Whether a module was called with gradients since an optimizer last stepped."""
        return bool(self._round.calls) and not self._round.stepped

    # ---- the end -------------------------------------------------------------------------------------------------

    def unsound(self) -> tuple[str, ...]:
        """Names of what is not finite now. Syncs."""
        with self._busy(), _compat.unwatched():
            return self.roster.unsound()

    def close(self) -> None:
        """Hears of what is under way, and ends the run log. Afterwards the program is on its own."""
        if self._is_closed or not self.children.is_parent:
            return
        self._tracer.stop()
        self._is_busy = True
        self.roster.close()
        self._switchboard.hang_up()
        self._is_closed = True

    def hang_up(self) -> None:
        """In a forked process that gets a guard of its own: nothing of this one is left."""
        self._switchboard.hang_up()
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
