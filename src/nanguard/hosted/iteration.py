"""What happened since an optimizer last stepped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nanguard.state.batch_indices import FetchedBatch
from nanguard.step.calls import Call
from nanguard.step.pending import Microbatch, PendingStep
from nanguard.step.tape import CallTape

if TYPE_CHECKING:
    from nanguard.hosted.in_backward import StepsInBackward
    from nanguard.hosted.step import HostedStep


class Iteration:
    """Optimizers that step without another backward pass in between share one iteration.

    One is made for each step, so it has only what each step has. The rest are attributes of the class, until they are
    set.

    ``noted`` are the hosted steps whose buffers were noted, ``stepped`` those that have stepped, ``unapplied`` those of
    them whose step had no effect. ``refused`` says that a step was not let through for another reason than an overflow
    of scaled gradients. ``divisors`` are the numbers by which the program has divided ``losses``, if there are several.
    Of the first ``num_cleared`` losses the program has cleared the gradients, None if that is not known. ``reruns`` are
    micro-batches that the host can run again with its own step function; ``uses_every_loss`` says that the host never
    throws the gradients of a loss away without saying so. ``tape`` has torch calls outside modules,
    ``fetched`` the batches that loaders of the program gave for it. ``live`` is the trace, if there is one;
    ``graph_finding`` what the graph of a bad loss shows. ``in_backward`` are steps inside the backward pass, if any.
    """

    batches: Sequence[Any] = ()
    reruns: Sequence[Microbatch] = ()
    uses_every_loss = False
    unapplied: Sequence[HostedStep] = ()
    refused = False
    live: Any = None
    graph_finding: Any = None
    in_backward: StepsInBackward | None = None

    def __init__(self, num_cleared: int | None, tape: CallTape, fetched: list[FetchedBatch]) -> None:
        self.num_cleared, self.tape, self.fetched = num_cleared, tape, fetched
        self.losses: list[Tensor] = []
        self.divisors: list[float] = []
        self.calls: list[Call] = []
        self.noted: list[HostedStep] = []
        self.stepped: list[HostedStep] = []

    def add_batch(self, batch: Any) -> None:
        self.batches = [*self.batches, batch]

    def add_rerun(self, micro: Microbatch) -> None:
        self.reruns = [*self.reruns, micro]

    def was_not_applied(self, hosted: HostedStep) -> None:
        """The step of ``hosted`` had no effect."""
        self.unapplied = [*self.unapplied, hosted]

    def add_to(self, pending: PendingStep) -> None:
        """What is needed to examine this step."""
        pending.calls = [call for call in self.calls if call.is_part_of_step]
        pending.last_seen = list(self.batches) or [(call.args, dict(call.kwargs)) for call in self.calls]
        pending.live, pending.graph_finding = self.live, self.graph_finding
        pending.microbatches = list(self.reruns)
        pending.tape = self.tape if self.tape.losses else None
        pending.fetched = list(self.fetched)
        pending.others = tuple(self.noted)

    @property
    def most_cleared(self) -> int:
        """The program can have cleared the gradients of at most so many losses, the first ones."""
        if self.uses_every_loss:
            return 0
        return len(self.losses) if self.num_cleared is None or len(self.noted) != 1 else self.num_cleared

    @property
    def has_begun(self) -> bool:
        """Whether a module was called with gradients since an optimizer last stepped."""
        return bool(self.calls) and not self.stepped
