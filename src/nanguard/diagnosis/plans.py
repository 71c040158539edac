"""Static facts about an op: which arguments it writes to, and whether it returns a view."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanguard import _compat
from nanguard.state.trees import tensors

LIFTS = ("lift", "lift_fresh")
"""The ops that the dispatcher sees for ``torch.tensor(...)``, ``torch.from_numpy(...)`` and the like."""

_OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "exponential_", "bernoulli_", "random_", "set_")
"""Ops that do not read what they write to."""

_SHAPED = frozenset(f"{name}_like" for name in ("ones", "zeros", "full", "rand", "randn", "randint"))
_SHAPED |= frozenset(("new_ones", "new_zeros", "new_full"))
"""Ops that take nothing but the shape of what they are given."""


_SCRATCH = {"_ctc_loss": 1}
"""How many results an op has; the others are for its derivative alone, and are infinite where nothing is possible."""

_READS_SCRATCH = {"_ctc_loss_backward": ("log_alpha",)}

MEMORY = frozenset(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize"))
"""Ops that give memory that nothing was written to yet."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Static facts about an op. ``unread`` arguments are overwritten, or give nothing but their shape.

    Only the first ``num_results`` results count, if it is not None.
    """

    op: str
    is_view: bool
    written: tuple[int, ...]
    written_kwargs: tuple[str, ...]
    is_pointwise: bool
    arguments: tuple[str, ...]
    is_empty: bool
    unread: tuple[str, ...]
    num_results: int | None

    def named_tensors(self, args: Any, kwargs: Any) -> Iterable[tuple[str, Tensor]]:
        """The tensors that the op is given, by the names of its arguments."""
        for place, value in enumerate(args):
            name = self.arguments[place] if place < len(self.arguments) else str(place)
            yield from ((name, tensor) for tensor in tensors(value))
        for name, value in kwargs.items():
            yield from ((name, tensor) for tensor in tensors(value))


def plan_of(func: Any) -> Plan:
    arguments = _compat.schema_arguments(func)
    is_written = [
        (a.alias_info is not None and a.alias_info.is_write) or _writes_unsaid(func, a.name) for a in arguments
    ]
    positional = tuple(i for i, (a, w) in enumerate(zip(arguments, is_written, strict=True)) if w)
    name = str(func.overloadpacket.__name__)
    unread = ("self",) if name in _OVERWRITES or name in _SHAPED else tuple(a.name for a in arguments if a.is_out)
    return Plan(
        op=name.strip("_"),
        is_view=_compat.is_view(func) and not any(is_written) and name not in LIFTS,
        written=positional,
        written_kwargs=tuple(a.name for a, w in zip(arguments, is_written, strict=True) if w),
        is_pointwise=torch.Tag.pointwise in func.tags,
        arguments=tuple(a.name for a in arguments),
        is_empty=name.strip("_") in MEMORY,
        unread=(*unread, *_READS_SCRATCH.get(name, ())),
        num_results=_SCRATCH.get(name),
    )


def _writes_unsaid(func: Any, argument: str) -> bool:
    """The schema of batch norm does not declare that it writes to its running statistics."""
    name = str(func.overloadpacket.__name__)
    is_forward = "batch_norm" in name and "backward" not in name
    return is_forward and argument in ("running_mean", "running_var")


def forward_op(node: Any) -> str:
    """``SqrtBackward0`` is ``sqrt``, ``ToCopyBackward0`` is ``to_copy``."""
    name = str(node.name() if callable(getattr(node, "name", None)) else type(node).__name__)
    base = name.rpartition("::")[2].rstrip("0123456789").removesuffix("Backward").removesuffix("Backwards")
    out = ""
    for place, letter in enumerate(base):
        if letter.isupper() and place and not base[place - 1].isupper() and base[place - 1] != "_":
            out += "_"
        out += letter.lower()
    return out.strip("_")


def belong(op: str, node: str) -> bool:
    """True if an op can have made a node."""
    op, node = op.replace("_", ""), node.replace("_", "")
    return op.startswith(node) or node.startswith(op)
