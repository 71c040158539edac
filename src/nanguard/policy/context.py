"""What a rung is given to act with. Types only: ``recovery`` implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from nanguard.records.diagnosis import Diagnosis
from nanguard.records.steps import Verdict

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class RungContext(Protocol):
    """The bad step, and the verbs of recovery.

    The step was refused: weights, buffers and optimizer state are as they were before it. If a warning is answered
    (``verdict.alert``), no step was refused: all steps so far are applied, and the next has not begun. Each verb
    returns what it did, in words; None if it could not do it, and then nothing has changed.
    """

    @property
    def verdict(self) -> Verdict:
        """What happened, and what could be done about it."""

    @property
    def diagnosis(self) -> Diagnosis | None:
        """Where it came from and why; None if the step was not examined."""

    @property
    def count(self) -> int:
        """How many times the rung has been used in its span, this time included."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def optimizers(self) -> Sequence[Optimizer]: ...

    def lower_lr(self, factor: float, *, recover_after: int | None = None) -> str:
        """Multiplies the learning rate; after ``recover_after`` steps without trouble it is as scheduled again."""

    def raise_precision(
        self, scope: Literal["module", "model"], *, verify: bool = True, retry_after: int | None = None
    ) -> str | None:
        """Runs the guilty module, or the whole model, in fp32, as ``RaisePrecision`` does."""

    def take_snapshot(self) -> str | None:
        """Has a snapshot taken before the next step, whether one is due or not."""

    def roll_back(
        self,
        steps: int = 1,
        *,
        skip_batches: int | Literal["failed"] = 0,
        lr: float = 1.0,
        raise_precision: bool = False,
    ) -> str | None:
        """Puts everything back to a good snapshot, as ``Rollback`` does; one snapshot further for each use."""

    def restore_newest(self) -> str | None:
        """Puts back the newest good snapshot, however often the rung was used."""

    def is_step_finite(self) -> bool | None:
        """Whether loss and gradients of the failed step are finite now. None if the step cannot be run again.

        Runs forward and backward without a trace: only the answer is left. All ranks must call it together.
        """
