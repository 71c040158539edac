"""HTML that cannot be broken by what is in it: plain strings are escaped, only ``Markup`` is taken as it stands."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from typing import Any

from nanguard.records.printable import printable

_VOID = frozenset({"input", "meta", "br", "hr", "path"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | int | Iterable[Any] | None
"""A string, a number, ``Markup``, nothing, or any nesting of these."""


def tag(name: str, /, *children: Child, **attributes: str | int | bool | None) -> Markup:
    """One element. A trailing ``_`` of an attribute's name is dropped, other ``_`` become ``-``.

    True writes the attribute alone; None and False leave it out.
    """
    told = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{told}>")
    return Markup(f"<{name}{told}>{joined(children)}</{name}>")


def joined(children: Iterable[Any]) -> Markup:
    """Children one after the other, escaped where they are no ``Markup``."""
    parts = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Markup):
            parts.append(str(child))
        elif isinstance(child, (str, int)):
            parts.append(escaped(child))
        else:
            parts.append(str(joined(child)))
    return Markup("".join(parts))


def escaped(value: str | int) -> str:
    """As HTML shows it letter by letter; what is not seen, or turns what is seen around, is spelled out."""
    text = str(value)
    shown = text if text.isprintable() else "\n".join(map(printable, text.split("\n")))
    return html.escape(shown, quote=True)


def embedded(data: Mapping[str, Any]) -> Markup:
    """JSON that may stand inside a ``script`` element: nothing in it can end the element or open another."""
    told = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for char in "<>&":
        told = told.replace(char, f"\\u{ord(char):04x}")
    return Markup(told)


def _attribute(name: str, value: str | int | bool | None) -> str:
    if value is None or value is False:
        return ""
    key = name.rstrip("_").replace("_", "-")
    return f" {key}" if value is True else f' {key}="{escaped(value)}"'
