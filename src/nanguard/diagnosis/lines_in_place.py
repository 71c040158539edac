"""Find the lines of the user's program that write to tensors in place: to gradients, to weights, to data.

They are searched for in the source code, so a line is a likely one, not a proven one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import TypeGuard

from nanguard.diagnosis.slicing import ProgramSource, last_name, source_of_node, targets_of
from nanguard.records.diagnosis import Source
from nanguard.records.words import joined
from nanguard.source.frames import source_of
from nanguard.step.tape import CallTape

WRITES = ("copy_", "fill_", "mul_", "div_", "add_", "sub_", "set_", "zero_", "normal_", "uniform_", "clamp_", "lerp_")
"""Methods of tensors."""

_NOT_IN_A_LOOP = ("step", "__init__", "reset_parameters", "init_weights", "_init_weights")
"""Functions that write to weights as they should."""


def lines_that_change_gradients(running: Iterable[tuple[str, str]]) -> list[Source]:
    """``p.grad /= n``, ``p.grad.div_(n)``, ``p.grad = p.grad / n``: those in these functions, or else in their files.

    ``running`` are files and names of functions.
    """
    running = set(running)
    files = [file for file, _ in running]
    program, found = ProgramSource(tuple(dict.fromkeys(files))), dict[tuple[str, str, int], Source]()
    for file, node in program.nodes(ast.Assign, ast.AugAssign, ast.Call):
        if isinstance(node, ast.Call):
            is_write = isinstance(node.func, ast.Attribute) and node.func.attr in WRITES and node.func.attr != "zero_"
            changes = is_write and isinstance(node.func, ast.Attribute) and _is_gradient(node.func.value)
        elif isinstance(node, ast.Assign):
            is_cleared = isinstance(node.value, ast.Constant) and node.value.value is None
            changes = not is_cleared and any(map(_is_gradient, targets_of(node)))
        else:
            changes = isinstance(node, ast.AugAssign) and _is_gradient(node.target)
        if changes and isinstance(node, (ast.stmt, ast.expr)):
            found[file, program.function_of(node), node.lineno] = source_of_node(file, node)
    near = [source for (file, function, _), source in found.items() if (file, function or "<module>") in running]
    return near or list(found.values())


def lines_that_write(files: Iterable[str]) -> list[Source]:
    """The lines that write to tensors in place, without gradients: ``p.data.mul_(x)``, ``p.add_(e)`` in ``no_grad``.

    Not those of optimizers, gradients and initialisation.
    """
    program, found = ProgramSource(tuple(files)), dict[tuple[str, int], Source]()
    for file, node in program.nodes(ast.With, ast.FunctionDef, ast.Expr, ast.Assign, ast.AugAssign):
        if isinstance(node, (ast.With, ast.FunctionDef)):
            marks = [i.context_expr for i in node.items] if isinstance(node, ast.With) else node.decorator_list
            names = {last_name(mark.func if isinstance(mark, ast.Call) else mark) for mark in marks}
            inside = list(ast.walk(node)) if names & {"no_grad", "inference_mode"} else []
        else:
            inside = [node] if any(isinstance(e, ast.Attribute) and e.attr == "data" for e in ast.walk(node)) else []
        for each in inside:
            if _writes_in_place(each) and program.function_of(each) not in _NOT_IN_A_LOOP:
                found[file, each.lineno] = source_of_node(file, each)
    lines = {str(source): source for _, source in sorted(found.items())}  # a file may have two names
    return list(lines.values())


def in_words(lines: Sequence[Source], does: str = "writes to tensors") -> str:
    """To be added to a reason, for lines that ``lines_that_write`` found; empty for none."""
    return f"; the program {does} at {joined(list(map(str, lines)))}" if lines else ""


def changes_in_words(tape: CallTape | None, storage: int | None) -> str:
    """To be added to a reason, for data that the program has changed in place in this step; empty if it has not."""
    changes = [] if tape is None or storage is None else tape.changes_of(storage)
    lines = [f"{name.rstrip('_')} at {source_of(place)}" for name, place in changes]
    return f"; {joined(lines)} changed it in place before, and may have made that" if lines else ""


def _writes_in_place(node: ast.AST) -> TypeGuard[ast.stmt]:
    if isinstance(node, ast.Expr):
        call = node.value.func if isinstance(node.value, ast.Call) else None
        is_write = isinstance(call, ast.Attribute) and call.attr in WRITES and call.attr != "zero_"
        return is_write and isinstance(call, ast.Attribute) and not _is_gradient(call.value)
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        parts = [part for target in targets_of(node) for part in ast.walk(target)]
        return any(isinstance(part, ast.Attribute) and part.attr in ("data", "weight", "bias") for part in parts)
    return False


def _is_gradient(node: ast.AST) -> bool:
    """``p.grad``, ``p.grad.data``, ``p.grad[mask]``."""
    while isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "data"):
        node = node.value
    return isinstance(node, ast.Attribute) and node.attr == "grad"
