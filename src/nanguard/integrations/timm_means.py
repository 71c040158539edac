"""Means of timm's ``AverageMeter`` without the values of skipped steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Where(NamedTuple):
    """Where a training loop is: ``num_steps`` were made, and ``was_skipped`` says that the last of them was bad.

    ``has_begun`` says that the model was called since, so that values belong to the next step.
    """

    num_steps: int = 0
    was_skipped: bool = False
    has_begun: bool = False


class StepMeans:
    """Stands in the place of ``AverageMeter.update``. ``where`` returns None if it cannot be told.

    Values that are given with a number of samples belong to a step: they are left out if it was skipped before, and
    taken back if it is skipped later. Others are times.
    """

    def __init__(self, where: Callable[[], Where | None]) -> None:
        self._where = where
        self._last = Where()
        self._noted: list[tuple[Any, dict[str, Any]]] = []
        """Meters that have got values of a step that is not made yet, and their attributes before."""

    def update(self, original: Callable[..., None], meter: Any, val: Any, *args: Any, **kwargs: Any) -> None:
        """``original(val, ...)`` adds the value to the meter. It is not called for a value that is not finite."""
        if _is_known_to_be_nonfinite(val):
            return
        now, has_samples = self.look(), bool(args or kwargs)
        if now is not None and has_samples and torch.is_grad_enabled():  # not in a validation
            if now.has_begun:
                self._noted.append((meter, dict(vars(meter))))
            elif now.was_skipped:
                return
        original(val, *args, **kwargs)

    def look(self) -> Where | None:
        """Takes back what meters have got of a step that was skipped since. Call it after each step."""
        now, last = self._where(), self._last
        if now is None:
            return None
        self._last = now
        if now.num_steps != last.num_steps:
            if now.was_skipped and now.num_steps == last.num_steps + 1:
                for meter, before in reversed(self._noted):
                    vars(meter).update(before)
            self._noted.clear()
        return now


def _is_known_to_be_nonfinite(val: Any) -> bool:
    """Without waiting for a device."""
    return not (isinstance(val, Tensor) and val.device.type != "cpu") and not math.isfinite(val)
