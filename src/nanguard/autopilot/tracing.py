"""Traces a program from the end of one step to the next, but not what it computes without gradients in between."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from nanguard import _compat, _compat_modes
from nanguard.diagnosis.live import Live
from nanguard.hosted.step import HostedStep

_ENTER = ((torch.no_grad, "__enter__"), (torch.enable_grad, "__enter__"), (torch.inference_mode, "__enter__"))
_EXIT = ((torch.no_grad, "__exit__"), (torch.enable_grad, "__exit__"), (torch.inference_mode, "__exit__"))
_SET = torch.set_grad_enabled
_SWITCHES = (*_ENTER, *_EXIT, *((_SET, name) for name in ("__init__", "__call__", "__enter__", "__exit__")))


class Tracer:
    """One trace at a time, in one thread.

    An evaluation between two steps is not traced at all: while gradients are off the trace is suspended, unless the
    step has begun (``in_step``): what is computed without gradients then (targets, for example) belongs to it. With
    ``trace=True`` everything is traced. In a backward pass (``is_nested``) a trace can neither begin nor end.
    """

    def __init__(self, *, in_step: Callable[[], bool], is_nested: Callable[[], bool]) -> None:
        self._in_step, self._is_nested = in_step, is_nested
        self._live: Live | None = None
        self.is_used = False
        """Whether a step is traced, maybe of another thread."""
        self._active: contextlib.ExitStack | None = None
        self._switches: GradSwitches | None = None
        self._thread = 0

    @property
    def live(self) -> Live | None:
        """That of the hosted step that is traced; None if no step is, or one of another thread."""
        return self._live if self._thread == threading.get_ident() else None

    def start(self, hosted_steps: Sequence[HostedStep]) -> None:
        """Not inside a dispatch mode of the program, which will be left before ours is."""
        if self._live is not None or self._is_nested() or _compat_modes.has_dispatch_mode():
            return
        for hosted in hosted_steps:
            if hosted.examinations.live.is_on and hosted.thread in (None, threading.get_ident()):
                self._live, self._thread = hosted.examinations.live, threading.get_ident()
                break
        else:
            return
        self.is_used = True
        if not self._live.is_always:
            self._switches = GradSwitches(self)
        self._set(self._is_wanted())

    def stop(self) -> None:
        if self.live is None or self._is_nested():
            return
        if self.is_active and not _compat_modes.has_dispatch_mode():
            return
        if self._switches is not None:
            self._switches.remove()
            self._switches = None
        self._set(False)
        self._live, self.is_used = None, False

    @contextlib.contextmanager
    def suspended(self, hosted_steps: Callable[[], Sequence[HostedStep]]) -> Iterator[None]:
        """Inside nothing is traced; afterwards a trace begins anew if there was one."""
        was_tracing = self.live is not None and not self._is_nested()
        self.stop()
        try:
            yield
        finally:
            if was_tracing:
                self.start(hosted_steps())

    def resume(self) -> None:
        """The program computes with gradients now. A step that is traced for too long is not traced any more."""
        if self.live is not None and not self._is_nested():
            if self.live.takes_too_long:
                self.stop()
            else:
                self._set(True)

    def _is_wanted(self) -> bool:
        is_always = self.live is not None and self.live.is_always
        return is_always or torch.is_grad_enabled() or self._in_step()

    @property
    def is_active(self) -> bool:
        """Whether what happens now is traced."""
        return self._active is not None

    def switched(self, was_active: bool) -> None:
        """Gradients were switched on or off. ``was_active``: a block ends now, and tracing was on when it was entered.

        Inside a function of autograd, which switches gradients off itself, only this says that tracing goes on.
        """
        if self.live is not None and not self._is_nested():
            self._set(was_active or self._is_wanted())

    def _set(self, active: bool) -> None:
        live = self.live
        if active and self._active is None and live is not None and not _compat_modes.has_dispatch_mode():
            self._active = contextlib.ExitStack()
            self._active.enter_context(_tracing(live))
        elif not active and self._active is not None and _compat_modes.has_dispatch_mode():
            stack, self._active = self._active, None
            stack.close()


@contextlib.contextmanager
def _tracing(live: Live) -> Iterator[None]:
    with _compat.without_compilation(), live.following():
        yield


class GradSwitches:
    """Tells the tracer when this thread switches gradients on or off, from when it is made until ``remove``."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._thread = threading.get_ident()
        self._entered: list[bool] = []
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        for owner, name in _SWITCHES:
            original = vars(owner)[name]
            ours = self._wrapped(name, original)
            self._replaced.append((owner, name, original, ours))
            setattr(owner, name, ours)

    def remove(self) -> None:
        """Restores the methods, except those that the program has replaced since."""
        for owner, name, original, ours in self._replaced:
            if vars(owner)[name] is ours:
                setattr(owner, name, original)

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return original(*args, **kwargs)
            if name == "__enter__":
                self._entered.append(self._tracer.is_active)
            result = original(*args, **kwargs)
            self._tracer.switched(name == "__exit__" and bool(self._entered) and self._entered.pop())
            return result

        return call
