"""Names as the user wrote them, without what DDP and ``torch.compile`` put in front."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from nanguard import _compat


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside DDP and ``torch.compile``."""
    while True:
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        elif (inner := _compat.compiled_module(model)) is not None:
            model = inner
        else:
            return model


def plain_name(name: str) -> str:
    """Without the name that ``torch.compile`` gives to a module it wraps."""
    return ".".join(part for part in name.split(".") if part not in ("", _compat.COMPILED))


def names_of(model: nn.Module) -> dict[int, str]:
    """Every parameter's name, by its identity."""
    return {id(param): plain_name(name) for name, param in unwrapped(model).named_parameters()}
