"""An optimizer whose ``step()`` the program calls. Each call is let through or not."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from nanguard.state.optimizer_traits import traits_of
from nanguard.step.optimizers import SkippableOptimizers

Step = Callable[[], Any]

_LARGEST_COPY = 256 << 20
"""In bytes."""


class ProgramOptimizers(SkippableOptimizers):
    """For one call of ``step()`` at a time. The program clears its gradients itself."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__([optimizer])
        self._call: Step | None = None
        self._grads: list[tuple[Tensor, Tensor | None]] = []
        self.result: Any = None
        self.was_called = False

    def take(self, step: Step | None) -> None:
        """The call that waits to be let through; None if the program itself has decided to skip."""
        self._call, self.result, self.was_called, self._grads = step, None, False, []

    def hold_gradients(self) -> None:
        if not self._grads:
            self._grads = [(param, param.grad) for group in self.groups() for param in group]

    @property
    def held(self) -> list[tuple[Tensor, Tensor | None]]:
        """The parameters, with the gradients that they had when ``hold_gradients`` was called."""
        return list(self._grads)

    def step(self) -> None:
        if self._call is not None:
            self.was_called = True
            self.result = self._call()

    def _step(self, optimizer: Optimizer) -> None:
        self.step()

    def end_step(self) -> None:
        """Gradients are the program's to clear."""

    def give_back(self) -> None:
        """After a step that was refused: puts the gradients back that are held."""
        if not self.was_called:
            for param, grad in self._grads:
                if param.grad is not grad:
                    param.grad = grad
        self._grads = []


class Once:
    """A call of the program, whether it was made, whether it raised, and what it returned."""

    def __init__(self, call: Step | None) -> None:
        self._call = call
        self.is_called = self.has_raised = False
        self.result: Any = None

    def __call__(self) -> Any:
        self.is_called = True
        try:
            self.result = None if self._call is None else self._call()
        except BaseException:
            self.has_raised = True
            raise
        return self.result


def makes_finite_updates(optimizer: Optimizer) -> bool:
    """Whether finite gradients make a finite update. They do in torch's own optimizers, unless these divide by zero.

    Each update of all others is checked, which takes a copy of what they train. Not for models above a moderate size.
    """
    size = sum(p.numel() * p.element_size() for group in optimizer.param_groups for p in group["params"])
    traits = traits_of(optimizer)
    divides_by_zero = any(_is_zero(group.get(traits.eps or "")) for group in optimizer.param_groups)
    return size > _LARGEST_COPY or (traits.update_is_finite and not divides_by_zero)


def num_steps_made(optimizer: Optimizer) -> int:
    """How many steps its state counts, after a resume; 0 if it counts none. May sync, if there is such state."""
    for state in optimizer.state.values():
        count = state.get("step") if isinstance(state, dict) else None
        if isinstance(count, Real) or (isinstance(count, Tensor) and count.numel() == 1):
            return max(0, int(float(count)))
    return 0


def _is_zero(eps: Any) -> bool:
    """A number, or a tensor with one number. Optimizers of the program may keep anything else under this name."""
    if isinstance(eps, Tensor):
        return eps.numel() == 1 and float(eps) == 0.0
    return isinstance(eps, Real) and eps == 0
