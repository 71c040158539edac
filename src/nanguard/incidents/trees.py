"""Converts batches of any kind to trees of plain values and tensors, and back.

Python's own containers come back unchanged. A named tuple comes back as one with the same fields, any other class as
``Fields``, a dictionary whose entries are also attributes, and what cannot be saved as ``Lost``. Reading a tree looks
up no class and runs no code.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import keyword
import operator
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from nanguard.state.snapshots.codec import Tagged, class_name, decode, encode, unfit_tensor

_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size)
_KEYS = (type(None), bool, int, float, str, bytes)
_FACTORIES: tuple[Any, ...] = (bool, dict, float, int, list, set, str, tuple)
_SCALARS: tuple[Any, ...] = (str, bytes, int, float, complex)
_NO_DATA = (type, nn.Module, torch.Generator, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_DEEPEST, _MOST_VALUES, _MOST_NOTES = 30, 1_000_000, 20


class Fields(dict[str, Any]):
    """The contents of an object of an unknown class: a dictionary whose entries are also attributes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


@dataclass(frozen=True, slots=True)
class Lost:
    """Takes the place of a value that could not be saved."""

    what: str


def flatten(tree: Any, name: str) -> tuple[Any, dict[str, Tensor], tuple[str, ...]]:
    """Strict JSON, the tensors it refers to, and sentences about what will not come back unchanged.

    ``name`` is the name of the tree in these sentences. Raises ``ValueError`` if there are too many values outside of
    tensors.
    """
    work = _Preparing()
    data, tensors = encode(work.value(tree, name))
    more = len(work.notes) - _MOST_NOTES
    return data, tensors, (*work.notes[:_MOST_NOTES], *([f"and {more:,} more"] if more > 0 else []))


def restore(data: Any, tensors: Mapping[str, Tensor], makers: Mapping[str, Callable[[Any], Any]] | None = None) -> Any:
    """The inverse of ``flatten``. Raises ``ValueError`` for anything that ``flatten`` does not write.

    ``makers`` make what the caller has ``Tagged``, by tag.
    """
    return decode(data, tensors, {**_MAKERS, **(makers or {})})


class _Preparing:
    """Converts a tree, which may contain itself, to types that the codec knows."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._open: set[int] = set()
        self._num = 0

    def value(self, value: Any, name: str) -> Any:
        self._num += 1
        if self._num > _MOST_VALUES:
            raise ValueError(f"it holds more than {_MOST_VALUES:,} values outside of tensors")
        if type(value) in _PLAIN or type(value) is Tagged:
            return value
        if isinstance(value, Tensor):
            return self._tensor(value, name)
        if id(value) in self._open:
            return self._lost("something that contains itself", name)
        if len(self._open) >= _DEEPEST:
            return self._lost(f"something nested more than {_DEEPEST} deep", name)
        self._open.add(id(value))
        try:
            return self._other(value, name)
        finally:
            self._open.discard(id(value))

    def _other(self, value: Any, name: str) -> Any:
        kind = type(value)
        if kind in _CONTAINERS:
            return _CONTAINERS[kind](self, value, name)
        if _of_numpy(value):
            return self._numpy(value, name)
        if isinstance(value, _NO_DATA):
            return self._lost(_name_of(value), name)
        if isinstance(value, PackedSequence):
            return Tagged("$packed", self._items(value, name))
        if isinstance(value, tuple) and _can_be_named(getattr(kind, "_fields", None)):
            return self._named(value, kind.__name__, name)
        if isinstance(value, Enum):
            return self._instead(value, value.value, "its value", name)
        for plain in _SCALARS:
            if isinstance(value, plain):
                return self._instead(value, plain(value), f"a plain {plain.__name__}", name)
        for container in (list, tuple, set, frozenset, deque):
            if isinstance(value, container):  # a subclass may generate values without end
                some = container(itertools.islice(value, _MOST_VALUES + 1))
                return self._instead(value, some, f"a plain {container.__name__}", name)
        if isinstance(value, PurePath):
            return self._instead(value, str(value), "text", name)
        return self._object(value, name)

    def _tensor(self, tensor: Tensor, name: str) -> Any:
        if unfit_tensor(tensor) is None:
            return tensor
        is_plain_inside = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
        plain = tensor.as_subclass(Tensor) if is_plain_inside else tensor
        if unfit_tensor(plain) is not None or (plain.numel() and not plain.data_ptr()):
            return self._lost(str(unfit_tensor(tensor)), name)
        self.notes.append(f"{name}: a {type(tensor).__name__} comes back as a plain tensor")
        return plain

    def _items(self, values: Iterable[Any], name: str) -> list[Any]:
        return [self.value(value, f"{name}[{place}]") for place, value in enumerate(values)]

    def _named(self, value: Any, kind: str, name: str) -> Any:
        items = [self.value(each, f"{name}.{field}") for field, each in zip(value._fields, value, strict=True)]
        return Tagged("$named", [kind, list(value._fields), items])

    def _dict(self, values: Mapping[Any, Any], name: str) -> dict[Any, Any]:
        return {self._key(key, name): self.value(value, f"{name}[{key!r:.80}]") for key, value in values.items()}

    def _key(self, key: Any, name: str) -> Any:
        if _is_plain_key(key):
            return key
        self.notes.append(f"{name}: a key of class {_name_of(key)} comes back as text")
        return str(key)

    def _set(self, value: Any, name: str) -> Any:
        if all(map(_is_plain_key, value)):
            return value
        self.notes.append(f"{name}: a set comes back as a list")
        return self._items(value, name)

    def _defaultdict(self, value: defaultdict[Any, Any], name: str) -> Any:
        factory = value.default_factory
        if factory is None or factory in _FACTORIES:
            return defaultdict(factory, self._dict(value, name))
        self.notes.append(f"{name}: a defaultdict comes back as a plain dict")
        return self._dict(value, name)

    def _numpy(self, value: Any, name: str) -> Any:
        numpy = sys.modules["numpy"]
        plain = numpy.asarray(value) if isinstance(value, numpy.ndarray) else value
        try:
            encode(plain.reshape(-1)[:0] if isinstance(value, numpy.ndarray) else plain)
        except ValueError:
            listed = value.tolist()
            known = not _of_numpy(listed)
            return self._instead(value, listed, "plain values", name) if known else self._lost(_name_of(value), name)
        if plain is not value:
            self.notes.append(f"{name}: a {_name_of(value)} comes back as a plain array")
        return plain

    def _object(self, value: Any, name: str) -> Any:
        if isinstance(value, Mapping):
            if not all(type(key) is str for key in value):
                return self._instead(value, dict(value), "a plain dict", name)
            return self._fields(value, dict(value), name)
        if dataclasses.is_dataclass(value):
            return self._fields(value, {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}, name)
        held = getattr(value, "__dict__", None)
        return self._fields(value, dict(held), name) if held else self._lost(_name_of(value), name)

    def _fields(self, value: Any, fields: dict[str, Any], name: str) -> Any:
        self.notes.append(f"{name}: a {_name_of(value)} comes back as a dict of its fields")
        return Tagged("$fields", {str(key): self.value(each, f"{name}.{key}") for key, each in fields.items()})

    def _instead(self, value: Any, other: Any, words: str, name: str) -> Any:
        self.notes.append(f"{name}: a {_name_of(value)} comes back as {words}")
        return self.value(other, name)

    def _lost(self, what: str, name: str) -> Any:
        self.notes.append(f"{name}: {what} cannot be saved")
        return Tagged("$lost", what)


_CONTAINERS: dict[type, Callable[[_Preparing, Any, str], Any]] = {
    list: _Preparing._items,
    tuple: lambda p, v, n: tuple(p._items(v, n)),
    dict: _Preparing._dict,
    OrderedDict: lambda p, v, n: OrderedDict(p._dict(v, n)),
    set: _Preparing._set,
    frozenset: _Preparing._set,
    deque: lambda p, v, n: deque(p._items(v, n), v.maxlen),
    Counter: lambda p, v, n: Counter(p._dict(v, n)),
    defaultdict: _Preparing._defaultdict,
}


def _is_plain_key(key: Any) -> bool:
    return type(key) in _KEYS or (type(key) is tuple and all(map(_is_plain_key, key)))


def _of_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _name_of(value: Any) -> str:
    return class_name(value if isinstance(value, type) else type(value))


# ---- reading ---------------------------------------------------------------------------------------------------------


def _can_be_named(fields: Any) -> bool:
    """Whether these can be the fields of a named tuple without hiding a method of tuple."""
    return isinstance(fields, (list, tuple)) and len(set(fields)) == len(fields) and all(map(_is_field, fields))


def _is_field(name: Any) -> bool:
    return type(name) is str and name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_")


def _named(content: Any) -> Any:
    name, fields, items = content
    if not _can_be_named(fields) or len(fields) != len(items) or type(name) is not str:
        raise ValueError(f"not the fields of a named tuple: {fields!r:.80}")
    return _kind(name if name.isidentifier() else "Named", tuple(fields))(*items)


@functools.lru_cache(maxsize=256)
def _kind(name: str, fields: tuple[str, ...]) -> Any:
    """A tuple class with these fields. ``collections.namedtuple`` is not used because it evaluates text."""
    members: dict[str, Any] = {
        "__slots__": (),
        "__new__": lambda cls, *items: tuple.__new__(cls, items),
        "_fields": fields,
        "_make": classmethod(lambda cls, items: tuple.__new__(cls, items)),
        "_asdict": lambda self: dict(zip(fields, self, strict=True)),
        "_replace": lambda self, **new: type(self)(*({**self._asdict(), **new}).values()),
        "__repr__": lambda self: f"{name}({', '.join(f'{k}={v!r}' for k, v in self._asdict().items())})",
    }
    members.update((field, property(operator.itemgetter(place))) for place, field in enumerate(fields))
    return type(name, (tuple,), members)


def _packed(content: Any) -> PackedSequence:
    is_one = isinstance(content, list) and len(content) == 4 and all(isinstance(each, Tensor) for each in content[:2])
    if not is_one or not all(each is None or isinstance(each, Tensor) for each in content[2:]):
        raise ValueError("not a packed sequence")
    return PackedSequence(*content)


def _made_fields(content: Any) -> Fields:
    if type(content) is not dict or not all(type(key) is str for key in content):
        raise ValueError("not the fields of an object")
    return Fields(content)


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "$named": _named,
    "$fields": _made_fields,
    "$lost": lambda content: Lost(str(content)),
    "$packed": _packed,
}
