"""Calls that torch does not tell its modes of, or slowly: of autograd Functions, ``Variable``, compiled code."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from torch import Tensor
from torch.autograd import Function, Variable

from nanguard import _compat_modes
from nanguard.step.switched_mode import SwitchedMode


class FunctionTape(Protocol):
    """Who is told."""

    def may_call(self) -> bool:
        """Whether ``call`` would note the call."""

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Makes the call and notes it."""


class Listening(ABC):
    """Patches something while a tape is written."""

    @abstractmethod
    def begin(self) -> bool:
        """False if that is not possible. Has no effect if it has begun."""

    @abstractmethod
    def end(self) -> None:
        """Has no effect if it has not begun."""


class FunctionCalls:
    """Tapes are told of every call of ``Function.apply``, and of ``Variable(tensor)`` in old programs.

    And sooner of those of ``torch.nn.functional``.

    One for all tapes, since it patches torch's own classes. They stay patched as long as there is a tape that has
    begun, not only while it is written: each change of them makes Python forget what it knows of all functions of
    autograd. And in ``Normalize.apply(model(x))`` the method is looked up before the model is called, which may be when
    the tape begins.
    """

    def __init__(self) -> None:
        self._tapes: list[weakref.ref[FunctionTape]] = []
        self._apply: Any = None
        self._slow_down: Callable[[], None] = lambda: None

    def add(self, tape: FunctionTape) -> None:
        if not self._tapes:
            self._apply = vars(Function)["apply"]
            Function.apply = classmethod(_applying(self._writing, self._apply))  # type: ignore[assignment, method-assign]
            type(Variable).__call__ = _aliasing(self._writing)  # type: ignore[method-assign]
            self._slow_down = _compat_modes.quicken_functional(SwitchedMode.active)
        self._tapes.append(weakref.ref(tape, self._forget))

    def remove(self, tape: FunctionTape) -> None:
        """Has no effect if it was not added."""
        for ref in self._tapes:
            if ref() is tape:
                self._forget(ref)

    def _forget(self, gone: weakref.ref[FunctionTape]) -> None:
        was_used = bool(self._tapes)
        self._tapes = [ref for ref in self._tapes if ref is not gone]
        if was_used and not self._tapes:
            Function.apply = self._apply  # type: ignore[method-assign]
            del type(Variable).__call__
            self._slow_down()

    def _writing(self) -> FunctionTape | None:
        """The tape that would note a call now. At most one does."""
        for ref in self._tapes:
            tape = ref()
            if tape is not None and tape.may_call():
                return tape
        return None


FUNCTION_CALLS = FunctionCalls()


class CompiledCalls(Listening):
    """``entered`` and ``left`` are called with torch's frame, before compiled code is looked up or run, and after.

    ``left`` is called only if ``is_inside`` is not empty.
    """

    def __init__(
        self, entered: Callable[[FrameType], None], left: Callable[[FrameType], None], is_inside: list[Any]
    ) -> None:
        self._entered, self._left, self._is_inside = entered, left, is_inside
        self._undo: Any = None
        self.has_begun = False
        """Not before the program has imported torch's compiler."""

    def begin(self) -> bool:
        """False if this torch cannot tell."""
        self._undo = self._undo or _compat_modes.on_compiled_calls(self._entered, self._left, self._is_inside)
        self.has_begun = bool(self._undo)
        return self._undo is not False

    def end(self) -> None:
        if self._undo:
            self._undo()
        self._undo, self.has_begun = None, False


def _applying(writing: Callable[[], FunctionTape | None], original: Any) -> Callable[..., Any]:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound, tape = original.__get__(None, cls), writing()
        return bound(*args, **kwargs) if tape is None else tape.call(bound, args, kwargs)

    return apply


def _aliasing(writing: Callable[[], FunctionTape | None]) -> Callable[..., Any]:
    """``Variable(tensor, requires_grad=True)`` is ``tensor.detach().requires_grad_()``, which a tape can hold."""

    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        is_alias = len(args) == 1 and type(args[0]) is Tensor and kwargs.keys() <= {"requires_grad"}
        tape = writing() if is_alias else None
        if tape is None:
            return type.__call__(cls, *args, **kwargs)
        alias = tape.call(Tensor.detach, args, {})
        return tape.call(Tensor.requires_grad_, (alias,), {}) if kwargs.get("requires_grad") else alias

    return call
