"""Faults outside of the forward and backward pass: bad data, corrupted state, the optimizer's update."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanguard import _compat
from nanguard.diagnosis import authorship, lines_in_place
from nanguard.diagnosis.batch_names import in_words, names_of
from nanguard.diagnosis.blame import CARRIES, TraceFinding
from nanguard.diagnosis.causes import name_cause
from nanguard.diagnosis.evidence import Evidence, where_bad
from nanguard.diagnosis.exam import Exam, NotRepeatable, module_of_untrained, operands_of, parameters_in, plain_dtype
from nanguard.diagnosis.provenance import OTHER, Leaf, Note, TraceEvent
from nanguard.diagnosis.rules import Case, reach
from nanguard.records.diagnosis import Diagnosis, Source
from nanguard.source.frames import source_of, user_files
from nanguard.state.held import Held, held_by_module
from nanguard.state.training_state import TrainingState

_ABSURD_RATE = 1e3
"""No training has such a learning rate, whatever the optimizer."""

_LEAVES_RANGE = frozenset(("div_by_zero", "overflow_any_precision", "overflow_fp16", "unknown"))

_ABSURD = 1e12
"""No initialisation makes numbers as large as this, or so much larger than the others."""

_KEPT = (
    "the step before was not finite either: if the program keeps this from step to step, such as a hidden state, a "
    "queue or an average, it has to reset it"
)


def state_fault(exam: Exam, finding: TraceFinding) -> Diagnosis | None:
    """The diagnosis of such a fault. None if an op of the forward or backward pass is to blame."""
    if exam.run.found == "update":
        return _of_update(exam, _first_in_backward(exam, finding))
    if finding.event.kind == "outside":
        return _of_outside(exam, finding)
    write = _write_on_the_way(finding)
    return None if write is None else _of_write(exam, finding, write)


# ---- values from before the step -------------------------------------------------------------------------------------


def _of_outside(exam: Exam, finding: TraceFinding) -> Diagnosis:
    event = finding.event
    if event.storage in exam.run.replaced:
        raise NotRepeatable(f"{exam.run.replaced[event.storage]} goes from one call to the next")
    kind, _, name = event.origin.partition(" ")
    user = _first_use(exam, finding)
    diagnosis = Diagnosis(
        phase="data",
        cause="input_nonfinite",
        op=user.name if user else "",
        module=(user.module if user else "") or module_of_untrained(user),
        source=source_of(user.place) if user else None,
        dtype=plain_dtype(user.dtype if user and user.dtype else event.note.dtype),
        shape=event.note.shape,
        samples=exam.samples_of(event),
        confidence="certain",
        evidence=() if user is None else (f"first used by {user.name} at {source_of(user.place)}",),
    )
    if event.note.place is not None:
        return _of_made_data(diagnosis, event)
    diagnosis = replace(diagnosis, because=f"{in_words(exam, event.origin)} holds {what_and_where(event.evidence)}")
    state, num_applied, whose = exam.parts.state, exam.past.num_applied, ""
    if kind == "foreign":
        kind, _, name = name.partition(" ")
        known = [(each, each.state.parameters() | each.state.buffers()) for each in exam.parts.other_parts()]
        named = [(each, tensors[name]) for each, tensors in known if name in tensors]  # a program may use a name again
        trains, _ = max(named, key=lambda each: _compat.storage_key(each[1]) == event.storage)
        state, num_applied = trains.state, trains.journal.counts["applied"]
        whose = ", which another optimizer trains,"
    if kind == "parameter":
        found = _of_parameter(exam, diagnosis, state, name, whose, is_trained=num_applied > 0)
        return _by_learning_rate(found, state, name) if num_applied else found
    if kind == "buffer":
        owner, line = _set_at(exam, state, name)
        because = f"buffer {name} held {what_and_where(event.evidence)} before the step"
        return replace(
            diagnosis,
            phase="buffer",
            cause="buffer_corrupted",
            module=owner,
            source=line or diagnosis.source,
            is_line_traced=line is None,
            because=because,
            samples=(),
            evidence=(),
        )
    if kind == "state":
        found = replace(diagnosis, phase="optimizer", cause="optimizer_state_corrupted", samples=(), evidence=())
        return replace(found, because=f"{name} is non-finite before the step")
    held = None if event.storage is None else held_by_module(event.storage)
    if held is not None:
        return _of_held(exam, diagnosis, held)
    exam.is_from_loader, exam.bad_data = exam.may_be_from_loader(event), event.storage
    changed = lines_in_place.changes_in_words(exam.pending.tape, event.storage)
    if changed:
        return replace(diagnosis, because=diagnosis.because + changed)
    record = exam.record_read_again(diagnosis.samples)
    if record.source is not None:
        return replace(diagnosis, source=record.source, makes_data=True)
    diagnosis = replace(diagnosis, is_record_finite=record.is_finite)
    if record.held and (line := authorship.line_that_fills(type(exam.dataset), record.held)) is not None:
        return replace(diagnosis, source=line, is_line_traced=False)
    users = [name for each in exam.pending.microbatches if (name := getattr(each.loss_fn, "__name__", ""))]
    used_in = user.place[2] if user is not None and user.place is not None else ""
    ran = {note.place[:2] for note in exam.run.trace.notes if note.place is not None}
    line = authorship.line_that_makes_data(
        *names_of(exam, event.origin), exam.files(), not_in=users, used_in=used_in, ran=ran
    )
    line = line or authorship.line_that_writes_nonfinite(exam.files(), nan=event.has_nan, not_in=users)
    is_repeated = exam.parts.journal.refused_in_a_row > 0 and not exam.pending.fetched
    return replace(
        diagnosis,
        source=line or diagnosis.source,
        is_line_traced=line is None,
        because=f"{diagnosis.because}; {_KEPT}" if is_repeated else diagnosis.because,
        confidence="guess" if event.note.roots & OTHER else "certain",  # its origin is unknown
    )


def _of_held(exam: Exam, diagnosis: Diagnosis, held: Held) -> Diagnosis:
    """A weight, running mean or table of a module that this network does not contain: a frozen one, another, a loss."""
    states = [parts.state for parts in exam.parts.other_parts()]
    is_trained = any(held.tensor is t for each in states for t in (each.parameters() | each.buffers()).values())
    whose = "which another optimizer trains" if is_trained else "which is not trained"
    is_weight, key = held.kind == "parameter", held.name.rpartition(".")[2]
    lines = lines_in_place.lines_that_write(exam.files()) if is_weight and not is_trained else ()
    where = what_and_where(where_bad(held.tensor))
    cause = "buffer_corrupted" if key.startswith("running_") else "nonfinite_constant"
    line = None if is_weight else authorship.line_that_gives(key, held.network, exam.files())
    return replace(
        diagnosis,
        phase=held.kind,
        source=line or diagnosis.source,
        is_line_traced=line is None,
        cause="parameter_corrupted" if is_weight else cause,
        module=diagnosis.module or held.name.rpartition(".")[0],
        because=f"{held}, {whose}, held {where} before the step{lines_in_place.in_words(lines)}",
        samples=(),
    )


def _of_made_data(diagnosis: Diagnosis, event: TraceEvent) -> Diagnosis:
    """Data that a line of the step makes a tensor of: an array, a list, a number that is assigned to an element."""
    what = what_and_where(event.evidence)
    does = (
        f"makes a tensor of data that hold {what}"
        if event.note.shape
        else f"puts a number that is {what} into a tensor"
    )
    return replace(diagnosis, source=source_of(event.note.place), because=f"this line {does}", makes_data=True)


def what_and_where(evidence: Evidence) -> str:
    """``NaN at [3, 0] and 2 more``."""
    data = evidence.output
    num, first = (0, None) if data is None else (data.num_nan + data.num_inf, data.value)
    what = "NaN" if evidence.is_nan else "-Inf" if first == -math.inf else "Inf"
    at = f" at {list(evidence.element)}" if evidence.element else ""
    return f"{what}{at}" + (f" and {num - 1:,} more" if num > 1 else "")


def _first_use(exam: Exam, finding: TraceFinding) -> Note | None:
    """The first op that used a value from before the step, ignoring casts and copies.

    If the program ended before it computed anything else, what it ended at is summed up by us, on no line of it.
    """
    line = {id(finding.event)}
    carried: Note | None = None
    for event in exam.run.trace.events:
        if event is not finding.event and any(id(parent) in line for parent in event.parents):
            line.add(id(event))
            if event.note.op not in CARRIES:
                return event.note if event.note.place is not None or carried is None else carried
            carried = event.note if event.note.place is not None else carried
    return finding.chain[1].note if len(finding.chain) > 1 else None


def _of_parameter(
    exam: Exam, diagnosis: Diagnosis, state: TrainingState, name: str, whose: str, *, is_trained: bool
) -> Diagnosis:
    """Rows of NaN, or many, were computed by something; a few among good values are what happened to be in memory.

    If all of them are the same infinity, the program has written it: to forbid something, say. ``is_trained``: it has
    been updated, so it was finite at first.
    """
    values = state.parameters()[name].detach()
    bad = ~torch.isfinite(values)
    is_written = values.is_floating_point() and bool(bad.any()) and bool((values[bad] == values[bad][0]).all())
    rows = bad.reshape(bad.shape[0], -1).any(1).nonzero().flatten() if bad.ndim else bad.new_zeros(0, dtype=torch.long)
    span = (int(rows[0]), int(rows[-1]), bad.shape[0]) if len(rows) else None
    whole_rows = bad.ndim > 1 and len(rows) > 0 and bool(bad.reshape(bad.shape[0], -1)[rows].all())
    owner, line = _set_at(exam, state, name, span)
    is_scattered = bad.ndim > 1 and not whole_rows and not is_written and 1 < int(bad.sum()) < bad.numel() / 2
    typical = _typical(values)
    is_garbage = _names_memory(line) or (is_scattered and typical < _ABSURD and not is_trained)
    share = f"{int(bad.sum()):,} of {bad.numel():,} elements" + (", whole rows" if whole_rows else "")
    share += f", all {values[bad][0]}" if is_written else ""
    share += f", and the others are as large as {typical:.3g}" * (typical >= _ABSURD)
    return replace(
        diagnosis,
        phase="parameter",
        cause="uninitialized_memory" if is_garbage else "parameter_corrupted",
        module=owner,
        source=line or diagnosis.source,
        is_line_traced=line is None,
        because=f"parameter {name}{whose} was non-finite before the step: {share}",
        samples=(),
        evidence=(),
        confidence="likely",
    )


def _by_learning_rate(diagnosis: Diagnosis, state: TrainingState, name: str) -> Diagnosis:
    """The same, or that an absurd learning rate is to blame for what updates have made of a parameter."""
    optimizer = state.optimizer_of(name)
    rate = absurd_rate(group.get("lr", 0.0) for group in optimizer.param_groups)
    if rate is None or diagnosis.cause != "parameter_corrupted":
        return diagnosis
    because = f"{diagnosis.because}; {type(optimizer).__name__} trains it with lr={rate:g}"
    return replace(diagnosis, cause="learning_rate_too_high", because=because)


def absurd_rate(rates: Iterable[Any]) -> float | None:
    """The first of these learning rates that no training is made with, None if there is none."""
    return next((float(rate) for rate in rates if _ABSURD_RATE <= float(rate) < math.inf), None)


def of_huge_parameter(exam: Exam, name: str, size: float) -> Diagnosis:
    """A finite parameter that is far larger than training can make it."""
    owner, line = _set_at(exam, exam.parts.state, name)
    because = f"parameter {name} holds values of {size:.3g}, and no training has made them"
    is_garbage = _names_memory(line) or _typical(exam.parts.state.parameters()[name]) < size / _ABSURD
    return Diagnosis(
        phase="parameter",
        cause="uninitialized_memory" if is_garbage else "parameter_corrupted",
        module=owner,
        source=line,
        is_line_traced=False,
        because=because,
        confidence="likely",
    )


def _typical(parameter: Tensor) -> float:
    """The median of the absolute values that are finite. Memory that nothing was written to has few large ones."""
    values = parameter.detach().abs().flatten().float()
    return float(values[torch.isfinite(values)].median().nan_to_num()) if parameter.numel() else 0.0


def _names_memory(line: Source | None) -> bool:
    return line is not None and ("empty" in line.text or "memory" in line.text)


def _set_at(
    exam: Exam, state: TrainingState, name: str, rows: tuple[int, int, int] | None = None
) -> tuple[str, Source | None]:
    """The module of a parameter or buffer, and the line that sets it, None if not found."""
    owner = name.rpartition(".")[0]
    module = state.module(owner)
    line = None if module is None else authorship.line_that_sets(module, name, exam.files(), rows)
    return owner, line


# ---- writes of the user's program during the step --------------------------------------------------------------------


def _write_on_the_way(finding: TraceFinding) -> TraceEvent | None:
    """The first forward event of the chain that wrote to a parameter or to optimizer state."""
    for event in finding.chain:
        if event.note.phase == "forward" and event.wrote.startswith(("parameter ", "state ")):
            return event
    return None


def _of_write(exam: Exam, finding: TraceFinding, write: TraceEvent) -> Diagnosis:
    note, (kind, _, name) = finding.event.note, write.wrote.partition(" ")
    is_computed = finding.event.kind in ("birth", "turned")
    cause, why = name_cause(Case(exam.run.trace, finding)) if is_computed else ("unknown", "a constant")
    because = f"the program itself writes a non-finite value into {name} during the step: {why}"
    if cause != "unknown":
        because = f"{why}; the program itself writes the result into {name} during the step"
    corrupted = "parameter_corrupted" if kind == "parameter" else "optimizer_state_corrupted"
    return Diagnosis(
        phase="parameter" if kind == "parameter" else "optimizer",
        cause=corrupted if cause == "unknown" else cause,
        op=note.op,
        module=name.rpartition(".")[0],
        source=source_of(note.place),
        dtype=plain_dtype(note.dtype),
        shape=note.shape,
        because=because,
        operands=operands_of(finding.event),
        confidence="certain",
    )


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def _of_update(exam: Exam, finding: TraceFinding) -> Diagnosis:
    """The gradients are finite, but the optimizer's update is not."""
    event, note, run = finding.event, finding.event.note, exam.run
    name = note.owner or run.names[0].rpartition(" ")[2]
    optimizer = exam.parts.state.optimizer_of(name)
    cause, because = _cause_of_update(exam, finding)
    source, evidence, is_traced = source_of(note.place), tuple[str, ...](), True
    kind = type(optimizer).__name__
    line = _line_of_state(exam, event, name) if cause == "optimizer_state_corrupted" else None
    rate = next((float(g["lr"]) for g in optimizer.param_groups if not math.isfinite(float(g.get("lr", 0)))), None)
    if cause in ("zero_over_zero", "div_by_zero") and any(group.get("eps") == 0 for group in optimizer.param_groups):
        cause, because = "optimizer_eps_underflow", f"{because}, since its eps is 0"
    if rate is not None:
        cause, because = "zero_over_zero" if math.isnan(rate) else "div_by_zero", f"the learning rate is {rate}"
    if cause == "overflow_any_precision" and note.op == "addcmul":
        largest = max((reach(operand) for operand in event.evidence.operands), default=math.inf)
        cause, because = "gradient_explosion", f"the square of {largest:.3g} exceeds 3.4e38, where fp32 ends"
    absurd = absurd_rate(group.get("lr", 0.0) for group in optimizer.param_groups)
    if absurd is not None and cause in _LEAVES_RANGE:
        cause, because = "learning_rate_too_high", f"lr={absurd:g}"
    if line is not None:
        source, evidence = line, (f"the program sets it itself, at {line}",)
    elif note.place is None or note.place[0] not in user_files([type(optimizer)]):  # inside torch.optim
        source, is_traced = _made_at(exam, optimizer, source)
        evidence = (f"it runs inside {kind}.step, of an optimizer made at {source}",)
    return Diagnosis(
        phase="optimizer",
        cause=cause,
        op=note.op or (user.op if (user := _first_use(exam, finding)) else ""),
        module=name.rpartition(".")[0],
        source=source,
        is_line_traced=is_traced,
        dtype=plain_dtype(note.dtype),
        shape=note.shape,
        because=f"{kind} makes a non-finite update of a finite gradient of {name}: {because}",
        evidence=evidence,
        operands=operands_of(event),
        element=event.evidence.element,
        confidence="likely",
    )


def _made_at(exam: Exam, optimizer: Optimizer, source: Source | None) -> tuple[Source | None, bool]:
    """The line that made an optimizer of torch, and whether that was seen; ``source`` if it is not found."""
    if exam.parts.optimizer_made_at is not None:
        return source_of(exam.parts.optimizer_made_at), True
    options = [key for key, value in optimizer.defaults.items() if value]
    called = exam.parts.network.rpartition("trained by ")[2].rpartition(".")[2]
    made = authorship.line_that_makes(type(optimizer).__name__, exam.files(optimizer), options, name=called)
    return made or source, made is None


def _cause_of_update(exam: Exam, finding: TraceFinding) -> tuple[str, str]:
    if finding.event.kind == "outside":
        kind, _, name = finding.event.origin.partition(" ")
        told = name if kind in ("buffer", "gradient", "parameter", "state") else finding.event.origin
        return "optimizer_state_corrupted", f"{told} is non-finite before the update"
    return name_cause(Case(exam.run.trace, finding))


def _line_of_state(exam: Exam, event: TraceEvent, name: str) -> Source | None:
    """The line where the user's program writes to the optimizer state: seen in this step, or found in the source."""
    for wrote, note in exam.run.trace.writes.items():
        if wrote.startswith("state ") and wrote.endswith(f" of {name}"):
            return source_of(note.place)
    names, waiting = [event.origin], list(event.note.parents)
    for _ in range(8):
        names += [each.name for each in waiting if isinstance(each, Leaf)]
        waiting = [parent for each in waiting if isinstance(each, Note) for parent in each.parents]
    keys = [each.partition(" ")[2].partition(" of ")[0] for each in names if each.startswith("state ")]
    return next(reversed(authorship.lines_that_set_entry(keys[0], exam.files())), None) if keys else None


def _first_in_backward(exam: Exam, finding: TraceFinding) -> TraceFinding:
    """If one line of the optimizer fails for several parameters, the one that backward reaches first.

    Its gradient is the origin of those of the others.
    """
    trace, event = exam.run.trace, finding.event
    same_line = (event.kind, event.note.op, event.note.place)
    alike = [e for e in trace.events if (e.kind, e.note.op, e.note.place) == same_line]
    owners = {e.note.owner: e for e in reversed(alike) if e.note.owner}
    if len(owners) < 2 or event.note.owner not in owners:
        return finding
    order = [name for note in trace.notes if note.phase == "forward" for name in parameters_in(note)]
    last = max(owners, key=lambda name: len(order) - order[::-1].index(name) if name in order else -1)
    return replace(finding, event=owners[last])
