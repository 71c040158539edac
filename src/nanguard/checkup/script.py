"""The source of a program: its names, calls and loops. It is parsed and never run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from nanguard.checkup.record import ScriptLine
from nanguard.errors import ScriptError

LARGEST = 10 * 2**20
Node = TypeVar("Node", bound=ast.AST)
Loop = ast.For | ast.AsyncFor | ast.While
Complaints = Iterator[tuple[ast.AST, str]]
"""Nodes, each with what is wrong there."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_UNKNOWN: Any = object()


class Script:
    """One file. Nothing is guessed: an ambiguous name counts as unknown."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path = path
        try:
            self.tree = ast.parse(source)
        except SyntaxError as error:
            at = f", line {error.lineno}" if error.lineno else ""
            raise ScriptError(f"{path}{at} cannot be parsed by this Python: {error.msg}") from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise ScriptError(f"{path} cannot be parsed by this Python: {error}") from None
        self.lines = source.decode("utf-8", errors="replace").splitlines()
        self.nodes = list(ast.walk(self.tree))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.imports = self._imports()
        try:
            self._assigned = self._assignments()
        except RecursionError:
            raise too_deep(path) from None

    @classmethod
    def read(cls, path: str | Path) -> Script:
        """Raises ``ScriptError`` if the file cannot be read or parsed."""
        try:
            if Path(path).stat().st_size > LARGEST:
                raise ScriptError(f"{path} has more than {LARGEST // 2**20} MiB, which is too large for a program")
            source = Path(path).read_bytes()
        except OSError as error:
            raise ScriptError(f"cannot read {path}: {error.strerror or error}") from None
        return cls(str(path), source)

    def place(self, node: ast.AST) -> ScriptLine:
        line = getattr(node, "lineno", 1)
        return ScriptLine(
            file=self.path, line=line, text=self.lines[line - 1].strip() if line <= len(self.lines) else ""
        )

    # ---- names ---------------------------------------------------------------------------------------------------

    def _imports(self) -> dict[str, str]:
        """The full name of each imported name, as ``torch.optim.Adam``; without names that are also bound otherwise."""
        found: dict[str, set[str]] = {}
        for node in self.all(ast.Import):
            for alias in node.names:
                meant = alias.name if alias.asname else alias.name.partition(".")[0]
                found.setdefault(alias.asname or meant, set()).add(meant)
        for source in self.all(ast.ImportFrom):
            for alias in source.names:
                meant = f"{source.module}.{alias.name}" if source.module and not source.level else "?"
                found.setdefault(alias.asname or alias.name, set()).add(meant)
        bound = self._bound()
        return {name: next(iter(each)) for name, each in found.items() if len(each) == 1 and name not in bound}

    def _bound(self) -> set[str]:
        """Names that are bound by anything but an import."""
        stored = {node.id for node in self.all(ast.Name) if not isinstance(node.ctx, ast.Load)}
        defined = {node.name for node in self.nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        return stored | defined | {argument.arg for argument in self.all(ast.arg)}

    def imports_from(self, *packages: str) -> bool:
        """Whether the program imports any of these packages."""
        modules = {alias.name for node in self.all(ast.Import) for alias in node.names}
        modules |= {node.module for node in self.all(ast.ImportFrom) if node.module}
        return any(module.partition(".")[0] in packages for module in modules)

    def name(self, node: ast.AST | None) -> str:
        """The full name of an imported object; empty if it is not imported."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.imports:
            return ""
        name = ".".join([self.imports[node.id], *reversed(parts)])
        for short, full in (("torch.nn.functional.", "F."), ("torch.nn.modules.loss.", "torch.nn.")):
            name = name.replace(short, full)
        return name

    def called(self, node: ast.AST | None) -> str:
        """The full name of what is called; empty if ``node`` is not a call of an imported object."""
        return self.name(node.func) if isinstance(node, ast.Call) else ""

    def method(self, node: ast.AST | None) -> str:
        """The name of the called method of an object that is not imported."""
        is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not self.name(node.func)
        return node.func.attr if is_method else ""  # type: ignore[union-attr]

    # ---- values --------------------------------------------------------------------------------------------------

    def _assignments(self) -> dict[str, ast.expr | None]:
        """The value of each variable, as ``x`` or ``self.x``; None if it is not assigned exactly once."""
        found: dict[str, ast.expr | None] = {}
        known: set[ast.AST] = set()
        for node in self.nodes:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, (ast.Name, ast.Attribute)):
                    known.add(target)
                    key = ast.unparse(target)
                    found[key] = None if key in found else node.value
        for node in self.nodes:
            stored = isinstance(node, (ast.Name, ast.Attribute)) and not isinstance(node.ctx, ast.Load)
            if stored and node not in known:
                found[ast.unparse(node)] = None
        return found | {argument.arg: None for argument in self.all(ast.arg)}

    def behind(self, node: ast.expr | None) -> ast.expr | None:
        """The value of a variable if it is assigned exactly once in the program, else the node itself."""
        for _ in range(8):
            if not isinstance(node, (ast.Name, ast.Attribute)):
                break
            value = self._assigned.get(ast.unparse(node))
            if value is None:
                break
            node = value
        return node

    def constant(self, node: ast.expr | None) -> Any:
        """A number, string, bool or None; a unique object if the value is not known."""
        try:
            return _UNKNOWN if node is None else ast.literal_eval(self.behind(node) or node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return _UNKNOWN

    def argument(self, call: ast.Call, name: str, place: int | None = None) -> ast.expr | None:
        """The argument with this name or at this position."""
        for keyword in call.keywords:
            if keyword.arg == name:
                return keyword.value
        plain = not any(isinstance(each, ast.Starred) for each in call.args)
        return call.args[place] if place is not None and plain and place < len(call.args) else None

    def is_on(self, switch: ast.expr | None) -> bool:
        """Whether an argument that is on by default is certainly on."""
        return switch is None or self.constant(switch) is True

    def is_open(self, call: ast.Call) -> bool:
        """Whether it may get more arguments than are visible: ``*args`` or ``**options``."""
        return any(k.arg is None for k in call.keywords) or any(isinstance(each, ast.Starred) for each in call.args)

    # ---- places --------------------------------------------------------------------------------------------------

    def all(self, kind: type[Node]) -> Iterator[Node]:
        return (node for node in self.nodes if isinstance(node, kind))

    def calls(self, *names: str) -> list[ast.Call]:
        """Calls of imported objects with these full names, in the order of lines."""
        return sorted((call for call in self.all(ast.Call) if self.called(call) in names), key=_position)

    def methods(self, *names: str) -> list[ast.Call]:
        """Calls of methods with these names, in the order of lines."""
        return sorted((call for call in self.all(ast.Call) if self.method(call) in names), key=_position)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, from inside out, up to its function."""
        while node in self.parents:
            node = self.parents[node]
            if isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Module)):
                return
            yield node

    def function(self, node: ast.AST) -> ast.AST:
        """The innermost function, or the module."""
        while node in self.parents and not isinstance(node, _FUNCTIONS):
            node = self.parents[node]
        return node

    def loops(self, node: ast.AST) -> list[Loop]:
        """The loops around it within its function, from inside out."""
        return [each for each in self.around(node) if isinstance(each, (ast.For, ast.AsyncFor, ast.While))]

    def is_conditional(self, node: ast.AST, within: ast.AST | None = None) -> bool:
        """Whether it is inside an ``if`` or similar that is inside ``within``."""
        for each in self.around(node):
            if each is within:
                return False
            if isinstance(each, (ast.If, ast.IfExp, ast.Try, ast.BoolOp, ast.Match)):
                return True
        return False

    def contexts(self, node: ast.AST) -> list[ast.Call]:
        """The calls in the ``with`` statements around it."""
        withs = [each for each in self.around(node) if isinstance(each, (ast.With, ast.AsyncWith))]
        managers = [self.behind(item.context_expr) for each in withs for item in each.items]
        return [manager for manager in managers if isinstance(manager, ast.Call)]

    def owner(self, call: ast.Call) -> str:
        """The object whose method is called, as written: ``self.optimizer``."""
        owner = owner_of(call)
        return "" if owner is None else ast.unparse(owner)

    def variable(self, call: ast.Call) -> str:
        """The variable that the result of a call is assigned to; empty if that is not clear."""
        parent = self.parents.get(call)
        if isinstance(parent, ast.Assign) and len(parent.targets) == 1 and parent.value is call:
            target = parent.targets[0]
            if isinstance(target, (ast.Name, ast.Attribute)) and self._assigned.get(ast.unparse(target)) is call:
                return ast.unparse(target)
        return ""


def owner_of(call: ast.Call) -> ast.expr | None:
    """The object whose method is called."""
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def arguments_of(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def is_given(call: ast.Call, variable: str) -> bool:
    """Whether the variable is an argument of the call."""
    given = [each for each in arguments_of(call) if isinstance(each, (ast.Name, ast.Attribute))]
    return any(ast.unparse(each) == variable for each in given)


def too_deep(path: str) -> ScriptError:
    return ScriptError(f"{path} is nested too deeply to be checked")


def _position(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
