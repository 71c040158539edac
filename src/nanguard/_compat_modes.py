"""The private names of torch that the tape of a step depends on, as ``_compat`` has the others."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)


def enter_function_mode(mode: Any) -> None:
    """Puts a function mode below all others of this thread, so that leaving theirs never leaves ours.

    Torch wants the context of ``torch.set_default_device`` to be the lowest one: ours comes right above it.
    """
    if not torch._C._len_torch_function_stack():
        torch._C._push_on_torch_function_stack(mode)
        return
    above = _popped_function_modes()
    lowest = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    if lowest is not None and above[-1] is lowest:
        torch._C._push_on_torch_function_stack(above.pop())
    for each in (mode, *reversed(above)):
        torch._C._push_on_torch_function_stack(each)


def leave_function_mode(mode: Any) -> bool:
    """Takes a function mode out, also from below others.

    False if it is not there: while it handles a call, torch holds it aside.
    """
    above = []
    for _ in range(torch._C._len_torch_function_stack()):
        each = torch._C._pop_torch_function_stack()
        if each is mode:
            break
        above.append(each)
    else:
        each = None
    for other in reversed(above):
        torch._C._push_on_torch_function_stack(other)
    return each is mode


def _popped_function_modes() -> list[Any]:
    """All function modes of this thread, the innermost first."""
    return [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]


def takes_default_device(function: Any) -> bool:
    """Whether a function that is called without a device is given that of ``torch.set_default_device``."""
    return function in _device_constructors()


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor belongs to ``torch.func.grad``, ``vmap`` or others, and has no value of its own outside them."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def on_compiled_calls(entered: Any, left: Any) -> Any:
    """Calls ``entered`` before compiled code is looked up or run, and ``left`` after it, each with torch's frame.

    Returns what undoes that; None if ``torch.compile`` was not used so far, False if this torch cannot tell.
    """
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return None
    original = getattr(dynamo, "_maybe_set_eval_frame", None)
    if original is None:
        return False

    def set_eval_frame(callback: Any) -> Any:
        if callback is None or callback is False:
            before = original(callback)
            left(sys._getframe(1))
            return before
        entered(sys._getframe(1))
        return original(callback)

    dynamo._maybe_set_eval_frame = set_eval_frame

    def undo() -> None:
        if dynamo._maybe_set_eval_frame is set_eval_frame:
            dynamo._maybe_set_eval_frame = original

    return undo


is_any_autocast_enabled: Any = torch._C._is_any_autocast_enabled


def unwatched() -> contextlib.AbstractContextManager[Any]:
    """Ops inside are not seen by any dispatch mode."""
    if not has_dispatch_mode() and not _num_modes_before_dispatch():  # entering torch's context takes some 5 us
        return _NOTHING
    context: contextlib.AbstractContextManager[Any] = _disable_current_modes()
    return context


_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
_num_modes_before_dispatch: Any = getattr(torch._ops, "_len_torch_dispatch_stack_pre_dispatch", lambda: 0)


def has_dispatch_mode() -> bool:
    """Whether a dispatch mode is active in this thread, fake tensors and other modes of torch's own included."""
    return bool(torch._C._len_torch_dispatch_stack())


def leave_mode(mode: Any) -> None:
    """Leaves a dispatch mode, below those that the program has entered since: ``__exit__`` alone would leave theirs."""
    if not any(each is mode for each in _get_current_dispatch_mode_stack()):
        return
    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    _push_mode(mode)
    mode.__exit__(None, None, None)
    for other in reversed(above):
        _push_mode(other)


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Autocast that the program turns on inside has no effect."""
    kind: Any = torch.autocast
    enter = kind.__enter__

    def enter_disabled(self: Any) -> Any:
        enabled, self._enabled = self._enabled, False
        try:
            return enter(self)
        finally:
            self._enabled = enabled

    kind.__enter__ = enter_disabled
    try:
        yield
    finally:
        kind.__enter__ = enter
