"""Which module of the program holds a tensor, also if no optimizer trains that module."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
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
    outermost: nn.Module

    @property
    def module(self) -> str:
        """The module that holds it: ``target.fc1`` if the program calls the outermost one ``target``, else ``fc1``."""
        return ".".join(filter(None, (_name_in_program(self.outermost), self.name.rpartition(".")[0])))

    def __str__(self) -> str:
        return f"{self.kind} {self.name} of {self.network}"


def held_by_module(storage: int) -> Held | None:
    """The tensor with this ``storage_key``. None if no module that is alive holds one. Slow: looks at all objects."""
    modules = [module for module in live_objects(nn.Module) if _is_made(module)]
    for module in modules:
        for kind, name, tensor in _tensors(module):
            if _compat.storage_key(tensor) == storage:
                path, outermost = _from_outside(module, modules)
                return Held(kind, plain_name(".".join([*path, name])), type(outermost).__name__, tensor, outermost)
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


def _from_outside(module: nn.Module, modules: list[nn.Module]) -> tuple[list[str], nn.Module]:
    """The path to a module from the outermost one that contains it, and that one."""
    above = {id(child): (parent, name) for parent in modules for name, child in parent.named_children()}
    path: list[str] = []
    while id(module) in above and not _is_ours(above[id(module)][0]):
        module, name = above.pop(id(module))  # popped, so that a circle ends
        path.insert(0, name)
    return path, module


def _name_in_program(module: nn.Module) -> str:
    """The global variable or attribute that holds a module; empty if it has no name, or several. Looks at all objects.

    The variables of running functions are not looked at.
    """
    names: set[str] = set()
    for holder in gc.get_referrers(module):
        if isinstance(holder, (FrameType, nn.Module)) or type(holder).__module__.startswith("nanguard"):
            continue
        entries = holder if type(holder) is dict else getattr(holder, "__dict__", None)
        if type(entries) is dict:  # attributes that Python has no dict for yet are held by the object itself
            names |= {name for name, value in list(entries.items()) if value is module and isinstance(name, str)}
    return names.pop() if len(names) == 1 else ""
