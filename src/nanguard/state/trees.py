"""Tensors in nested containers: lists, tuples, named tuples, mappings and dataclasses.

Not ``torch.utils._pytree``: to it a dataclass, or a subclass of a container, is a leaf unless the program has
registered it.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from types import MappingProxyType, ModuleType
from typing import Any, cast

from torch import Tensor, nn

log = logging.getLogger("nanguard")

PLAIN = frozenset((int, float, bool, str, bytes, type(None)))
"""Types that hold no tensor: a batch may have millions of them."""

_NO_RESULTS = (nn.Module, type, ModuleType)
"""Objects whose attributes are no results of a call, though it may return them."""

_MOST_CONTAINERS = 1024
"""An object may lead to everything that the program holds."""


def children(tree: Any) -> Iterable[tuple[Any, Any]] | None:
    """Keys and values of a container, in order; None for anything else.

    Also for a container of the program's own class that cannot be read now: what it raises must not reach the program.
    """
    kind = type(tree)
    if kind is tuple or kind is list:
        return enumerate(tree)
    if kind is dict:
        return cast("dict[Any, Any]", tree).items()
    if isinstance(tree, Tensor):
        return None
    try:
        return _children_of_own_class(tree)
    except Exception:
        log.debug("a %s could not be read", kind.__name__, exc_info=True)
        return None


def _children_of_own_class(tree: Any) -> Iterable[tuple[Any, Any]] | None:
    """As ``children``. Everything is read at once, so that it raises here or not at all."""
    if isinstance(tree, (list, tuple)):
        return list(enumerate(tree))
    if isinstance(tree, Mapping):
        return list(tree.items())
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = [each.name for each in dataclasses.fields(tree)]
        return [(name, getattr(tree, name)) for name in fields if hasattr(tree, name)]  # some may not be set
    return None


def leaves(tree: Any) -> Iterator[Any]:
    """Everything in ``tree`` that is no container, in order."""
    inside = children(tree)
    if inside is None:
        yield tree
        return
    for _, child in inside:
        if type(child) in PLAIN:
            yield child
        else:
            yield from leaves(child)


def tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in ``tree``, in order."""
    return iter((tree,)) if isinstance(tree, Tensor) else _tensors_inside(tree)


def _tensors_inside(tree: Any) -> Iterator[Tensor]:
    for _, child in children(tree) or ():
        if type(child) not in PLAIN:
            yield from tensors(child)


def tensors_returned(result: Any) -> list[Tensor]:
    """The tensors in what a module returned, each once and in order.

    Also those that its objects have as attributes, such as the parameters of a distribution.
    """
    if isinstance(result, Tensor):
        return [result]
    found: dict[int, Tensor] = {}
    _collect(result, found, set())
    return list(found.values())


def _collect(tree: Any, found: dict[int, Tensor], seen: set[int]) -> None:
    if isinstance(tree, Tensor):
        found.setdefault(id(tree), tree)
        return
    if id(tree) in seen or len(seen) >= _MOST_CONTAINERS:
        return
    seen.add(id(tree))
    for inside in (children(tree) or (), attributes(tree)):
        for _, child in inside:
            if type(child) not in PLAIN:
                _collect(child, found, seen)


def attributes(tree: Any) -> Iterable[tuple[str, Any]]:
    """Of an object that may hold tensors, which may also be a container; not of modules and classes."""
    return vars(tree).items() if hasattr(tree, "__dict__") and not isinstance(tree, _NO_RESULTS) else ()


def is_float(tensor: Tensor) -> bool:
    """Whether the tensor is floating point or complex, so that a gradient can reach it."""
    return tensor.is_floating_point() or tensor.is_complex()


def in_python(tree: Any, key: Any) -> str:
    """``["image"]``, ``[1]`` or ``.mask``: how a program reaches a child."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return f".{tree._fields[key]}"
    return f"[{key!r}]" if isinstance(tree, (Mapping, list, tuple)) else f".{key}"


def named_tensors(tree: Any, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Each tensor with its path, such as ``batch["image"]`` or ``batch[1].mask``."""
    return ((path, leaf) for path, leaf in named_leaves(tree, name) if isinstance(leaf, Tensor))


def named_leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The same for everything that may hold a tensor and is no container."""
    inside = children(tree)
    if inside is None:
        yield name, tree
        return
    for key, child in inside:
        if type(child) not in PLAIN:
            yield from named_leaves(child, name + in_python(tree, key))


def mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """A copy of ``tree`` with leaves replaced by what ``function`` returns for them, if that is not None.

    Containers in which nothing is replaced are not copied, nor is ``tree`` itself.
    """
    new = _replaced(tree, function)
    return tree if new is None else new


def exchanged(tree: Any, new: Mapping[int, Tensor]) -> Any:
    """A copy of ``tree`` with the tensors whose ``id`` is in ``new`` exchanged."""
    return mapped(tree, lambda leaf: new.get(id(leaf)) if isinstance(leaf, Tensor) else None)


def _replaced(tree: Any, function: Callable[[Any], Any]) -> Any:
    """None if nothing is replaced."""
    inside = children(tree)
    if inside is None:
        return function(tree)
    old = dict(inside)
    every = {key: _replaced(child, function) for key, child in old.items()}
    new = {key: each for key, each in every.items() if each is not None}
    if not new:
        return None
    return _with_children(tree, old, new)


def _with_children(tree: Any, old: Mapping[Any, Any], new: Mapping[Any, Any]) -> Any:
    """A copy of a container with some children exchanged.

    Classes of the program may check what they are made of, or need other arguments: they are not called if possible.
    """
    kind: Any = type(tree)
    every = {**old, **new}
    if isinstance(tree, tuple) and not hasattr(kind, "n_sequence_fields"):
        made = tuple.__new__(kind, every.values())
        if hasattr(tree, "__dict__"):
            vars(made).update(vars(tree))
        return made
    if kind in (dict, list) or isinstance(tree, tuple):
        return kind(every if kind is dict else every.values())
    if isinstance(tree, Mapping) and not isinstance(tree, MutableMapping):
        try:
            return kind(every)
        except Exception:
            return MappingProxyType(every)
    try:
        copied = _copied(tree, new)
    except Exception:  # it cannot be copied or written to
        copied = None
    if copied is not None:
        return copied
    return list(every.values()) if isinstance(tree, list) else every


def _copied(tree: Any, new: Mapping[Any, Any]) -> Any:
    """None if the copy shares what it holds with the first. The first is as before then."""
    copied: Any = copy.copy(tree)
    if not isinstance(tree, (list, Mapping)):
        for key, each in new.items():
            object.__setattr__(copied, key, each)  # works for a frozen dataclass too
        return copied
    first: Any = tree
    before = {key: first[key] for key in new}
    for key, each in new.items():
        copied[key] = each
    if all(first[key] is not each for key, each in new.items()):
        return copied
    for key, each in before.items():
        first[key] = each
    return None
