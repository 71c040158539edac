"""Numbers as a line of text, one character per column. Pure text, no colour."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
LETTERS = "_.-=+*#@"

_DECADES = 2.0
"""Positive values that span more decades than this are drawn on a logarithmic scale."""


_FLAT = 1e-6
"""Values that differ by less than this share of their size are equal except for rounding."""


def columns(points: Iterable[tuple[int, float]], width: int) -> list[list[float]]:
    """The values of ordered points, grouped into at most ``width`` columns; fewer if there are fewer points.

    A point is a position and a value. Each column covers the same range of positions.
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
    """One character for each value, taller for larger values; a blank if it is None or non-finite.

    With ``may_be_log``, positive values of very different size are drawn on a logarithmic scale.
    """
    levels = LETTERS if ascii_only else BLOCKS
    drawn = [value if value is not None and math.isfinite(value) else None for value in values]
    finite = [value for value in drawn if value is not None]
    if not finite:
        return " " * len(values)
    low, high = min(finite), max(finite)
    if is_flat(low, high):
        high = low
    elif may_be_log and low > 0 and math.log10(high) - math.log10(low) > _DECADES:
        drawn = [None if value is None else math.log10(value) for value in drawn]
        low, high = math.log10(low), math.log10(high)
    return "".join(" " if v is None else levels[_level(v, low, high)] for v in drawn)


def is_flat(low: float, high: float) -> bool:
    """Whether all values between these are equal except for rounding."""
    return high / 2 - low / 2 <= _FLAT * max(abs(low), abs(high)) / 2


def mean_of_finite(values: Iterable[float]) -> float | None:
    """The mean of the finite values; None if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(value / len(finite) for value in finite) if finite else None


def _level(value: float, low: float, high: float) -> int:
    half = high / 2 - low / 2  # the full difference may overflow a float
    return 0 if half <= 0 else min(7, int((value / 2 - low / 2) / half * 8))
