"""An optimizer whose ``step()`` the program calls. Each call is let through or not."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from nanguard.state.optimizer_traits import traits_of
from nanguard.step.optimizers import SkippableOptimizers

_LARGEST_COPY = 256 << 20
"""In bytes."""


class ProgramCall:
    """A call of ``step()`` that the program makes: whether it was let through, whether it raised, what it returned.

    ``step`` is None if the program itself, or its GradScaler, has decided to skip.
    """

    __slots__ = ("_args", "_kwargs", "_step", "has_raised", "is_called", "result")

    def __init__(self, step: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> None:
        self._step, self._args, self._kwargs = step, args, kwargs
        self.is_called = self.has_raised = False
        self.result: Any = None

    @property
    def is_skipped(self) -> bool:
        """Whether there is nothing to call."""
        return self._step is None

    def __call__(self) -> Any:
        if self._step is None:
            return None
        self.is_called = True
        try:
            self.result = self._step(*self._args, **self._kwargs)
        except BaseException:
            self.has_raised = True
            raise
        return self.result


class ProgramOptimizers(SkippableOptimizers):
    """For one call of ``step()`` at a time. The program clears its gradients itself."""

    are_programs = True

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__([optimizer])
        self._call = ProgramCall(None)
        self._grads: list[tuple[Tensor, Tensor | None]] = []

    def take(self, call: ProgramCall) -> None:
        """The call that waits to be let through."""
        self._call, self._grads = call, []

    def hold_gradients(self) -> None:
        if not self._grads:
            self._grads = [(param, param.grad) for group in self.groups() for param in group]

    @property
    def held(self) -> list[tuple[Tensor, Tensor | None]]:
        """The parameters, with the gradients that they had when ``hold_gradients`` was called."""
        return list(self._grads)

    def step(self) -> None:
        self._call()

    def _step(self, optimizer: Optimizer) -> None:
        self._call()

    def end_step(self) -> None:
        """Gradients are the program's to clear."""

    def give_back(self) -> None:
        """After a step that was refused: puts the gradients back that are held."""
        if self._grads and not self._call.is_called:
            for param, grad in self._grads:
                if param.grad is not grad:
                    param.grad = grad
        self._grads = []


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
