"""Read the autograd graph of a non-finite loss, for a step that cannot be run again.

Autograd saves operands or results of the ops that it will differentiate. Until the backward pass frees them, they show
which op made a non-finite value from finite ones. They do not show its line; that is searched for in the source code.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nanguard import _compat
from nanguard.diagnosis.causes import with_remedy
from nanguard.diagnosis.evidence import where_bad
from nanguard.diagnosis.exam import Exam, Past
from nanguard.diagnosis.examiner import Examiner
from nanguard.diagnosis.look import look
from nanguard.diagnosis.plans import forward_op
from nanguard.diagnosis.process import of_exploded_weights
from nanguard.diagnosis.slicing import ProgramSource
from nanguard.diagnosis.trace import Trace
from nanguard.diagnosis.watched import WatchedRun
from nanguard.records.diagnosis import Diagnosis, Source
from nanguard.records.steps import Reading
from nanguard.source.frames import Place, calling_line, source_of, user_files
from nanguard.source.modules import Modules
from nanguard.step.parts import StepParts
from nanguard.step.pending import PendingStep

log = logging.getLogger("nanguard")

_MOST_NODES = 20_000

_OF_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    name: getattr(torch, name)
    for name in ("log", "log2", "log10", "log1p", "acos", "asin", "atanh", "acosh", "erfinv", "lgamma", "digamma")
}
"""Ops whose operand is saved."""

_BY_RESULT: dict[str, tuple[str, str]] = {
    "exp": ("exp_overflow", "the result exceeds what its format can hold"),
    "expm1": ("exp_overflow", "the result exceeds what its format can hold"),
    "rsqrt": ("div_by_zero", "1 is divided by the root of 0"),
    "reciprocal": ("div_by_zero", "1 is divided by 0"),
    "div": ("div_by_zero", "a denominator is 0; what it divides was not kept"),
}
"""Ops whose result or denominator alone is saved: the cause and the reason. The result is Inf: NaN is inherited."""

_ARGUMENTS = {"self": 0, "input": 0, "other": 1, "target": 1, "mat1": 1, "mat2": -1}
"""Saved operands, and the place of each among the inputs of its node."""

_ADDS = ("add", "sub", "rsub")
"""Ops that save nothing. What they were given shows in what the next op has saved."""

_AS_WRITTEN = {"self": "the input", "input": "the input", "mat1": "the input"}
"""How an operand is called if its own name says little."""


@dataclass(frozen=True, slots=True)
class GraphFinding:
    """An op that made a non-finite value from finite ones. ``again`` runs it again, None if that is not possible.

    If the op was given non-finite ``data``, they are described there. If the backward pass itself was followed,
    ``backward`` is how it ran, and the op is read from there. ``place`` is the line, if it is known. Without an op and
    data, the program has computed something non-finite there with weights that have exploded.
    """

    op: str
    again: Callable[[], Tensor] | None
    data: str
    became_nan: bool
    backward_at: Place | None
    backward: WatchedRun | None = None
    place: Place | None = None


def examine_if_bad(losses: Sequence[Tensor]) -> GraphFinding | None:
    """For every backward pass on a CPU: None at once if all losses are finite. Elsewhere looking would mean waiting."""
    is_bad = False
    for loss in losses:
        if not loss.is_cpu:
            return None
        if loss.numel() == 1 and not loss.is_complex() and not math.isfinite(loss.item()):
            is_bad = True
    return examine_graph(losses, calling_line()) if is_bad else None


def examine_graph(losses: Iterable[Tensor], backward_at: Place | None) -> GraphFinding | None:
    """The first such op in the graph of a non-finite loss. Call it before the backward pass. Syncs."""
    try:
        for loss in losses:
            if not look(loss).is_finite and loss.grad_fn is not None:
                found = _first_birth(loss.grad_fn)
                if found is not None:
                    return GraphFinding(*found, look(loss).has_nan, backward_at)
    except Exception:  # what a node saves is an internal of torch
        log.info("the graph of a loss could not be taken apart", exc_info=True)
    return None


def read(
    graph_finding: GraphFinding,
    parts: StepParts,
    examiner: Examiner,
    pending: PendingStep,
    reading: Reading,
    past: Past,
) -> Diagnosis:
    """The diagnosis: op and cause from the graph, the line from the source code."""
    diagnosis = _by_running_it(graph_finding, parts, examiner, pending, past)
    if graph_finding.backward is not None:
        diagnosis = examiner.read(Exam(parts, pending, graph_finding.backward, past, None))
        if diagnosis.phase != "backward":  # it inherits what the forward pass made, which was not followed
            diagnosis = Diagnosis(phase="backward", cause="unknown", because="only the backward pass was followed")
    elif graph_finding.data:
        diagnosis = Diagnosis(phase="data", cause="input_nonfinite", because=graph_finding.data)
    elif not graph_finding.op:
        diagnosis = of_exploded_weights((parts, *parts.other_parts()))
    elif diagnosis is None:
        cause, words = _BY_RESULT.get(graph_finding.op, ("unknown", "no operand of it was kept"))
        if graph_finding.op == "div" and graph_finding.became_nan:  # x / 0 is Inf
            cause = "zero_over_zero"
        diagnosis = Diagnosis(phase="forward", cause=cause, because=words)
    op, place = graph_finding.op or diagnosis.op, graph_finding.place
    source, is_behind = source_of(place), True
    if place is None:
        files = user_files(map(type, parts.state.own_model.modules()))
        source, is_behind = _line_of(op, graph_finding.backward_at, files)
    return replace(
        with_remedy(diagnosis),
        op=op,
        module="",
        source=source,
        is_line_traced=place is not None,
        samples=(),
        chain=(),
        harmless=(),
        trail=(),
        confidence="likely" if is_behind else "guess",
        capture="graph",
        step=reading.step,
        epoch=reading.epoch,
        batch=reading.batch,
    )


def _by_running_it(
    graph_finding: GraphFinding, parts: StepParts, examiner: Examiner, pending: PendingStep, past: Past
) -> Diagnosis | None:
    """Trace the op alone, so that the rules can look at its operands."""
    if graph_finding.again is None:
        return None
    run = WatchedRun(Trace(Modules()))
    with torch.no_grad(), run.trace:
        result = graph_finding.again()
    run.look_at_loss(result)
    return None if run.is_finite else examiner.read(Exam(parts, pending, run, past, None))


# ---- the graph -------------------------------------------------------------------------------------------------------


def _first_birth(root: Any) -> tuple[str, Callable[[], Tensor] | None, str] | None:
    """The first op that made a non-finite value from finite ones, or was given one: what comes later inherits it."""
    found = []
    for node in _nodes(root):
        op = forward_op(node)
        birth, data = _birth(op, node), _bad_data(op, node)
        if birth is not None or data:
            again = None if birth is None else birth[0]
            found.append((_compat.sequence_nr(node) or 0, node, (op, again, data)))
        added, data = _bad_summand(node)
        if data:
            found.append((_compat.sequence_nr(added) or 0, added, (forward_op(added), None, data)))
    if not found:
        return None
    _, node, first = min(found, key=lambda each: each[0])
    is_inherited = not first[2] and any(_shows_nonfinite(each) for each in _nodes(node) if each is not node)
    return None if is_inherited else first


def _bad_data(op: str, node: Any) -> str:
    """The words for a non-finite operand that no node of the graph made; ``""`` if there is none."""
    for name, place in _ARGUMENTS.items():
        operand = _saved(node, name)
        inputs = node.next_functions
        if operand is None or place >= len(inputs) or inputs[place][0] is not None:
            continue
        if look(operand).has_nan or (name == "target" and not look(operand).is_finite):  # Inf may be a mask
            where = where_bad(operand)
            at = f" at {list(where.element)}" if where.element else ""
            return f"{_AS_WRITTEN.get(name, name)} of {op} holds {'NaN' if where.is_nan else 'Inf'}{at}"
    return ""


def _bad_summand(node: Any) -> tuple[Any, str]:
    """As ``_bad_data``, of what was added or subtracted just before: ``(values - targets).pow(2)`` saves the result."""
    result = _saved(node, "self")
    added = node.next_functions[0][0] if result is not None else None
    if result is None or added is None or forward_op(added) not in _ADDS or not look(result).has_nan:
        return None, ""
    known = [each for each, _ in added.next_functions if each is not None]
    if len(known) != 1 or any(_shows_nonfinite(each) for each in _nodes(known[0])):
        return None, ""
    element = where_bad(result).element
    return added, f"what {forward_op(added)} is given, and needs no gradient, holds NaN" + f" at {list(element or ())}"


def _shows_nonfinite(node: Any) -> bool:
    """True if a node has saved a non-finite operand or result."""
    saved = (_saved(node, name) for name in ("result", "input", "weight", *_ARGUMENTS))
    return any(tensor is not None and not look(tensor).is_finite for tensor in saved)


def _nodes(root: Any) -> Iterator[Any]:
    todo, seen = [root], {root}
    while todo and len(seen) < _MOST_NODES:
        node = todo.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)


def has_compiled_code(losses: Iterable[Tensor]) -> bool:
    """Whether ``torch.compile`` has made a part of the graph. True for a graph that is too large to tell."""
    nodes = [node for loss in losses if loss.grad_fn is not None for node in _nodes(loss.grad_fn)]
    return len(nodes) >= _MOST_NODES or any(type(node).__name__.startswith("CompiledFunction") for node in nodes)


def _birth(op: str, node: Any) -> tuple[Callable[[], Tensor] | None] | None:
    """How to run such an op again. None if the op did not make a non-finite value, or if that is unknown."""
    again = _again(op, node)
    if again is not None:
        operands, call = again
        is_birth = all(look(each).is_finite for each in operands) and not look(call()).is_finite
        return (call,) if is_birth else None
    other = _saved(node, "other")
    if op == "div" and other is not None and look(other).is_finite and bool((other == 0).any()):
        return (None,)
    result = _saved(node, "result")
    if op in _BY_RESULT and result is not None and look(result).high == math.inf:
        return (None,)
    return None


def _again(op: str, node: Any) -> tuple[Sequence[Tensor], Callable[[], Tensor]] | None:
    """The saved operands, and a call of the op on them."""
    first = _operand_of(node) if op == "sqrt" else _saved(node, "self")
    if first is None:
        return None
    if op == "sqrt":
        return (first,), first.sqrt
    if op.startswith("nll_loss"):
        return _loss_again(node, first)
    if op in _OF_ONE:
        return (first,), lambda: _OF_ONE[op](first)
    if op in ("div", "mul"):
        other = _saved(node, "other")
        function = torch.div if op == "div" else torch.mul
        return None if other is None else ((first, other), lambda: function(first, other))
    if op == "pow":
        exponent = _compat.saved_by(node, "exponent")
        if isinstance(exponent, Tensor):
            return (first, exponent), lambda: torch.pow(first, exponent)
        return None if exponent is None else ((first,), lambda: torch.pow(first, exponent))
    return None


def _operand_of(node: Any) -> Tensor | None:
    """The operand of an op that saves its result alone: what the op before it gives again."""
    before = node.next_functions[0][0]
    again = None if before is None else _again(forward_op(before), before)
    return None if again is None else again[1]()


def _loss_again(node: Any, scores: Tensor) -> tuple[Sequence[Tensor], Callable[[], Tensor]] | None:
    """The same for ``nll_loss`` with a mean, as ``cross_entropy`` ends with."""
    target, weight, ignored = _saved(node, "target"), _saved(node, "weight"), _compat.saved_by(node, "ignore_index")
    if target is None or ignored is None or _compat.saved_by(node, "reduction") != 1:
        return None
    return (scores,), lambda: functional.nll_loss(scores, target, weight, ignore_index=ignored)


def _saved(node: Any, name: str) -> Tensor | None:
    """A saved tensor of a node. None if the node has none or has freed it."""
    value = _compat.saved_by(node, name)
    return value.detach() if isinstance(value, Tensor) else None


# ---- the line --------------------------------------------------------------------------------------------------------


def _line_of(op: str, backward_at: Place | None, files: Sequence[str]) -> tuple[Source | None, bool]:
    """The only line behind the loss that calls this op (True), or else the only such line of the program (False)."""
    if backward_at is None:
        return None, False
    file, number, _ = backward_at
    program = ProgramSource(tuple(dict.fromkeys((file, *files))))
    behind, everywhere = program.lines_behind(file, number, op), program.lines_with(op)
    found = behind or everywhere
    return (found[0], bool(behind)) if len(found) == 1 else (None, False)
