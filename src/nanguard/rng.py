"""The random number generators a step can draw from: torch's on the CPU and the accelerator, Python's and NumPy's.

torch's cost nothing to read. Python's and NumPy's take longer than some whole kernels, and few programs draw from them
inside a step, so they are read in the first steps and now and then, and always once a step was seen to draw from them.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_FIRST, _EVERY = 16, 64


@dataclass(frozen=True, slots=True)
class RngState:
    """States as they were; ``host`` (Python's, NumPy's) is None where they were not read."""

    cpu: Tensor
    cuda: Tensor | None
    host: tuple[Any, Any] | None

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)
        if self.host is not None:
            random.setstate(self.host[0])
            if self.host[1] is not None:
                sys.modules["numpy"].random.set_state(self.host[1])


class Dice:
    """Reads the generators before a step. Nothing here syncs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._drawn_on_host = False

    def now(self, step: int = 0) -> RngState:
        look = self._drawn_on_host or step < _FIRST or step % _EVERY == 0
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return RngState(torch.get_rng_state(), cuda, _host_state() if look else None)

    def compare(self, before: RngState) -> None:
        """Tells whether the step that just ran drew from Python's or NumPy's generator."""
        if before.host is not None and not self._drawn_on_host:
            python, numpy = _host_state()
            drew_numpy = numpy is not None and not _same_numpy(before.host[1], numpy)
            self._drawn_on_host = python != before.host[0] or drew_numpy


def _host_state() -> tuple[Any, Any]:
    # NumPy is asked only where the program has imported it: nothing else can have drawn from it.
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _same_numpy(a: Any, b: Any) -> bool:
    return a is not None and a[2:] == b[2:] and bool((a[1] == b[1]).all())
