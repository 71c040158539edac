"""Which module of the program holds a tensor, also if no optimizer trains that module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from nanguard import _compat
from nanguard.state.live_objects import live_objects
from nanguard.state.names import plain_name

Kind = Literal["parameter", "buffer"]


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter or buffer: its name from the outermost module on, and the class of that module."""

    kind: Kind
    name: str
    network: str
    tensor: Tensor

    def __str__(self) -> str:
        return f"{self.kind} {self.name} of {self.network}"


def held_by_module(storage: int) -> Held | None:
    """The tensor with this ``storage_key``. None if no module that is alive holds one. Slow: looks at all objects."""
    modules = [module for module in live_objects(nn.Module) if _is_made(module)]
    for module in modules:
        for kind, name, tensor in _tensors(module):
            if _compat.storage_key(tensor) == storage:
                path, network = _from_outside(module, modules)
                return Held(kind, plain_name(".".join([*path, name])), network, tensor)
    return None


def _is_made(module: nn.Module) -> bool:
    """False while its class has not called ``nn.Module.__init__``."""
    return "training" in vars(module)


def _is_ours(module: nn.Module) -> bool:
    """True for what stands for several networks of a program that train together."""
    return type(module).__module__.partition(".")[0] == __name__.partition(".")[0]


def _tensors(module: nn.Module) -> Iterator[tuple[Kind, str, Tensor]]:
    """Its own, not those of the modules inside."""
    yield from (("parameter", name, tensor) for name, tensor in module.named_parameters(recurse=False))
    yield from (("buffer", name, tensor) for name, tensor in module.named_buffers(recurse=False))


def _from_outside(module: nn.Module, modules: list[nn.Module]) -> tuple[list[str], str]:
    """The path to a module from the outermost one that contains it, and the class of that one."""
    above = {id(child): (parent, name) for parent in modules for name, child in parent.named_children()}
    path: list[str] = []
    while id(module) in above and not _is_ours(above[id(module)][0]):
        module, name = above.pop(id(module))  # popped, so that a circle ends
        path.insert(0, name)
    return path, type(module).__name__
