"""What a person reads in the terminal when something happened. Pure text, no colour."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from nanguard.records.diagnosis_text import page_of
from nanguard.records.diagnosis_text import rows as diagnosis_rows
from nanguard.records.layout import laid_out, verbatim
from nanguard.records.steps import Action, Incident, Outcome, Reading, span_in_words
from nanguard.records.words import counted, joined

_CAUSES = {
    "input": "the batch itself holds NaN or Inf",
    "batch": "this batch: the weights still work on one that was good before",
    "weights": "the weights: a batch that was finite before is not any more",
}


def panel(incident: Incident, where: str | None = None) -> str:
    """The incident in a few lines; ``where`` is the run log, if there is one."""
    outcome = incident.outcome
    return laid_out(f" nanguard  step {incident.reading.step:,}  {headline(outcome)}", rows(outcome, where))


def repeated(incident: Incident, *, same_as: int, count: int, of: str = "") -> str:
    """The line for an incident with the same fault as that of an earlier step, the ``count``-th of them.

    ``of`` is the network of the earlier step, if that was another one.
    """
    answer = done(incident.outcome).removesuffix(", nothing changed")
    network = _short(incident.diagnosis.network) if incident.diagnosis is not None else ""
    whose, other = f" ({network})" if network else "", _short(of)
    now, then = (whose, f" ({other})") if other and other != network else ("", whose)
    same = f"same as step {same_as:,}{then}: {answer} ({count:,} times now)"
    return f" nanguard  step {incident.reading.step:,}{now}  {same}"


def _short(network: str) -> str:
    """Without the optimizer that trains it, if the network has a name: the line fits 80 columns."""
    return network.partition(", trained by ")[0]


def headline(outcome: Outcome) -> str:
    """What happened, and what was done about it, in one line."""
    return f"{what_happened(outcome)}: {done(outcome)}"


def rows(outcome: Outcome, where: str | None = None) -> list[tuple[str, str]]:
    """Name and text of each row under the headline: what was done, where, why, what to do, and what was saved."""
    reading, diagnosis = outcome.verdict.reading, outcome.diagnosis
    told = [("done", outcome.did)] if outcome.did else []
    if diagnosis is not None:
        told += diagnosis_rows(diagnosis)
    elif cause := _cause(outcome):
        told.append(("why", cause))
    told.append(("found", _found(outcome)))
    if reading.batch is not None:
        told.append(("batch", _position(reading)))
    if reading.ranks:
        told.append(("ranks", f"seen first by {_ranks(reading)}"))
    if reading.dropped_microbatches:
        told.append(("dropped", "micro-batch " + joined([str(i) for i in reading.dropped_microbatches])))
    if reading.dropped_gradients:
        told.append(("dropped", joined(reading.dropped_gradients)))
    told += _rest(outcome)
    if outcome.bundle:
        told.append(_saved_to(outcome))
    elif where:
        told.append(("log", where))
    if diagnosis is not None:
        told.append(("docs", page_of(diagnosis)))
    return told


def _rest(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """What was left alone, what comes next, and what became of the steps behind this one."""
    if outcome.lost_device:
        yield "lost", "what was on the GPU: weights and optimizer state cannot be read. Go on from a checkpoint"
    elif not outcome.applied and not outcome.action.changes_more and outcome.verdict.kind != "damage":
        yield "untouched", _untouched(outcome)
        if others := outcome.verdict.reading.num_stepped_before:
            earlier = f"{counted(others, 'other optimizer')} had stepped inside this backward pass, on finite gradients"
            yield "stepped", f"before the fault showed, {earlier}; those steps stay"
    if used := _used(outcome.action):
        yield "ladder", used
    if outcome.rerun:
        yield "in flight", f"{counted(outcome.rerun, 'step')} after it had no effect and ran again"
    if outcome.lost:
        verb = "counts" if outcome.lost == 1 else "count"
        yield "in flight", f"{counted(outcome.lost, 'step')} after it had no effect and {verb} as lost"


def _cause(outcome: Outcome) -> str:
    """What is known of the cause if the step was not examined."""
    verdict = outcome.verdict
    if verdict.kind == "divergence" and not verdict.reading.found and verdict.cause == "weights":
        return "the weights: they have become worse; the data have not become harder"
    return "" if verdict.kind == "damage" else _CAUSES.get(verdict.cause, "")


def _saved_to(outcome: Outcome) -> tuple[str, str]:
    command = f"nanguard explain {shlex.quote(outcome.bundle)}"
    return "saved to", f"{outcome.bundle}{verbatim(command)}"


def halt_message(incident: Incident, *, known: Incident | None = None) -> str:
    """What ``NonFiniteError`` says: what, where, why, what is preserved, what to do.

    ``known`` is the last incident of which a cause is known: it is told of if this one has none.
    """
    reading, outcome = incident.reading, incident.outcome
    ranks = f" on {_ranks(reading)}" if reading.ranks else ""
    passed = "; ".join(outcome.action.passed) or "the policy has no rung but Halt"
    why = outcome.action.because or f"no rung of the ladder was left: {passed}"
    if outcome.verdict.kind == "damage":
        damaged = f"{joined(reading.damaged) or 'the state of another rank'} were non-finite before this update"
        then = "Next: find out what wrote to them."
        if outcome.did:
            kept = (
                f"Put back: {damaged}, so the newest good snapshot has taken the place of the damaged state "
                f"({outcome.did}). A checkpoint saved now is sound."
            )
        else:
            kept = (
                f"Not sound: {damaged}, and there is no good snapshot to put back: this state is damaged. "
                "Do not save it; go on from the last good checkpoint (find it with `nanguard check FILE ...`)."
            )
        if not outcome.verdict.means.snapshots:
            then += " Snapshots let a run go back by itself: Guard(..., snapshots=Snapshots())."
    elif outcome.action.because:
        kept = f"Preserved: {_untouched(outcome)}, so a checkpoint saved now is sound."
        then = (
            "Next: fix the cause. Going on would not train the model. To allow more refused steps, give Guard or "
            "nanguard.install a Policy(max_consecutive_skips=..., max_skipped_share=...); None turns a limit off."
        )
    else:
        kept = f"Preserved: {_untouched(outcome)}, so a checkpoint saved now is sound."
        or_default = "" if len(outcome.action.passed) > 1 else ", or take the default ladder, Policy()"
        then = (
            "Next: look at that batch and at the parameters named above. To go on for longer, give the policy more "
            f"rungs or patience, Policy([Skip(times=10), ..., Halt()]){or_default}. Under nanguard run, leave out "
            "--halt-on-first or choose another --policy."
        )
    rows = [] if outcome.diagnosis is None else [*diagnosis_rows(outcome.diagnosis)]
    if known is not None and known.diagnosis is not None and _is_unknown(outcome):
        rows += [("before", f"step {known.reading.step:,} had a known cause:"), *diagnosis_rows(known.diagnosis)]
    if outcome.bundle:
        rows.append(_saved_to(outcome))
    if outcome.diagnosis is not None:
        rows.append(("docs", page_of(outcome.diagnosis)))
    position = "" if reading.batch is None else f" ({_position(reading)})"
    head = f"{noun(outcome)} at step {reading.step:,}{position}{ranks}: {_found(outcome)}."
    return f"{laid_out(head, rows)}\nHalted, since {why}.\n{kept}\n{then}"


def _untouched(outcome: Outcome) -> str:
    """What a refused step leaves alone. A schedule that the program advances itself goes on over such a step."""
    if outcome.verdict.reading.num_stepped_before:
        return "buffers, and the weights and state of this optimizer, exactly as before this step"
    if outcome.verdict.means.holds_schedule:
        return "weights, optimizer state, buffers and schedule, exactly as before this step"
    return "weights, optimizer state and buffers, exactly as before this step"


def _is_unknown(outcome: Outcome) -> bool:
    return outcome.diagnosis is None or outcome.diagnosis.cause == "unknown"


def done(outcome: Outcome) -> str:
    """What was done about the step, in plain words."""
    if outcome.lost_device:
        return "the GPU has stopped, and the program ends"
    action, skipped = outcome.action, "step applied" if outcome.applied else "step skipped"
    if action.response == "skip":
        if outcome.is_left_out:
            return "not used for training, nothing changed"
        return "step skipped" if outcome.verdict.reading.num_stepped_before else "step skipped, nothing changed"
    return {
        "apply": "bad micro-batches dropped, the rest of the step applied",
        "drop_gradients": "bad gradients dropped, the step applied to all other parameters",
        "lower_lr": f"{skipped}, learning rate lowered",
        "raise_precision": f"{skipped}, precision raised",
        "roll_back": "rolled back",
        "act": f"{'rolled back' if outcome.is_rollback else skipped}, rung taken: {action.words}",
        "warn": "nothing on the ladder answers it, training goes on",
        "halt": f"training halted, {_left_by_halt(outcome)}",
        "back_off": f"{skipped}, the loss scale goes down",
    }[action.response]


def _left_by_halt(outcome: Outcome) -> str:
    if outcome.verdict.kind != "damage":
        is_whole = not outcome.verdict.reading.num_stepped_before
        return "nothing changed" if is_whole else "the weights of this optimizer unchanged"
    return "the newest good snapshot put back" if outcome.did else "the state is damaged"


def _used(action: Action) -> str:
    """How often the rung was used, if something else happens when it is used up."""
    if action.times is None or not action.then:
        return ""
    return f"{action.words} {action.count} of {action.times} {span_in_words(action.per)}, then: {action.then}"


def what_happened(outcome: Outcome) -> str:
    """What was wrong with the step, in plain words."""
    reading, kind = outcome.verdict.reading, outcome.verdict.kind
    if outcome.lost_device:
        return "the data hold NaN or Inf"
    if kind == "damage":
        return "weights or state were damaged before this update"
    if kind == "divergence" and not reading.found:
        return "the loss diverged"
    if not reading.found:
        return "a micro-batch has NaN or Inf" if reading.dropped_microbatches else "a gradient is NaN or Inf"
    if reading.found[0] == "loss":
        is_here = not math.isfinite(reading.loss)
        return f"the loss is {_spelled(reading.loss)}" if is_here else f"the loss {_elsewhere(reading)} is NaN or Inf"
    return {
        "gradients": "a gradient is NaN or Inf" if len(reading.gradients) < 2 else "gradients are NaN or Inf",
        "buffers": "a buffer is NaN or Inf",
        "update": "the update is NaN or Inf",
        "output": "the output of the model is NaN or Inf",
        "input": "a call that raised was given NaN or Inf",
    }[reading.found[0]]


def _elsewhere(reading: Reading) -> str:
    return f"of {_ranks(reading) or 'another rank'}"


def _ranks(reading: Reading) -> str:
    return joined([f"rank {flags.rank}" for flags in reading.ranks])


def _spelled(value: float) -> str:
    return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"


def noun(outcome: Outcome) -> str:
    """What was wrong with the step, as a name for it."""
    reading, kind = outcome.verdict.reading, outcome.verdict.kind
    if kind == "damage":
        return "damaged state"
    if kind == "divergence":
        return "diverged loss"
    if not reading.found:
        return "non-finite micro-batch" if reading.dropped_microbatches else "non-finite gradient"
    return f"non-finite {reading.found[0].removesuffix('s') if reading.found[0] != 'loss' else 'loss'}"


def _found(outcome: Outcome) -> str:
    reading = outcome.verdict.reading
    parts = []
    elsewhere = _elsewhere(reading)
    if outcome.verdict.kind == "damage":
        parts.append(f"non-finite before this update: {joined(reading.damaged) if reading.damaged else elsewhere}")
    if outcome.verdict.kind == "divergence" and not reading.found:
        parts.append(f"loss {reading.mean_loss:.4g} and those before it are far above earlier losses")
    if "loss" in reading.found:
        parts.append(f"loss {elsewhere if math.isfinite(reading.loss) else _spelled(reading.loss)}")
    if "gradients" in reading.found:
        whose = f"of {joined(reading.gradients)}" if reading.gradients else elsewhere
        is_on_its_way = not (reading.gradients or reading.ranks)  # anomaly mode has raised before it got anywhere
        parts.append("a gradient inside the backward pass" if is_on_its_way else f"gradients {whose}")
    if "update" in reading.found:
        parts.append("the gradients are finite, but not the update; it was undone")
    if "output" in reading.found:
        parts.append("what the model returned")
    if "input" in reading.found:
        parts.append("what the step was given" if outcome.lost_device else "what the call that raised was given")
    if "buffers" in reading.found:
        parts.append(f"buffers {joined(reading.buffers) if reading.buffers else elsewhere}")
    return "; ".join(parts) or "nothing else in this step"


def _position(reading: Reading) -> str:
    return f"batch {reading.batch:,} of epoch {reading.epoch}"
