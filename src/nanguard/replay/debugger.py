"""Stops in the debugger where a non-finite value first appears: in the user's frame, right after the op.

In the backward pass that frame no longer exists. Then the frames of the forward op, which made the node of the graph,
are kept and inspected as after an error.
"""

from __future__ import annotations

import bdb
import contextlib
import pdb
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch

from nanguard import _compat
from nanguard.diagnosis.look import look
from nanguard.diagnosis.plans import forward_op
from nanguard.errors import ReplayError
from nanguard.records.diagnosis import Diagnosis
from nanguard.replay.calls import call_again
from nanguard.replay.entry import is_inside, told
from nanguard.replay.rerun import Stage
from nanguard.source.frames import Place, find_site
from nanguard.source.modules import Modules
from nanguard.state.names import unwrapped
from nanguard.state.trees import tensors
from nanguard.step.precision import Precision

Say = Callable[[str], None]
Moment = list[tuple[FrameType, int, int]]
"""The user's frames of one op, innermost first, each with its instruction and line."""


@dataclass(frozen=True, kw_only=True)
class Aim:
    """Where to stop: at an op, a line, or both. If neither is given, at the first non-finite value.

    With ``born``, only if it comes from finite inputs. With ``backward``, only in the backward pass: infinities of
    the forward pass may be intended.
    """

    op: str = ""
    file: str = ""
    line: int = 0
    born: bool = True
    backward: bool = False


def debug(stage: Stage, diagnosis: Diagnosis, say: Say) -> bool:
    """Runs the step until the value appears, and opens the debugger there. False if the place was not reached."""
    for aim in _aims(diagnosis):
        for place in stage.batches:
            watch = _Watch(aim, say)
            try:
                _run(stage, place, watch)
            except bdb.BdbQuit:
                return True
            except Exception as error:
                if not watch.has_stopped:
                    raise ReplayError(f"the step raised {told(error)}") from error
            if watch.has_stopped:
                return True
    return False


def _aims(diagnosis: Diagnosis) -> Iterator[Aim]:
    backward, source = diagnosis.phase == "backward", diagnosis.source
    if source is not None:
        yield Aim(op=diagnosis.op, file=source.file, line=source.line, born=False, backward=backward)
        yield Aim(file=source.file, line=source.line, born=False, backward=backward)
    yield Aim(backward=backward)
    yield Aim(born=False)


def _run(stage: Stage, place: int, watch: _Watch) -> None:
    """Forward and backward as in the guard. Buffers and gradients are restored afterwards."""
    model = stage.program.model
    buffers = [(buffer, buffer.detach().clone()) for buffer in unwrapped(model).buffers()]
    grads = [(param, param.grad) for param in model.parameters()]
    model.zero_grad(set_to_none=True)
    tracer = sys.gettrace()
    try:
        with stage.conditions(place), _compat.without_compilation(), watch:
            with Precision.resolve(stage.precision, stage.device).autocast():
                result = (stage.program.loss_fn or call_again())(model, stage.batches[place])
            loss = result[0] if isinstance(result, tuple) else result
            scaled = loss if stage.loss_scale is None else loss.float() * stage.loss_scale.initial
            scaled.sum().backward()
    finally:
        sys.settrace(tracer)
        with torch.no_grad():
            for buffer, copy in buffers:
                buffer.copy_(copy)
        for param, grad in grads:
            param.grad = grad


class _Watch(_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stops once while it is active as a context manager."""

    def __init__(self, aim: Aim, say: Say) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_stopped = False
        self._aim, self._say, self._modules = aim, say, Modules()
        self._moments: dict[int, Moment] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.has_stopped:
            return func(*args, **kwargs)
        node = _compat.current_node()
        site = find_site(self._modules, in_engine=node is not None)
        by_engine = site.by_engine and not site.in_user_code
        if not by_engine:
            self._remember(site.place)
        was_finite = _is_finite((args, kwargs))
        result = func(*args, **kwargs)
        if _is_finite(result) or (self._aim.born and not was_finite):
            return result
        name = str(func.overloadpacket.__name__).strip("_")
        if by_engine:
            self._look_back(node, name)
        elif site.in_user_code or not self._aim.backward:
            self._look(name, site.place)
        return result

    def _remember(self, place: Place | None) -> None:
        """Keeps the frames of a forward op by the number of its graph node."""
        number = _compat.next_sequence_nr()
        is_new = self._aim.backward and number and number - 1 not in self._moments
        if is_new and number and place is not None and self._is_there(place):
            self._moments[number - 1] = _moment(place)

    def _is_there(self, place: Place) -> bool:
        return not self._aim.file or (self._aim.file, self._aim.line) == place[:2]

    def _look(self, name: str, place: Place | None) -> None:
        if place is None or not self._is_there(place) or self._aim.op not in ("", name):
            return
        moment = _moment(place)
        if not moment:
            return
        self.has_stopped = True
        frame = moment[0][0]
        self._say(f"{name} has just returned a non-finite value, called in line {frame.f_lineno}")
        debugger = _Debugger()
        debugger.reset()
        debugger.interaction(frame, None)
        if debugger.quitting:
            raise bdb.BdbQuit
        if debugger.steps:
            debugger.set_trace(frame)

    def _look_back(self, node: Any, name: str) -> None:
        number = _compat.sequence_nr(node)
        moment = None if number is None else self._moments.get(number)
        op = forward_op(node)
        if not self._aim.backward or not moment or self._aim.op not in ("", op, name):
            return
        self.has_stopped = True
        frame, _, line = moment[0]
        text = f"{type(node).__name__}, the derivative of {op}, has just returned a non-finite gradient"
        self._say(f"{text}; the forward pass made it in line {line} of {frame.f_code.co_name}, as it was then:")
        debugger = _Debugger()
        debugger.reset()
        debugger.interaction(None, _traceback(moment))
        if debugger.quitting:
            raise bdb.BdbQuit


class _Debugger(pdb.Pdb):
    """Remembers whether the user steps on. Stepping skips torch and nanguard."""

    def __init__(self) -> None:
        super().__init__(skip=["torch", "torch.*", "nanguard", "nanguard.*", "contextlib"])
        self.steps = False

    def do_next(self, arg: str) -> bool | None:
        self.steps = True
        return super().do_next(arg)

    def do_step(self, arg: str) -> bool | None:
        self.steps = True
        return super().do_step(arg)

    do_n, do_s = do_next, do_step


def _moment(place: Place) -> Moment:
    """The user's current frames, from the one at ``place`` up to ``_run``."""
    found: Moment = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not _run.__code__:
        is_at = (frame.f_code.co_filename, frame.f_lineno) == place[:2]
        if is_at or (found and not is_inside(frame.f_code.co_filename)):
            found.append((frame, frame.f_lasti, frame.f_lineno))
        frame = frame.f_back
    return found if frame is not None else []


def _traceback(moment: Moment) -> TracebackType | None:
    """A traceback as if an error had passed through these frames."""
    chain: TracebackType | None = None
    for frame, instruction, line in moment:
        chain = TracebackType(chain, frame, instruction, line)
    return chain


def _is_finite(tree: Any) -> bool:
    for tensor in tensors(tree):
        with contextlib.suppress(RuntimeError):  # a tensor that cannot be examined counts as finite
            if not look(tensor).is_finite:
                return False
    return True
