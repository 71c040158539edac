"""Small pieces of text that panels, reports and commands share."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """``a, b, c``, or the first few and how many more there are."""
    shown, more = ", ".join(names[:most]), len(names) - most
    return f"{shown} and {more:,} more" if more > 0 else shown


def joined(names: Sequence[str], most: int = 3) -> str:
    """``a, b and c``, or the first few and how many more there are."""
    if len(names) > most:
        return listed(names, most)
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def step_range(first: int, last: int) -> str:
    """``step 3``, ``steps 3 to 5``."""
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def with_article(name: str) -> str:
    """``a list``, ``an int``."""
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def reason(error: BaseException) -> str:
    """The message of an error; with its type if the message alone may not say what happened."""
    if isinstance(error, (ValueError, OSError)) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"
