"""The state of every random number generator a step can draw from: Python, NumPy, CPU and accelerator."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RngState:
    """Taken by ``now()``, put back by ``restore()``; neither syncs."""

    python: tuple[Any, ...]
    numpy: Any
    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RngState:
        # NumPy is looked at only where the program has imported it: nothing else can have drawn from it.
        numpy = sys.modules.get("numpy")
        return cls(
            random.getstate(),
            numpy.random.get_state() if numpy is not None else None,
            torch.get_rng_state(),
            torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        )

    def restore(self, device: torch.device) -> None:
        random.setstate(self.python)
        numpy = sys.modules.get("numpy")
        if numpy is not None and self.numpy is not None:
            numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)
