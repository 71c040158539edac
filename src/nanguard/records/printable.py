"""Text from files and programs, made safe to show in a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text on one line, with control characters spelled out: text from a file must not control the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def printable_lines(text: str) -> str:
    """The same for a text of several lines, which stay apart."""
    return "\n".join(map(printable, text.split("\n")))
