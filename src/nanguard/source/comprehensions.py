"""What a program calls the entries that a comprehension goes through: ``x, y = [t.to(device) for t in batch]``."""

from __future__ import annotations

import ast
import functools
import itertools
from types import CodeType

from nanguard.source.statements import tree_of

_KINDS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
_PARTS = frozenset(("items", "values"))


def name_of_entry(name: str, code: CodeType | None, at: int, place: int, num: int) -> str:
    """Another name for a variable of the comprehension at a position in code; the same if it is no such variable.

    The program was at this position ``num`` times; the time ``place`` is meant. If the comprehension is unpacked into
    so many variables, it is the one at that place, else an entry of what the comprehension goes through.
    """
    found = _around(code, at)
    if found is None:
        return name
    target, loop = found
    variables = {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}
    if name not in variables:
        return name
    targets = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
    if len(targets) == num and isinstance(targets[place], ast.Name):
        return ast.unparse(targets[place])
    whole = loop.iter
    is_of_dict = isinstance(whole, ast.Call) and isinstance(whole.func, ast.Attribute) and whole.func.attr in _PARTS
    if is_of_dict and isinstance(whole, ast.Call) and isinstance(whole.func, ast.Attribute):
        whole = whole.func.value
    return f"an entry of {ast.unparse(whole)}" if isinstance(whole, (ast.Name, ast.Attribute, ast.Subscript)) else name


@functools.lru_cache(maxsize=64)
def _around(code: CodeType | None, at: int) -> tuple[ast.expr | None, ast.comprehension] | None:
    """What the innermost comprehension around a position is assigned to, None if nothing, and its only loop."""
    if code is None or not hasattr(code, "co_positions"):
        return None
    line, _, column, _ = next(itertools.islice(code.co_positions(), at // 2, None), (None,) * 4)
    tree = None if line is None or column is None else tree_of(code.co_filename)
    if tree is None:
        return None
    around = [node for node in ast.walk(tree) if isinstance(node, _KINDS) and _contains(node, line, column)]
    if not around or len(around[-1].generators) != 1:
        return None
    target = None
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Assign) else None
        if isinstance(value, ast.Call) and len(value.args) == 1:  # tuple(t.to(device) for t in batch)
            value = value.args[0]
        if isinstance(node, ast.Assign) and value is around[-1]:
            target = node.targets[0]
    return target, around[-1].generators[0]


def _contains(node: ast.expr, line: int | None, column: int | None) -> bool:
    end = node.end_lineno or node.lineno, node.end_col_offset or 0
    return (node.lineno, node.col_offset) <= (line or 0, column or 0) < end
