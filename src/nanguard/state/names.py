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
