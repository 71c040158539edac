"""The diagnosis of an op that made a non-finite value from finite ones, forward or backward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

from nanguard.diagnosis import authorship
from nanguard.diagnosis.blame import TraceFinding
from nanguard.diagnosis.causes import name_cause
from nanguard.diagnosis.exam import Exam, module_of_untrained, operands_of, plain_dtype, size_of
from nanguard.diagnosis.provenance import PARAMETER, Note, TraceEvent
from nanguard.diagnosis.rules import Case
from nanguard.diagnosis.rules_of_quotients import ignored_label
from nanguard.diagnosis.trace import Trace
from nanguard.records.diagnosis import Diagnosis, Phase
from nanguard.source.frames import is_users_file, source_of
from nanguard.state.batch_indices import num_samples_of
from nanguard.state.trees import is_float, named_tensors

_LARGEST_FP16 = 65504.0
_JUMP = 64.0
"""An op that makes gradients grow by this factor is blamed for their overflow."""


def op_fault(exam: Exam, finding: TraceFinding) -> Diagnosis:
    """The cause, op, module and line of a birth."""
    run, event, note = exam.run, finding.event, finding.event.note
    case = Case(run.trace, finding)
    cause, because = name_cause(case)
    phase: Phase = "backward" if finding.discarded else note.phase
    if run.found == "buffers":
        phase, cause, because = "buffer", "buffer_corrupted", f"written into {run.names[0]}: {because}"
    source, is_traced = source_of(note.place), True
    if cause == "all_labels_ignored" and not (note.place and is_users_file(note.place[0])):
        source, is_traced = authorship.line_with_number(ignored_label(case), exam.files()), False
    diagnosis = Diagnosis(
        phase=phase,
        cause=cause,
        op=_op(exam, finding),
        module=_module(exam, note),
        source=source,
        is_line_traced=is_traced,
        dtype=plain_dtype(note.dtype),
        shape=note.shape,
        because=because,
        operands=operands_of(event),
        element=event.evidence.element,
        samples=_samples(exam, case, cause),
        confidence="guess" if cause == "unknown" else "likely",
    )
    return _upstream(exam, diagnosis, event)


def _op(exam: Exam, finding: TraceFinding) -> str:
    """Torch's own constants belong to the op that the user called: ``logdet`` makes its NaN with ``scalar_tensor``."""
    note = finding.event.note
    if finding.event.kind == "given" and note.op in ("scalar_tensor", "where", "full"):
        near = [n.op for n in exam.run.trace.notes if n.place == note.place and "det" in n.op]
        users = [event.note.name for event in finding.chain[1:]] if note.op == "scalar_tensor" else []
        return next(iter([*near, *users]), note.name)
    return note.name


def _samples(exam: Exam, case: Case, cause: str) -> tuple[int, ...]:
    if cause == "all_labels_ignored":
        return _unlabelled(exam, ignored_label(case))
    if cause == "ctc_inf" and case.note.phase == "forward" and len(case.note.shape) == 1:
        return case.evidence.samples  # each target has a loss of its own
    return exam.samples_of(case.event)


def _unlabelled(exam: Exam, ignored: float | None) -> tuple[int, ...]:
    """The samples of which no label counts: of a shifted row of labels, the first does not count either."""
    batch = exam.batch()
    num = num_samples_of(batch, exam.pending.fetched)
    if ignored is None:
        return ()
    labels = [t for _, t in named_tensors(batch) if t.ndim and t.shape[0] == num and not is_float(t)]
    for shift in (0, 1):
        for tensor in labels:
            row = tensor.reshape(tensor.shape[0], -1)[:, shift:]
            rows = row.eq(ignored).all(1).nonzero().flatten().tolist() if row.shape[1] else []
            if rows:
                return tuple(rows)
    return ()


def _module(exam: Exam, note: Note) -> str:
    """A hook on a gradient belongs to the module that registered it."""
    homes = {module for _, module in exam.run.hooks}
    if note.in_user_code and not note.is_custom and len(homes) == 1:
        return homes.pop()
    return note.module or module_of_untrained(note) or _module_of_method(exam.run.trace, note)


def _module_of_method(trace: Trace, note: Note) -> str:
    """The module whose ``forward`` the program calls itself, by its code and the layers around it. Empty if unclear."""
    names = [] if note.place is None else trace.modules.with_method(*note.place)
    if len(names) < 2:
        return "".join(names)
    notes = trace.notes
    later, earlier = notes[note.index + 1 :], reversed(notes[: note.index])
    beside = [_nearest_layer(note, some) for some in (earlier, later)]
    own = {module for module, is_inside in beside if is_inside and module in names}
    if own:
        return own.pop() if len(own) == 1 else ""
    parts = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*(m.split(".") for m, _ in beside), strict=False))
    prefix = "".join(f"{part}." for part, _ in parts)
    within = [name for name in names if name.startswith(prefix)]
    return within[0] if prefix and len(within) == 1 else ""


def _nearest_layer(note: Note, others: Iterable[Note]) -> tuple[str, bool]:
    """The module of the first of these ops that has one, and whether all until then belong to the same function."""
    is_inside = True
    for other in others:
        if other.phase != note.phase:
            break
        is_inside &= other.place is None or note.place is None or other.place[::2] == note.place[::2]
        if other.module:
            return other.module, is_inside
    return "", False


# ---- gradients that overflow fp16 ------------------------------------------------------------------------------------


def _upstream(exam: Exam, diagnosis: Diagnosis, event: TraceEvent) -> Diagnosis:
    """If a gradient overflows fp16, blame what made it large, not the op whose result overflowed."""
    if diagnosis.cause != "overflow_fp16" or diagnosis.phase != "backward":
        return diagnosis
    scaler = exam.parts.precision.scaler
    scale = 1.0 if scaler is None else scaler.scale.item()
    if scale > 1 and event.evidence.wide_reach / scale <= _LARGEST_FP16:
        because = f"the loss is multiplied by {scale:g}, and a gradient of it exceeds 65504, where fp16 ends"
        return replace(diagnosis, cause="loss_scale_overflow", because=because)
    blamed = _largest_jump(event) or _unnormalised_sum(exam.run.loss)
    if blamed is None:
        return diagnosis
    source = source_of(blamed.place)
    cause = "overflow_fp16"
    if blamed.node == "mul" and math.prod(blamed.shape) == 1:
        factor = max(map(abs, blamed.scalars), default=size_of(blamed))
        cause = "loss_scale_overflow"
        because = f"the loss is multiplied by {factor:g} before its gradients are taken in fp16"
    elif blamed.phase == "backward":
        grew = f"from {size_of(_gradient_into(blamed) or blamed):.3g} to {size_of(blamed):.3g}"
        because = f"{diagnosis.because}; the derivative of {blamed.name} at {source} makes gradients grow {grew}"
    else:
        because = f"the loss is a sum over {math.prod(_input_shape(blamed))} elements, not a mean; {diagnosis.because}"
    return replace(diagnosis, cause=cause, source=source, module=blamed.module, because=because)


def _largest_jump(event: TraceEvent) -> Note | None:
    """The op that made a gradient grow most, between the loss and the overflow.

    None if it grew nowhere, or in the op that overflowed. Matrix products do not count: they sum over many entries.
    """
    note: Note | None = event.note
    best: tuple[float, Note] | None = None
    while note is not None and (before := _gradient_into(note)) is not None:
        size = event.evidence.wide_reach if note is event.note else size_of(note)
        jump = size / max(size_of(before), 1e-30)
        if note.op not in ("mm", "bmm", "addmm", "convolution_backward") and (best is None or jump > best[0]):
            best = jump, note
        note = before
    return best[1] if best is not None and best[0] >= _JUMP and best[1].place and best[1] is not event.note else None


def _gradient_into(note: Note) -> Note | None:
    """The incoming gradient of an op of the backward pass."""
    return next((p for p in note.parents if isinstance(p, Note) and p.phase == "backward"), None)


def _unnormalised_sum(loss: Note | None) -> Note | None:
    """The sum that the loss is made of, if it is not divided by the number of elements."""
    note = loss
    for _ in range(12):
        if note is None or note.op == "mean" or (note.op == "div" and max(map(abs, note.scalars), default=2.0) > 1):
            return None
        sums = note.op.endswith(("_loss", "_loss_forward", "_with_logits")) and 2.0 in note.scalars
        if sums or (note.op == "sum" and math.prod(_input_shape(note)) > 1):
            return note
        note = next((p for p in note.parents if isinstance(p, Note) and p.roots & PARAMETER), None)
    return None


def _input_shape(note: Note) -> tuple[int, ...]:
    return next((p.shape for p in note.parents if isinstance(p, Note)), ())
