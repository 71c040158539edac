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
    found = simple_statement_at(file, line)
    statement = "" if found is None else ast.unparse(found)
    return statement if "\n" not in statement and len(statement) <= _LONGEST else ""


def simple_statement_at(file: str, line: int) -> ast.stmt | None:
    """The statement that computes something on a line; None if there is none."""
    tree = tree_of(file)
    nodes = [] if tree is None else [node for node in ast.walk(tree) if isinstance(node, _SIMPLE)]
    around = [node for node in nodes if node.lineno <= line <= (node.end_lineno or node.lineno)]
    return max(around, key=lambda node: node.lineno) if around else None


@functools.lru_cache(maxsize=16)
def tree_of(file: str) -> ast.Module | None:
    """The parsed file; None if it cannot be parsed."""
    return _parsed("".join(linecache.getlines(file)))


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None
