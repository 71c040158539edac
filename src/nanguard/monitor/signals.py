"""Signals that are more than a maximum: pure functions of tensors. Nothing here syncs or draws random numbers.

A result that is not finite says nothing, and is left out when it is read: a NaN changes no state on the host.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_ITERATIONS = 6
"""A power iteration goes on where it stopped at the last probe, so few of them are enough."""


def attention_bound(q: Tensor, k: Tensor, scale: float | None) -> Tensor:
    """The largest logit that these queries and keys can have: the norms of the longest rows, multiplied."""
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else abs(scale)
    return _longest_row(q) * _longest_row(k) * factor


def _longest_row(tensor: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float32)
    return norms.amax()


def moment_lag(grad: Tensor, second_moment: Tensor, step: Any, beta2: float) -> Tensor:
    """How far a gradient is ahead of Adam's second moment: the mean of g²/v, about 1 if gradients are as they were."""
    made = float(step) if not isinstance(step, Tensor) or step.device.type == "cpu" else step.double()
    expected = second_moment.double() / (1 - beta2**made)
    ratio = grad.double().square() / expected
    return torch.where(expected > 0, ratio, 0.0).mean()


def spectral_growth(weight: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """By how much the weight multiplies a vector that it is applied to again and again; and that vector, to go on from.

    The mean over the iterations, since the growth of a vector goes up and down if eigenvalues are complex.
    """
    weight = weight.float()
    vector = torch.ones_like(weight[0]) if start is None else start
    first = vector = vector / vector.norm()
    growth = torch.zeros((), dtype=torch.float32, device=weight.device)
    for _ in range(_ITERATIONS):
        vector = weight @ vector
        size = vector.norm()
        growth = growth + size.log()
        vector = vector / size
    return (growth / _ITERATIONS).exp(), torch.where(vector.isfinite().all(), vector, first)


def spread_over_batch(output: Tensor) -> Tensor:
    """How much the elements of an output differ between samples, in relation to their size; 0 if all are the same."""
    samples = output.flatten(1).float()
    return samples.std(dim=0).amax() / samples.abs().amax()
