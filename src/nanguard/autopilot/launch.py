"""Runs a script or a module as ``python`` would: same ``__main__``, arguments, path, exit status and tracebacks."""

from __future__ import annotations

import builtins
import dis
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from nanguard.errors import LaunchError, NanguardError

_OURS = str(Path(__file__).parents[1]) + os.sep

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class LaunchedProgram:
    """The program to run. Raises ``LaunchError`` if it does not exist, before anything has happened."""

    def __init__(self, target: str, args: Sequence[str], *, is_module: bool) -> None:
        self.args = tuple(args)
        if is_module:
            # The current folder, as with python -m.
            self._path0 = str(Path.cwd())
            sys.path.insert(0, self._path0)
            try:
                self._code: CodeType | bytes
                self._code, self._facts = _module(target)
            finally:
                sys.path.pop(0)
        else:
            self._path0 = str(Path(target).resolve().parent)
            self._code, self._facts = _script(target)
        self.path = str(self._facts["__file__"])
        self._argv0 = self.path if is_module else target
        self.module = self._facts["__spec__"].name if is_module else ""
        self.name = target.rpartition(".")[2] if is_module else Path(target).stem

    def run(self) -> None:
        """Raises whatever the program raises, ``SystemExit`` too. The traceback begins with the program."""
        main = ModuleType("__main__")
        vars(main).update(self._facts, __builtins__=builtins)
        sys.modules["__main__"] = main
        sys.excepthook = sys.__excepthook__  # not that of our command line
        sys.argv = [self._argv0, *self.args]
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0:1] = [self._path0]  # instead of the folder of our own command
        try:
            exec(self._compiled(), vars(main))
        except SystemExit:
            raise
        except BaseException as error:
            sys.excepthook = _without_our_frames(error, sys.excepthook)
            raise

    def _compiled(self) -> CodeType:
        if isinstance(self._code, CodeType):
            return self._code
        return compile(self._code, self.path, "exec", dont_inherit=True)  # without our own __future__ imports


def _without_our_frames(ours: BaseException, hook: Hook) -> Hook:
    """Also for the errors that it came from."""
    inside: dict[int, tuple[BaseException, TracebackType | None]] = {}
    todo: list[BaseException | None] = [ours]
    while todo:
        each = todo.pop()
        if each is not None and id(each) not in inside:
            inside[id(each)] = each, _of_program(each)
            todo += [each.__cause__, each.__context__]

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is ours:
            for each, its_trace in inside.values():
                each.__traceback__ = its_trace  # Python's own hook reads these
            trace = error.__traceback__
        hook(kind, error, trace)

    return show


def _of_program(error: BaseException) -> TracebackType | None:
    """The traceback as it is without nanguard. If nanguard itself has failed, its lines stay."""
    lines: list[TracebackType] = []
    trace = error.__traceback__
    while trace is not None:
        lines.append(trace)
        trace = trace.tb_next
    if lines and _has_failed(lines[-1]) and not isinstance(error, NanguardError):
        return error.__traceback__
    kept: list[TracebackType] = []
    for line in lines:
        if not _is_ours(line):
            kept.append(line)
        elif kept and kept[-1].tb_frame.f_code.co_filename == _torch_overrides():
            del kept[-2:]  # the tape was asked by a function of torch, which is called once more then
    rest: TracebackType | None = None
    for line in reversed(kept):
        rest = TracebackType(rest, line.tb_frame, line.tb_lasti, line.tb_lineno)
    return rest


def _has_failed(last: TracebackType) -> bool:
    """Whether an error came from our code: not from the program, which is compiled here, nor from a call of torch."""
    return _is_ours(last) and last.tb_frame.f_code.co_filename != __file__ and not _passes_a_call_on(last)


def _torch_overrides() -> str:
    """The file of torch that asks modes; the program may not have imported torch."""
    return getattr(sys.modules.get("torch.overrides"), "__file__", None) or ""


def _passes_a_call_on(line: TracebackType) -> bool:
    """True for ``func(*args)``: a function of torch that is written in C++ has raised, and has no line of its own."""
    code = line.tb_frame.f_code.co_code
    return line.tb_lasti >= 0 and dis.opname[code[line.tb_lasti]] == "CALL_FUNCTION_EX"


def _is_ours(line: TracebackType) -> bool:
    return line.tb_frame.f_code.co_filename.startswith(_OURS)


def _script(target: str) -> tuple[bytes, dict[str, Any]]:
    path = Path(target)
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            raise LaunchError(f"{target} is a folder without a __main__.py: give the script to run")
        path /= "__main__.py"
    try:
        source = path.read_bytes()
    except OSError as error:
        raise LaunchError(f"cannot open {target}: {error.strerror}") from None
    file = str(path.absolute())
    return source, _main_facts(file, None, SourceFileLoader("__main__", file))


def _module(target: str) -> tuple[CodeType, dict[str, Any]]:
    try:
        spec = importlib.util.find_spec(target)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{target}.__main__")
    except (ImportError, ValueError) as error:
        raise LaunchError(f"cannot find the module {target}: {error}") from None
    if spec is None or spec.loader is None or spec.origin is None:
        raise LaunchError(f"there is no module {target}, or it is a package without a __main__: check its name")
    loader: Any = spec.loader
    code = loader.get_code(spec.name) if hasattr(loader, "get_code") else None
    if code is None:
        raise LaunchError(f"{target} is not written in Python, so it cannot be run as a program")
    return code, _main_facts(spec.origin, spec, loader)


def _main_facts(file: str, spec: Any, loader: Any) -> dict[str, Any]:
    return {
        "__name__": "__main__",
        "__file__": file,
        "__spec__": spec,
        "__package__": None if spec is None else spec.parent,
        "__loader__": loader,
        "__cached__": None,
        "__doc__": None,
        "__annotations__": {},
    }


class WhenImported(MetaPathFinder):
    """Calls a function once a module has been imported; at once if it has been imported already.

    What a program does before it imports torch, such as setting environment variables, has its usual effect on torch.
    If the module is being imported now, the function is called when that is done.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then
        self._is_done = self._is_looking = False
        module = sys.modules.get(name)
        if module is None:
            sys.meta_path.insert(0, self)
        elif getattr(module.__spec__, "_initializing", False):
            _UnfinishedSpec.watch(module, self._call)
        else:
            self._call()

    def _call(self) -> None:
        if not self._is_done:
            self.forget()
            self._then()

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != self._name or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_looking = False
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module  # the method of the loader's class again
                execute(module)
                self._call()

            loader.exec_module = exec_module
        return spec

    def forget(self) -> None:
        self._is_done = True
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _UnfinishedSpec(ModuleSpec):
    """The spec of a module that is being imported. Python sets ``_initializing`` to False when that is done."""

    @classmethod
    def watch(cls, module: ModuleType, then: Callable[[], None]) -> None:
        spec: Any = module.__spec__
        if type(spec) is ModuleSpec:
            spec.__class__ = cls
            vars(spec)["nanguard_waits"] = []
        if isinstance(spec, cls):
            vars(spec)["nanguard_waits"].append(then)

    @property
    def _initializing(self) -> bool:
        return bool(vars(self).get("_initializing", False))

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        vars(self)["_initializing"] = value
        if not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            for then in vars(self).pop("nanguard_waits") if self.name in sys.modules else ():
                then()


def is_first_rank() -> bool:
    """Whether the launcher (torchrun, Lightning) has given this process the first rank, or none at all."""
    names = ("RANK",) if os.environ.get("RANK") else ("LOCAL_RANK", "NODE_RANK")
    return all(os.environ.get(name, "") in ("", "0") for name in names)
