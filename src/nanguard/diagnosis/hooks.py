"""Find the hooks that the user's program registers on gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from nanguard.source.frames import Place, find_site
from nanguard.source.modules import Modules


class GradientHooks(TorchFunctionMode):
    """A context that records line and module of each hook that is registered on a tensor."""

    def __init__(self, modules: Modules, found: list[tuple[Place, str]]) -> None:
        super().__init__()
        self._modules, self._found = modules, found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook:
            site = find_site(self._modules, in_engine=False)
            if site.place is not None:
                self._found.append((site.place, site.module or ""))
        return func(*args, **(kwargs or {}))
