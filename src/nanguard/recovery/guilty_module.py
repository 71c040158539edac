"""Which module went non-finite first: one hooked re-run of the step.

Forward: a module whose output is non-finite although its inputs were not; where a module is *given* something
non-finite, it was born in the module around it, between two of its parts. Backward: the same with gradients, seen as
they arrive at outputs and leave from inputs. Else the owner of the first parameter whose gradient is non-finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nanguard import _compat
from nanguard.state.names import plain_name, unwrapped
from nanguard.state.trees import is_float, tensors
from nanguard.step.dry_run import DryRun
from nanguard.step.parts import StepParts
from nanguard.step.pending import PendingStep

_MOST_MODULES = 4
"""How many modules one rung raises at most: if more are needed, the whole model is raised."""


def find_culprit(parts: StepParts, dry_run: DryRun, pending: PendingStep) -> str | None:
    """The name of the module; None where nothing points to one. All ranks get the same answer. Syncs at will."""
    modules = dict(unwrapped(parts.state.model).named_modules())
    probe = _Probe({id(module): plain_name(name) for name, module in reversed(modules.items())})
    handles = [handle for module in modules.values() for handle in probe.watch(module)]
    try:
        with dry_run.stage(pending), _compat.without_compilation():
            dry_run.run(pending)
            owner = _owner_of_bad_gradient(parts)
    finally:
        for handle in handles:
            handle.remove()
    name = probe.born_in if probe.born_in is not None else owner
    order = [plain_name(each) for each in modules]
    place = parts.ranks.lowest(order.index(name) if name in order else len(order))
    return order[place] if place < len(order) else None


def modules_that_help(parts: StepParts, dry_run: DryRun, pending: PendingStep, *, verify: bool) -> tuple[str, ...]:
    """The fewest modules found that make the step sound in fp32, in fp32 already; none if no few of them do."""
    islands, kept, helps = parts.islands, list[str](), False
    try:
        while not helps and len(kept) < _MOST_MODULES:
            name = find_culprit(parts, dry_run, pending)
            # What it hands on may not fit into the lower precision either; and a list of modules is never called.
            while name and (name in islands.names or not islands.can_keep(name)):
                name = name.rpartition(".")[0]
            if not name:
                break
            kept += islands.keep(name)
            helps = not verify or dry_run.is_sound(pending)
    finally:
        if kept and not helps:
            islands.release(*kept)
    return tuple(kept) if helps else ()


@dataclass(slots=True)
class _Probe:
    names: dict[int, str]
    born_in: str | None = None
    _around: list[str] = field(default_factory=list)

    def watch(self, module: nn.Module) -> Iterator[Any]:
        yield module.register_forward_pre_hook(self._enter, with_kwargs=True)
        yield module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = self.names[id(module)]
        inputs = _floats((args, kwargs))
        if self.born_in is None and self._around and any(map(_is_bad, inputs)):
            self.born_in = self._around[-1]
        _on_gradients(inputs, lambda: self._gradient_born_in(name))
        self._around.append(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._around.pop()
        outputs = _floats(output)
        if self.born_in is None and any(map(_is_bad, outputs)):
            self.born_in = self.names[id(module)]
        around = self._around[-1] if self._around else ""
        _on_gradients(outputs, lambda: self._gradient_born_in(around))

    def _gradient_born_in(self, name: str) -> None:
        if self.born_in is None:
            self.born_in = name


def _on_gradients(passing: list[Tensor], tell: Callable[[], None]) -> None:
    """Tells when a non-finite gradient passes by."""

    def look(gradient: Tensor) -> None:
        if _is_bad(gradient):
            tell()

    for tensor in passing:
        if tensor.requires_grad:
            tensor.register_hook(look)  # type: ignore[no-untyped-call]


def _owner_of_bad_gradient(parts: StepParts) -> str | None:
    """Of the last parameter of the model with a non-finite gradient: backward reaches that one first."""
    for name, param in reversed(list(unwrapped(parts.state.model).named_parameters())):
        if param.grad is not None and _is_bad(param.grad):
            return plain_name(name).rpartition(".")[0]
    return None


@torch.no_grad()  # or activation checkpointing would count what is looked at here
def _is_bad(tensor: Tensor) -> bool:
    values = tensor if tensor.layout is torch.strided else tensor.coalesce().values()
    return not bool(torch.isfinite(values).all())


def _floats(tree: Any) -> list[Tensor]:
    return [tensor for tensor in tensors(tree) if is_float(tensor)]
