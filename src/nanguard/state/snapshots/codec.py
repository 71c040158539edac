"""State dictionaries as strict JSON and tensors, and back, exactly.

JSON types stay as they are: text, booleans, ``None``, finite floats, integers of 64 bits, lists, and dictionaries whose
keys are text without ``$`` in front. All else is an object of one key that begins with ``$``: ``{"$tuple": [1, 2]}``,
``{"$dict": [[key, value], ...]}``, ``{"$tensor": "0"}``. Tensors, and the bytes of NumPy arrays, are returned apart.

Reading builds values from a fixed list of types. It looks up no name that is in the data, and runs nothing.
A caller with other objects describes them by plain values (``Tagged``), and says how to make them again.
"""

from __future__ import annotations

import base64
import math
import re
import struct
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanguard.records.words import with_article

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}

_ACCEPTED = (
    "dense tensors, numbers, text, bytes, None, dict, list, tuple, set, frozenset, deque, OrderedDict, Counter, "
    "defaultdict of a builtin type, torch.dtype, torch.device, torch.Size, and NumPy arrays and scalars of plain types"
)
_DEEPEST = 100
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)}
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
# No pointers (objects, variable-width strings) and no fields: those would not survive as bytes.
_NUMPY_KIND = re.compile(r"[<>|][biufcmMSU][1-9][0-9]*(\[\w+\])?")


@dataclass(frozen=True, slots=True)
class Tagged:
    """Something of the caller's own, as ``{tag: content}``; a tag begins with ``$``, and ``decode`` is told of it."""

    tag: str
    content: Any


def encode(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Data for ``json.dumps(..., allow_nan=False)``, and the tensors that it refers to, not copied.

    Raises ``ValueError`` that names the place of what cannot be kept. A parameter is kept as a plain tensor, and of
    containers what they contain.
    """
    encoder = _Encoder()
    try:
        return encoder.value(tree, 0), encoder.tensors
    except _Unfit as unfit:
        raise ValueError(f"{unfit.path}: {unfit.what} cannot be kept in a snapshot; accepted are {_ACCEPTED}") from None


def decode(data: Any, tensors: Mapping[str, Tensor], makers: Mapping[str, Callable[[Any], Any]] | None = None) -> Any:
    """The tree that ``encode`` was given. Raises ``ValueError`` for what ``encode`` does not write.

    ``makers`` make what was ``Tagged`` of its content, by tag.
    """
    try:
        return _Decoder(tensors, makers or {}).value(data)
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, struct.error) as error:
        raise ValueError(f"not a state that nanguard wrote ({type(error).__name__}: {error})") from error


def unfit_tensor(tensor: Tensor) -> str | None:
    """What kind of tensor this is, if its elements alone do not describe it; else None."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return f"a tensor of class {type(tensor).__name__}"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_quantized:
        return "a quantized tensor"
    return "a meta tensor, which has no values," if tensor.is_meta else None


class _Unfit(Exception):
    """Something that cannot be kept; the containers around it add where it is while the exception passes."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.parts: list[str] = []

    @property
    def path(self) -> str:
        path = "".join(reversed(self.parts)).lstrip(".")
        return f"{path[:80]}…" if len(path) > 81 else path or "the state itself"


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}

    def value(self, value: Any, depth: int) -> Any:
        # Exact types throughout: a subclass (an enum, a named tuple) would come back as something else.
        kind = type(value)
        if value is None or kind is str or kind is bool:
            return value
        if kind is int:
            # Python refuses to read or write decimal numbers of thousands of digits.
            return value if -(1 << 63) <= value < 1 << 63 else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if depth > _DEEPEST:
            raise _Unfit(f"something nested more than {_DEEPEST} deep (does it hold itself?)")
        if kind is list:
            return self._items(value, depth)
        if kind is dict:
            if all(type(key) is str and not key.startswith("$") for key in value):
                return self._plain_dict(value, depth)
            return {"$dict": self._pairs(value, depth)}
        if kind in _ENCODERS:
            return _ENCODERS[kind](self, value, depth)
        if isinstance(value, Tensor):
            return self._tensor(value)
        return self._numpy(value, depth)

    def _items(self, values: Iterable[Any], depth: int) -> list[Any]:
        done: list[Any] = []
        try:
            for value in values:
                done.append(self.value(value, depth + 1))
        except _Unfit as unfit:
            unfit.parts.append(f"[{len(done)}]")
            raise
        return done

    def _plain_dict(self, values: dict[str, Any], depth: int) -> dict[str, Any]:
        done: dict[str, Any] = {}
        key = ""
        try:
            for key, value in values.items():
                done[key] = self.value(value, depth + 1)
        except _Unfit as unfit:
            unfit.parts.append(f".{key}")
            raise
        return done

    def _pairs(self, values: Mapping[Any, Any], depth: int) -> list[Any]:
        done: list[Any] = []
        key: Any = None
        try:
            for key, value in values.items():
                if isinstance(key, Tensor):
                    raise _Unfit("a tensor as a key")  # found by identity, which nothing that is read back has
                done.append([self.value(key, depth + 1), self.value(value, depth + 1)])
        except _Unfit as unfit:
            unfit.parts.append(f".{key if type(key) is str else repr(key)}")
            raise
        return done

    def _defaultdict(self, value: defaultdict[Any, Any], depth: int) -> Any:
        factory = value.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if name is not None and _FACTORIES.get(name) is not factory:
            raise _Unfit(f"a defaultdict of {_article(factory)}")
        return {"$defaultdict": [name, self._pairs(value, depth)]}

    def _tensor(self, tensor: Tensor) -> Any:
        if trouble := unfit_tensor(tensor):
            raise _Unfit(trouble)
        return {"$tensor": self._add(tensor)}

    def _add(self, tensor: Tensor) -> str:
        """Its name; a tensor that is in several places is one afterwards too."""
        name = self._names.setdefault(id(tensor), str(len(self.tensors)))
        self.tensors.setdefault(name, tensor)
        return name

    def _numpy(self, value: Any, depth: int) -> Any:
        numpy = sys.modules.get("numpy")  # if the program has not imported it, this is no value of NumPy
        if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
            raise _Unfit(_article(value))
        dtype = value.dtype
        if type(value) is numpy.str_:
            return {"$numpy.str": str.__str__(value)}  # NumPy's own drops zeros at the end
        if type(value) is numpy.bytes_:
            return {"$numpy.bytes": self.value(bytes(value), depth)}
        is_plain = _NUMPY_KIND.fullmatch(dtype.str) and numpy.dtype(dtype.str) == dtype
        if not is_plain or type(value) not in (numpy.ndarray, dtype.type):
            raise _Unfit(f"{_article(value)} of dtype {dtype}")
        if isinstance(value, numpy.generic):
            return {"$numpy.scalar": [dtype.str, value.tobytes().hex()]}
        content = torch.from_numpy(numpy.frombuffer(value.tobytes(), numpy.uint8).copy())
        return {"$numpy.array": [dtype.str, list(value.shape), self._add(content)]}


_ENCODERS: dict[type, Callable[[_Encoder, Any, int], Any]] = {
    tuple: lambda e, v, d: {"$tuple": e._items(v, d)},
    torch.Size: lambda e, v, d: {"$size": e._items(v, d)},
    set: lambda e, v, d: {"$set": e._items(v, d)},
    frozenset: lambda e, v, d: {"$frozenset": e._items(v, d)},
    deque: lambda e, v, d: {"$deque": [v.maxlen, e._items(v, d)]},
    OrderedDict: lambda e, v, d: {"$ordered": e._pairs(v, d)},
    Counter: lambda e, v, d: {"$counter": e._pairs(v, d)},
    defaultdict: _Encoder._defaultdict,
    bytes: lambda e, v, d: {"$bytes": base64.b64encode(v).decode("ascii")},
    bytearray: lambda e, v, d: {"$bytearray": base64.b64encode(v).decode("ascii")},
    complex: lambda e, v, d: {"$complex": [e.value(v.real, d), e.value(v.imag, d)]},
    torch.dtype: lambda e, v, d: {"$dtype": str(v).removeprefix("torch.")},
    torch.device: lambda e, v, d: {"$device": str(v)},
    Tagged: lambda e, v, d: {v.tag: e.value(v.content, d + 1)},
}


def _article(value: Any) -> str:
    if isinstance(value, _FUNCTIONS):
        return "a function"
    return with_article(class_name(type(value)))


def class_name(kind: type) -> str:
    """``list``, ``pathlib.PosixPath``."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


@dataclass(frozen=True, slots=True)
class _Decoder:
    tensors: Mapping[str, Tensor]
    makers: Mapping[str, Callable[[Any], Any]]

    def value(self, data: Any) -> Any:
        if type(data) is list:
            return [self.value(value) for value in data]
        if type(data) is not dict:
            return data
        if not any(key.startswith("$") for key in data):
            return {key: self.value(value) for key, value in data.items()}
        ((tag, content),) = data.items()
        if tag in self.makers:
            return self.makers[tag](self.value(content))
        return _DECODERS[tag](content, self)

    def pairs(self, content: Any) -> dict[Any, Any]:
        return {self.value(key): self.value(value) for key, value in content}

    def default(self, content: Any) -> defaultdict[Any, Any]:
        name, pairs = content
        return defaultdict(None if name is None else _FACTORIES[name], self.pairs(pairs))

    def numpy_array(self, content: Any) -> Any:
        dtype, shape, name = content
        return self.tensors[name].numpy().copy().view(_numpy_dtype(dtype)).reshape(shape)


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise ValueError("the state holds NumPy values, and NumPy is not installed") from error
    return numpy


def _numpy_dtype(text: str) -> Any:
    if not _NUMPY_KIND.fullmatch(text):
        raise ValueError(f"not a plain NumPy dtype: {text!r}")
    return _numpy().dtype(text)


_DECODERS: dict[str, Callable[[Any, _Decoder], Any]] = {
    "$int": lambda c, d: int(c, 16),
    "$float": lambda c, d: struct.unpack(">d", bytes.fromhex(c))[0],
    "$tuple": lambda c, d: tuple(d.value(c)),
    "$size": lambda c, d: torch.Size(c),
    "$set": lambda c, d: set(d.value(c)),
    "$frozenset": lambda c, d: frozenset(d.value(c)),
    "$deque": lambda c, d: deque(d.value(c[1]), c[0]),
    "$dict": lambda c, d: d.pairs(c),
    "$ordered": lambda c, d: OrderedDict(d.pairs(c)),
    "$counter": lambda c, d: Counter(d.pairs(c)),
    "$defaultdict": lambda c, d: d.default(c),
    "$bytes": lambda c, d: base64.b64decode(c, validate=True),
    "$bytearray": lambda c, d: bytearray(base64.b64decode(c, validate=True)),
    "$complex": lambda c, d: complex(*d.value(c)),
    "$dtype": lambda c, d: DTYPES[c],
    "$device": lambda c, d: torch.device(c),
    "$tensor": lambda c, d: d.tensors[c],
    "$numpy.str": lambda c, d: _numpy().str_(c),
    "$numpy.bytes": lambda c, d: _numpy().bytes_(d.value(c)),
    "$numpy.scalar": lambda c, d: _numpy().frombuffer(bytes.fromhex(c[1]), _numpy_dtype(c[0]))[0],
    "$numpy.array": lambda c, d: d.numpy_array(c),
}
