"""Calls of autograd Functions: torch does not tell its modes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch.autograd import Function


class FunctionTape(Protocol):
    """Who is told."""

    def may_call(self) -> bool:
        """Whether ``call`` would note the call."""

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Makes the call and notes it."""


class FunctionCalls:
    """Between ``begin`` and ``end`` the tape is told of every call of ``Function.apply``."""

    def __init__(self, tape: FunctionTape) -> None:
        self._tape = tape
        self._original: Any = None
        self._stays = False

    def begin(self) -> None:
        if self._original is None:
            self._original = vars(Function)["apply"]
            Function.apply = classmethod(_applying(self._tape, self._original))  # type: ignore[assignment, method-assign]

    def end(self) -> None:
        if self._original is not None and not self._stays:
            Function.apply, self._original = self._original, None  # type: ignore[method-assign]

    def begin_for_good(self) -> None:
        """Until ``end_for_good``, whatever ends in between.

        In ``Normalize.apply(model(x))`` the method is looked up before the model is called, which may be when the tape
        begins. Otherwise only methods that are looked up while it is on are seen.
        """
        self.begin()
        self._stays = True

    def end_for_good(self) -> None:
        self._stays = False
        self.end()


def _applying(tape: FunctionTape, original: Any) -> Callable[..., Any]:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = original.__get__(None, cls)
        return tape.call(bound, args, kwargs) if tape.may_call() else bound(*args, **kwargs)

    return apply
