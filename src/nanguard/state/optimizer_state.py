"""An optimizer's state as a tree of plain containers in which names stand for tensors.

Every node is a dict with one key, the kind of the node, so that the tree can be saved as JSON.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Node = dict[str, Any]
States = list[list[tuple[str, Any]]]
"""Of each optimizer, the state of each parameter, by its name."""


def skeleton(value: Any, path: str) -> Node:
    """The tree of ``value``. Tensors are named by ``path`` and their place; everything else is copied."""
    if isinstance(value, Tensor):
        return {"tensor": [path, str(value.device)]}
    if isinstance(value, dict):
        return {"dict": [[key, skeleton(child, f"{path}.{key}")] for key, child in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [skeleton(child, f"{path}.{i}") for i, child in enumerate(value)]}
    return {"value": copy.deepcopy(value)}


def leaves(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of ``value`` by the names that ``skeleton`` gives them."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from leaves(child, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, child in enumerate(value):
            yield from leaves(child, f"{path}.{i}")


def tensors_of(states: States) -> dict[str, Tensor]:
    """By name, the tensors of all optimizers."""
    found: dict[str, Tensor] = {}
    for i, named in enumerate(states):
        for name, state in named:
            found.update(leaves(state, f"optimizer.{i}.{name}"))
    return found


def skeletons(states: States) -> list[dict[str, Node]]:
    """For each optimizer the trees of its state; names are those of ``tensors_of``."""
    return [{name: skeleton(state, f"optimizer.{i}.{name}") for name, state in named} for i, named in enumerate(states)]


def references(node: Node) -> Iterator[str]:
    """The names of the tensors in a tree."""
    ((kind, content),) = node.items()
    if kind == "tensor":
        yield content[0]
    elif kind != "value":
        for child in content:
            yield from references(child[1] if kind == "dict" else child)


def filled(node: Node, leaf: Callable[[str, str], Tensor], now: Any = None) -> Any:
    """The value of a tree; ``leaf`` gives the tensor of a name and device. If ``now`` is a dict, it is reused."""
    ((kind, content),) = node.items()
    if kind == "tensor":
        return leaf(*content)
    if kind == "value":
        return copy.deepcopy(content)
    if kind == "dict":
        whole = now if isinstance(now, dict) else {}
        entries = {key: filled(child, leaf, whole.get(key)) for key, child in content}
        whole.clear()
        whole.update(entries)
        return whole
    children = [filled(child, leaf) for child in content]
    if kind == "list":
        return children
    return type(now)(*children) if isinstance(now, tuple) and hasattr(now, "_fields") else tuple(children)


def impossible(state: Mapping[str, Any]) -> tuple[str, str]:
    """What finite gradients cannot have made of the state of one parameter, and why; empty if nothing. Syncs.

    If all moments are NaN, weights that were damaged before may have made them so, by a weight decay.
    """
    moments = {key: each for key, each in state.items() if isinstance(each, Tensor) and _is_moment(each)}
    for key, moment in moments.items():
        if key in _SQUARES and bool((moment < 0).any()):
            return key, f"holds {float(moment[moment < 0].min()):.3g}: a second moment can never be negative"
    damaged = [key for key, moment in moments.items() if bool(moment.isnan().any())]
    return (damaged[0], "holds NaN") if 0 < len(damaged) < len(moments) else ("", "")


_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")


def _is_moment(tensor: Tensor) -> bool:
    return tensor.ndim > 0 and tensor.is_floating_point() and tensor.layout is torch.strided and not tensor.is_meta
