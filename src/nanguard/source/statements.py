"""The statement that a line belongs to, if it goes over several lines."""

from __future__ import annotations

import ast
import functools
import linecache

_SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)
_LONGEST = 240


def statement_at(file: str, line: int) -> str:
    """In one line, without comments; ``""`` if the line alone can be understood, or the statement is long."""
    text = linecache.getline(file, line).strip()
    if not text or _parsed(text) is not None:
        return ""
    tree = _tree(file)
    nodes = [] if tree is None else [node for node in ast.walk(tree) if isinstance(node, _SIMPLE)]
    around = [node for node in nodes if node.lineno <= line <= (node.end_lineno or node.lineno)]
    if not around:
        return ""
    statement = ast.unparse(max(around, key=lambda node: node.lineno))
    return statement if "\n" not in statement and len(statement) <= _LONGEST else ""


@functools.lru_cache(maxsize=16)
def _tree(file: str) -> ast.Module | None:
    return _parsed("".join(linecache.getlines(file)))


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None
