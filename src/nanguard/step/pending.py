"""A step that is not finished: what was noted when it began, and its micro-batches so far."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nanguard.records.steps import Verdict
from nanguard.state.batch_indices import FetchedBatch
from nanguard.state.readback import PendingCopy
from nanguard.state.rng import RngState
from nanguard.state.schedule import ScheduleNote
from nanguard.state.training_modes import NO_MODES, TrainingModes
from nanguard.state.undo import Copies, Undo
from nanguard.step.calls import Call
from nanguard.step.measurement import EMPTY_LAYOUT, Group, MeasuredValues, MeasurementLayout
from nanguard.step.tape import CallTape

LossFn = Callable[[Any, Any], Any]

LAG = 2
"""How many steps are in flight before the host looks at the first of them."""


@dataclass(slots=True)
class Microbatch:
    """One call of the loss function, with all that is needed to call it again.

    A dict or list is passed on as a copy, since loss functions may remove items. ``shown`` is the loss that the user
    was given: if the step runs again, it is set to the new value.
    """

    loss_fn: LossFn
    batch: Any
    rng: RngState | None
    reduce_gradients: bool
    autocast: tuple[bool, torch.dtype] = (False, torch.bfloat16)
    shown: Tensor | None = None

    def fresh_batch(self) -> Any:
        if self.rng is not None and isinstance(self.batch, (list, MutableMapping)):
            return copy(self.batch)
        return self.batch

    def show(self, loss: Tensor) -> None:
        if self.shown is not None:
            self.shown.copy_(loss)


class StepEvidence(Protocol):
    """What happened in a step, for those who examine it."""

    def add_to(self, pending: PendingStep) -> None:
        """Sets its ``calls``, ``tape``, ``microbatches`` and whatever else is known of it."""


class Noted(Protocol):
    """A network whose buffers were noted."""

    def put_back(self) -> None:
        """Puts its buffers back to what they were when they were noted."""


class OnDevice(NamedTuple):
    """A step that was measured on the device: the flag that says whether to skip it, and the latch before, if asked."""

    groups: list[Group]
    skip: Tensor
    latched_before: Tensor | None


@dataclass(slots=True)
class PendingStep:
    """One optimizer step, from its beginning until the host has processed its reading.

    ``divisor`` is the number of micro-batches the step's mean is taken over. ``rerunnable`` says whether the guard
    itself ran the forward pass and can do so again. ``last_seen`` is what ``guard.epoch`` gave last, ``last_batch`` its
    position, ``fetched`` are the batches that a loader gave for this step; ``lrs`` are the learning rates it is made
    with; ``is_spoiled`` says that its update was taken back. In a loop of the user's own ``has_begun`` says that there
    was a forward pass, ``calls`` are those of the model, ``tape`` has the torch calls around it, and ``live`` is how
    the step ran, if it was traced. ``measured``, or ``on_device`` if the host does not wait, is set if it was measured
    before it was finished, ``verdict`` once its reading has been judged. ``is_in_backward`` says that the optimizer
    steps while a backward pass is under way: a bad step is then answered after it. ``num_stepped_before`` other
    optimizers have stepped in that pass before.
    """

    step: int
    epoch: int
    batch: int | None
    rerunnable: bool
    divisor: int
    microbatches: list[Microbatch] = field(default_factory=list)
    last_seen: Any = None
    last_batch: int | None = None
    fetched: list[FetchedBatch] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    knows_loss: bool = True
    in_microbatch: bool = False
    has_begun: bool = False
    is_outside: bool = False
    """Whether it stands for what the program did between two steps, with any of its networks."""
    is_in_backward: bool = False
    num_stepped_before: int = 0
    flags: list[Tensor] = field(default_factory=list)
    shown: Tensor | None = None
    elsewhere: list[tuple[Undo, Copies]] = field(default_factory=list)
    schedule: ScheduleNote | None = None
    num_states: tuple[int, ...] = ()
    training: TrainingModes = NO_MODES
    lrs: tuple[float | None, ...] = ()
    layout: MeasurementLayout = EMPTY_LAYOUT
    measured: MeasuredValues | None = None
    on_device: OnDevice | None = None
    readback: PendingCopy | None = None
    before_clipping: PendingCopy | None = None
    """By what the program has divided the gradients of each group."""
    known_norms: Tensor | None = None
    """Of the gradients before the program has clipped them, if it has."""
    verdict: Verdict | None = None
    latches: bool = True
    is_spoiled: bool = False
    calls: list[Call] = field(default_factory=list)
    tape: CallTape | None = None
    live: Any = None
    graph_finding: Any = None
    others: Sequence[Noted] = ()
    """Networks that others train and that this step has called: their buffers are put back before it is examined."""
    evidence: StepEvidence | None = None
    """Has what is needed to examine the step, if it is not here yet: a sound step does without."""

    @property
    def is_put_off(self) -> bool:
        """Whether it was refused, and is to be answered when the backward pass has ended."""
        return self.is_in_backward and self.verdict is not None and self.readback is None

    def complete(self) -> None:
        """Before it is answered."""
        if self.evidence is not None:
            self.evidence.add_to(self)
            self.evidence = None

    def let_go(self) -> None:
        """It is over: holds no batch any more."""
        self.calls, self.microbatches = [], []
        self.last_seen = self.tape = self.evidence = None
        self.others = ()

    @property
    def batches(self) -> list[Any]:
        """The batches of the step, as far as they are known."""
        return [micro.batch for micro in self.microbatches] or [self.last_seen]

    def afresh(self) -> PendingStep:
        """The same step, not yet run."""
        return replace(self, losses=[], flags=[], readback=None, verdict=None, is_spoiled=False)

    def show_mean(self) -> None:
        if self.shown is not None:
            self.shown.copy_(self.mean_loss())

    def mean_loss(self) -> Tensor:
        """The mean over the micro-batches that were kept; NaN if none was. Does not sync."""
        if len(self.losses) == 1 and not self.flags:
            return self.losses[0]
        losses = torch.stack([loss.double() for loss in self.losses])
        if not self.flags:
            return losses.mean()
        dropped = torch.stack(self.flags)
        return torch.where(dropped != 0, 0.0, losses).sum() / (1 - dropped).sum()

    def correction(self) -> Tensor | None:
        """The factor that makes the sum of gradients the mean over the kept micro-batches; None if it is 1.

        In the user's own loop it only makes up for what was dropped: how often to call backward is up to the user.
        """
        gathered = len(self.losses)
        expected = self.divisor if self.rerunnable else gathered
        if self.flags:
            return expected / (1 - torch.stack(self.flags).double()).sum()
        return None if gathered == expected else self.losses[0].new_full((), expected / gathered, dtype=torch.float64)
