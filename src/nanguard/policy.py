"""What to make of a reading, and what to do about it. Pure functions of records: the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nanguard.records import Action, Outcome, Reading, Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How much trouble a run may have.

    Up to ``patience`` non-finite steps ``per`` epoch (or run) are skipped; the next one halts training with
    ``NonFiniteError``. A corrupt update is never accepted, whatever the count.

    With ``drop_bad_gradients`` a step with a finite loss whose gradients are non-finite for some parameters is
    applied to the others: the bad gradients become None, so that their parameters and moments stay as they are. It
    makes the host check every step, and is ignored under fp16 loss scaling, where an overflow says nothing about a
    single parameter.
    """

    patience: int = 3
    per: Literal["epoch", "run"] = "epoch"
    drop_bad_gradients: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.patience, bool) or not isinstance(self.patience, int) or self.patience < 0:
            raise ValueError(f"patience must be a whole number, 0 or more, got {self.patience!r}")
        if self.per not in ("epoch", "run"):
            raise ValueError(f"per must be 'epoch' or 'run', got {self.per!r}")


def judge(reading: Reading, *, scale_floor: float | None = None) -> Verdict:
    """What a reading means.

    With a loss scale (``scale_floor`` given), non-finite gradients behind a finite loss are a routine overflow as
    long as the scale can still go down.
    """
    if not reading.found:
        return Verdict(kind="healthy", reading=reading)
    can_back_off = scale_floor is not None and reading.scale is not None and reading.scale > scale_floor
    routine = can_back_off and reading.found == ("gradients",)
    return Verdict(kind="overflow" if routine else "nonfinite", reading=reading)


def decide(policy: Policy, history: Sequence[Outcome], verdict: Verdict) -> Action:
    """What to do, given the outcomes of the steps that needed an answer before."""
    if verdict.kind == "healthy":
        return Action(response="drop_gradients" if verdict.reading.dropped_gradients else "apply")
    if verdict.kind == "overflow":
        return Action(response="back_off")
    epoch = verdict.reading.epoch
    before = sum(
        past.action.response == "skip" and (policy.per == "run" or past.verdict.reading.epoch == epoch)
        for past in history
    )
    response: Literal["skip", "halt"] = "skip" if before < policy.patience else "halt"
    return Action(response=response, count=before + 1, patience=policy.patience, per=policy.per)
