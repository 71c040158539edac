"""Hears when the program calls the modules it trains. Nothing is put into them: they can be saved as ever."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from nanguard.capture import Call, Ear
from nanguard.naming import unwrapped


class Switchboard:
    """The outermost modules, and below one that is never called itself those inside it.

    ``begins`` is called before such a call, ``opens`` gives the list that calls are noted in, None where they are not.
    """

    def __init__(self, begins: Callable[[], None], opens: Callable[[], list[Call] | None], ear: Ear) -> None:
        self._begins, self._opens, self._ear = begins, opens, ear
        self._listed: dict[int, nn.Module] = {}
        self._heard: set[int] = set()
        self._wrapped: dict[type[nn.Module], Any] = {}
        self._is_inside = False

    def listen(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            self._listed[id(module)] = module
            self._wrap(type(module))

    def listen_closer(self) -> None:
        """To the children of modules that have never been called: a program may use their parts alone."""
        for key, module in list(self._listed.items()):
            children = list(module.children())
            if key not in self._heard and children:
                del self._listed[key]
                self.listen(children)

    def hang_up(self) -> None:
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
        self._wrapped[kind] = vars(kind).get("__call__")
        original: Callable[..., Any] = kind.__call__

        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(module) not in self._listed or self._is_inside or torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            self._is_inside = True
            try:
                return self._hear(original, module, args, kwargs)
            finally:
                self._is_inside = False

        kind.__call__ = call  # type: ignore[method-assign]

    def _hear(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._begins()
        self._heard.add(id(module))
        self._ear.enter(module, args, kwargs)
        output = original(module, *args, **kwargs)
        self._ear.leave(module, args, output)
        calls = self._opens()
        if calls:
            calls[-1].module = unwrapped(module)
        return output
