"""The private kernels of torch that nanguard calls; ``_compat`` has the other names. Nothing here syncs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

foreach_copy_: Any = torch._foreach_copy_
foreach_mul_: Any = torch._foreach_mul_
foreach_add_: Any = torch._foreach_add_

_flatten: Any = torch._C._nn.flatten_dense_tensors
_InferenceMode: Any = torch._C._InferenceMode


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """All elements of strided tensors of one kind in one flat tensor, in one call. It is to be read, never written to.

    Made in inference mode, in which the many views take half the time.
    """
    with _InferenceMode(True):
        flat: Tensor = _flatten(tensors)
        return flat


def foreach_norm(tensors: Sequence[Tensor], order: float) -> Sequence[Tensor]:
    """Norms accumulated in float64, one 0-dim tensor each. Does not sync."""
    norms: Sequence[Tensor] = torch._foreach_norm(tensors, order, dtype=torch.float64)  # type: ignore[arg-type]
    return norms


def foreach_norm_as_is(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Norms in the tensors' own dtype."""
    norms: Sequence[Tensor] = torch._foreach_norm(tensors)  # type: ignore[arg-type]
    return norms


def torch_total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The very norm ``clip_grad_norm_`` clips by. Public since torch 2.7 as ``get_total_norm``. Does not sync."""
    function: Any = getattr(clip_grad, "_get_total_norm", None) or clip_grad.get_total_norm  # type: ignore[attr-defined]
    total: Tensor = function(tensors)
    return total


def clip_grad_norm(grads: list[Tensor], max_norm: float, *beside: Tensor) -> tuple[Tensor, Tensor]:
    """Does what ``clip_grad_norm_`` does to gradients of one device and dtype. Returns their norms and that of all.

    The same kernels as torch's, so the same bits, without what it does for gradients of several kinds. Does not sync.
    The norms are in one tensor with the 0-dim tensors ``beside``, which come after them.
    """
    norms, total = norms_of_alike(grads, *beside)
    torch._foreach_mul_(grads, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return norms, total


def norms_of_alike(grads: Sequence[Tensor], *beside: Tensor) -> tuple[Tensor, Tensor]:
    """The norms of gradients of one device and dtype, and that of all, as ``clip_grad_norm_`` computes them."""
    values = torch.stack([*torch._foreach_norm(grads, 2.0), *beside])  # type: ignore[arg-type]
    return values, torch.linalg.vector_norm(values[: len(grads)] if beside else values, 2.0)


def by_device_and_dtype(tensors: Sequence[Tensor]) -> Iterable[tuple[list[Tensor], list[int]]]:
    """Lists of tensors that one kernel can take together, each with the places they had in ``tensors``."""
    grouped: Any = _group_tensors_by_device_and_dtype([list(tensors)], with_indices=True)
    for (members,), indices in grouped.values():
        yield members, indices


def raise_if_nonfinite_(flag: Tensor, values: Tensor, one: Tensor) -> None:
    """Sets ``flag`` to 1 where any of ``values`` is NaN or Inf, in one kernel. Does not sync.

    GradScaler's own check; it divides by a scale too, which is ``one`` here. It knows no bf16.
    """
    torch._amp_foreach_non_finite_check_and_unscale_([values], flag, one)


def update_scale_(
    scale: Tensor, tracker: Tensor, found_inf: Tensor, *, growth: float, backoff: float, interval: int
) -> None:
    """GradScaler's own rule, on the device. Does not sync."""
    torch._amp_update_scale_(scale, tracker, found_inf, growth, backoff, interval)
