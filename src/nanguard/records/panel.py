"""What a person reads in the terminal when something happened. Pure text, no colour."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nanguard.records.diagnosis_text import rows as diagnosis_rows
from nanguard.records.steps import Action, Incident, Outcome, Reading, span_in_words

_CAUSES = {
    "input": "the batch itself holds NaN or Inf",
    "batch": "this batch: the weights still work on one that was good before",
    "weights": "the weights: a batch that was good before is no longer",
}


def panel(incident: Incident, where: str | None = None, *, in_a_row: int = 1) -> str:
    """The incident in a few lines; ``where`` is the run log, if there is one.

    In one line where it is the same again, ``in_a_row`` times in all.
    """
    again = in_a_row > 1
    times = f" ({in_a_row:,} in a row)" if again else ""
    head = f" nanguard  step {incident.reading.step:,}  {headline(incident.outcome, again=again)}{times}"
    shown = [] if again else rows(incident.outcome, where)
    return "\n".join([head] + [f"   {name:<9} {text}" for name, text in shown])


def headline(outcome: Outcome, *, again: bool = False) -> str:
    """What happened, and what was done about it, in one line."""
    return f"{_noun(outcome)}{' again' * again}: {_headline(outcome)}"


def rows(outcome: Outcome, where: str | None = None) -> list[tuple[str, str]]:
    """Name and text of each row under the headline."""
    reading = outcome.verdict.reading
    told = [("found", _found(outcome))]
    if reading.batch is not None:
        told.append(("batch", _position(reading)))
    cause = outcome.verdict.cause
    if outcome.diagnosis is not None:
        told += diagnosis_rows(outcome.diagnosis)
    elif outcome.verdict.kind == "divergence" and not reading.found and cause == "weights":
        told.append(("cause", "the weights: they have become worse, not the data harder"))
    elif cause in _CAUSES and outcome.verdict.kind != "damage":
        told.append(("cause", _CAUSES[cause]))
    if reading.ranks:
        told.append(("ranks", "seen first by " + _listed([f"rank {flags.rank}" for flags in reading.ranks])))
    if reading.dropped_microbatches:
        told.append(("dropped", "micro-batch " + _listed([str(i) for i in reading.dropped_microbatches])))
    if reading.dropped_gradients:
        told.append(("dropped", _listed(reading.dropped_gradients)))
    if outcome.did:
        told.append(("done", outcome.did))
    if not outcome.applied and not outcome.action.changes_more and outcome.verdict.kind != "damage":
        told.append(("kept", _untouched(outcome)))
    if outcome.rerun:
        told.append(("in flight", f"{_steps(outcome.rerun)} behind it had no effect and ran again"))
    if outcome.lost and outcome.is_rollback:
        told.append(("in flight", f"{_steps(outcome.lost)} behind it had no effect and count no more"))
    elif outcome.lost:
        told.append(("in flight", f"{_steps(outcome.lost)} behind it had no effect and count as skipped"))
    if outcome.bundle:
        told.append(("kept in", f"{outcome.bundle}   nanguard explain {outcome.bundle}"))
    elif where:
        told.append(("log", where))
    return told


def halt_message(incident: Incident, *, known: Incident | None = None) -> str:
    """What ``NonFiniteError`` says: what, where, why, what is preserved, what to do.

    ``known`` is the last incident of which a cause is known: it is told of if this one has none.
    """
    reading, outcome = incident.reading, incident.outcome
    ranks = f" on {_listed([f'rank {flags.rank}' for flags in reading.ranks])}" if reading.ranks else ""
    passed = "; ".join(outcome.action.passed) or "the policy has no rung but Halt"
    why = outcome.action.because or f"no rung of the ladder was left: {passed}"
    if outcome.verdict.kind == "damage":
        damaged = f"{_listed(reading.damaged) or 'the state of another rank'} were non-finite before this step"
        then = "Next: find out what wrote to them."
        if outcome.did:
            kept = (
                f"Put back: {damaged}, so the newest good snapshot has taken the place of the damaged state "
                f"({outcome.did}). A checkpoint saved now is sound."
            )
        else:
            kept = (
                f"Not sound: {damaged}, and there is no good snapshot to put back: this state is damaged. "
                "Do not save it; go on from the last good checkpoint (`nanguard check FILE` tells)."
            )
        if not outcome.verdict.means.snapshots:
            then += " Snapshots let a run go back by itself: Guard(..., snapshots=Snapshots())."
    elif outcome.action.because:
        kept = f"Preserved: {_untouched(outcome)}, so a checkpoint saved now is sound."
        then = (
            "Next: fix the cause. Going on would not train the model. To allow more refused steps, raise "
            "Policy(max_consecutive_skips=..., max_skipped_share=...); None turns a limit off."
        )
    else:
        kept = f"Preserved: {_untouched(outcome)}, so a checkpoint saved now is sound."
        then = (
            "Next: look at that batch and at the parameters named above. To go on for longer, give the policy more "
            "rungs or patience, Policy([Skip(times=10), ..., Halt()]), or take the default ladder, Policy()."
        )
    rows = [] if outcome.diagnosis is None else list(diagnosis_rows(outcome.diagnosis))
    if known is not None and known.diagnosis is not None and _is_unknown(outcome):
        rows += [("before", f"step {known.reading.step:,} had a known cause:"), *diagnosis_rows(known.diagnosis)]
    if outcome.bundle:
        rows.append(("kept in", f"{outcome.bundle}   nanguard explain {outcome.bundle}"))
    told = "".join(f"  {name:<9} {row}\n" for name, row in rows)
    position = "" if reading.batch is None else f" ({_position(reading)})"
    return (
        f"{_noun(outcome)} at step {reading.step:,}{position}{ranks}: {_found(outcome)}.\n{told}"
        f"Halted, since {why}.\n{kept}\n{then}"
    )


def _untouched(outcome: Outcome) -> str:
    """What a refused step leaves alone. A schedule that the program advances itself goes on over such a step."""
    if outcome.verdict.means.holds_schedule:
        return "weights, optimizer state, buffers and schedule, exactly as before this step"
    return "weights, optimizer state and buffers, exactly as before this step"


def _is_unknown(outcome: Outcome) -> bool:
    return outcome.diagnosis is None or outcome.diagnosis.cause == "unknown"


def _headline(outcome: Outcome) -> str:
    action, skipped = outcome.action, "step applied" if outcome.applied else "step skipped"
    if action.response == "skip":
        return f"step skipped, nothing changed{_counted(action)}"
    return {
        "apply": "bad micro-batches dropped, the rest of the step applied",
        "drop_gradients": "bad gradients dropped, the step applied to all other parameters",
        "lower_lr": f"{skipped}, learning rate lowered{_counted(action)}",
        "raise_precision": f"{skipped}, precision raised{_counted(action)}",
        "roll_back": f"rolled back{_counted(action)}",
        "act": f"{'rolled back' if outcome.is_rollback else skipped}, rung taken: {action.words}{_counted(action)}",
        "warn": "nothing on the ladder answers it, training goes on",
        "halt": f"training halted, {_left_by_halt(outcome)}",
        "back_off": f"{skipped}, the loss scale goes down",
    }[action.response]


def _left_by_halt(outcome: Outcome) -> str:
    if outcome.verdict.kind != "damage":
        return "nothing changed"
    return "the newest good snapshot put back" if outcome.did else "the state is damaged"


def _counted(action: Action) -> str:
    return "" if action.times is None else f" ({action.count} of {action.times} {span_in_words(action.per)})"


def _noun(outcome: Outcome) -> str:
    reading, kind = outcome.verdict.reading, outcome.verdict.kind
    if kind == "damage":
        return "damaged state"
    if kind == "divergence":
        return "diverged loss"
    if not reading.found:
        return "non-finite micro-batch" if reading.dropped_microbatches else "non-finite gradient"
    return (
        "non-finite "
        + {"loss": "loss", "gradients": "gradient", "buffers": "buffer", "update": "update"}[reading.found[0]]
    )


def _found(outcome: Outcome) -> str:
    reading = outcome.verdict.reading
    parts = []
    elsewhere = "of another rank"
    if outcome.verdict.kind == "damage":
        parts.append(f"non-finite before this step: {_listed(reading.damaged) if reading.damaged else elsewhere}")
    if outcome.verdict.kind == "divergence" and not reading.found:
        parts.append(f"loss {reading.mean_loss:.4g}, and the ones before it, far above their own past")
    if "loss" in reading.found:
        parts.append(f"loss {elsewhere if math.isfinite(reading.loss) else f'{reading.loss:g}'}")
    if "gradients" in reading.found:
        parts.append(f"gradients {f'of {_listed(reading.gradients)}' if reading.gradients else elsewhere}")
    if "update" in reading.found:
        parts.append("finite gradients, but what the optimizer made of them; taken back")
    if "buffers" in reading.found:
        parts.append(f"buffers {_listed(reading.buffers) if reading.buffers else elsewhere}")
    return "; ".join(parts) or "nothing else in this step"


def _position(reading: Reading) -> str:
    return f"batch {reading.batch:,} of epoch {reading.epoch}"


def _listed(names: Sequence[str], most: int = 3) -> str:
    """``a, b and c``, or the first few and how many more there are."""
    shown, more = list(names[:most]), len(names) - most
    if more > 0:
        return f"{', '.join(shown)} and {more} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number} steps"
