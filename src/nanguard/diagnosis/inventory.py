"""What a run is made of, by name: parameters, buffers, optimizer state, modules, and the files of the program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from nanguard.source.frames import user_files
from nanguard.source.modules import Modules
from nanguard.state.names import plain_name, unwrapped
from nanguard.step.parts import StepParts


class Inventory:
    """Looked up anew each time: programs replace what they are made of."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts

    @property
    def model(self) -> nn.Module:
        return unwrapped(self._parts.state.model)

    def parameters(self) -> dict[str, Tensor]:
        return {plain_name(name): p for name, p in self.model.named_parameters()}

    def buffers(self) -> dict[str, Tensor]:
        return {plain_name(name): b for name, b in self.model.named_buffers()}

    def states(self) -> Iterator[tuple[str, str, Tensor]]:
        """Name, parameter and tensor of all optimizer state: ``exp_avg of head.weight``."""
        for optimizer in self._parts.state.optimizers:
            for param, state in optimizer.state.items():
                owner = self._parts.state.name_of(param) if isinstance(param, Tensor) else ""
                for key, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, Tensor):
                        yield f"{key} of {owner}", owner, value

    def tensors(self) -> dict[str, Tensor]:
        """All of them, each with its kind in front of its name."""
        return {
            **{f"buffer {name}": tensor for name, tensor in self.buffers().items()},
            **{f"parameter {name}": tensor for name, tensor in self.parameters().items()},
            **{f"state {name}": tensor for name, _, tensor in self.states()},
        }

    def modules(self) -> Modules:
        return Modules(self.model)

    def module(self, name: str) -> nn.Module | None:
        try:
            return self.model.get_submodule(name)
        except AttributeError:
            return None

    def optimizer_of(self, name: str) -> Optimizer:
        """The one that steps a parameter; the first where none does."""
        param = self.parameters().get(name)
        for optimizer in self._parts.state.optimizers:
            if any(p is param for group in optimizer.param_groups for p in group["params"]):
                return optimizer
        return self._parts.state.optimizers[0]

    def files(self, *others: Any) -> list[str]:
        """Of the program: where its modules, and ``others``, are defined."""
        return user_files([*others, *(type(module) for module in self.model.modules())])
