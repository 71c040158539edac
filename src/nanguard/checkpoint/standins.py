"""Inert objects in place of the few harmless classes that checkpoints often hold besides tensors.

torch reads a checkpoint without running anything in it, and refuses classes that it does not know. A NumPy number or
the ``argparse.Namespace`` of a run is data, though, and what it holds can be told without its class: these take the
place of the real classes while a file is read, and neither import nor call them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import AbstractContextManager
from math import prod
from typing import Any

import torch

_DTYPES = {
    "f2": torch.float16,
    "f4": torch.float32,
    "f8": torch.float64,
    "c8": torch.complex64,
    "c16": torch.complex128,
}


class Standin:
    """Takes whatever it is made and filled with, and does nothing with it."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Standin:
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def contents(self) -> Any:
        """Plain containers, numbers and tensors; None where there is nothing to look into."""
        return None


class Namespace(Standin):
    """``argparse.Namespace`` and ``types.SimpleNamespace``."""

    def contents(self) -> Any:
        return self.state if isinstance(self.state, dict) else None


class Opaque(Standin):
    """Paths, dates, versions: nothing in them could be non-finite."""


class NumpyDtype(Standin):
    """``numpy.dtype``."""

    def of_torch(self) -> torch.dtype | None:
        """None for all that is not floating point in the byte order of most machines."""
        big_endian = isinstance(self.state, tuple) and self.state[1:2] == (">",)
        return None if big_endian or not self.args else _DTYPES.get(str(self.args[0]))


class NumpyArray(Standin):
    """``numpy.ndarray``."""

    def contents(self) -> Any:
        match self.state:
            case (_, tuple() as shape, NumpyDtype() as dtype, _, bytes() as data):
                kind = dtype.of_torch()
                if kind is None or not data:
                    return None
                if len(data) != prod(map(int, shape)) * kind.itemsize:
                    raise ValueError("an array that is not of its shape")
                return torch.frombuffer(bytearray(data), dtype=kind).reshape(shape)
            case (_, _, _, _, list() as objects):
                return objects
        return None


class NumpyNumber(Standin):
    """A NumPy scalar, such as ``numpy.float64``."""

    def contents(self) -> Any:
        match self.args:
            case (NumpyDtype() as dtype, bytes() as data):
                kind = dtype.of_torch()
                code = {torch.float16: "<e", torch.float32: "<f", torch.float64: "<d"}.get(kind) if kind else None
                return struct.unpack(code, data)[0] if code and len(data) == struct.calcsize(code) else None
        return None


def _named(kind: type[Standin], *names: str) -> list[Callable[..., Any]]:
    """Stand-ins that go by these names, which is how torch finds them."""
    split = [name.rpartition(".") for name in names]
    return [type(name, (kind,), {"__module__": module, "__qualname__": name}) for module, _, name in split]


_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_STANDINS = [
    *_named(Namespace, "argparse.Namespace", "types.SimpleNamespace"),
    *_named(Opaque, *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATHS)),
    *_named(Opaque, *(f"datetime.{name}" for name in ("date", "datetime", "time", "timedelta", "timezone"))),
    *_named(Opaque, "torch.torch_version.TorchVersion"),
    *_named(NumpyDtype, "numpy.dtype"),
    *_named(NumpyNumber, "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
    # The second makes an empty array, of which the first is the class; then it is filled.
    *_named(NumpyArray, "numpy.ndarray", "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
]


def in_place() -> AbstractContextManager[None]:
    """While it lasts, ``torch.load(weights_only=True)`` reads these classes as their stand-ins."""
    context: Any = torch.serialization.safe_globals
    made: AbstractContextManager[None] = context(_STANDINS)
    return made
