"""Programs that update their tensors themselves, without an optimizer: ``w -= lr * w.grad``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanguard.hosted.optimizers import ProgramCall

if TYPE_CHECKING:
    from nanguard.hosted.iteration import Iteration
    from nanguard.hosted.step import HostedStep


class ManualUpdate:
    """An optimizer that does nothing, for tensors that the program updates. ``expect`` sets which these are now."""

    def __init__(self) -> None:
        self.optimizer: Optimizer = _NoOpOptimizer(
            [torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)]
        )
        self.hosted: HostedStep | None = None

    def attach(self, hosted: HostedStep | None) -> None:
        """``hosted`` guards ``optimizer``; None if it could not be guarded."""
        self.hosted = hosted

    def expect(self, leaves: list[Tensor]) -> None:
        if leaves:
            self.optimizer.param_groups[0]["params"] = leaves

    @property
    def leaves(self) -> list[Tensor]:
        leaves: list[Tensor] = self.optimizer.param_groups[0]["params"]
        return leaves

    def step(self, this: Iteration) -> None:
        """A backward pass was made, which is the step. Bad gradients become zeros."""
        if self.hosted is not None:
            this.stepped.append(self.hosted)
            self.hosted.look_again()
            self.hosted.step(ProgramCall(_nothing), this)  # not its step(): hooks of the program would be told of it
            if this.refused:
                self._clear_gradients()

    def _clear_gradients(self) -> None:
        """Sets them to zero, so that an update with them changes nothing."""
        for param in self.optimizer.param_groups[0]["params"]:
            if param.grad is not None:
                param.grad = torch.zeros_like(param.grad)


def _nothing() -> None:
    """The program updates the tensors."""


class _NoOpOptimizer(Optimizer):
    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        """The program updates the tensors."""


@contextlib.contextmanager
def holding(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Gives each tensor its gradient, as a backward pass would, and takes it away at the end."""
    before = [(leaf, leaf.grad) for leaf, _ in pairs]
    for leaf, grad in pairs:
        leaf.grad = grad.detach()
    try:
        yield
    finally:
        for leaf, old in before:
            leaf.grad = old


def leaves_of(losses: Iterable[Tensor]) -> list[Tensor]:
    """The tensors whose ``grad`` a backward pass of these will fill."""
    todo: list[Any] = [loss.grad_fn for loss in losses]
    seen: set[Any] = set()
    found: dict[int, Tensor] = {}
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":  # a Function of the program's may have a variable too
            found[id(node.variable)] = node.variable
        todo.extend(following for following, _ in node.next_functions)
    return list(found.values())


def losses_in(tensors: Any) -> list[Tensor]:
    """Those of the tensors to differentiate that are single numbers."""
    if isinstance(tensors, Tensor):
        return [tensors] if tensors.numel() == 1 and tensors.is_floating_point() else []
    several = tensors if isinstance(tensors, (list, tuple)) else ()
    return [t for t in several if isinstance(t, Tensor) and t.numel() == 1 and t.is_floating_point()]


def is_trained(leaf: Any, grad: Any) -> bool:
    """Whether ``grad`` is the gradient of a tensor that a program may update with it."""
    return isinstance(leaf, Tensor) and isinstance(grad, Tensor) and leaf.is_leaf and leaf.requires_grad
