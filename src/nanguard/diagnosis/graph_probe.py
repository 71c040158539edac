"""Read the autograd graph of a non-finite loss, for a step that cannot be run again.

Autograd saves operands or results of the ops that it will differentiate. Until the backward pass frees them, they show
which op made a non-finite value from finite ones. They do not show its line; that is searched for in the source code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanguard import _compat
from nanguard.diagnosis.causes import with_remedy
from nanguard.diagnosis.exam import Exam, Past
from nanguard.diagnosis.examiner import Examiner
from nanguard.diagnosis.look import look
from nanguard.diagnosis.slicing import ProgramSource
from nanguard.diagnosis.trace import Trace, forward_op
from nanguard.diagnosis.watched import WatchedRun
from nanguard.records.diagnosis import Diagnosis, Source
from nanguard.records.steps import Reading
from nanguard.source.frames import Place, user_files
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
    "sqrt": ("sqrt_of_negative", "the root of a negative number was taken"),
    "rsqrt": ("div_by_zero", "1 is divided by the root of 0"),
    "reciprocal": ("div_by_zero", "1 is divided by 0"),
    "div": ("div_by_zero", "a denominator is 0; what it divides was not kept"),
}
"""Ops whose result or denominator alone is saved: the cause and the reason."""


@dataclass(frozen=True, slots=True)
class GraphFinding:
    """An op that made a non-finite value from finite ones. ``again`` runs it again, None if that is not possible."""

    op: str
    again: Callable[[], Tensor] | None
    became_nan: bool
    backward_at: Place | None


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
    if diagnosis is None:
        cause, words = _BY_RESULT.get(graph_finding.op, ("unknown", "no operand of it was kept"))
        if graph_finding.op == "div" and graph_finding.became_nan:  # x / 0 is Inf
            cause = "zero_over_zero"
        diagnosis = Diagnosis(phase="forward", cause=cause, because=words)
    source = _line_of(graph_finding)
    return replace(
        with_remedy(diagnosis),
        phase="forward",
        op=graph_finding.op,
        module="",
        source=source,
        is_line_traced=False,
        samples=(),
        chain=(),
        harmless=(),
        trail=(),
        confidence="guess" if source is None else "likely",
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


def _first_birth(root: Any) -> tuple[str, Callable[[], Tensor] | None] | None:
    """The first op that made a non-finite value from finite ones."""
    births = []
    for node in _nodes(root):
        op = forward_op(node)
        birth = _birth(op, node)
        if birth is not None:
            births.append((_compat.sequence_nr(node) or 0, op, birth[0]))
    if not births:
        return None
    _, op, again = min(births, key=lambda each: each[0])
    return op, again


def _nodes(root: Any) -> Iterator[Any]:
    todo, seen = [root], {root}
    while todo and len(seen) < _MOST_NODES:
        node = todo.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)


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
    if op in _BY_RESULT and result is not None and not look(result).is_finite:
        return (None,)
    return None


def _again(op: str, node: Any) -> tuple[Sequence[Tensor], Callable[[], Tensor]] | None:
    """The saved operands, and a call of the op on them."""
    first = _saved(node, "self")
    if first is None:
        return None
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


def _saved(node: Any, name: str) -> Tensor | None:
    """A saved tensor of a node. None if the node has none or has freed it."""
    value = _compat.saved_by(node, name)
    return value.detach() if isinstance(value, Tensor) else None


# ---- the line --------------------------------------------------------------------------------------------------------


def _line_of(graph_finding: GraphFinding) -> Source | None:
    """The only line behind the loss that calls this op, or else the only such line of the program."""
    if graph_finding.backward_at is None:
        return None
    file, number, _ = graph_finding.backward_at
    program = ProgramSource(tuple(dict.fromkeys((file, *user_files([])))))
    for lines in (program.lines_behind(file, number, graph_finding.op), program.lines_with(graph_finding.op)):
        if len(lines) == 1:
            return lines[0]
        if lines:
            return None
    return None
