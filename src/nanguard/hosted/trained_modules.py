"""What the optimizers of a program train: outermost modules and bare tensors, with the names the program gives them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nanguard import _compat
from nanguard.state.names import unwrapped


class TrainedModules(nn.Module):
    """Several modules, and tensors in no module, that are trained together. It is never called, and has no parent."""

    def __init__(self, modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        _compat.children_of(self).update(modules)
        _compat.parameters_of(self).update(tensors)  # type: ignore[arg-type]

    def take(self, tensors: Iterable[Tensor], names: Mapping[int, str]) -> None:
        """Replaces the tensors that are in no module. If all shapes are the same, in order, the names stay."""
        inside = {id(param) for module in self.children() for param in module.parameters()}
        bare = [tensor for tensor in tensors if id(tensor) not in inside]
        before = [(name, tensor) for name, tensor in _compat.parameters_of(self).items() if tensor is not None]
        if [t.shape for t in bare] == [t.shape for _, t in before]:
            kept = {id(new): name for new, (name, _) in zip(bare, before, strict=True)}
            names = {**kept, **names}
        _compat.parameters_of(self).clear()
        _compat.parameters_of(self).update(_named(bare, names))  # type: ignore[arg-type]


def names_inside(model: nn.Module) -> dict[int, str]:
    """Names of the parts of a ``TrainedModules``, by identity."""
    if not isinstance(model, TrainedModules):
        return {}
    parts = [*model.named_children(), *_compat.parameters_of(model).items()]
    return {id(part): name for name, part in parts if name.isidentifier()}


def is_same(one: nn.Module, other: nn.Module) -> bool:
    """Whether these stand for the same modules and tensors."""
    if not (isinstance(one, TrainedModules) and isinstance(other, TrainedModules)):
        return one is other
    parts = [[*each.children(), *_compat.parameters_of(each).values()] for each in (one, other)]
    return [id(part) for part in parts[0]] == [id(part) for part in parts[1]]


def owners(tensors: Iterable[Tensor], modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The outermost of the modules that the tensors are parameters of, wrappers (DDP, ``torch.compile``) included."""
    wanted = {id(tensor) for tensor in tensors}
    living = [each for each in modules if type(each) is not TrainedModules]
    parents: dict[int, list[nn.Module]] = {}
    for module in living:
        for child in _compat.children_of(module).values():
            parents.setdefault(id(child), []).append(module)
    found: dict[int, nn.Module] = {}
    for module in living:
        if any(id(param) in wanted for param in _compat.parameters_of(module).values()):
            for root in _roots(module, parents, set()):
                found[id(root)] = root
    return list(found.values())


def without_copies(roots: list[nn.Module], used: Container[int]) -> list[nn.Module]:
    """Without what ``torch.jit`` made of modules that are themselves ``used`` (by identity): they share parameters.

    Torch keeps the original of a scripted module alive, so that it exists does not mean that it is used.
    """
    plain = [root for root in roots if not isinstance(root, torch.jit.ScriptModule)]
    owned = {id(param) for root in plain if id(root) in used for param in root.parameters()}
    copies = [root for root in roots if isinstance(root, torch.jit.ScriptModule)]
    return plain + [copy for copy in copies if any(id(param) not in owned for param in copy.parameters())]


def trained_modules_of(
    tensors: list[Tensor], roots: list[nn.Module], names: Mapping[int, str], *, among_others: bool
) -> nn.Module:
    """One module that contains them all: the program's own if there is only one.

    ``among_others`` says that other optimizers train other modules. Names then begin with that of the module.
    """
    inside = [unwrapped(root) for root in roots]
    known = {id(param) for module in inside for param in module.parameters()}
    bare = [tensor for tensor in tensors if id(tensor) not in known]
    if len(inside) == 1 and not bare and not among_others:
        return inside[0]
    called = _distinct((names.get(id(r)) or names.get(id(m)) or type(m).__name__.lower() for r, m in _both(roots)), "")
    return TrainedModules(dict(zip(called, inside, strict=True)), _named(bare, names))


def _named(tensors: list[Tensor], names: Mapping[int, str]) -> dict[str, Tensor]:
    return dict(zip(_distinct((names.get(id(t), "") for t in tensors), "params"), tensors, strict=True))


def _roots(module: nn.Module, parents: Mapping[int, list[nn.Module]], seen: set[int]) -> Iterator[nn.Module]:
    if id(module) in seen:
        return
    seen.add(id(module))
    above = parents.get(id(module), [])
    if not above:
        yield module
    for parent in above:
        yield from _roots(parent, parents, seen)


def _both(roots: list[nn.Module]) -> Iterator[tuple[nn.Module, nn.Module]]:
    return ((root, unwrapped(root)) for root in roots)


def _distinct(names: Iterable[str], otherwise: str) -> list[str]:
    """Without dots, which separate the names of modules, and without duplicates."""
    taken: list[str] = []
    for place, name in enumerate(names):
        plain = name.replace(".", "_") or f"{otherwise}[{place}]"
        taken.append(plain if plain not in taken else f"{plain}_{place}")
    return taken


def called_parts(model: nn.Module) -> list[nn.Module]:
    """The model, and parts of it that are wrapped in DDP on their own."""
    return [
        model,
        *(part for part in model.modules() if part is not model and isinstance(part, DistributedDataParallel)),
    ]
