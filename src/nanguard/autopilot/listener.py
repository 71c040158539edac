"""Is told when the program calls the modules it trains. Nothing is added to the modules, so they save as usual."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from nanguard import _compat
from nanguard.autopilot.own_work import Threads
from nanguard.step.calls import Call, CallRecorder


class CallListener:
    """Listens to the outermost modules, and to the children of one that is never called itself.

    ``begins`` is called before such a call with the identity of the outermost module. It returns the list that the call
    is recorded in, or None, and whether the tape was paused for it.
    """

    def __init__(
        self,
        begins: Callable[[int], tuple[list[Call] | None, bool]],
        recorder: CallRecorder,
        threads: Threads,
    ) -> None:
        self._begins, self._recorder, self._threads = begins, recorder, threads
        self._listed: dict[int, tuple[weakref.ref[nn.Module], int]] = {}
        self._called: set[int] = set()
        self._wrapped: dict[type[nn.Module], Any] = {}

    def listen(self, modules: Iterable[nn.Module], root: int | None = None) -> None:
        """``root`` is the identity of the outermost module that they are inside of."""
        for module in modules:
            key = id(module)
            if type(module).forward is nn.Module.forward and "forward" not in vars(module):  # it cannot be called
                self.listen(module.children(), key if root is None else root)
                continue
            self._listed[key] = weakref.ref(module, self._forgetting(key)), key if root is None else root
            self._wrap(type(module))

    def _forgetting(self, key: int) -> Callable[[Any], None]:
        listed, called = self._listed, self._called

        def forget(_: Any) -> None:
            listed.pop(key, None)
            called.discard(key)

        return forget

    def look_inside(self, module: nn.Module) -> None:
        """To the children of a module that is being called: it steps its optimizer itself, so it is a whole loop."""
        listed = self._listed.get(id(module))
        if listed is not None and any(module.children()):
            del self._listed[id(module)]
            self.listen(module.children(), listed[1])

    def listen_closer(self) -> None:
        """To the children of modules that were never called to train: a program may use their parts alone."""
        for key, (ref, root) in list(self._listed.items()):
            module = ref()
            children = [] if module is None or key in self._called else list(module.children())
            if children:
                del self._listed[key]
                self.listen(children, root)

    def stop(self) -> None:
        """Restores the classes of all modules."""
        for kind, original in self._wrapped.items():
            if original is None:
                del kind.__call__
            else:
                kind.__call__ = original  # type: ignore[method-assign]
        self._wrapped.clear()
        self._listed.clear()

    def _wrap(self, kind: type[nn.Module]) -> None:
        if kind in self._wrapped:
            return
        own = self._wrapped[kind] = vars(kind).get("__call__")
        threads, listed, called = self._threads, self._listed, self._called
        begins, recorder = self._begins, self._recorder

        @functools.wraps(kind.__call__)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Looked up at each call: others, such as torch.fx, may replace the inherited method.
            inherited: Any = super(kind, module)
            original = inherited.__call__ if own is None else functools.partial(own, module)
            # This comes first: a compiled program must not depend on what we listen to.
            if _compat.is_traced_by_compile() or id(module) not in listed or _compat.is_recording():
                return original(*args, **kwargs)
            here = threads.here
            if here.module is not None:
                return original(*args, **kwargs)
            here.module, record = module, None
            try:
                calls, is_taped = begins(listed[id(module)][1])
                if is_taped or calls is not None:
                    record = recorder.begin(calls, args, kwargs, sys._getframe(1), is_taped=is_taped, module=module)
                if id(module) not in called and torch.is_grad_enabled():  # it may validate with what it trains in parts
                    called.add(id(module))
                if record is None:
                    return original(*args, **kwargs)
                record.called = module
                try:
                    output = original(*args, **kwargs)
                except BaseException:
                    recorder.raised(record)
                    raise
                recorder.end(module, record, output)
                return output
            finally:
                here.module = None

        kind.__call__ = call  # type: ignore[method-assign]
