"""What a function was given, if the program raised outside a step: an agent that chooses an action without gradients.

Nothing of that is recorded. The functions that the error has passed still have their arguments.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import FrameType

from torch import Tensor

from nanguard.diagnosis.evidence import where_bad
from nanguard.diagnosis.graph_probe import GraphFinding
from nanguard.source.frames import Place, is_users_file
from nanguard.step.tape import is_readable


def given_nan(error: BaseException | None) -> GraphFinding | None:
    """The outermost function of the program that was given NaN, if what raised had NaN as well.

    Only for an error that ends the program: reading variables may keep them alive. Syncs.
    """
    frames = list(passed(error))
    if not isinstance(error, Exception) or not _has_nan_where_it_raised([frame for frame, _ in frames]):
        return None
    caller: Place | None = None
    for frame, line in frames:
        code, is_own = frame.f_code, is_users_file(frame.f_code.co_filename)
        for name in _arguments(frame) if is_own and caller is not None else ():
            if _has_nan(value := frame.f_locals[name]):
                element = where_bad(value).element
                at = f" at {list(element)}" if element else ""
                words = f"{name}, which {code.co_name}() was given, holds NaN{at}"
                return GraphFinding("", None, words, True, None, place=caller)
        caller = (code.co_filename, line, code.co_name) if is_own else caller
    return None


def _has_nan_where_it_raised(frames: list[FrameType]) -> bool:
    """Whether the innermost function that has tensors has NaN in one of them. Inf may be meant: a mask."""
    for frame in reversed(frames):
        values = [value for value in list(frame.f_locals.values()) if issubclass(type(value), Tensor)]
        if values:
            return any(map(_has_nan, values))
    return False


def _arguments(frame: FrameType) -> Iterator[str]:
    """The names of the arguments that still are what the function was given."""
    code = frame.f_code
    stores = [each.argval for each in dis.get_instructions(code) if each.opname.startswith(("STORE_", "DELETE_"))]
    changed = {name for each in stores for name in (each if isinstance(each, tuple) else (each,))}
    for name in inspect.getargs(code).args:
        if name not in changed and name in frame.f_locals:
            yield name


def _has_nan(value: object) -> bool:
    # type(), since isinstance asks proxies for their class, and some of them then do something.
    if not issubclass(type(value), Tensor):
        return False
    assert isinstance(value, Tensor)
    return is_readable(value) and bool(value.detach().isnan().any())


def passed(error: BaseException | None) -> Iterator[tuple[FrameType, int]]:
    """The functions that an error has passed, the outermost first, and the line in each."""
    trace = None if error is None else error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next
