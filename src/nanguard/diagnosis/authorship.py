"""Find the lines of the user's program that made an optimizer, a parameter or a piece of data.

These lines ran before the failing step, so the trace does not contain them. They are searched for in the source code.
The result is a likely line, not a proven one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from nanguard.diagnosis.lines_in_place import WRITES
from nanguard.diagnosis.slicing import (
    Origin,
    ProgramSource,
    is_nonfinite_literal,
    last_name,
    source_of_node,
    stored_by,
    stored_names,
    targets_of,
)
from nanguard.records.diagnosis import Source
from nanguard.source.frames import is_users

_NO_MODULES = ("optim", "sched", "scaler")
"""Words in the names of what is no module, but loads a state as well."""

_LARGE = 3
"""The risk of a line that initialises with a very large number."""

Rows = tuple[int, int, int]
"""The first and last bad row of a tensor, and how many rows it has."""


def line_that_makes(kind: str, files: Iterable[str], keywords: Sequence[str] = (), *, name: str = "") -> Source | None:
    """The line that makes an object of a class: ``torch.optim.Adam(...)``.

    Of several, the one that is stored under this name, or else the one with most keywords.
    """
    best: tuple[tuple[bool, int], Source] | None = None
    program = ProgramSource(tuple(files))
    named = {id(node.value) for _, node in program.nodes(ast.Assign) if name in stored_names(node)} if name else set()
    for file, node in program.nodes(ast.Call):
        if last_name(node.func) == kind:
            said = {keyword.arg for keyword in node.keywords}
            score = id(node) in named, sum(keyword in said for keyword in keywords)
            if best is None or score > best[0]:
                best = score, source_of_node(file, node)
    return None if best is None else best[1]


def line_that_sets(owner: nn.Module, name: str, files: Iterable[str], rows: Rows | None) -> Source | None:
    """The line that sets a parameter or buffer: in the class of its module, or anywhere in the program.

    ``name`` is the whole name: ``encoder.fc.weight``. What is written to ``decoder.weight`` is another parameter.
    """
    program = ProgramSource(tuple(files))
    path, _, name = name.rpartition(".")
    called = path.rpartition(".")[2]
    found: list[tuple[int, int, Origin]] = []
    if is_users(type(owner)):
        names = {base.__name__ for base in type(owner).__mro__}
        for file, statement, value in _set_in_class(program, names, name):
            origin = program.origin(file, statement, value)
            found.append((origin.risk, 0, origin))
    if all(risk == 0 for risk, _, _ in found):
        for file, statement, written, covers in _writes(program, name, called, rows):
            if isinstance(statement, ast.Assign) and _is_harmless(written):
                continue
            origin = Origin(_LARGE if _has_large_number(statement) else -1, source_of_node(file, statement))
            if written is not None:
                origin = program.origin(file, statement, written)
            found.append((origin.risk, covers, origin))
    if not found:
        found = [(origin.risk, 0, origin) for origin in _of_tables(program, called) if origin.risk > 1]
    return max(reversed(found), key=lambda each: each[:2])[2].source if found else None  # the last one overwrites


def _is_harmless(written: ast.AST | None) -> bool:
    """True for a number as programs write it: ``table.weight.data[0] = 0`` makes nothing non-finite, nor large."""
    value = written.operand if isinstance(written, ast.UnaryOp) else written
    return isinstance(value, ast.Constant) and isinstance(value.value, (int, float)) and abs(value.value) <= 1e6


def line_that_fills(owner: type, names: Sequence[str]) -> Source | None:
    """The line of a class that most likely gives one of these attributes NaN or Inf, or what it is computed from."""
    classes = [each for each in owner.__mro__ if is_users(each)]
    files = [getattr(sys.modules.get(each.__module__), "__file__", None) or "" for each in classes]
    program = ProgramSource(tuple(dict.fromkeys(filter(None, files))))
    found = [
        program.origin(file, statement, value)
        for file, node in program.nodes(ast.ClassDef)
        if node.name in {each.__name__ for each in classes}
        for statement in ast.walk(node)
        for name, value in stored_by(statement)
        if name in names
    ]
    best = max(found, key=lambda origin: origin.risk, default=None)
    return best.source if best is not None and best.risk > 1 else None


def lines_that_set_entry(key: str, files: Iterable[str]) -> list[Source]:
    """The lines that store something under this key: ``state["exp_avg_sq"] = ...``."""
    found = []
    for file, node in ProgramSource(tuple(files)).nodes(ast.Assign):
        for target in targets_of(node):
            index = target.slice if isinstance(target, ast.Subscript) else None
            if isinstance(index, ast.Constant) and index.value == key:
                found.append(source_of_node(file, node))
    return found


def line_that_gives(name: str, kind: str, files: Iterable[str]) -> Source | None:
    """The line that may have made the argument of this name of the only such call: ``CrossEntropyLoss(weight=w)``."""
    program = ProgramSource(tuple(files))
    calls = [(file, call) for file, call in program.nodes(ast.Call) if last_name(call.func) == kind]
    given = [(file, call, each.value) for file, call in calls for each in call.keywords if each.arg == name]
    origin = program.origin(*given[0]) if len(given) == 1 else None
    return origin.source if origin is not None and origin.risk > 1 else None


def line_that_makes_data(
    names: Sequence[str],
    place: int | None,
    num: int,
    files: Iterable[str],
    *,
    not_in: Sequence[str] = (),
    used_in: str = "",
    ran: Iterable[tuple[str, int]] = (),
) -> Source | None:
    """The line that makes a piece of data, found by its names or by its index in the ``num`` entries of a batch.

    Functions that only use the data are ignored: ``not_in``, and ``forward`` of modules. If the function that uses the
    data, ``used_in``, has a variable of such a name itself, variables of other functions are others. ``ran`` are files
    and lines that ran in the step: they were given the data.
    """
    program, found = ProgramSource(tuple(files), frozenset(ran)), list[tuple[bool, Origin]]()
    own = list[tuple[bool, Origin]]()
    for file, node in program.nodes(ast.Assign, ast.AugAssign, ast.Expr, ast.Return):
        if program.function_of(node) in ("forward", *not_in):
            continue
        if isinstance(node, (ast.Assign, ast.AugAssign)) and set(names) & set(stored_names(node)):
            found.append((True, program.origin(file, node, node.value)))
            own += found[-1:] if program.function_of(node) == used_in else []
        for value, is_by_name in _parts_of_batch(node, names, place, num):
            found.append((is_by_name, program.origin(file, node, value)))
    found += ((False, origin) for origin in _in_datasets(program, names))
    risky = [each for each in own or found if each[1].risk > 1]  # a name says more than a place
    return max(risky, key=lambda each: (each[0], each[1].risk))[1].source if risky else None


def _in_datasets(program: ProgramSource, names: Sequence[str]) -> Iterator[Origin]:
    """Of what a ``TensorDataset`` is made, at the place that a loop gives one of the names: ``for x, y in loader``."""
    loops = [
        part for _, loop in program.nodes(ast.For) for part in ast.walk(loop.target) if isinstance(part, ast.Tuple)
    ]
    places = {place for part in loops for place, each in enumerate(part.elts) if last_name(each) in names}
    for file, call in program.nodes(ast.Call) if len(places) == 1 else ():
        if last_name(call.func) == "TensorDataset" and max(places) < len(call.args):
            yield program.origin(file, call, call.args[max(places)])


def line_that_writes_nonfinite(files: Iterable[str], *, nan: bool, not_in: Sequence[str] = ()) -> Source | None:
    """The only line that stores a literal NaN (or Inf) into a part of a tensor. None if there is not exactly one.

    Functions that only use the data are ignored (``not_in``, and ``forward`` of modules): what they fill is a mask.
    """
    program, found = ProgramSource(tuple(files)), []
    for file, node in program.nodes(ast.Assign):
        if program.function_of(node) not in ("forward", *not_in):
            into_a_part = any(isinstance(target, ast.Subscript) for target in node.targets)
            if into_a_part and any(is_nonfinite_literal(each, nan=nan) for each in ast.walk(node.value)):
                found.append(source_of_node(file, node))
    return found[0] if len(found) == 1 else None


def line_with_number(number: float | None, files: Iterable[str]) -> Source | None:
    """The only line that stores this number somewhere. None if there is not exactly one."""
    program, found = ProgramSource(tuple(files)), dict[int, Source]()
    for file, node in program.nodes(ast.Assign):
        if any(_is_number(each, number) for each in ast.walk(node.value)):
            found[node.lineno] = source_of_node(file, node)
    return next(iter(found.values())) if len(found) == 1 else None


def _is_number(node: ast.AST, number: float | None) -> bool:
    try:
        value = ast.literal_eval(node) if isinstance(node, (ast.Constant, ast.UnaryOp)) else None
    except ValueError:
        return False
    return type(value) in (int, float) and value == number


def line_that_calls(name: str, files: Iterable[str]) -> Source | None:
    """The only line that calls a method of this name. None if there is not exactly one."""
    calls = ProgramSource(tuple(files)).nodes(ast.Call)
    found = [source_of_node(file, call) for file, call in calls if last_name(call.func) == name]
    return found[0] if len(found) == 1 else None


def names_in_unpacking(function: object, place: int) -> list[str]:
    """The name that a loss function gives to an entry of its batch: ``x, y = batch``."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_argcount < 2:
        return []
    batch, first = code.co_varnames[1], code.co_firstlineno
    for _, node in ProgramSource((code.co_filename,)).nodes(ast.Assign):
        if not first <= node.lineno <= first + 200:
            continue
        for target in node.targets if last_name(node.value) == batch else ():
            if isinstance(target, (ast.Tuple, ast.List)) and place < len(target.elts):
                name = last_name(target.elts[place])
                return [name] if name else []
    return []


def _parts_of_batch(node: ast.AST, names: Sequence[str], place: int | None, num: int) -> Iterator[tuple[ast.AST, bool]]:
    """Entries of dicts by name (True), and of tuples of the batch's length by place (False)."""
    unpacked = node.value if isinstance(node, ast.Assign) else None  # a, b = 1, 2
    for each in ast.walk(node):
        if isinstance(each, ast.Dict):
            pairs = zip(each.keys, each.values, strict=True)
            yield from ((v, True) for k, v in pairs if isinstance(k, ast.Constant) and k.value in names)
        elif isinstance(each, ast.Tuple) and each is not unpacked and len(each.elts) == num and place is not None:
            yield from ((v, False) for v in each.elts[place : place + 1] if isinstance(each.ctx, ast.Load))


def _set_in_class(program: ProgramSource, classes: set[str], name: str) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    for file, node in program.nodes(ast.ClassDef):
        if node.name not in classes:
            continue
        for each in ast.walk(node):
            if isinstance(each, (ast.Assign, ast.AnnAssign)) and each.value is not None:
                for target in targets_of(each):
                    if isinstance(target, ast.Attribute) and (target.attr, last_name(target.value)) == (name, "self"):
                        yield file, each, each.value
            elif isinstance(each, ast.Expr) and isinstance(each.value, ast.Call):
                call = each.value
                is_own = last_name(call.func) in ("register_buffer", "register_parameter") and len(call.args) > 1
                if is_own and isinstance(call.args[0], ast.Constant) and call.args[0].value == name:
                    yield file, each, call.args[1]


def _of_tables(program: ProgramSource, called: str) -> Iterator[Origin]:
    """Of what a layer is made of: ``self.position = nn.Embedding.from_pretrained(table)``."""
    for file, node in program.nodes(ast.Assign):
        made = node.value if isinstance(node.value, ast.Call) and called in stored_names(node) else None
        if made is not None and last_name(made.func) == "from_pretrained" and made.args:
            yield program.origin(file, node, made.args[0])


def _writes(
    program: ProgramSource, name: str, called: str, rows: Rows | None
) -> Iterator[tuple[str, ast.AST, ast.AST | None, int]]:
    """Statements that write to an attribute of this name or to an alias of it, with the value they write."""
    aliases = {name}
    for _, assignment in program.nodes(ast.Assign):
        if _reads(assignment.value, name):
            aliases |= {target.id for target in targets_of(assignment) if isinstance(target, ast.Name)}
    for file, node in program.nodes(ast.Assign, ast.AugAssign, ast.Expr):
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            for target in targets_of(node):
                covers = _is_target(target, {name}, called, rows)
                if covers:
                    yield file, node, node.value, covers
        elif (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _loads_no_model(program, node.value)
        ):
            yield from ((file, node, value, covers) for value, covers in _written_by(node.value, aliases, called, rows))


def _loads_no_model(program: ProgramSource, call: ast.Call) -> bool:
    """True for ``optimizer.load_state_dict(...)``, and of a schedule or a scaler: no weights are in these."""
    if last_name(call.func) != "load_state_dict" or not isinstance(call.func, ast.Attribute):
        return False
    name = last_name(call.func.value) or ""
    if any(word in name.lower() for word in ("optim", "sched", "scaler")):
        return True
    made = [node.value for _, node in program.nodes(ast.Assign) if name in stored_names(node)]
    return any(isinstance(each, ast.Call) and hasattr(torch.optim, last_name(each.func) or "") for each in made)


def _written_by(
    call: ast.Call, names: set[str], called: str, rows: Rows | None
) -> Iterator[tuple[ast.AST | None, int]]:
    first = call.args[0] if call.args else None
    if not isinstance(call.func, ast.Attribute):
        return
    if call.func.attr == "load_state_dict":
        if not any(each in last_name(call.func.value).lower() for each in _NO_MODULES):
            is_copy = first is not None and any(
                isinstance(each, ast.Call) and last_name(each.func) == "state_dict" for each in ast.walk(first)
            )
            yield first, 0 if is_copy else 1  # one of another module
        return
    if call.func.attr in WRITES:
        covers = _is_target(call.func.value, names, called, rows)
        if covers:
            yield first, covers
    if call.func.attr.endswith("_") and first is not None:  # nn.init.normal_(w)
        covers = _is_target(first, names, called, rows)
        if covers:
            yield None, covers


def _reads(value: ast.AST, name: str) -> bool:
    """True for the attribute itself (``layer.weight``, ``layer.weight.data``), not for a value computed from it."""
    while isinstance(value, ast.Attribute) and value.attr in ("data", "detach"):
        value = value.value
    return isinstance(value, ast.Attribute) and value.attr == name


def _is_target(target: ast.AST, names: set[str], called: str, rows: Rows | None) -> int:
    """0 if the target is something else. Higher if the part that is written to matches the bad rows better.

    ``called`` is what the model calls the module of the parameter: ``x.fc.weight`` is not that of ``x.head``.
    """
    covers = 2
    if isinstance(target, ast.Subscript):
        covers = _covers(target.slice, rows)
        target = target.value
    if isinstance(target, ast.Attribute) and target.attr == "data":
        target = target.value
    if isinstance(target, ast.Subscript):
        target = target.value
    is_attribute = isinstance(target, ast.Attribute) and target.attr in names
    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Attribute) and not called.isdigit():
        is_attribute = is_attribute and target.value.attr in (called, "module")
    return covers if is_attribute or (isinstance(target, ast.Name) and target.id in names) else 0


def _has_large_number(statement: ast.AST) -> bool:
    """True for ``nn.init.normal_(w, std=1e30)``."""
    numbers = [each.value for each in ast.walk(statement) if isinstance(each, ast.Constant)]
    return any(isinstance(number, (int, float)) and abs(number) > 1e6 for number in numbers)


def _covers(index: ast.AST, rows: Rows | None) -> int:
    """3 if the slice is open on the side of the bad rows, 1 if it is open on the other side, 2 if unclear."""
    if rows is None or not isinstance(index, ast.Slice):
        return 2
    first, last, num = rows
    if first > 0 and last == num - 1:
        return 3 if index.upper is None and index.lower is not None else 1
    if first == 0 and last < num - 1:
        return 3 if index.lower is None and index.upper is not None else 1
    return 2
