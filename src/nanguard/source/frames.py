"""Find the running line of the user's program from Python frames."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from nanguard import _compat
from nanguard.records.diagnosis import Source
from nanguard.source.cells import cell_of
from nanguard.source.modules import Modules
from nanguard.source.statements import statement_at

_FRAMEWORKS = (
    "accelerate",
    "click",
    "deepspeed",
    "einops",
    "lightning",
    "lightning_fabric",
    "numpy",
    "peft",
    "pytorch_lightning",
    "speechbrain",
    "timm",
    "torchaudio",
    "torchdata",
    "torchmetrics",
    "torchvision",
    "transformers",
    "trl",
    "typer",
)
_PACKAGES = ("site-packages", "dist-packages")
_TORCH = str(Path(torch.__file__).parent) + os.sep
_NANGUARD = str(Path(__file__).parents[1]) + os.sep
_DEMO = os.path.join(_NANGUARD, "demo", "")
_STDLIB = {str(Path(sysconfig.get_paths()[key])) + os.sep for key in ("stdlib", "platstdlib")}
_CHECKPOINT = _TORCH + os.path.join("utils", "checkpoint.py")
_BOUNDARIES: set[CodeType] = set()
_STAND_IN: list[tuple[str, int, str] | None] = [None]

HANDLERS = frozenset(("__torch_dispatch__", "__torch_function__"))
"""Code of a mode or a tensor subclass, which torch calls for a line of the program."""

F = TypeVar("F", bound=Callable[..., Any])


def runs_user_code(function: F) -> F:
    """Mark a nanguard function that calls the user's code; frames above it are ignored."""
    _BOUNDARIES.add(function.__code__)
    return function


Place = tuple[str, int, str]
"""File, line and function."""


class SavedPosition(NamedTuple):
    """Where the program was, and what it calls the arguments there: of a call that was read from disk."""

    place: Place | None
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Site:
    """Where an op was called: the user's line, and the innermost module.

    ``home`` is the module whose code contains the line. ``by_engine`` is True if the autograd engine ran the op,
    ``in_user_code`` if the engine called Python code of the user: the backward of a custom Function, or a hook.
    ``is_stand_in``: nanguard calls torch in the place of that line, outside of the modules that called it.
    """

    place: Place | None
    module: str | None
    home: str | None = None
    by_engine: bool = False
    in_user_code: bool = False
    is_stand_in: bool = False


def find_site(modules: Modules, *, in_engine: bool) -> Site:
    """The site of the op that is being dispatched now.

    The innermost line outside of torch, frameworks and nanguard is the user's. If the autograd engine's frame comes
    first, a node of the graph ran the op, and the lines above that frame do not belong to it.
    """
    frame: FrameType | None = sys._getframe(1)
    place: Place | None = None
    lesser: Place | None = None
    module: str | None = None
    home: str | None = None
    recomputes = False
    while frame is not None:
        code = frame.f_code
        if code in _BOUNDARIES:
            break
        kind = _kind_of(code.co_filename)
        if code.co_name in HANDLERS and not code.co_filename.startswith(_NANGUARD):
            place = lesser = None  # the line that called torch is above it
            frame = frame.f_back
            continue
        if kind == "torch" and _compat.runs_backward(code):
            if in_engine and not recomputes:
                return Site(place, module, home, by_engine=True, in_user_code=place is not None)
            in_engine = False
        if kind == "checkpoint":
            recomputes = True
        elif kind == "user" and place is None:
            place = (code.co_filename, frame.f_lineno, code.co_name)
        elif kind == "framework" and lesser is None:
            lesser = (code.co_filename, frame.f_lineno, code.co_name)
        if code.co_argcount and kind != "nanguard" and (module is None or (home is None and place is not None)):
            owner = modules.at(frame)
            module = owner if module is None else module
            home = owner if home is None and place is not None else home
        if home is not None and not in_engine:
            break
        frame = frame.f_back
    by_engine = in_engine and not recomputes
    is_stand_in = not (by_engine or place or lesser) and _STAND_IN[-1] is not None
    found = _STAND_IN[-1] if is_stand_in else place or lesser
    in_user_code = by_engine and place is not None
    return Site(found, module, home, by_engine=by_engine, in_user_code=in_user_code, is_stand_in=is_stand_in)


@contextlib.contextmanager
def standing_in(place: Place | None) -> Iterator[None]:
    """Code of nanguard that runs inside calls torch in the place of this line of the program."""
    _STAND_IN.append(place)
    try:
        yield
    finally:
        _STAND_IN.pop()


def calling_line() -> Place | None:
    """The user's line that is being executed. None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def position_of(frame: FrameType | None) -> tuple[CodeType | None, int]:
    """Where the program is, in the innermost of its functions. Quicker than to look up the line: see ``place_of``."""
    while frame is not None:
        code = frame.f_code
        if _kind_of(code.co_filename) == "user" and code.co_name not in HANDLERS:
            return code, frame.f_lasti
        frame = frame.f_back
    return None, 0


def place_of(code: CodeType | SavedPosition | None, at: int) -> Place | None:
    """The line of a position in code."""
    if code is None or isinstance(code, SavedPosition):
        return None if code is None else code.place
    line = next((line for start, end, line in code.co_lines() if start <= at < end and line), code.co_firstlineno)
    return code.co_filename, line, code.co_name


def calling_point() -> tuple[Place, int] | None:
    """The user's line that is being executed below a boundary, and which call of that line it is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _BOUNDARIES:
        if is_users_file(frame.f_code.co_filename):
            return (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name), frame.f_lasti
        frame = frame.f_back
    return None


def source_of(place: Place | None) -> Source | None:
    """The source record of a place, with the text of its line and of its statement."""
    return None if place is None else source_at(*place)


def source_at(file: str, line: int, function: str = "") -> Source:
    return Source(
        file=cell_of(file) or file,
        line=line,
        function=function,
        text=linecache.getline(file, line).strip(),
        statement=statement_at(file, line),
        folder=_folder_of_one_of_several(file),
    )


def _folder_of_one_of_several(file: str) -> str:
    """The name of its folder, if the program has imported another file of this name; else empty."""
    folder, name = os.path.split(file)
    loaded = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    same = {os.path.abspath(each) for each in loaded if isinstance(each, str) and os.path.basename(each) == name}
    others = [each for each in same - {os.path.abspath(file)} if _is_of_program(each)]
    return os.path.basename(folder) if others else ""


def user_files(objects: Any) -> list[str]:
    """The files of the user's program: the main script, then those that define these functions and classes."""
    files: dict[str, None] = {}
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main:
        files[os.path.abspath(main)] = None
    for each in objects:
        code = getattr(each, "__code__", None)
        if code is not None:
            files[code.co_filename] = None
            continue
        kind = each if isinstance(each, type) else type(each)
        module = sys.modules.get(kind.__module__)
        file = getattr(module, "__file__", None)
        if file:
            files[file] = None
    return [file for file in files if _kind_of(file) == "user" and file.endswith(".py")]


def is_users_file(file: str) -> bool:
    """True if a file belongs to the user's program, not to torch, a framework or nanguard."""
    return _kind_of(file) == "user"


def is_library_file(file: str) -> bool:
    """True if a file belongs to torch or nanguard."""
    return _kind_of(file) in ("torch", "checkpoint", "nanguard")


def is_users(kind: type[nn.Module]) -> bool:
    """True if a class is defined in the user's program."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and is_users_file(file)


def _is_of_program(file: str) -> bool:
    return is_users_file(file) and not any(part in file for part in _PACKAGES)


@functools.cache
def _kind_of(file: str) -> str:
    if file == _CHECKPOINT:
        return "checkpoint"
    if file.startswith(_TORCH):
        return "torch"
    if file.startswith(_NANGUARD) and not file.startswith(_DEMO):
        return "nanguard"
    for part in _PACKAGES:
        _, found, rest = file.rpartition(os.sep + part + os.sep)
        if found:
            return "framework" if rest.split(os.sep)[0].removesuffix(".py") in _FRAMEWORKS else "user"
    if file.startswith(("<frozen", "<__array", "<string>")) or any(file.startswith(folder) for folder in _STDLIB):
        return "stdlib"
    return "user"
