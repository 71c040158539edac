"""Whose fault a bad step is, as far as it can be proven: the batch, or the weights."""

from __future__ import annotations

from dataclasses import replace

from nanguard.records.steps import Verdict
from nanguard.state.nonfinite import holds_nonfinite
from nanguard.step.dry_run import DryRun
from nanguard.step.parts import StepParts
from nanguard.step.pending import PendingStep


def holds_what_is_new(parts: StepParts, pending: PendingStep, last_good: PendingStep | None) -> bool:
    """Whether the batch holds NaN or Inf, and the last good one did not: some data do so on purpose. Syncs."""
    if not parts.ranks.any(any(map(holds_nonfinite, pending.batches))):
        return False
    was_so_before = last_good is not None and any(map(holds_nonfinite, last_good.batches))
    return not parts.ranks.any(was_so_before)


def by_rehearsal(
    parts: StepParts, dry_run: DryRun, pending: PendingStep, witness: PendingStep, verdict: Verdict
) -> Verdict:
    """The verdict with its cause, ``"unknown"`` if nothing is proven. ``witness`` is the last good step. Syncs.

    The batch is at fault if nothing but the batch differs: weights and loss function still work on the good one. All
    ranks ask together and get the same answer.
    """
    if dry_run.is_sound(witness):
        return replace(verdict, cause="batch") if _works_on(witness, pending, parts, dry_run) else verdict
    was_leaving = parts.journal.trend.beyond >= 2
    return replace(verdict, cause="weights", kind="divergence" if was_leaving else verdict.kind)


def _works_on(witness: PendingStep, pending: PendingStep, parts: StepParts, dry_run: DryRun) -> bool:
    """Whether the loss function of the bad step works on the good batch, which may have been given another one."""
    functions = [micro.loss_fn for micro in pending.microbatches]
    if parts.ranks.any(not functions):
        return False
    last = len(functions) - 1
    chosen = [functions[min(place, last)] for place in range(len(witness.microbatches))]
    is_same = all(micro.loss_fn == fn for micro, fn in zip(witness.microbatches, chosen, strict=True))
    if not parts.ranks.any(not is_same):
        return True
    micros = [replace(micro, loss_fn=fn) for micro, fn in zip(witness.microbatches, chosen, strict=True)]
    return dry_run.is_sound(replace(witness, microbatches=micros))
