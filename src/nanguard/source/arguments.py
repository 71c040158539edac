"""What the program calls the arguments of a call, read from its source code."""

from __future__ import annotations

import ast
import builtins
import itertools
import linecache
from collections.abc import Sequence
from types import CodeType

_LONGEST = 40


def argument_names(code: CodeType | None, at: int, num: int, *, is_method: bool = False) -> list[str]:
    """The source text of the ``num`` arguments of the call at a position in code. Empty if it cannot be found.

    With ``is_method`` the first one is the object that has the method. Of a long call there is only the first argument,
    instead of another long text an empty one.
    """
    text = "" if code is None else _expression(code, at)
    try:
        node = ast.parse(f"({text})", mode="eval").body if text else None  # in brackets: it may go over several lines
    except SyntaxError:
        return []
    nodes = _arguments(node, num, is_method=is_method)
    if len(nodes) < num and not is_method and (only := _only_argument(node)) is not None:  # layer(x) calls linear(x, w)
        return [_short(only), *[""] * (num - 1)]
    return [_short(each) for each in nodes] if len(nodes) == num else []


def _only_argument(node: ast.expr | None) -> ast.expr | None:
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords or isinstance(node.args[0], ast.Starred):
        return None
    is_builtin = isinstance(node.func, ast.Name) and hasattr(builtins, node.func.id)
    return None if is_builtin else node.args[0]


def _short(node: ast.expr) -> str:
    """``torch.tensor(rewards, ...)`` of a long call."""
    text = ast.unparse(node)
    if len(text) > _LONGEST and isinstance(node, ast.Call) and (node.args or node.keywords):
        first = [*node.args[:1], *([] if len(node.args) + len(node.keywords) == 1 else [ast.Constant(...)])]
        text = ast.unparse(ast.Call(node.func, first or [ast.Constant(...)], []))
    return text if len(text) <= _LONGEST else ""


def names_beside_number(code: CodeType | None, at: int, *, is_reflected: bool, is_method: bool) -> list[str]:
    """As ``argument_names``, if the second argument is a number: in ``a * b`` torch has changed their order, or not."""
    names = argument_names(code, at, 2, is_method=is_method)
    text = "" if code is None else _expression(code, at)
    try:
        node = ast.parse(f"({text})", mode="eval").body
    except SyntaxError:
        return names
    if not isinstance(node, ast.BinOp) or len(names) != 2 or isinstance(node.right, ast.Constant):
        return names
    if is_reflected or isinstance(node.left, ast.Constant):
        return names[::-1]
    return [f"the tensor in {ast.unparse(node)}", ""] if isinstance(node.op, (ast.Mult, ast.Add)) else names


def name_of_iterated(code: CodeType | None, at: int) -> str:
    """What a loop goes through, or what is unpacked, at a position in code: ``for x in sequence``. Empty if unknown."""
    text = "" if code is None else _expression(code, at)
    try:
        is_loop = text.startswith("for ")  # the position is that of the whole loop
        statement = ast.parse(text if is_loop else f"({text})").body[0] if text else None
    except SyntaxError:
        return ""
    node: ast.expr | None = None
    if isinstance(statement, (ast.For, ast.Expr)):
        node = statement.iter if isinstance(statement, ast.For) else statement.value
    while isinstance(node, ast.Call) and len(node.args) == 1 and isinstance(node.func, ast.Name):
        if not hasattr(builtins, node.func.id):
            return ""
        node = node.args[0]  # of enumerate(sequence)
    return _short(node) if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) else ""


def names_of_parts(name: str, paths: Sequence[str]) -> list[str]:
    """The names of what is at these paths inside an argument: in ``[a, b]``, ``[1].x`` is ``b.x``."""
    try:
        node = ast.parse(name, mode="eval").body
    except SyntaxError:
        node = None
    entries = node.elts if isinstance(node, (ast.List, ast.Tuple)) else []
    if any(isinstance(entry, ast.Starred) for entry in entries):
        entries = []
    is_plain = isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call))
    whole = name if is_plain else f"({name})"
    return [_name_at(path, entries) or (whole + path if path else name) for path in paths]


def _name_at(path: str, entries: Sequence[ast.expr]) -> str:
    place, closed, rest = path.removeprefix("[").partition("]")
    if not (closed and place.isdigit() and int(place) < len(entries)):
        return ""
    return ast.unparse(entries[int(place)]) + rest


def _arguments(node: ast.expr | None, num: int, *, is_method: bool) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.Compare) and len(node.comparators) == 1:
        return [node.left, node.comparators[0]]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    if isinstance(node, ast.Subscript):
        return [node.value, node.slice]
    if isinstance(node, ast.Attribute):  # x.T
        return [node.value]
    if not isinstance(node, ast.Call):
        return []
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    if len(given) > 1 and isinstance(node.func, ast.Name) and hasattr(builtins, node.func.id):
        return []  # zip(a, b) goes through one of them, and does not show which
    if (is_method or len(given) < num) and isinstance(node.func, ast.Attribute):
        given = [node.func.value, *given]
    return given[:num]


def _expression(code: CodeType, at: int) -> str:
    """The text of the expression that is evaluated there. Needs Python 3.11."""
    if not hasattr(code, "co_positions"):
        return ""
    first, last, begin, end = next(itertools.islice(code.co_positions(), at // 2, None), (None,) * 4)
    if first is None or last is None or begin is None or end is None:
        return ""
    lines = [linecache.getline(code.co_filename, number).encode() for number in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return b"".join(lines).decode(errors="replace")
