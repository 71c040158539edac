"""Safe HTML: plain strings are escaped, only ``Markup`` is used as it is."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from typing import Any

from nanguard.records.printable import printable_lines

_VOID = frozenset({"input", "meta", "br", "hr", "path"})


class Markup(str):
    """Text that is already HTML."""

    __slots__ = ()


Child = str | int | Iterable[Any] | None
"""A string, a number, ``Markup``, None, or a nested iterable of these."""


def tag(name: str, /, *children: Child, **attributes: str | int | bool | None) -> Markup:
    """One element. In names of attributes a trailing ``_`` is dropped, and other ``_`` become ``-``.

    True writes the attribute without a value. None and False omit it.
    """
    told = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{told}>")
    return Markup(f"<{name}{told}>{joined(children)}</{name}>")


def joined(children: Iterable[Any]) -> Markup:
    """The children joined, each escaped unless it is ``Markup``."""
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
    """Escaped for HTML. Invisible characters and those that reverse text are spelled out."""
    text = str(value)
    return html.escape(text if text.isprintable() else printable_lines(text), quote=True)


def embedded(data: Mapping[str, Any]) -> Markup:
    """JSON that is safe inside a ``script`` element: it cannot close the element or open another."""
    told = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for char in "<>&":
        told = told.replace(char, f"\\u{ord(char):04x}")
    return Markup(told)


def _attribute(name: str, value: str | int | bool | None) -> str:
    if value is None or value is False:
        return ""
    key = name.rstrip("_").replace("_", "-")
    return f" {key}" if value is True else f' {key}="{escaped(value)}"'
