"""How far the operands of dangerous ops are from the edge of their domain, as numbers that have a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nanguard.source.frames import Place, calling_point, source_of

Margin = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class DangerSite:
    """A line of the program, the op that it calls there, and which call of the line it is."""

    place: Place
    op: str
    call: int

    @property
    def line(self) -> tuple[str, int]:
        """The file, or the cell of a notebook, and the line, as a diagnosis names them."""
        source = source_of(self.place)
        return self.place[:2] if source is None else (source.file, source.line)


def _above_zero(operand: Tensor) -> Tensor:
    return operand.amin()


def _from_zero(operand: Tensor) -> Tensor:
    return operand.abs().amin()


_MARGINS: dict[str, Margin] = {
    **dict.fromkeys(("log", "log2", "log10", "sqrt", "rsqrt", "lgamma", "digamma"), _above_zero),
    **dict.fromkeys(("reciprocal",), _from_zero),
    **dict.fromkeys(
        ("exp", "exp2", "expm1", "sinh", "cosh", "i0", "special_i0"),
        lambda operand: -operand.amax(),
    ),
    **dict.fromkeys(
        ("acos", "asin", "arccos", "arcsin", "atanh", "arctanh", "erfinv"),
        lambda operand: (1 - operand.abs()).amin(),
    ),
    "log1p": lambda operand: (1 + operand).amin(),
    "acosh": lambda operand: (operand - 1).amin(),
    "logit": lambda operand: torch.minimum(operand, 1 - operand).amin(),
}
"""Functions of one operand. A margin gets smaller as the operand comes nearer to the edge."""

_LAST_ARGUMENT = ("xlogy", "special_xlogy")
_DIVISIONS = ("div", "divide", "true_divide", "__truediv__", "__div__")
_FROM_RIGHT = ("__rtruediv__", "__rdiv__")
_POWERS = ("pow", "__pow__", "float_power")
_ZERO_RESULTS = ("std", "hypot")
"""Ops whose derivative has its edge where the result is 0."""


class EdgeWatch(TorchFunctionMode):
    """Notes the margin of each dangerous op that the program calls, by its line, while gradients are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self._operands: list[tuple[DangerSite, Tensor, Margin]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled():
            name = str(getattr(func, "__name__", ""))
            name = name if name.startswith("__") else name.rstrip("_")
            for operand, margin in _operands(name, args, result):
                called = calling_point()
                if called is not None and operand.requires_grad and operand.is_floating_point() and operand.numel():
                    self._operands.append((DangerSite(called[0], name, called[1]), operand, margin))
        return result

    def margins(self) -> dict[DangerSite, Tensor]:
        """The least margin of each site. Call it after the program has run: a checkpointed module would notice."""
        found: dict[DangerSite, Tensor] = {}
        for site, operand, margin in self._operands:
            value, before = margin(operand.float()), found.get(site)
            found[site] = value if before is None else torch.minimum(before, value)
        return found

    def crosses(self, site: DangerSite) -> bool:
        """Whether a denominator of this site has both signs."""
        values = [o.detach() for each, o, margin in self._operands if each == site and margin is _from_zero]
        return any(bool((v < 0).any()) for v in values) and any(bool((v > 0).any()) for v in values)


def _operands(name: str, args: Any, result: Any) -> Iterator[tuple[Tensor, Margin]]:
    """What may come too near to an edge in this call."""
    first, second = (args[0] if args else None), (args[1] if len(args) > 1 else None)
    if name in _MARGINS and isinstance(first, Tensor):
        yield first, _MARGINS[name]
    elif name in _LAST_ARGUMENT and isinstance(second, Tensor):
        yield second, _above_zero
    elif name in _DIVISIONS and isinstance(second, Tensor):
        yield second, _from_zero
    elif name in _FROM_RIGHT and isinstance(first, Tensor):
        yield first, _from_zero
    elif name in _POWERS and isinstance(first, Tensor) and isinstance(second, (int, float)):
        if second != int(second):
            yield first, _above_zero
        elif second < 0:
            yield first, _from_zero
    elif name in _ZERO_RESULTS and isinstance(result, Tensor):
        yield result, _above_zero
