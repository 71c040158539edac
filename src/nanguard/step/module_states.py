"""What modules of the program hold in attributes when a step first calls them: a hidden state, a memory, a counter.

A step replaces it. To make the calls of the step again, it has to be what it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nanguard import _compat
from nanguard.source.frames import is_users
from nanguard.state.trees import PLAIN, mapped, tensors

_LARGEST = 8 << 20
"""In bytes: a larger state is not held until the step is over."""

_MOST_ENTRIES = 64
"""A longer list or dict is no state."""

_OF_TORCH = frozenset(vars(nn.Module()))


class ModuleStates:
    """Finds the modules that hold tensors, or numbers that change, in attributes. In most programs it only looks up."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[nn.Module, _Holders] = weakref.WeakKeyDictionary()
        self._numbers: weakref.WeakKeyDictionary[nn.Module, dict[str, float]] = weakref.WeakKeyDictionary()
        self._counting: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def of(self, module: nn.Module) -> Sequence[NotedState]:
        """Of a module that is about to be called, and of those inside it. Their tensors are held, without a graph."""
        known = self._known.get(module)
        if known is None:
            known = self._known[module] = _Holders()
        known.num_calls += 1
        if not known.num_calls & (known.num_calls - 1):  # the 1st, 2nd, 4th, ...: the first calls may make the state
            own = [each for each in module.modules() if is_users(type(each))]
            known.modules = [weakref.ref(each) for each in own if self._counts(each) or _holds(each)]
        if not known.modules:
            return ()
        noted = [NotedState(each) for ref in known.modules if (each := ref()) is not None]
        size = sum(tensor.numel() * tensor.element_size() for state in noted for tensor in state.tensors)
        return noted if size <= _LARGEST else ()

    def _counts(self, module: nn.Module) -> bool:
        """Whether a number that the module holds was another one when it was asked before."""
        now = {name: value for name, value in vars(module).items() if type(value) in (int, float)}
        if self._numbers.get(module, now) != now:
            self._counting.add(module)
        self._numbers[module] = now
        return module in self._counting


class _Holders:
    __slots__ = ("modules", "num_calls")

    def __init__(self) -> None:
        self.num_calls = 0
        self.modules: list[weakref.ref[nn.Module]] = []


class NotedState:
    """The attributes of one module, but for those of torch."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        own = {name: value for name, value in vars(module).items() if name not in _OF_TORCH and _is_state(value)}
        self._values = {name: _without_graph(value) for name, value in own.items()}
        self.tensors = [tensor for value in self._values.values() for tensor in tensors(value)]
        self._versions = _compat.versions(self.tensors)

    @torch.no_grad()
    def put_back(self, modules: Iterable[nn.Module]) -> None:
        """If the module is one of these, and if it is still known what it held. Not NaN or Inf. Syncs."""
        module = self._module()
        if module is None or not any(each is module for each in modules):
            return
        if _compat.versions(self.tensors) == self._versions and all(map(_is_finite, self.tensors)):
            vars(module).update(self._values)


def _holds(module: nn.Module) -> bool:
    return any(
        any(not isinstance(tensor, nn.Parameter) for tensor in tensors(value))
        for name, value in vars(module).items()
        if name not in _OF_TORCH and type(value) not in PLAIN and _is_state(value)
    )


def _is_state(value: Any) -> bool:
    if isinstance(value, Tensor) or type(value) in PLAIN:
        return True
    return isinstance(value, (tuple, list, dict)) and len(value) <= _MOST_ENTRIES


def _without_graph(value: Any) -> Any:
    noted = mapped(value, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) and not leaf.is_leaf else None)
    return noted.copy() if noted is value and type(value) in (list, dict) else noted


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
