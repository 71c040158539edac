"""What a function was given, if the program raised outside a step: an agent that chooses an action without gradients.

Nothing of that is recorded. The functions that the error has passed still have their arguments.
"""

from __future__ import annotations

import dis
import inspect
import itertools
from collections.abc import Collection, Iterable, Iterator
from types import FrameType

from torch import Tensor

from nanguard.diagnosis.evidence import where_bad
from nanguard.diagnosis.graph_probe import GraphFinding
from nanguard.diagnosis.process import jumped
from nanguard.errors import NonFiniteError
from nanguard.source.frames import Place, is_users_file
from nanguard.state.trees import named_tensors
from nanguard.step.parts import StepParts
from nanguard.step.tape import is_readable

_MOST_TENSORS = 1000
"""So many are looked at in what a function was given."""


def given_nan(error: BaseException | None, computed: Collection[int] | None = None) -> GraphFinding | None:
    """The outermost function of the program that was given NaN, if what raised had NaN as well.

    If it was in a step, ``computed`` are identities of tensors that were computed in it, so that they are no data.

    Only for an error that ends the program: reading variables may keep them alive. Syncs.
    """
    frames = list(passed(error))
    if isinstance(error, NonFiniteError):  # ours: it says why itself
        return None
    if not isinstance(error, Exception) or not any(map(_has_nan, _tensors_where_it_raised(error))):
        return None
    caller: Place | None = None
    for frame, line in frames:
        code, is_own = frame.f_code, is_users_file(frame.f_code.co_filename)
        for name in _arguments(frame) if is_own and caller is not None else ():
            for path, tensor in itertools.islice(named_tensors(frame.f_locals[name], name), _MOST_TENSORS):
                is_data = computed is None or (tensor.grad_fn is None and id(tensor) not in computed)
                if is_data and _has_nan(tensor):
                    element = where_bad(tensor).element
                    at = f" at {list(element)}" if element else ""
                    words = f"{path}, which {code.co_name}() was given, holds NaN{at}"
                    return GraphFinding("", None, words, True, None, place=caller)
        caller = (code.co_filename, line, code.co_name) if is_own else caller
    return None


def made_by_exploded_weights(error: BaseException | None, networks: Iterable[StepParts]) -> GraphFinding | None:
    """The line that raised, if it was looking at NaN or Inf, and a learning rate has made the weights explode. Syncs.

    For a program that evaluates its model, or draws samples with it, right after its first steps.
    """
    if isinstance(error, NonFiniteError) or not isinstance(error, Exception):
        return None
    place, seen = _where_it_raised(error)
    if not any(_has_nan(each) or _has_inf(each) for each in seen) or not jumped(networks):
        return None
    return GraphFinding("", None, "", True, None, place=place)


def raised_by_nonfinite(error: BaseException | None, *, is_in_model: bool) -> bool:
    """Whether what raised was looking at NaN; in the model also at Inf, such as the scale of a distribution. Syncs.

    -Inf may be a mask, and outside the model so may Inf.
    """
    if not isinstance(error, (ValueError, RuntimeError, ArithmeticError, AssertionError)):
        return False
    return any(_has_nan(each) or (is_in_model and _has_inf(each)) for each in _tensors_where_it_raised(error))


def _tensors_where_it_raised(error: BaseException | None) -> list[Tensor]:
    """Those of the innermost function that has any."""
    return _where_it_raised(error)[1]


def _where_it_raised(error: BaseException | None) -> tuple[Place | None, list[Tensor]]:
    """The line of the innermost function that has any tensors, and these."""
    for frame, line in reversed(list(passed(error))):
        # type(), since isinstance asks proxies for their class, and some of them then do something.
        values = [value for value in list(frame.f_locals.values()) if issubclass(type(value), Tensor)]
        if values:
            return (frame.f_code.co_filename, line, frame.f_code.co_name), values
    return None, []


def _arguments(frame: FrameType) -> Iterator[str]:
    """The names of the arguments that still are what the function was given."""
    code = frame.f_code
    stores = [each.argval for each in dis.get_instructions(code) if each.opname.startswith(("STORE_", "DELETE_"))]
    changed = {name for each in stores for name in (each if isinstance(each, tuple) else (each,))}
    for name in inspect.getargs(code).args:
        if name not in changed and name in frame.f_locals:
            yield name


def _has_nan(tensor: Tensor) -> bool:
    return is_readable(tensor) and bool(tensor.detach().isnan().any())


def _has_inf(tensor: Tensor) -> bool:
    return is_readable(tensor) and bool(tensor.detach().isposinf().any())


def passed(error: BaseException | None) -> Iterator[tuple[FrameType, int]]:
    """The functions that an error has passed, the outermost first, and the line in each."""
    trace = None if error is None else error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next
