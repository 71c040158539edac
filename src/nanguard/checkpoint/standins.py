"""Inert objects that replace the few harmless classes that checkpoints often contain besides tensors.

torch reads a checkpoint without running code from it, and refuses classes that it does not know. But a NumPy number or
the ``argparse.Namespace`` of a run is data that can be read without its class. These stand-ins replace the real classes
while a file is read, and neither import nor call them.
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
    """Accepts any arguments and state, and does nothing with them."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Standin:
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def contents(self) -> Any:
        """Plain containers, numbers and tensors; None if there is nothing to check."""
        return None


class Namespace(Standin):
    """``argparse.Namespace`` and ``types.SimpleNamespace``."""

    def contents(self) -> Any:
        return self.state if isinstance(self.state, dict) else None


class Opaque(Standin):
    """Paths, dates and versions, which cannot be non-finite."""


class NumpyDtype(Standin):
    """``numpy.dtype``."""

    def of_torch(self) -> torch.dtype | None:
        """The torch dtype; None if it is not little-endian floating point."""
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
                    raise ValueError("an array whose data does not fit its shape")
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
    """Stand-in classes with these names, by which torch finds them."""
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
    # ``_reconstruct`` makes an empty ``ndarray``, which is then filled.
    *_named(NumpyArray, "numpy.ndarray", "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
]


def in_place() -> AbstractContextManager[None]:
    """Inside, ``torch.load(weights_only=True)`` reads these classes as their stand-ins."""
    context: Any = torch.serialization.safe_globals
    made: AbstractContextManager[None] = context(_STANDINS)
    return made
