"""Calls of a model, as ``nanguard run`` saves them: a list of ``(args, kwargs)`` instead of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nanguard.state.names import unwrapped
from nanguard.state.trees import is_float, tensors


def is_calls(batch: Any) -> bool:
    """Whether this is a list of calls."""
    return isinstance(batch, list) and bool(batch) and all(_is_call(each) for each in batch)


def calls_in(batch: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return list(batch) if is_calls(batch) else []


def call_again(
    device: str = "cpu", dtype: torch.dtype = torch.bfloat16, enabled: bool = False, *, rng: Tensor | None = None
) -> Callable[[Any, Any], Tensor]:
    """A loss function that makes the calls again, under this autocast, and sums up what comes out."""

    def loss_fn(model: Any, calls: Any) -> Tensor:
        if rng is not None:
            torch.set_rng_state(rng)
        parts = []
        for args, kwargs in calls:
            with torch.autocast(device, dtype=dtype, enabled=enabled or torch.is_autocast_enabled(device)):
                given = model(*args, **kwargs)
            parts += [t.float().sum() for t in tensors(given) if is_float(t) and t.requires_grad]
        if not parts:
            raise ValueError("the model returns no tensor that a gradient could reach")
        return torch.stack(parts).sum()

    return loss_fn


class CalledModules(nn.Module):
    """Several modules by the names that a tape has for them. It is never called itself."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, module in modules.items():
            *above, last = name.split(".")
            owner: nn.Module = self
            for part in above:
                if part not in dict(owner.named_children()):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.add_module(last, unwrapped(module))


def called_modules(names: Sequence[str], modules: Sequence[nn.Module]) -> CalledModules | None:
    """What was called, under the names of the calls on a tape. None if it is not clear which is which."""
    known = dict(zip(names, modules, strict=False))
    is_clear = len(names) == len(modules) and [id(known[name]) for name in names] == [id(each) for each in modules]
    nested = [name for name in known for other in known if other != name and f"{other}.".startswith(f"{name}.")]
    return CalledModules(known) if is_clear and "" not in known and not nested else None


def _is_call(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple) and isinstance(value[1], dict)
