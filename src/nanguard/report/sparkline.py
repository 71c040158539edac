"""A line of numbers as a line of text: one character a column. Pure text, no colour."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
LETTERS = "_.-=+*#@"

_DECADES = 2.0
"""Positive values that span more than this are drawn by their logarithm."""


_FLAT = 1e-6
"""Values that lie within this share of their size are all the same: what is left are roundings."""


def columns(points: Iterable[tuple[int, float]], width: int) -> list[list[float]]:
    """The values of points in order, by the column each falls into: at most ``width``, fewer for fewer points.

    A point is a place and a value; equal stretches of places get equal numbers of columns.
    """
    points = list(points)
    if not points or width < 1:
        return []
    first, last = points[0][0], points[-1][0]
    width = min(width, last - first + 1, len(points))
    found: list[list[float]] = [[] for _ in range(width)]
    for place, value in points:
        found[(place - first) * width // (last - first + 1)].append(value)
    return found


def sparkline(values: Sequence[float | None], *, ascii_only: bool = False, may_be_log: bool = True) -> str:
    """One character for each value, higher ones larger; a blank where there is none, or it is not finite.

    Positive values of very different size are drawn by their logarithm where that ``may_be``.
    """
    levels = LETTERS if ascii_only else BLOCKS
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return " " * len(values)
    low, high = min(finite), max(finite)
    if is_flat(low, high):
        drawn = [low if v is not None and math.isfinite(v) else None for v in values]
        high = low
    elif may_be_log and low > 0 and math.log10(high) - math.log10(low) > _DECADES:
        drawn = [math.log10(v) if v is not None and math.isfinite(v) else None for v in values]
        low, high = math.log10(low), math.log10(high)
    else:
        drawn = [v if v is not None and math.isfinite(v) else None for v in values]
    return "".join(" " if v is None else levels[_level(v, low, high)] for v in drawn)


def is_flat(low: float, high: float) -> bool:
    """Whether what lies between these is one value but for roundings."""
    return high / 2 - low / 2 <= _FLAT * max(abs(low), abs(high)) / 2


def mean_of_finite(values: Iterable[float]) -> float | None:
    """None where none is."""
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(value / len(finite) for value in finite) if finite else None


def _level(value: float, low: float, high: float) -> int:
    half = high / 2 - low / 2  # the whole may be more than a float holds
    return 0 if half <= 0 else min(7, int((value / 2 - low / 2) / half * 8))
