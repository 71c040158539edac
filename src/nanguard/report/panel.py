"""What a person reads in the terminal when something happened. Pure text, no colour."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nanguard.records import Incident, Reading

_UNTOUCHED = "weights, optimizer state, buffers and schedule, exactly as before this step"


def panel(incident: Incident, where: str | None = None) -> str:
    """The incident in a few lines; ``where`` is the run log, if there is one."""
    reading, action = incident.reading, incident.outcome.action
    if action.response == "drop_gradients":
        headline = "bad gradients dropped, the step applied to all other parameters"
    elif action.response == "halt":
        headline = "training halted, nothing changed"
    elif action.response == "apply":
        headline = "bad micro-batches dropped, the rest of the step applied"
    else:
        headline = f"step skipped, nothing changed ({action.count} of {action.patience} this {action.per})"
    rows = [("found", _found(reading)), ("batch", _position(reading))]
    if reading.ranks:
        rows.append(("ranks", "seen first by " + _listed([f"rank {flags.rank}" for flags in reading.ranks])))
    if reading.dropped_microbatches:
        rows.append(("dropped", "micro-batch " + _listed([str(i) for i in reading.dropped_microbatches])))
    if reading.dropped_gradients:
        rows.append(("dropped", _listed(reading.dropped_gradients)))
    if not incident.outcome.applied:
        rows.append(("kept", _UNTOUCHED))
    if incident.outcome.rerun:
        rows.append(("in flight", f"{_steps(incident.outcome.rerun)} behind it had no effect and ran again"))
    if incident.outcome.lost:
        rows.append(("in flight", f"{_steps(incident.outcome.lost)} behind it had no effect and count as skipped"))
    if where:
        rows.append(("log", where))
    lines = [f" nanguard  step {reading.step:,}  {_noun(reading)}: {headline}"]
    return "\n".join(lines + [f"   {name:<9} {text}" for name, text in rows])


def halt_message(incident: Incident) -> str:
    """What ``NonFiniteError`` says: what, where, why, what is preserved, what to do."""
    reading, action = incident.reading, incident.outcome.action
    allowed = {0: "no non-finite step is", 1: "1 skipped step is"}.get(
        action.patience, f"{action.patience} skipped steps are"
    )
    ranks = f" on {_listed([f'rank {flags.rank}' for flags in reading.ranks])}" if reading.ranks else ""
    return (
        f"{_noun(reading)} at step {reading.step:,} ({_position(reading)}){ranks}: {_found(reading)}.\n"
        f"Halted: {allowed} allowed per {action.per}, and this is number {action.count}.\n"
        f"Preserved: {_UNTOUCHED}, so a checkpoint saved now is sound.\n"
        "Next: look at that batch and at the parameters named above. To go on for longer, raise the patience, "
        f"Policy(patience={max(2 * action.patience, 3)}); to leave single bad gradients out, "
        "Policy(drop_bad_gradients=True)."
    )


def _noun(reading: Reading) -> str:
    found = reading.found
    if not found:
        return "non-finite micro-batch" if reading.dropped_microbatches else "non-finite gradient"
    return "non-finite " + {"loss": "loss", "gradients": "gradient", "buffers": "buffer"}[found[0]]


def _found(reading: Reading) -> str:
    parts = []
    elsewhere = "of another rank"
    if "loss" in reading.found:
        parts.append(f"loss {elsewhere if math.isfinite(reading.loss) else f'{reading.loss:g}'}")
    if "gradients" in reading.found:
        parts.append(f"gradients {f'of {_listed(reading.gradients)}' if reading.gradients else elsewhere}")
    if "buffers" in reading.found:
        parts.append(f"buffers {_listed(reading.buffers) if reading.buffers else elsewhere}")
    return "; ".join(parts) or "nothing else in this step"


def _position(reading: Reading) -> str:
    if reading.batch is None:
        return "position unknown: iterate over guard.epoch(loader) to have it here"
    return f"batch {reading.batch:,} of epoch {reading.epoch}"


def _listed(names: Sequence[str], most: int = 3) -> str:
    """``a, b and c``, or the first few and how many more there are."""
    shown, more = list(names[:most]), len(names) - most
    if more > 0:
        return f"{', '.join(shown)} and {more} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number} steps"
