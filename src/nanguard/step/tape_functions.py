"""Calls of autograd Functions, of ``Variable`` and of compiled code: torch does not tell its modes of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from torch import Tensor
from torch.autograd import Function, Variable

from nanguard import _compat_modes


class FunctionTape(Protocol):
    """Who is told."""

    def may_call(self) -> bool:
        """Whether ``call`` would note the call."""

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Makes the call and notes it."""


class Listening(ABC):
    """Patches something while a tape is written: up to ``end``, or up to ``end_for_good`` if it ``stays``."""

    stays = False

    @abstractmethod
    def begin(self) -> bool:
        """False if that is not possible."""

    @abstractmethod
    def end(self) -> None: ...

    def begin_for_good(self) -> None:
        self.begin()
        self.stays = True

    def end_for_good(self) -> None:
        self.stays = False
        self.end()


class FunctionCalls(Listening):
    """The tape is told of every call of ``Function.apply``, and of ``Variable(tensor)`` in old programs.

    In ``Normalize.apply(model(x))`` the method is looked up before the model is called, which may be when the tape
    begins. Only methods that are looked up while it listens are seen, so it is best to listen for good.
    """

    def __init__(self, tape: FunctionTape) -> None:
        self._tape = tape
        self._original: Any = None
        self._alias_before: Any = None

    def begin(self) -> bool:
        if self._original is None:
            self._original = vars(Function)["apply"]
            Function.apply = classmethod(_applying(self._tape, self._original))  # type: ignore[assignment, method-assign]
            self._alias_before = vars(type(Variable)).get("__call__")
            type(Variable).__call__ = _aliasing(self._tape)  # type: ignore[method-assign]
        return True

    def end(self) -> None:
        if self._original is not None and not self.stays:
            Function.apply, self._original = self._original, None  # type: ignore[method-assign]
            if self._alias_before is not None:  # that of another tape
                type(Variable).__call__ = self._alias_before  # type: ignore[method-assign]
            elif "__call__" in vars(type(Variable)):
                del type(Variable).__call__


class CompiledCalls(Listening):
    """``entered`` and ``left`` are called with torch's frame, before compiled code is looked up or run, and after."""

    def __init__(self, entered: Callable[[FrameType], None], left: Callable[[FrameType], None]) -> None:
        self._entered, self._left = entered, left
        self._undo: Any = None

    def begin(self) -> bool:
        """False if this torch cannot tell."""
        self._undo = self._undo or _compat_modes.on_compiled_calls(self._entered, self._left)
        return self._undo is not False

    def end(self) -> None:
        if self._undo and not self.stays:
            self._undo()
            self._undo = None


def _applying(tape: FunctionTape, original: Any) -> Callable[..., Any]:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = original.__get__(None, cls)
        return tape.call(bound, args, kwargs) if tape.may_call() else bound(*args, **kwargs)

    return apply


def _aliasing(tape: FunctionTape) -> Callable[..., Any]:
    """``Variable(tensor)`` is the same as ``tensor.detach()``, which a tape can hold."""

    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        is_alias = len(args) == 1 and type(args[0]) is Tensor and not kwargs
        return (
            tape.call(Tensor.detach, args, {}) if is_alias and tape.may_call() else type.__call__(cls, *args, **kwargs)
        )

    return call
