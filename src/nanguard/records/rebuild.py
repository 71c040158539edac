"""Builds records from their JSON form. Every value is checked against the type of its field."""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def built(kind: Any, value: Any, at: str) -> Any:
    """A value of type ``kind`` from its JSON form. Raises ``ValueError`` that names the place if it does not fit."""
    origin, options = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (types.UnionType, Union):
        return _built_of_any(options, value, at)
    if is_dataclass(kind) and isinstance(kind, type):
        return _built_record(kind, value, at)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(built(options[0], each, f"{at}[{place}]") for place, each in enumerate(value))
    if origin is Literal and value in options:
        return value
    if kind is float and (value in ("nan", "inf", "-inf") or type(value) in (int, float)):
        return float(value)
    if isinstance(kind, type) and type(value) is kind:
        return value
    expected = getattr(kind, "__name__", str(kind)) if origin is None else str(kind).removeprefix("typing.")
    raise ValueError(f"{at}: expected {expected}, got {value!r:.60}")


def _built_of_any(options: tuple[Any, ...], value: Any, at: str) -> Any:
    if value is None and type(None) in options:
        return None
    others = [option for option in options if option is not type(None)]
    for option in others[:-1]:
        if type(value) is option:
            return value
    return built(others[-1], value, at)


def _built_record(kind: type[T], value: Any, at: str) -> T:
    if not isinstance(value, dict):
        raise ValueError(f"{at}: expected an object of {kind.__name__}, got {value!r:.60}")
    hints = get_type_hints(kind)
    members = {f.name: built(hints[f.name], value[f.name], f"{at}.{f.name}") for f in fields(kind) if f.name in value}  # type: ignore[arg-type]
    try:
        return kind(**members)
    except TypeError as error:
        raise ValueError(f"{at}: {error}") from None
