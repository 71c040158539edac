"""What the program calls its modules, tensors and optimizers.

The variables of running functions are never read: before Python 3.13, reading ``frame.f_locals`` writes to the
very dict that ``locals()`` gave to the program, and keeps alive what the program has deleted. Names come from the
globals of the program's modules, from attributes of the objects in them, and from the source of the line that makes the
optimizer, as in ``SGD([*encoder.parameters(), scale])``. Source is read, not run, so a name is taken only if the number
and kind of what is written there fit the optimizer.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Literal

from torch import Tensor, nn

from nanguard.diagnosis.slicing import last_name, parsed
from nanguard.source.frames import is_library_file, is_users_file

Kind = Literal["module", "tensor"]
Atom = tuple[Kind, str]
"""Something with a name that an expression is made of: a module, by its path, or a tensor."""

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_FUNCTIONS, ast.ClassDef, ast.Module)
_PARAMETERS = ("parameters", "named_parameters")
_COLLECTS = ("list", "tuple", "set", "iter", "chain", "from_iterable", "filter", "values", "items", "dict")
_DEEPEST = 8


def names_in_sight(things: Iterable[Any]) -> dict[int, str]:
    """By identity: global variables of the program's modules, then attributes of the objects in them."""
    wanted = {id(thing) for thing in things}
    names: dict[int, str] = {}
    scopes = list(_globals(sys._getframe(1)))
    for variables in scopes:
        for name, value in list(variables.items()):
            if id(value) in wanted and not name.startswith("__"):
                names.setdefault(id(value), name)
    for variables in scopes:
        for value in list(variables.values()):
            for name, attribute in _attributes(value):
                if id(attribute) in wanted:
                    names.setdefault(id(attribute), name)
    return names


def name_being_assigned() -> str:
    """The variable or attribute that what is being made will be assigned to: ``opt`` of ``opt = SGD(...)``."""
    for line in _lines(sys._getframe(1)):
        target = line.target()
        if target is not None or not line.passes_on:
            return target or ""
    return ""


def names_in_call(params: Sequence[Tensor], roots: Sequence[nn.Module], *, also_alone: bool) -> dict[int, str]:
    """What the call that is making an optimizer of these parameters says, of outermost modules and bare tensors.

    ``also_alone`` says to read it for one module alone, too.
    """
    owner = {id(param): root for root in roots for param in root.parameters()}
    owned = [param for param in params if id(param) in owner]
    bare = [param for param in params if id(param) not in owner]
    if not bare and len(roots) == 1 and not also_alone:
        return {}
    atoms = list(dict.fromkeys(_atoms_of_call(list(_lines(sys._getframe(1))))))
    modules, tensors = [[name for each, name in atoms if each == kind] for kind in ("module", "tensor")]
    names = {id(param): name for param, name in zip(bare, tensors, strict=False)} if len(bare) == len(tensors) else {}
    return {**names, **_matched(owned, owner, modules)}


def names_of_leaves(leaves: Sequence[Tensor]) -> dict[int, str]:
    """What the line that differentiates calls these: by ``grad(loss, [a, b])``, or by the only ``w.grad`` around it."""
    line = next(_lines(sys._getframe(1)), None)
    if line is None:
        return {}
    if last_name(line.call.func) == "grad":
        atoms = list(_several(line.call.args[1:2], line, 0))
        return {id(t): name for t, (_, name) in zip(leaves, atoms, strict=False)} if len(atoms) == len(leaves) else {}
    read = (node.value for node in ast.walk(line.scope) if isinstance(node, ast.Attribute) and node.attr == "grad")
    names = {last_name(each) for each in read} - {""}
    loops = {last_name(node.target) for node in ast.walk(line.scope) if isinstance(node, ast.For)}
    return {id(leaves[0]): names.pop()} if len(leaves) == len(names) == 1 and not names & loops else {}


def _matched(params: Sequence[Tensor], owner: Mapping[int, nn.Module], paths: Sequence[str]) -> dict[int, str]:
    """Each of the paths, as in ``net.body.parameters()``, takes its parameters; nothing if not all are taken."""
    names: dict[int, str] = {}
    taken = 0
    for path in paths:
        if taken == len(params):
            return {}
        root = owner[id(params[taken])]
        name, part = _called(root, path)
        names.setdefault(id(root), name)
        inside = {id(param) for param in part.parameters()}
        before = taken
        while taken < len(params) and id(params[taken]) in inside:
            taken += 1
        if taken == before:
            return {}
    return names if taken == len(params) else {}


def _called(root: nn.Module, path: str) -> tuple[str, nn.Module]:
    """The name of the root in a path that ends with it or with a part of it, and that part."""
    words = path.split(".")
    for place, word in enumerate(words):
        with contextlib.suppress(AttributeError):
            return word, root.get_submodule(".".join(words[place + 1 :]))
    return words[-1], root


def _globals(frame: FrameType | None) -> Iterator[dict[str, Any]]:
    """Of the program's functions that are running, the innermost first, and of its main module."""
    seen: set[int] = set()
    while frame is not None:
        if is_users_file(frame.f_code.co_filename) and id(frame.f_globals) not in seen:
            seen.add(id(frame.f_globals))
            yield frame.f_globals
        frame = frame.f_back
    main = sys.modules.get("__main__")
    if main is not None and id(vars(main)) not in seen:
        yield vars(main)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Of an object of a class of the program's; ``model`` of a trainer, say."""
    try:
        return iter(list(vars(value).items()))
    except TypeError:
        return iter(())


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Line:
    """What a running function is doing: the call it waits for, its statement, and the scope around both."""

    call: ast.Call
    statement: ast.stmt
    scope: ast.AST

    @property
    def passes_on(self) -> bool:
        """Whether what the call gives is the caller's: by ``return``, or since it fills the caller's object."""
        gives = isinstance(self.statement, ast.Return) and self.statement.value is self.call
        return gives or getattr(self.scope, "name", "") == "__init__"

    def target(self) -> str | None:
        statement = self.statement
        if isinstance(statement, ast.AnnAssign):
            return last_name(statement.target) if statement.value is self.call else None
        if not isinstance(statement, ast.Assign):
            return None
        for target in statement.targets:
            pairs = [(target, statement.value)]
            if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                pairs = list(zip(target.elts, statement.value.elts, strict=False))
            for each, value in pairs:
                if value is self.call and last_name(each):
                    return last_name(each)
        return None


def _lines(frame: FrameType | None) -> Iterator[_Line]:
    """Of the program's running functions, the innermost first. Ends at what cannot be read, or is not the program's."""
    while frame is not None:
        if not is_library_file(frame.f_code.co_filename):
            if not is_users_file(frame.f_code.co_filename):
                return
            line = _line_at(frame.f_code, frame.f_lasti, frame.f_lineno)
            if line is None:
                return
            yield line
        frame = frame.f_back


@functools.lru_cache(maxsize=256)
def _line_at(code: CodeType, instruction: int, number: int) -> _Line | None:
    tree = parsed(code.co_filename)
    if tree is None:
        return None
    positions = getattr(code, "co_positions", None)  # since Python 3.11
    end: tuple[Any, Any] | None = None
    if positions is not None:
        here = next(itertools.islice(positions(), instruction // 2, None), (None,) * 4)
        end = here[1], here[3]
    for statement, scope in reversed(list(_statements(tree, tree, number))):  # the innermost first
        for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
            if call.lineno == number if end is None else (call.end_lineno, call.end_col_offset) == end:
                return _Line(call, statement, scope)
    return None


def _statements(node: ast.AST, scope: ast.AST, line: int) -> Iterator[tuple[ast.stmt, ast.AST]]:
    """Those that a line is a part of, each with the function, class or module that it is in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            if not child.lineno <= line <= (child.end_lineno or child.lineno):
                continue
            yield child, scope
        yield from _statements(child, child if isinstance(child, _SCOPES) else scope, line)


def _atoms_of_call(lines: Sequence[_Line]) -> list[Atom]:
    """Of the first argument of the innermost call, followed to where it was written."""
    if not lines:
        return []
    given = lines[0].call.args[:1] or [k.value for k in lines[0].call.keywords if k.arg == "params"]
    value = given[0] if given else None
    for line, caller in itertools.zip_longest(lines, lines[1:]):
        if value is None:
            return []
        argument = _argument(value, line.scope)
        if argument is None:
            return list(_atoms(value, line, 0))
        if caller is None:
            return []
        value = _passed(argument, line.scope, caller.call)
    return []


def _argument(value: ast.expr, scope: ast.AST) -> int | None:
    """The place of a function's argument, if the expression is nothing but that."""
    if not isinstance(value, ast.Name) or not isinstance(scope, _FUNCTIONS):
        return None
    names = [each.arg for each in (*scope.args.posonlyargs, *scope.args.args)]
    is_changed = any(True for _ in _stored(value, scope))
    return names.index(value.id) if value.id in names and not is_changed else None


def _passed(place: int, function: ast.AST, call: ast.Call) -> ast.expr | None:
    """What a call gives for an argument of a function."""
    assert isinstance(function, _FUNCTIONS)
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    by_name = [keyword.value for keyword in call.keywords if keyword.arg == names[place]]
    if by_name:
        return by_name[0]
    place -= names[0] in ("self", "cls")
    return call.args[place] if 0 <= place < len(call.args) else None


def _atoms(value: ast.expr, line: _Line, depth: int) -> Iterator[Atom]:
    """In the order in which the parameters come."""
    if depth > _DEEPEST:
        return
    below = functools.partial(_several, line=line, depth=depth + 1)
    if isinstance(value, ast.Starred):
        yield from below([value.value])
    elif isinstance(value, (ast.List, ast.Tuple, ast.Set)):
        yield from below(value.elts)
    elif isinstance(value, ast.Dict):
        groups = [v for k, v in zip(value.keys, value.values, strict=True) if _is_params(k)]
        yield from below(groups or value.values)
    elif isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        yield from below([value.left, value.right])
    elif isinstance(value, (ast.ListComp, ast.GeneratorExp, ast.SetComp)):
        yield from _atoms_of_loop(value, line, depth)
    elif isinstance(value, ast.Call):
        name = last_name(value.func)
        if isinstance(value.func, ast.Attribute) and name in _PARAMETERS:
            path = _path(value.func.value)
            if path:
                yield "module", path
        elif name in _COLLECTS:
            on = [value.func.value] if isinstance(value.func, ast.Attribute) and name in ("values", "items") else []
            yield from below([*on, *value.args, *(keyword.value for keyword in value.keywords)])
    elif isinstance(value, (ast.Name, ast.Attribute)):
        stored = list(_stored(value, line.scope))
        inside = [atom for each in stored for atom in below([each])]
        is_collection = any(not isinstance(each, (ast.Name, ast.Attribute)) for each in stored) and bool(inside)
        if is_collection:
            yield from inside
        else:
            yield "tensor", last_name(value)


def _several(values: Iterable[ast.expr], line: _Line, depth: int) -> Iterator[Atom]:
    for value in values:
        yield from _atoms(value, line, depth)


def _atoms_of_loop(value: ast.ListComp | ast.GeneratorExp | ast.SetComp, line: _Line, depth: int) -> Iterator[Atom]:
    """``[p for net in (a, b) for p in net.parameters()]``."""
    loops = {last_name(each.target): each.iter for each in value.generators}
    over = value.generators[-1].iter
    is_call = isinstance(over, ast.Call) and last_name(over.func) in _PARAMETERS
    owner = over.func.value if is_call and isinstance(over, ast.Call) and isinstance(over.func, ast.Attribute) else over
    modules = loops.get(last_name(owner))
    for kind, name in _atoms(over if modules is None else modules, line, depth + 1):
        yield kind if modules is None else "module", name


def _stored(value: ast.expr, scope: ast.AST) -> Iterator[ast.expr]:
    """What a scope stores in a variable or attribute: ``params = [a]``, ``params += [b]``, ``params.append(c)``."""
    said = ast.dump(value)
    for node in sorted(ast.walk(scope), key=lambda node: getattr(node, "lineno", 0)):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(_is_same(target, said) for target in targets) and last_name(value) not in _names(node.value):
                yield node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            is_added = node.func.attr in ("append", "extend") and ast.dump(node.func.value) == said
            yield from node.args[: int(is_added)]


def _path(value: ast.expr) -> str:
    """``net.body`` of ``self.net.body``; empty if it is anything but names, or ``self`` alone, which says nothing."""
    if isinstance(value, ast.Attribute):
        above = _path(value.value)
        is_own = isinstance(value.value, ast.Name) and value.value.id == "self"
        return value.attr if is_own else f"{above}.{value.attr}" if above else ""
    return value.id if isinstance(value, ast.Name) and value.id != "self" else ""


def _is_same(target: ast.expr, said: str) -> bool:
    return ast.dump(target).replace("Store()", "Load()") == said


def _names(value: ast.expr) -> set[str]:
    return {last_name(each) for each in ast.walk(value)}


def _is_params(key: ast.expr | None) -> bool:
    return isinstance(key, ast.Constant) and key.value == "params"
