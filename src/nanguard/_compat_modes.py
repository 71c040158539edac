"""The private names of torch that tell what a thread is doing, such as modes; ``_compat`` has the others."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as _functional
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

num_function_modes: Any = torch._C._len_torch_function_stack
push_function_mode: Any = torch._C._push_on_torch_function_stack
pop_function_mode: Any = torch._C._pop_torch_function_stack


def enter_function_mode(mode: Any) -> None:
    """Puts a function mode below all others of this thread, so that leaving theirs never leaves ours.

    Torch wants the context of ``torch.set_default_device`` to be the lowest one: ours comes right above it.
    """
    above = [pop_function_mode() for _ in range(num_function_modes())]
    lowest = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    if lowest is not None and above and above[-1] is lowest:
        push_function_mode(above.pop())
    for each in (mode, *reversed(above)):
        push_function_mode(each)


def leave_function_mode(mode: Any) -> bool:
    """Takes a function mode out, also from below others.

    False if it is not there: while it handles a call, torch holds it aside.
    """
    above: list[Any] = []
    is_found = False
    while num_function_modes() and not is_found:
        each = pop_function_mode()
        is_found = each is mode
        if not is_found:
            above.append(each)
    for other in reversed(above):
        push_function_mode(other)
    return is_found


def takes_default_device(function: Any) -> bool:
    """Whether a function that is called without a device is given that of ``torch.set_default_device``."""
    return function in _device_constructors()


is_transformed: Any = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor belongs to ``torch.func.grad``, ``vmap`` or others, and has no value of its own outside them."""


is_transforming: Any = torch._C._are_functorch_transforms_active
"""Whether this is inside ``torch.func.grad``, ``vmap`` or others.

Not by looking at the stack of transforms: once it was looked at, torch copies it for every node of a backward pass.
"""


def on_compiled_calls(entered: Any, left: Any, is_inside: list[Any]) -> Any:
    """Calls ``entered`` before compiled code is looked up or run, and ``left`` after it, each with torch's frame.

    ``left`` is not called if ``is_inside`` is empty. Returns what undoes that; None if ``torch.compile`` was not used
    so far, False if this torch cannot tell.
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
            if is_inside:
                left(sys._getframe(1))
            return before
        entered(sys._getframe(1))
        return original(callback)

    dynamo._maybe_set_eval_frame = set_eval_frame

    def undo() -> None:
        if dynamo._maybe_set_eval_frame is set_eval_frame:
            dynamo._maybe_set_eval_frame = original

    return undo


def quicken_functional(active: Any) -> Callable[[], None]:
    """Torch tells the mode ``active.mode`` of calls of ``torch.nn.functional`` in a third of the time.

    That is, if no other mode is on: torch's own way takes ten calls of Python. Returns what undoes that.
    """
    original = functional.handle_torch_function

    def handle(public_api: Any, relevant_args: Any, *args: Any, **kwargs: Any) -> Any:
        mode = active.mode
        if mode is not None and num_function_modes() == 1 and _is_mode_enabled():
            top = pop_function_mode()
            try:
                if top is mode:
                    return mode.__torch_function__(public_api, (), args, kwargs)
            finally:
                push_function_mode(top)
        return original(public_api, relevant_args, *args, **kwargs)

    functional.handle_torch_function = handle
    HANDLERS_OF_FUNCTIONAL.add(handle.__code__)

    def undo() -> None:
        if functional.handle_torch_function is handle:
            functional.handle_torch_function = original

    return undo


functional: Any = _functional
_is_mode_enabled: Any = torch._C._is_torch_function_mode_enabled

HANDLERS_OF_FUNCTIONAL: set[CodeType] = {torch.overrides.handle_torch_function.__code__}
"""Code that functions of torch run to ask the modes."""


set_grad_enabled: Any = torch._C._set_grad_enabled
"""As a function alone, which takes less time than torch's own context."""


class NoGrad:
    """``torch.no_grad()``, in less time, for what is done at every step. Not reentrant, and not for a function."""

    __slots__ = ("_was_enabled",)

    def __enter__(self) -> None:
        self._was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch._C._set_grad_enabled(self._was_enabled)


is_any_autocast_enabled: Any = torch._C._is_any_autocast_enabled


def unwatched() -> contextlib.AbstractContextManager[Any]:
    """Ops inside are not seen by any dispatch mode."""
    return _disable_current_modes() if is_watched() else _NOTHING  # the former takes some 5 us


def is_watched() -> bool:
    """Whether a dispatch mode sees ops now."""
    # Torch sets a key while there are modes that see ops before autograd does, as in torch.export.
    return bool(_num_dispatch_modes() or _is_key_included(_BEFORE_DISPATCH))


_num_dispatch_modes: Any = torch._C._len_torch_dispatch_stack
_is_key_included: Any = torch._C._dispatch_tls_is_dispatch_key_included


_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
_BEFORE_DISPATCH: Any = torch._C.DispatchKey.PreDispatch


def has_dispatch_mode() -> bool:
    """Whether a dispatch mode is active in this thread, fake tensors and other modes of torch's own included."""
    return bool(torch._C._len_torch_dispatch_stack())


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass now: one of the program's, or one of autograd's own."""
    return bool(current_pass() != -1)


current_pass: Any = torch._C._current_graph_task_id
"""The number of the backward pass that this thread runs; -1 if there is none."""


_cuda: Any = torch.cuda
_is_in_bad_fork, _is_stream_capturing = _cuda._is_in_bad_fork, torch._C._cuda_isCurrentStreamCapturing


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured. Never initializes CUDA."""
    try:
        return bool(_cuda._initialized and not _is_in_bad_fork() and _is_stream_capturing())
    except RuntimeError:  # the GPU has stopped: whatever the program does next tells it so
        return False


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
