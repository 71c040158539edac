"""Read the user's source code: which lines a value is computed from, and which could return NaN or Inf."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from nanguard.records.diagnosis import Source
from nanguard.source.frames import source_at

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
Node = TypeVar("Node", bound=ast.AST)

_LITERAL, _LIKELY, _POSSIBLE = 4, 3, 1
_LIKELY_CALLS = frozenset(
    (
        *("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "std", "var", "mean", "nanmean", "reciprocal", "div"),
        *("divide", "true_divide", "erfinv", "acos", "arccos", "asin", "arcsin", "atanh", "arctanh", "inv"),
    )
)
_POWERS = frozenset(("float_power", "pow", "power"))
_POSSIBLE_CALLS = frozenset(("exp", *_POWERS, "norm", "half", "empty", "empty_like", "prod", "cumprod", "square"))
_DEEPEST = 4
_OPERATORS: dict[str, type[ast.operator]] = {
    "add": ast.Add,
    "div": ast.Div,
    "mul": ast.Mult,
    "pow": ast.Pow,
    "rsub": ast.Sub,
    "sub": ast.Sub,
}


@dataclass(frozen=True, slots=True)
class Origin:
    """A line that may have made a value non-finite, and its risk: 0 is none."""

    risk: int
    source: Source


@dataclass(slots=True)
class ProgramSource:
    """The parsed files of a program. Lines that ``ran`` in the step were seen, and did not make what came before."""

    files: tuple[str, ...]
    ran: frozenset[tuple[str, int]] = frozenset()
    functions: dict[str, list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]] = field(default_factory=dict)
    _scopes: dict[int, Scope] = field(default_factory=dict)
    _classes: dict[int, ast.ClassDef] = field(default_factory=dict)
    _constants: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for file in self.files:
            tree = parsed(file)
            if tree is not None:
                self._enter(file, tree, tree, None)
                self._constants |= set(_nonfinite_constants(tree))

    def _enter(self, file: str, node: ast.AST, scope: Scope, inside: ast.ClassDef | None) -> None:
        for child in ast.iter_child_nodes(node):
            self._scopes[id(child)] = scope
            if inside is not None:
                self._classes[id(child)] = inside
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self.functions.setdefault(child.name, []).append((file, child))
                self._enter(file, child, child, inside)
            else:
                self._enter(file, child, scope, child if isinstance(child, ast.ClassDef) else inside)

    def function_of(self, node: ast.AST) -> str:
        """The name of the function that contains a node, ``""`` if it is in none."""
        return getattr(self._scopes.get(id(node)), "name", "")

    def nodes(self, *kinds: type[Node]) -> Iterator[tuple[str, Node]]:
        """All nodes of these kinds, file by file."""
        for file in self.files:
            tree = parsed(file)
            if tree is not None:
                yield from ((file, node) for node in ast.walk(tree) if isinstance(node, kinds))

    def origin(self, file: str, statement: ast.AST, value: ast.AST) -> Origin:
        """The line that most likely made a value non-finite: the statement, or one that it is computed from.

        Follows names to their assignments in the same function, and calls into functions of the program.
        """
        best = Origin(self._risk_of(file, statement, value), source_of_node(file, statement))
        seen: set[int] = {id(value)}
        waiting = [(file, statement, value, 0)]
        while waiting:
            file, statement, value, depth = waiting.pop(0)
            risk = self._risk_of(file, statement, value)
            if risk > best.risk:
                best = Origin(risk, source_of_node(file, statement))
            if depth < _DEEPEST:
                for part in self._made_of(file, statement, value):
                    if id(part[2]) not in seen:
                        seen.add(id(part[2]))
                        waiting.append((*part, depth + 1))
        return best

    def lines_behind(self, file: str, line: int, op: str) -> list[Source]:
        """The lines that compute an op on the way to the loss that this line differentiates: ``loss.backward()``."""
        tree = parsed(file)
        found: dict[int, Source] = {}
        for call in ast.walk(tree) if tree is not None else ():
            if isinstance(call, ast.Call) and last_name(call.func) in ("backward", "grad") and call.lineno == line:
                for place, statement, value in self._behind(file, call):
                    if computes(value, op):
                        found[id(statement)] = source_of_node(place, statement)
        return list(dict.fromkeys(found.values()))

    def lines_with(self, op: str) -> list[Source]:
        """All lines of the program that compute an op."""
        statements = (ast.Assign, ast.AugAssign, ast.Return, ast.Expr)
        found = [source_of_node(file, node) for file, node in self.nodes(*statements) if computes(node, op)]
        return list(dict.fromkeys(found))

    def _behind(self, file: str, value: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST]]:
        seen: set[int] = {id(value)}
        waiting = [(file, value, value)]
        while waiting:
            yield (here := waiting.pop(0))
            for part in self._made_of(*here):
                if id(part[2]) not in seen:
                    seen.add(id(part[2]))
                    waiting.append(part)

    def _risk_of(self, file: str, statement: ast.AST, value: ast.AST) -> int:
        lines = range(getattr(value, "lineno", 0), (getattr(value, "end_lineno", 0) or 0) + 1)
        if any((file, line) in self.ran for line in lines):
            return 0
        uses_one = any(isinstance(each, ast.Name) and each.id in self._constants for each in ast.walk(value))
        changed = _changed_by(statement) if isinstance(statement, ast.AugAssign) and statement.value is value else 0
        return _LITERAL if uses_one else max(risk_of(value), changed)

    def _made_of(self, file: str, statement: ast.AST, value: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST]]:
        names = {each.id for each in _values_in(value) if isinstance(each, ast.Name)} - self._constants
        scope = self._scopes.get(id(statement))
        if scope is not None:
            for node in ast.walk(scope):
                yield from ((file, node, made) for name, made in stored_by(node) if name in names)
        for call in _values_in(value):
            if isinstance(call, ast.Call):
                for other, function in self._called(call, statement):
                    for node in ast.walk(function):
                        if isinstance(node, (ast.Return, ast.Yield)) and node.value is not None:
                            yield other, node, node.value

    def _called(
        self, call: ast.Call, statement: ast.AST
    ) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        """The functions that a call may mean: ``self.loss(...)`` is a method of the same class or of its bases."""
        found, here = self.functions.get(last_name(call.func), ()), self._classes.get(id(statement))
        if here is None or not (isinstance(call.func, ast.Attribute) and last_name(call.func.value) == "self"):
            yield from found
            return
        names = {here.name, *map(last_name, here.bases)}
        yield from (each for each in found if getattr(self._classes.get(id(each[1])), "name", "") in names)


def _nonfinite_constants(tree: ast.Module) -> Iterator[str]:
    """Constants such as ``NAN = float("nan")``. The line that uses one is reported, not its definition."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for target in targets_of(node):
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                if isinstance(target, ast.Name) and all(map(is_nonfinite_literal, values)):
                    yield target.id


def risk_of(value: ast.AST) -> int:
    """How likely an expression itself returns NaN or Inf."""
    risk, paths = 0, _paths_in(value)
    for each in _values_in(value):
        if is_nonfinite_literal(each):
            return _LITERAL
        if id(each) in paths:
            continue
        if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Div) and not isinstance(each.right, ast.Constant):
            risk = max(risk, _LIKELY)
        elif isinstance(each, ast.BinOp) and isinstance(each.op, ast.Pow):
            risk = max(risk, _LIKELY if _is_root_or_division(each.right) else _POSSIBLE)
        elif isinstance(each, ast.Call) and last_name(each.func) in _POWERS:
            risk = max(risk, _LIKELY if any(map(_is_root_or_division, each.args)) else _POSSIBLE)
        elif isinstance(each, ast.Call) and last_name(each.func) in _LIKELY_CALLS:
            risk = max(risk, _LIKELY)
        elif isinstance(each, ast.Call) and last_name(each.func) in _POSSIBLE_CALLS:
            risk = max(risk, _POSSIBLE)
    return risk


def _values_in(node: ast.AST) -> Iterator[ast.AST]:
    """The node and those inside it that its value is made of: an index only says which part of it."""
    waiting = [node]
    while waiting:
        yield (here := waiting.pop())
        waiting += [child for child in ast.iter_child_nodes(here) if child is not getattr(here, "slice", None)]


def _changed_by(statement: ast.AugAssign) -> int:
    """The risk of ``x /= n`` itself, whatever ``n`` is computed by."""
    if not isinstance(statement.op, (ast.Div, ast.Pow)):
        return 0
    if isinstance(statement.value, ast.Constant):
        return _LITERAL if isinstance(statement.op, ast.Div) and statement.value.value == 0 else 0
    return _LIKELY if isinstance(statement.op, ast.Div) else _POSSIBLE


def _is_root_or_division(exponent: ast.AST) -> bool:
    """``-2``, ``0.5``"""
    if isinstance(exponent, ast.UnaryOp):
        return isinstance(exponent.op, ast.USub) and isinstance(exponent.operand, ast.Constant)
    number = exponent.value if isinstance(exponent, ast.Constant) else None
    return isinstance(number, float) and number != int(number)


def _paths_in(value: ast.AST) -> set[int]:
    """Identities of the divisions that join a path: ``folder / name / "data.pt"``."""
    found: set[int] = set()
    for each in ast.walk(value):
        if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Div):
            sides = (each.left, each.right)
            if id(each) in found or any(map(_is_text, sides)):
                found |= {id(each), id(each.left)}
    return found


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return last_name(node.func) in ("Path", "str", "format")
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def computes(value: ast.AST, op: str) -> bool:
    """True if an expression contains an op: ``torch.log(p)``, ``p.log()``, ``a / b``."""
    operator = _OPERATORS.get(op)
    for each in ast.walk(value):
        if isinstance(each, ast.Call) and last_name(each.func) == op:
            return True
        if operator is not None and isinstance(each, ast.BinOp) and isinstance(each.op, operator):
            by_number = isinstance(each.right, ast.Constant) and op not in ("mul", "pow")  # stays finite
            return not (by_number or (op == "div" and id(each) in _paths_in(value)))
    return False


def is_nonfinite_literal(node: ast.AST, *, nan: bool | None = None) -> bool:
    """True for ``float("nan")``, ``math.inf`` and so on. ``nan=True`` accepts NaN only, ``nan=False`` Inf only."""
    names = {True: ("nan",), False: ("inf", "infinity"), None: ("nan", "inf", "infinity")}[nan]
    if isinstance(node, ast.Call) and last_name(node.func) == "float" and node.args:
        text = node.args[0]
        return isinstance(text, ast.Constant) and str(text.value).strip("+-").lower() in names
    modules = ("math", "np", "numpy", "torch")
    return isinstance(node, ast.Attribute) and node.attr.lower() in names and last_name(node.value) in modules


def stored_names(node: ast.Assign | ast.AugAssign) -> Iterator[str]:
    """The variables, attributes and string keys that a statement assigns to."""
    return map(stored_name, targets_of(node))


def stored_by(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The names that a statement assigns to, or whose list it appends to, each with the value."""
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        yield from ((name, node.value) for name in stored_names(node))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        call = node.value
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("append", "extend") and call.args:
            yield last_name(call.func.value), call.args[0]


def targets_of(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> Iterator[ast.expr]:
    """What a statement assigns to; the parts of a tuple one by one."""
    return flattened(node.targets if isinstance(node, ast.Assign) else [node.target])


def stored_name(target: ast.AST) -> str:
    if isinstance(target, ast.Subscript):
        if isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str):
            return target.slice.value
        return stored_name(target.value)
    return last_name(target)


def flattened(targets: Iterable[ast.expr]) -> Iterator[ast.expr]:
    for target in targets:
        if isinstance(target, (ast.Tuple, ast.List)):
            yield from flattened(target.elts)
        else:
            yield target


def last_name(node: ast.AST) -> str:
    """``Adam`` of ``torch.optim.Adam``."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def source_of_node(file: str, node: ast.AST) -> Source:
    return source_at(file, int(getattr(node, "lineno", 1)))


@functools.lru_cache(maxsize=64)
def parsed(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None
