"""Find the op to blame: the first birth whose non-finite values reach a loss or a gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nanguard.diagnosis.plans import MEMORY
from nanguard.diagnosis.provenance import BATCH, PARAMETER, Note, TraceEvent
from nanguard.diagnosis.trace import Trace

_DISCARDS = frozenset(
    [
        "where",
        "masked_fill",
        "masked_scatter",
        "nan_to_num",
        "index",
        "index_select",
        "gather",
        "select",
        "slice",
        "masked_select",
        "index_put",
        "index_copy",
        "index_fill",
        "scatter",
        "take",
        "narrow",
        "topk",
    ]
)
_ARITHMETIC = frozenset(("add", "addcmul", "div", "mul", "pow", "rsub", "sub", "true_divide"))
PRODUCTS = frozenset(("addmm", "bmm", "convolution", "dot", "mm", "mv"))
CARRIES = frozenset(("to_copy", "clone", "copy", "cat", "stack", "index", "unsafe_view", "fill", "index_put"))
"""They pass values on as they are."""
_TAKES_NO_MASK = frozenset(
    (
        *("binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss", "mse_loss", "smooth_l1_loss"),
        *("cudnn_batch_norm", "native_batch_norm", "native_group_norm", "native_layer_norm", "std", "var"),
    )
)
_ENDS_IN_ZERO = frozenset(("div", "exp", "reciprocal", "rsqrt", "sigmoid", "true_divide"))
"""Of an infinity."""
_KEEPS_ZERO = frozenset(("abs", "clone", "mean", "mul", "neg", "pow", "sqrt", "square", "sum", "to_copy"))
ASKS_FOR_LOGS = frozenset(
    (
        *("log_softmax", "logsumexp", "log"),
        *("gather", "index", "index_select", "nll_loss_forward", "nll_loss2d_forward", "take"),
    )
)
"""Ops that a masked entry reaches the loss by."""
_MOST_LINKS = 12


@dataclass(frozen=True, slots=True)
class TraceFinding:
    """The ``event`` to blame, and the ``chain`` of events from it to the loss or gradient.

    ``harmless`` births reached neither. ``discarded`` is True if the forward pass dropped the value (``torch.where``, a
    mask) and only the derivative brought it back or made a new one (the derivative of ``log`` at 0).
    """

    event: TraceEvent
    chain: tuple[TraceEvent, ...]
    harmless: tuple[TraceEvent, ...]
    discarded: bool = False


def find(trace: Trace, ends: Sequence[TraceEvent]) -> TraceFinding | None:
    """``ends`` are the events of the non-finite loss or gradients. None if there are none."""
    reached = ancestors(ends)
    if not reached:
        return None
    suspects = [event for event in reached if is_suspect(event) or _is_no_mask(trace, event)]
    suspects = [event for event in suspects if event.kind != "turned" or not any(map(is_suspect, above(event)))]
    users = [event for event in reached if not event.is_mask]  # a mask is intended, its use may be wrong
    order = {id(event): place for place, event in enumerate(trace.events)}  # of what was there before the step
    guilty = min(suspects or users or reached, key=lambda event: (event.note.index, order.get(id(event), -1)))
    if not suspects and _is_plain_use(guilty, reached):
        guilty = guilty.parents[0]
    elif guilty.kind == "given" and guilty.note.op in MEMORY:  # what was in it may have been written over, part by part
        births = [event for event in suspects if event.kind != "given" and guilty not in above(event)]
        guilty = min(births, key=lambda event: event.note.index, default=guilty)
    harmless = [e for e in trace.events if e.kind in ("birth", "turned") and e not in reached and is_suspect(e)]
    chain = tuple(_path(ends, guilty))
    forerunners = sorted((e for e in harmless if _is_derivative_of(guilty, e)), key=lambda event: event.note.index)
    discarded = any(_was_discarded(trace, each, ends) for each in forerunners)
    if forerunners and not discarded:  # the forward pass made it finite again (a sigmoid of Inf) and used it
        guilty, chain = forerunners[0], (forerunners[0], *chain)
    elif (custom := _custom_backward_behind(guilty, chain)) is not None:
        guilty = custom
    elif (above_zero := _infinity_behind_zero(trace, guilty)) is not None:
        guilty, chain = above_zero, (above_zero, *chain)
    return TraceFinding(
        event=guilty,
        chain=chain,
        harmless=tuple([e for e in harmless if e not in forerunners and e is not guilty][:_MOST_LINKS]),
        discarded=discarded or (guilty.note.phase == "forward" and _was_discarded(trace, guilty, ends)),
    )


def _custom_backward_behind(birth: TraceEvent, chain: Sequence[TraceEvent]) -> TraceEvent | None:
    """A hand-written backward that turned an infinity of the forward pass into NaN, although the loss was finite."""
    if birth.note.phase != "forward" or chain[-1].note.phase == "forward":
        return None
    first = next(event for event in chain if event.note.phase != "forward")
    return first if first.kind == "turned" and first.note.is_custom and first.note.in_user_code else None


def _infinity_behind_zero(trace: Trace, birth: TraceEvent) -> TraceEvent | None:
    """The overflow that made the zero of ``log(0)`` or ``x / 0``: 1 / inf and exp(-inf) are 0 again."""
    if birth.kind != "birth" or birth.note.phase != "forward":
        return None
    operands = zip(birth.evidence.operands, birth.evidence.sources, strict=False)
    sources = [source for operand, source in operands if operand.value == 0 and isinstance(source, Note)]
    hidden = {id(swallow.note): swallow for swallow in trace.swallowed if swallow.note.op in _ENDS_IN_ZERO}
    for source in sources:
        behind = [hidden[id(note)] for note in _made_from(source) if id(note) in hidden]
        events = [e for swallow in behind for e in ancestors(swallow.events) if e.kind in ("birth", "turned")]
        if events:
            return min(events, key=lambda event: event.note.index)
    return None


def _made_from(note: Note) -> list[Note]:
    """A value, and those that it has its zeros from."""
    made = [note]
    while len(made) < _MOST_LINKS and made[-1].op in _KEEPS_ZERO:
        parent = next((parent for parent in made[-1].parents if isinstance(parent, Note)), None)
        if parent is None:
            break
        made.append(parent)
    return made


def _is_derivative_of(event: TraceEvent, other: TraceEvent) -> bool:
    """True if an event belongs to the derivative of an op whose result was infinite."""
    note, before = event.note, other.note
    if note.phase != "backward" or note.in_user_code or before.phase != "forward" or other.has_nan:
        return False
    return (note.node, note.place) == (before.op, before.place)


def is_suspect(event: TraceEvent) -> bool:
    """True if an event could be a fault: neither an intended infinity nor an inherited one."""
    if event.kind in ("birth", "turned"):
        return True
    if event.kind == "outside":
        return event.has_nan or not event.is_mask
    return event.kind == "given" and (event.has_nan or computes_with_inf(event))


def _is_no_mask(trace: Trace, event: TraceEvent) -> bool:
    """True for infinities in data that a layer multiplies by its weights, or that are a target: a mask is added.

    The program may have put such a number into its data in this step.
    """
    if event.kind != "outside" or event.note.roots & PARAMETER:
        return False
    line, uses = {id(event)}, PRODUCTS | _TAKES_NO_MASK
    if event.has_posinf and event.note.place is not None:  # put there in this step, and a mask is negative
        uses |= _ARITHMETIC
    for each in trace.events:
        if any(id(parent) in line for parent in each.parents):
            if each.note.op in uses:
                return True
            if each.note.op in CARRIES and not each.note.roots & PARAMETER:
                line.add(id(each))
    return False


def _is_plain_use(event: TraceEvent, reached: Sequence[TraceEvent]) -> bool:
    """True if infinities of the data reach the loss by arithmetic alone: they were zeros and infinities by chance."""
    if event.kind != "heir" or any(each.has_nan or each.note.op in ASKS_FOR_LOGS for each in reached):
        return False
    data = (parent.kind == "outside" and (parent.note.roots & BATCH or not parent.note.op) for parent in event.parents)
    return bool(event.parents) and all(data)


def computes_with_inf(event: TraceEvent) -> bool:
    """True if the model's values are multiplied by an infinite constant or the like. To fill with one is a mask."""
    note = event.note
    return note.op in _ARITHMETIC and bool(note.roots & PARAMETER and note.constants)


def ancestors(ends: Iterable[TraceEvent]) -> list[TraceEvent]:
    """These events and all events that led to them."""
    seen: dict[int, TraceEvent] = {}
    waiting = list(ends)
    while waiting:
        event = waiting.pop()
        if id(event) not in seen:
            seen[id(event)] = event
            waiting.extend(event.parents)
    return list(seen.values())


def above(event: TraceEvent) -> list[TraceEvent]:
    """All events that led to this one."""
    return [each for each in ancestors(event.parents) if each is not event]


def _path(ends: Sequence[TraceEvent], start: TraceEvent) -> Iterable[TraceEvent]:
    """The shortest path from an event to one of the ends."""
    came_from: dict[int, TraceEvent | None] = {id(end): None for end in ends}
    waiting = list(ends)
    while waiting:
        event = waiting.pop(0)
        if event is start:
            step: TraceEvent | None = event
            while step is not None:
                yield step
                step = came_from[id(step)]
            return
        for parent in event.parents:
            if id(parent) not in came_from:
                came_from[id(parent)] = event
                waiting.append(parent)


def _was_discarded(trace: Trace, event: TraceEvent, ends: Sequence[TraceEvent]) -> bool:
    """True if the forward pass dropped all of its non-finite values, by selection only (``torch.where``, an index)."""
    if any(end.note.phase == "forward" for end in ends):
        return False
    # Activation checkpointing recomputes ops; the first run of the same op shows where its values went.
    same = (event.note.op, event.note.place, event.note.module)
    line = {id(e) for e in trace.events if (e.note.op, e.note.place, e.note.module) == same} | {id(event)}
    for each in trace.events:
        if any(id(parent) in line for parent in each.parents) and each.note.phase == "forward":
            line.add(id(each))
    ends_of_line = [s for s in trace.swallowed if s.note.phase == "forward" and any(id(e) in line for e in s.events)]
    return bool(ends_of_line) and all(s.note.op in _DISCARDS for s in ends_of_line)


def feeds_a_module(trace: Trace, birth: Note) -> bool:
    """True if a value that was made outside of all modules is used in one."""
    line = {id(birth)}
    for note in trace.notes[birth.index + 1 :]:
        if any(id(parent) in line for parent in note.parents):
            if note.module and note.phase == "forward":
                return True
            line.add(id(note))
    return False
