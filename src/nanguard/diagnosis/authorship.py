"""Who wrote it: lines of the user's program that made an optimizer, a parameter or a piece of data.

Such lines ran before the failing step, so no trace leads to them. They are looked for in the source itself, and what is
found is a likely place, never a proven one.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from nanguard.diagnosis.record import Source
from nanguard.diagnosis.source import is_users, user_files

_WRITES = ("copy_", "fill_", "mul_", "div_", "add_", "sub_", "set_", "zero_", "normal_", "uniform_", "clamp_", "lerp_")


def line_that_makes(kind: str, files: Iterable[str], keywords: Sequence[str] = ()) -> Source | None:
    """Where an object of a class is made: ``torch.optim.Adam(...)``. Of several, the one with most of the keywords."""
    best: tuple[int, Source] | None = None
    for file, node in _nodes(files, ast.Call):
        if _last_name(node.func) != kind:
            continue
        said = {keyword.arg for keyword in node.keywords}
        score = sum(keyword in said for keyword in keywords)
        if best is None or score > best[0]:
            best = score, _source(file, node)
    return None if best is None else best[1]


def line_that_sets(
    owner: nn.Module, name: str, files: Iterable[str], rows: tuple[int, int, int] | None
) -> Source | None:
    """Where a parameter or buffer gets its values.

    In the class of its module, if that is the user's; else where the program writes to an attribute of this name.
    ``rows`` are the first and last bad row and their number in all: a slice that covers them speaks for its line.
    """
    if is_users(type(owner)):
        found = _in_class(type(owner), name)
        if found is not None:
            return found
    best: tuple[int, Source] | None = None
    for file, node in _nodes(files, ast.stmt):
        score = _writes_to(node, name, rows)
        if score and (best is None or score >= best[0]):
            best = score, _source(file, node)
    return None if best is None else best[1]


def line_that_sets_entry(key: str, files: Iterable[str]) -> Source | None:
    """The last line that stores something under this key: ``state["exp_avg_sq"] = ...``."""
    found = None
    for file, node in _nodes(files, ast.Assign):
        for target in _flattened(node.targets):
            index = target.slice if isinstance(target, ast.Subscript) else None
            if isinstance(index, ast.Constant) and index.value == key:
                found = _source(file, node)
    return found


def line_that_makes_data(names: Sequence[str], files: Iterable[str]) -> Source | None:
    """Where a piece of data of one of these names gets its values.

    A line that stores a literal NaN or Inf into it, or computes it by something that can give one: a division, a
    logarithm, a root, a deviation.
    """
    best: tuple[int, Source] | None = None
    for file, node in _nodes(files, (ast.Assign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        values = [node.value] if set(names) & {_stored_name(target) for target in _flattened(targets)} else []
        for each in ast.walk(node.value):
            if isinstance(each, ast.Dict):
                values += [
                    v
                    for k, v in zip(each.keys, each.values, strict=True)
                    if isinstance(k, ast.Constant) and k.value in names
                ]
        score = max((_can_be_nonfinite(value) for value in values), default=0)
        if score and (best is None or score > best[0]):
            best = score, _source(file, node)
    return None if best is None else best[1]


def names_in_unpacking(function: object, place: int) -> list[str]:
    """What a loss function calls the entry of its batch at a place: ``x, y = batch``."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_argcount < 2:
        return []
    batch = code.co_varnames[1]
    for _, node in _nodes([code.co_filename], ast.Assign):
        if not code.co_firstlineno <= node.lineno <= code.co_firstlineno + 200 or _last_name(node.value) != batch:
            continue
        for target in node.targets:
            if isinstance(target, (ast.Tuple, ast.List)) and place < len(target.elts):
                name = _last_name(target.elts[place])
                return [name] if name else []
    return []


def _stored_name(target: ast.AST) -> str:
    if isinstance(target, ast.Subscript):
        if isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str):
            return target.slice.value
        return _stored_name(target.value)
    return _last_name(target)


_RISKY = frozenset(
    [
        "log",
        "log2",
        "log10",
        "log1p",
        "sqrt",
        "rsqrt",
        "std",
        "var",
        "pow",
        "exp",
        "norm",
        "reciprocal",
        "div",
        "true_divide",
        "mean",
    ]
)


def _can_be_nonfinite(value: ast.AST) -> int:
    for each in ast.walk(value):
        if _is_nonfinite_literal(each):
            return 3
    for each in ast.walk(value):
        if isinstance(each, ast.BinOp) and isinstance(each.op, (ast.Div, ast.Pow)):
            return 2
        if isinstance(each, ast.Call) and _last_name(each.func) in _RISKY:
            return 2
    return 0


def line_that_writes_nonfinite(files: Iterable[str]) -> Source | None:
    """The only line that stores a literal NaN or Inf into a part of something; None where there are none or many."""
    found = []
    for file, node in _nodes(files, ast.Assign):
        into_a_part = any(isinstance(target, (ast.Subscript, ast.Attribute)) for target in node.targets)
        if into_a_part and any(_is_nonfinite_literal(each) for each in ast.walk(node.value)):
            found.append(_source(file, node))
    return found[0] if len(found) == 1 else None


def line_that_calls(name: str, files: Iterable[str]) -> Source | None:
    """The only line that calls a method of this name."""
    found = [_source(file, node) for file, node in _nodes(files, ast.Call) if _last_name(node.func) == name]
    return found[0] if len(found) == 1 else None


def _in_class(kind: type[nn.Module], name: str) -> Source | None:
    for base in kind.__mro__:
        files = user_files([base]) if base.__module__ != "builtins" else []
        for file, node in _nodes(files[-1:], ast.ClassDef):
            if node.name != base.__name__:
                continue
            for each in ast.walk(node):
                if isinstance(each, (ast.Assign, ast.AnnAssign)):
                    targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                    for target in _flattened(targets):
                        if (
                            isinstance(target, ast.Attribute)
                            and target.attr == name
                            and _last_name(target.value) == "self"
                        ):
                            return _source(file, each)
                if isinstance(each, ast.Call) and _last_name(each.func) in ("register_buffer", "register_parameter"):
                    first = each.args[0] if each.args else None
                    if isinstance(first, ast.Constant) and first.value == name:
                        return _source(file, each)
    return None


def _writes_to(node: ast.AST, name: str, rows: tuple[int, int, int] | None) -> int:
    """How much speaks for a statement having written to an attribute: 0 where it does not."""
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return max((_is_target(target, name, rows) for target in _flattened(targets)), default=0)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        call = node.value
        if _last_name(call.func) == "load_state_dict":
            return 1
        if isinstance(call.func, ast.Attribute) and call.func.attr in _WRITES:
            return _is_target(call.func.value, name, rows)
        if isinstance(call.func, ast.Attribute) and call.func.attr.endswith("_") and call.args:  # nn.init.normal_(w)
            return _is_target(call.args[0], name, rows)
    return 0


def _is_target(target: ast.AST, name: str, rows: tuple[int, int, int] | None) -> int:
    covers = 2
    if isinstance(target, ast.Subscript):
        covers = _covers(target.slice, rows)
        target = target.value
    if isinstance(target, ast.Attribute) and target.attr == "data":
        target = target.value
    if isinstance(target, ast.Subscript):
        target = target.value
    return covers if isinstance(target, ast.Attribute) and target.attr == name else 0


def _covers(index: ast.AST, rows: tuple[int, int, int] | None) -> int:
    """3 where a slice is open on the side where the bad rows lie, 1 where it is not."""
    if rows is None or not isinstance(index, ast.Slice):
        return 2
    first, last, num = rows
    if first > 0 and last == num - 1:
        return 3 if index.upper is None and index.lower is not None else 1
    if first == 0 and last < num - 1:
        return 3 if index.lower is None and index.upper is not None else 1
    return 2


def _is_nonfinite_literal(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and _last_name(node.func) == "float" and node.args:
        text = node.args[0]
        return isinstance(text, ast.Constant) and str(text.value).strip("+-").lower() in ("nan", "inf", "infinity")
    return (
        isinstance(node, ast.Attribute)
        and node.attr in ("nan", "NaN", "inf")
        and _last_name(node.value)
        in (
            "math",
            "np",
            "numpy",
            "torch",
        )
    )


def _flattened(targets: Iterable[ast.expr]) -> Iterator[ast.expr]:
    for target in targets:
        if isinstance(target, (ast.Tuple, ast.List)):
            yield from _flattened(target.elts)
        else:
            yield target


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _nodes(files: Iterable[str], kind: Any) -> Iterator[tuple[str, Any]]:
    for file in files:
        tree = _parsed(file)
        if tree is not None:
            yield from ((file, node) for node in ast.walk(tree) if isinstance(node, kind))


@functools.lru_cache(maxsize=64)
def _parsed(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def _source(file: str, node: ast.AST) -> Source:
    line = int(getattr(node, "lineno", 1))
    return Source(file=file, line=line, text=linecache.getline(file, line).strip())
