"""Finds and calls the user's function that builds model and loss, and checks what it returns."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from nanguard.errors import ReplayError
from nanguard.records.words import with_article
from nanguard.source.frames import is_library_file

SHAPES = "(model, loss_fn), (model, optimizer, loss_fn), (model, optimizer, batches, loss_fn), or a dict of these names"
_ORDERS = {
    2: ("model", "loss_fn"),
    3: ("model", "optimizer", "loss_fn"),
    4: ("model", "optimizer", "batches", "loss_fn"),
}


@dataclass(frozen=True, kw_only=True)
class BuiltProgram:
    """What the user's function returned. ``loss_fn(model, batch)`` returns the loss; None: there was none.

    ``notes`` say what may be different from the run. ``is_of_run`` says that the program of ``nanguard run`` itself
    was run to get the model; ``loss_fn`` then only calls it.
    """

    model: nn.Module
    loss_fn: Callable[[Any, Any], Any] | None
    optimizer: Any = None
    batches: Any = None
    notes: tuple[str, ...] = ()
    is_of_run: bool = False


def build(entry: str, seed: int) -> BuiltProgram:
    """Imports ``package.module:function`` or ``path/to/file.py:function`` and calls it, with the seed if it takes one.

    Seeds torch before. Raises ``ReplayError`` for any error, also in the user's code.
    """
    function = _function(entry)
    arguments = (seed,) if _takes_seed(function, entry) else ()
    torch.manual_seed(seed)
    try:
        given = function(*arguments)
    except (Exception, SystemExit) as error:
        raise ReplayError(f"--entry {entry}: {_call(function, arguments)} raised {told(error)}") from error
    return _program(given, entry)


def _function(entry: str) -> Callable[..., Any]:
    where, colon, name = entry.rpartition(":")
    if not colon or not where or not name:
        raise ReplayError(f"--entry {entry}: it must be module:function or path/to/file.py:function")
    _check_source(where, name, entry)
    module = _from_file(where, entry) if where.endswith(".py") else _by_name(where, entry)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        there = [n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_")]
        raise ReplayError(_no_function(entry, where, name, there))
    function: Callable[..., Any] = found
    return function


def _no_function(entry: str, where: str, name: str, there: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, there, cutoff=0.4) or there[:5]
    hint = f"; there are {', '.join(close)}" if close else ""
    return f"--entry {entry}: {where} has no function {name!r}{hint}"


def _check_source(where: str, name: str, entry: str) -> None:
    """Raises ``ReplayError`` if the file cannot have such a function. It is read, not run: running it may train."""
    path = Path(where) if where.endswith(".py") else Path(*where.split(".")).with_suffix(".py")
    if not path.is_file():
        return
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (OSError, SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ReplayError(f"--entry {entry}: {path} is not a Python file{line}: {why}") from None
    names = list(_bound_names(tree.body))
    first = name.partition(".")[0]
    if "*" not in names and first not in names and "__getattr__" not in names:
        functions = [each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each in tree.body]
        raise ReplayError(_no_function(entry, where, name, functions))


def _bound_names(body: Iterable[ast.stmt]) -> Iterator[str]:
    """The names that a file defines; ``*`` for a star import. What is inside functions does not count."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement.name
            continue
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in statement.names)
        yield from (
            node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        )
        for part in ("body", "orelse", "finalbody"):
            yield from _bound_names(getattr(statement, part, ()))
        for handler in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            yield from _bound_names(handler.body)


def _from_file(where: str, entry: str) -> ModuleType:
    path = Path(where)
    if not path.is_file():
        raise ReplayError(f"--entry {entry}: there is no file {where}")
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise ReplayError(f"--entry {entry}: {where} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    _put_on_path(str(path.resolve().parent))
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        if before is None:
            del sys.modules[path.stem]
        else:
            sys.modules[path.stem] = before
        raise ReplayError(f"--entry {entry}: importing {where} raised {told(error)}") from error
    return module


def _by_name(where: str, entry: str) -> ModuleType:
    _put_on_path(os.getcwd())
    try:
        return importlib.import_module(where)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{where}.".startswith(f"{missing}."):
            looked = f"there is no module {missing!r}, neither in {os.getcwd()} nor installed"
            raise ReplayError(f"--entry {entry}: {looked}. A file works too: path/to/file.py:build") from None
        raise ReplayError(f"--entry {entry}: importing {where} raised {told(error)}") from error


def _put_on_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _takes_seed(function: Callable[..., Any], entry: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(needed) > 1 or any(p.kind is p.KEYWORD_ONLY for p in needed):
        names = ", ".join(p.name for p in needed)
        raise ReplayError(f"--entry {entry}: it needs {names}, but can only be called as build() or build(seed)")
    return bool(needed) or any(p.name == "seed" for p in positional[:1])


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    return f"{getattr(function, '__name__', 'it')}({', '.join(map(str, arguments))})"


def _program(given: Any, entry: str) -> BuiltProgram:
    wrong = f"--entry {entry}: it must return {SHAPES}; it returned "
    if isinstance(given, nn.Module):
        return BuiltProgram(model=given, loss_fn=None)
    if isinstance(given, (tuple, list)) and not hasattr(given, "_fields"):
        if len(given) not in _ORDERS:
            raise ReplayError(f"{wrong}{len(given)} values")
        members = dict(zip(_ORDERS[len(given)], given, strict=True))
    elif isinstance(given, Mapping):
        members = {str(key): value for key, value in given.items()}
    else:
        names = ("model", "optimizer", "batches", "loss_fn")
        members = {name: getattr(given, name) for name in names if hasattr(given, name)}
    for name in ("model", "loss_fn"):
        if name not in members:
            raise ReplayError(f"{wrong}{_kind(given)} without {name}")
    model, loss_fn = members["model"], members["loss_fn"]
    if not isinstance(model, nn.Module):
        raise ReplayError(f"{wrong}{_kind(model)} as the model, which must be a torch.nn.Module")
    if isinstance(loss_fn, nn.Module) or not callable(loss_fn):
        raise ReplayError(f"{wrong}{_kind(loss_fn)} as loss_fn, which must be a function: loss_fn(model, batch)")
    return BuiltProgram(
        model=model, loss_fn=loss_fn, optimizer=members.get("optimizer"), batches=members.get("batches")
    )


def _kind(value: Any) -> str:
    return with_article(type(value).__name__)


def told(error: BaseException) -> str:
    """An error of the user's code in one line, with its file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not is_inside(frame.filename)]
    at = f" ({os.path.basename(users[-1].filename)}:{users[-1].lineno})" if users else ""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}".rstrip(": ") + at


def is_inside(file: str) -> bool:
    """Whether a file belongs to torch, nanguard or the import system."""
    return is_library_file(file) or file.startswith("<frozen") or file == importlib.__file__
