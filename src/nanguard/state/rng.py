"""The random number generators a step can draw from: torch's on the CPU and the accelerator, Python's and NumPy's.

torch's cost little to read. Python's and NumPy's take longer than some whole kernels, and few programs draw from them
inside a step, so they are read in the first steps and now and then, and always once a step was seen to draw from them.
For calls of a model in a loop of the user's own, which can only be examined again, torch's on the CPU is read so too.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_FIRST, _EVERY = 16, 256


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
        self._drawn_on_host = self._drawn_on_cpu = False
        self._num_calls = 0
        self._last = torch.default_generator.get_state()
        self._unused = RngState(self._last, None, None)

    def now(self, step: int = 0) -> RngState:
        """The current states. Those of Python and NumPy are always read at step 0."""
        look = self._drawn_on_host or step < _FIRST or step % _EVERY == 0
        return RngState(torch.default_generator.get_state(), self._on_cuda(), _host_state() if look else None)

    def before_call(self) -> RngState:
        """Before a call of the model. A generator that such calls do not draw from may have another state."""
        number = self._num_calls
        self._num_calls += 1
        if number < _FIRST or number % _EVERY == 0 or self._drawn_on_host:
            return self.now()
        if self._generator is None and not self._drawn_on_cpu:
            return self._unused
        if self._drawn_on_cpu:
            self._last = torch.default_generator.get_state()
        return RngState(self._last, self._on_cuda(), None)

    def after_call(self, before: RngState) -> None:
        """Learns from which generators such calls draw."""
        if before.host is not None:
            self.compare(before)
            if not self._drawn_on_cpu:
                self._last = torch.default_generator.get_state()
                self._unused = RngState(self._last, None, None)
                self._drawn_on_cpu = not torch.equal(before.cpu, self._last)

    def compare(self, before: RngState) -> None:
        """Notes whether the step that just ran drew from Python's or NumPy's generator."""
        if before.host is not None and not self._drawn_on_host:
            python, numpy = _host_state()
            drew_numpy = numpy is not None and not _same_numpy(before.host[1], numpy)
            self._drawn_on_host = python != before.host[0] or drew_numpy

    def _on_cuda(self) -> tuple[int, int] | None:
        """Two numbers are all of the generator's state, and quicker to read than the tensor of it."""
        generator = self._generator
        return None if generator is None else (generator.initial_seed(), generator.get_offset())


def reader_now() -> RngReader:
    """For the device that torch uses now, if it uses one."""
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return RngReader(torch.device("cuda" if is_used else "cpu"))


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
