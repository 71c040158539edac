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
    """Random states. ``host`` (Python's, NumPy's) is None if they were not read."""

    cpu: Tensor
    cuda: tuple[int, int] | None
    host: tuple[Any, Any] | None

    def as_dict(self) -> dict[str, Any]:
        """Plain containers, numbers and one tensor; ``from_dict`` reads it back."""
        return {"cpu": self.cpu, "cuda": self.cuda, "host": self.host}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RngState:
        return cls(data["cpu"], data["cuda"], data["host"])

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            seed, offset = self.cuda
            _cuda_generator(device).manual_seed(seed).set_offset(offset)
        if self.host is not None:
            random.setstate(self.host[0])
            if self.host[1] is not None:
                sys.modules["numpy"].random.set_state(self.host[1])


class RngReader:
    """Reads the generators before a step. Nothing here syncs."""

    def __init__(self, device: torch.device) -> None:
        self._generator = _cuda_generator(device) if device.type == "cuda" else None
        self._drawn_on_host = False

    def now(self, step: int = 0) -> RngState:
        """The current states. Those of Python and NumPy are always read at step 0."""
        look = self._drawn_on_host or step < _FIRST or step % _EVERY == 0
        cuda = None
        if self._generator is not None:  # two numbers are all of its state, and quicker to read than the tensor of it
            cuda = (self._generator.initial_seed(), self._generator.get_offset())
        return RngState(torch.default_generator.get_state(), cuda, _host_state() if look else None)

    def compare(self, before: RngState) -> None:
        """Notes whether the step that just ran drew from Python's or NumPy's generator."""
        if before.host is not None and not self._drawn_on_host:
            python, numpy = _host_state()
            drew_numpy = numpy is not None and not _same_numpy(before.host[1], numpy)
            self._drawn_on_host = python != before.host[0] or drew_numpy


def states_now() -> RngState:
    """Of all generators, on the device that torch uses if it uses one. Does not sync."""
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return RngReader(torch.device("cuda" if is_used else "cpu")).now()


def _cuda_generator(device: torch.device) -> torch.Generator:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _host_state() -> tuple[Any, Any]:
    # Only if the program has imported NumPy: otherwise nothing can have drawn from it.
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _same_numpy(a: Any, b: Any) -> bool:
    return a is not None and a[2:] == b[2:] and bool((a[1] == b[1]).all())
