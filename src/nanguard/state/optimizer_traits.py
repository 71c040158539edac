"""What nanguard has to know about optimizer classes: one row each. A new quirk is a change of one row.

This module does not import torch: the checks of scripts use the table too.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerTraits:
    """The defaults suit an optimizer that is not in the table: nothing is taken for granted.

    can_be_fused: with ``fused=True`` it skips a step on the device.
    update_is_finite: finite gradients give a finite update, unless the option ``eps`` is 0.
    needs_closure: ``step()`` cannot be called without a closure.
    calls_closure_once: ``step(closure)`` calls it once, before anything else.
    eps: the option that keeps it from dividing by zero; None if it does not divide.
    loses_eps_in_fp16: the default eps rounds to zero in fp16, and the update then divides by zero.
    num_state_tensors: how many tensors of a parameter's size it makes for each parameter; each option in
        ``state_options`` that is set adds one.
    """

    can_be_fused: bool = False
    update_is_finite: bool = False
    needs_closure: bool = False
    calls_closure_once: bool = False
    eps: str | None = "eps"
    loses_eps_in_fp16: bool = False
    num_state_tensors: int = 2
    state_options: tuple[str, ...] = ("amsgrad",)


_TORCHS = OptimizerTraits(update_is_finite=True, calls_closure_once=True)
_ADAM = replace(_TORCHS, can_be_fused=True, loses_eps_in_fp16=True)

TRAITS: dict[str, OptimizerTraits] = {
    "torch.optim.Adam": _ADAM,
    "torch.optim.AdamW": _ADAM,
    "torch.optim.SGD": replace(_TORCHS, can_be_fused=True, eps=None, num_state_tensors=0, state_options=("momentum",)),
    "torch.optim.Adagrad": replace(_TORCHS, can_be_fused=True, num_state_tensors=1, state_options=()),
    "torch.optim.ASGD": replace(_TORCHS, eps=None, num_state_tensors=1, state_options=()),
    "torch.optim.LBFGS": replace(_TORCHS, needs_closure=True, calls_closure_once=False, eps=None),
    "torch.optim.NAdam": replace(_TORCHS, loses_eps_in_fp16=True),
    "torch.optim.RAdam": _TORCHS,
    "torch.optim.RMSprop": replace(
        _TORCHS, loses_eps_in_fp16=True, num_state_tensors=1, state_options=("momentum", "centered")
    ),
}
"""By full name, without the module that torch defines the class in. Torch's other optimizers have no quirks."""


def traits_of(optimizer: Optimizer) -> OptimizerTraits:
    """The row of its class, or else what can be said from its base class and its ``step()``."""
    kind = type(optimizer)
    return TRAITS.get(full_name(kind)) or _traits_without_row(kind)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=256)
def _traits_without_row(kind: Any) -> OptimizerTraits:
    """Kept, since it is asked at every step and slow. A row of the table is never kept: it may still be added."""
    base = next((each for each in kind.__mro__ if full_name(each) in TRAITS), None)
    # Its constructor may not take ``fused``, even if that of the base class does.
    row = OptimizerTraits() if base is None else replace(TRAITS[full_name(base)], can_be_fused=False)
    if base is not None and _step_of(base) == _step_of(kind):
        return row
    is_torchs = kind.step.__module__.startswith("torch.optim")
    return replace(row, update_is_finite=is_torchs, calls_closure_once=is_torchs, needs_closure=_asks_for_closure(kind))


def names_of_optimizers(trait: str) -> tuple[str, ...]:
    """Full names of the classes in the table whose ``trait`` is neither False nor None."""
    return tuple(name for name, row in TRAITS.items() if getattr(row, trait) not in (False, None))


def full_name(kind: type) -> str:
    """``torch.optim.Adam``: the key of the table."""
    module = "torch.optim" if kind.__module__.startswith("torch.optim.") else kind.__module__
    return f"{module}.{kind.__qualname__}"


def _step_of(kind: type) -> tuple[str, str]:
    """Where ``step()`` is defined. Torch wraps the method when an optimizer is made, and leaves these names."""
    step = kind.step  # type: ignore[attr-defined]
    return step.__module__, step.__qualname__


def _asks_for_closure(kind: type[Optimizer]) -> bool:
    # Torch wraps step() when the optimizer is made; the signature to ask is the one its class defines.
    parameters = list(inspect.signature(kind.step).parameters.values())[1:]
    return (
        bool(parameters)
        and parameters[0].default is inspect.Parameter.empty
        and parameters[0].kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    )
