"""Names as the user wrote them, without the prefixes of DDP, ``torch.compile`` and Fabric."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from nanguard import _compat


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside DDP, ``torch.compile`` and Fabric."""
    *_, inner = layers(model)
    return inner


def layers(model: nn.Module) -> Iterator[nn.Module]:
    """The module and what it wraps, from the outside to the user's own module."""
    inner: Any = model
    while inner is not None:
        yield inner
        if isinstance(inner, (DistributedDataParallel, DataParallel)):
            inner = inner.module
        elif type(inner).__name__ == "_FabricModule":
            inner = inner._forward_module
        else:
            inner = _compat.compiled_module(inner)


def plain_name(name: str) -> str:
    """Without the name that ``torch.compile`` gives to a module it wraps."""
    return ".".join(part for part in name.split(".") if part not in ("", _compat.COMPILED))


def names_of(model: nn.Module) -> dict[int, str]:
    """Every parameter's name, by its identity."""
    return {id(param): plain_name(name) for name, param in unwrapped(model).named_parameters()}


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, by names without prefixes of wrappers."""
    inner = unwrapped(model)
    return {plain_name(name): tensor for name, tensor in (*inner.named_parameters(), *inner.named_buffers())}


def tensor_slots(module: nn.Module, prefix: str, *, buffers_only: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, those that are there; one that has two names once."""
    seen: set[int] = set()
    for name, (owner, key) in tensor_places(module, prefix, buffers_only=buffers_only):
        buffers = _compat.buffers_of(owner)
        tensor = buffers[key] if key in buffers else _compat.parameters_of(owner).get(key)
        if tensor is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def tensor_places(
    module: nn.Module, prefix: str, *, buffers_only: bool = False
) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    for path, owner in module.named_modules():
        buffers = _compat.buffers_of(owner)
        keys = (*buffers,) if buffers_only else (*_compat.parameters_of(owner), *buffers)
        if keys:
            start = plain_name(f"{prefix}.{path}")
            yield from ((f"{start}.{key}", (owner, key)) for key in keys)
