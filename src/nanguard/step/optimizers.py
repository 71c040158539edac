"""Makes any set of optimizers skippable together: all of them step, or none does.

Fused Adam, AdamW, SGD and Adagrad, and any optimizer that says it supports AMP scaling, read a flag on the device
inside ``step()`` and then leave parameters, moments and step counters bit-exact: the host need not know. For all
others the host has to decide whether to call ``step()`` at all, which costs one sync a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import chain

from torch import Tensor, nn
from torch.optim import Optimizer

from nanguard import _compat
from nanguard.errors import ProtocolError
from nanguard.numerics.norm import gradients_of
from nanguard.state.optimizer_traits import traits_of

_OF_GUARDS: weakref.WeakSet[SkippableOptimizers] = weakref.WeakSet()


class SkippableOptimizers:
    """The guarded optimizers."""

    are_programs = False
    """Whether a program calls ``step()`` itself, and goes on as it likes if that raises."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        self._has_stepped = False

    @classmethod
    def of_guard(cls, optimizers: Sequence[Optimizer]) -> SkippableOptimizers:
        """Of a ``Guard`` that the program has made: ``nanguard run`` leaves them alone as long as there is one."""
        made = cls(optimizers)
        _OF_GUARDS.add(made)
        return made

    @property
    def skips_on_device(self) -> bool:
        return all(_compat.skips_on_device(o) for o in self.optimizers)

    def not_fused(self) -> list[str]:
        """Names of the optimizers that ``fused=True`` would bring onto the path without syncs."""
        return [type(o).__name__ for o in self.optimizers if _can_be_fused(o)]

    def groups(self) -> Iterator[list[nn.Parameter]]:
        """The parameters of each group of each optimizer, as they are now."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield group["params"]

    def gradients(self) -> list[Tensor]:
        """Those that there are now."""
        return gradients_of(chain.from_iterable(self.groups()))

    def hold_gradients(self) -> None:
        """A step may be refused. Whoever calls ``step()`` may want the gradients back that it has now."""

    def step(self) -> None:
        for optimizer in self.optimizers:
            self._step(optimizer)

    def _step(self, optimizer: Optimizer) -> None:
        optimizer.step()

    def step_unless(self, flag: Tensor) -> None:
        """Steps all optimizers, or none if the 0-dim float32 ``flag`` is 1. Does not sync."""
        self._has_stepped = True
        for optimizer in self.optimizers:
            _check_still_fused(optimizer)
            added: dict[str, Tensor | None] = {"found_inf": flag}
            if not hasattr(optimizer, "grad_scale"):
                added["grad_scale"] = None
            vars(optimizer).update(added)
            try:
                self._step(optimizer)
            finally:
                for name in added:
                    delattr(optimizer, name)  # a GradScaler of the user's would stumble over what stays behind

    def end_step(self) -> None:
        """Clears the gradients after a step was made, or refused."""
        self.zero_grad()

    def zero_grad(self) -> None:
        """Sets all gradients to None, as torch's own ``zero_grad`` does, but faster."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.grad = None

    def num_states(self) -> tuple[int, ...]:
        """How many parameters have optimizer state now, for ``forget_states_after``."""
        return tuple([len(o.state) for o in self.optimizers])

    def lacks_state(self) -> bool:
        """Whether a step now would make optimizer state that is not there yet."""
        return any(
            p.grad is not None and p not in optimizer.state
            for optimizer in self.optimizers
            if optimizer.state or not self._has_stepped  # plain SGD never makes any
            for group in optimizer.param_groups
            for p in group["params"]
        )

    def forget_states_after(self, num_states: tuple[int, ...]) -> None:
        """Removes the state made since ``num_states()`` was taken.

        A step skipped on the device still makes the state of parameters it meets for the first time, and torch's
        fused SGD then leaves their momentum uninitialised.
        """
        for optimizer, number in zip(self.optimizers, num_states, strict=True):
            for param in list(optimizer.state)[number:]:
                del optimizer.state[param]


def has_guard(optimizer: Optimizer) -> bool:
    """Whether a ``Guard`` that the program has made drives it."""
    return any(each is optimizer for made in _OF_GUARDS for each in made.optimizers)


def check_optimizers(optimizers: Sequence[Optimizer], model: nn.Module) -> None:
    """Raises ``ValueError`` for what cannot be guarded, before training starts."""
    if not optimizers:
        raise ValueError("optimizer is an empty list: pass at least one torch.optim.Optimizer")
    owned = {id(p) for p in model.parameters()}
    seen: dict[int, str] = {}
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if not isinstance(optimizer, Optimizer):
            raise ValueError(f"optimizer must be a torch.optim.Optimizer or several of them, got {optimizer!r}")
        if traits_of(optimizer).needs_closure:
            raise ValueError(
                f"{name} calls its closure several times inside step() and changes weights between the calls, so no "
                "check can come before the update: it cannot be guarded. Use an optimizer whose step() takes no "
                "closure, such as AdamW(fused=True)"
            )
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if not params:
            raise ValueError(f"{name} has no parameters: pass model.parameters() when you make it")
        strangers = [p for p in params if id(p) not in owned]
        if strangers:
            shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3])
            raise ValueError(
                f"{len(strangers)} of {len(params)} parameters of {name} are not the model's (shapes {shapes}"
                f"{', ...' if len(strangers) > 3 else ''}): make the optimizer from the parameters of the model you "
                "pass, after the model is on its device and in its final form"
            )
        for p in params:
            if id(p) in seen:
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} is in two optimizers, {seen[id(p)]} and {name}"
                )
        seen.update((id(p), name) for p in params)


def _can_be_fused(optimizer: Optimizer) -> bool:
    return traits_of(optimizer).can_be_fused and not _compat.skips_on_device(optimizer)


def is_still_fused(optimizer: Optimizer) -> bool:
    """Of one that was: loading the state of another one may have changed that."""
    return all(group.get("fused", True) for group in optimizer.param_groups)


def _check_still_fused(optimizer: Optimizer) -> None:
    if not is_still_fused(optimizer):
        raise ProtocolError(
            f"{type(optimizer).__name__} was made with fused=True but has a group that is not fused, as after "
            "loading the state of one that was not: set group['fused'] = True in its param_groups, or use "
            "sync='eager'"
        )
