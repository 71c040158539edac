"""The loss of a step, from the losses that the program has called backward on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanguard.numerics.finite import nonfinite


def mean_that_counts(losses: list[Tensor], grads: list[Tensor], device: torch.device, num_cleared: int) -> Tensor:
    """The mean of finite losses if gradients are finite: the program has discarded the others. Does not sync.

    The program cannot have discarded those after the first ``num_cleared``: they count in any case.
    """
    values = torch.stack([loss.double().to(device) for loss in losses])
    is_good = torch.isfinite(values)
    all_count = (nonfinite(grads, device) != 0) | ~is_good.any() | ~is_good[num_cleared:].all()
    good = torch.where(is_good, values, 0.0).sum() / is_good.sum()
    return torch.where(all_count, values.mean(), good)


def undivided(losses: list[Tensor], divisors: Sequence[float], number: int) -> list[Tensor]:
    """If the program divides the loss of each micro-batch by their number, its loss is what it was before that.

    The step has this ``number`` of losses, all with such a divisor, but for the first one in the first of such steps.
    """
    first = divisors[0] if divisors else 0.0
    if first < number or any(divisor != first for divisor in divisors):
        return losses
    return [loss * first for loss in losses]
