"""Find the module of a model that a running function belongs to.

While a trace runs, calls of modules are recorded. A method that is called directly is found by its code, which belongs
to a class. The variables of a frame are never read: before Python 3.13 that changes the dict that ``locals()`` returned
to the program, and keeps deleted objects alive.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

from torch import nn

from nanguard import _compat
from nanguard.state.names import plain_name

_CALL = _compat.MODULE_CALL
_OF_ALL_MODULES = {value.__code__ for value in vars(nn.Module).values() if hasattr(value, "__code__")}


class Modules:
    """The modules of a model, by name. Their calls are recorded between ``listen`` and ``stop``.

    ``others`` are further networks that its steps may call; their names say which network is meant.
    """

    def __init__(self, model: nn.Module | None = None, others: Sequence[nn.Module] = ()) -> None:
        named = [] if model is None else list(model.named_modules())
        own = {id(module) for _, module in named}
        for other in others:
            named += [(name, module) for name, module in other.named_modules() if id(module) not in own]
        self._names = {id(module): plain_name(name) for name, module in reversed(named)}  # the first name wins
        self._methods: dict[CodeType, list[int]] = {}
        of_kind: dict[type, list[int]] = {}
        for _, module in named:
            of_kind.setdefault(type(module), []).append(id(module))
        for kind, members in of_kind.items():
            for code in _codes(kind):
                self._methods.setdefault(code, []).extend(members)
        self._calls: dict[int, int] = {}
        self._replaced: Any = None

    def listen(self) -> None:
        """Start recording calls. Not with torch's global hooks: ``torch.compile`` warns about them."""
        if not self._names or self._replaced is not None:
            return
        original = self._replaced = _compat.module_call()
        calls = self._calls

        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if _compat.is_recording():
                return original(module, *args, **kwargs)
            key = id(sys._getframe())  # the frame exists, with this id, until the call returns
            calls[key] = id(module)
            try:
                return original(module, *args, **kwargs)
            finally:
                calls.pop(key, None)

        _compat.set_module_call(call)

    def stop(self) -> None:
        if self._replaced is not None:
            _compat.set_module_call(self._replaced)
            self._replaced = None
            self._calls.clear()

    def at(self, frame: FrameType) -> str | None:
        """The name of the module whose method runs in a frame. None if there is none or more than one candidate."""
        code = frame.f_code
        if code is _CALL:
            return self._names.get(self._module_at(frame))
        those = self._methods.get(code)
        if not those:
            return None
        if len(those) == 1:
            return self._names[those[0]]
        above = self._called(frame.f_back)
        if above is None:
            return None
        prefix = f"{self._names[above]}.".lstrip(".")
        some = [above] if above in those else [each for each in those if self._names[each].startswith(prefix)]
        return self._names[some[0]] if len(some) == 1 else None

    def with_method(self, file: str, line: int, function: str) -> list[str]:
        """The names of the modules that have the method that this line is in."""
        same = [code for code in self._methods if (code.co_filename, code.co_name) == (file, function)]
        codes = [code for code in same if any(at == line for _, _, at in code.co_lines())]
        return [self._names[each] for code in codes for each in self._methods[code]]

    def _called(self, frame: FrameType | None) -> int | None:
        """The id of the innermost module that is being called."""
        while frame is not None:
            called = self._module_at(frame) if frame.f_code is _CALL else 0
            if called in self._names:
                return called
            frame = frame.f_back
        return None

    def _module_at(self, frame: FrameType) -> int:
        """The id of the module that torch calls in a frame; recorded by its caller, or by the caller of a probe."""
        above = frame.f_back
        found = self._calls.get(id(above), 0)
        return found if found or above is None else self._calls.get(id(above.f_back), 0)


def _codes(kind: type) -> Iterator[CodeType]:
    """The code of all methods of a module class, except those of ``nn.Module`` itself."""
    for each in kind.__mro__:
        if each is nn.Module:
            return
        for value in vars(each).values():
            function: Any = value.fget if isinstance(value, property) else value
            while hasattr(function, "__wrapped__"):  # no_grad, checkpointing and other decorators
                function = function.__wrapped__
            code = getattr(function, "__code__", None)
            if isinstance(code, CodeType) and not isinstance(value, (staticmethod, classmethod)):
                is_of_all = code in _OF_ALL_MODULES  # the __call__ of a class may wrap that of nn.Module
                yield from () if is_of_all else (code,)
