"""A robust trend of a shrinking room, and when it will have shrunk to nothing.

The window of points is divided into thirds, and the trend goes through their medians. A spike does not move a
median. A jump changes one half of the window only, so it is no trend. If the second half falls faster or slower than
the first, the forecast goes on like that: a series that levels off in time never reaches its limit. The forecast is
made only as far ahead as the trend has been seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

FEWEST_POINTS = 9
"""Three for each third."""

_SIGNIFICANT = 2.0
"""Each half of the window must fall by this many standard errors."""

_MOST_BENT = 4.0
"""A half of the window falls at most so many times faster, or slower, than the other: beyond that it is a jump."""

_EXTREME = 2.5
"""A value this many deviations beyond the trend is to be expected: the limit is crossed by it first."""

_SHORTER = 1.5
"""Windows are this many times shorter, one after the other."""

_FEWEST_LAST = 4
"""So many of the last points must still fall."""

_TO_DEVIATION = 1.4826
_TO_ERROR_OF_MEDIAN = 1.2533


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """``room`` is left in bits, on the line of the trend; ``rate`` bits are lost per step. ``span`` steps were seen.

    It is used up ``steps_left`` steps from now, between ``soonest`` and ``latest``.
    """

    room: float
    rate: float
    steps_left: float
    soonest: float
    latest: float
    span: int


def forecast(steps: Sequence[int], rooms: Sequence[float], *, horizon: float = 1.0) -> Forecast | None:
    """The forecast of the longest recent window that has a steady trend; None if there is none.

    ``horizon`` limits it to so many times the length of the window. All values must be finite.
    """
    size = len(steps)
    while size >= FEWEST_POINTS:
        found = _of_window(steps[-size:], rooms[-size:], horizon)
        if found is not None:
            return found
        size = int(size / _SHORTER)
    return None


def _of_window(steps: Sequence[int], rooms: Sequence[float], horizon: float) -> Forecast | None:
    third = len(steps) // 3
    parts = (slice(0, third), slice(third, len(steps) - third), slice(len(steps) - third, len(steps)))
    (x1, y1), (x2, y2), (x3, y3) = ((median(steps[part]), median(rooms[part])) for part in parts)
    if not y1 > y2 > y3:
        return None
    first, second, rate = (y1 - y2) / (x2 - x1), (y2 - y3) / (x3 - x2), (y1 - y3) / (x3 - x1)
    residuals = [room - (y2 - rate * (step - x2)) for step, room in zip(steps, rooms, strict=True)]
    middle = median(residuals)
    deviation = _TO_DEVIATION * median(abs(each - middle) for each in residuals)
    error = _TO_ERROR_OF_MEDIAN * deviation * math.sqrt(2 / third)  # of the difference of two medians
    if min(y1 - y2, y2 - y3) < _SIGNIFICANT * error:
        return None
    last = slice(len(steps) - third, len(steps))
    if not _goes_on(steps[last], rooms[last], second):
        return None
    half = (x3 - x1) / 2
    bend = _bend(first, second, error / half)
    room = y3 - second * (steps[-1] - x3)
    low = max(0.0, room - _EXTREME * deviation)
    span = steps[-1] - steps[0]
    if _time_to_fall(low, second, min(1.0, bend), half) > horizon * span:  # a fall need not go on faster and faster
        return None
    now = second * max(1.0, bend) ** ((steps[-1] - x3) / half)
    steps_left = _time_to_fall(low, now, bend, half)
    slack = 2 * error / half
    return Forecast(
        room=room,
        rate=now,
        steps_left=steps_left,
        soonest=min(steps_left, low / (max(now, rate) + slack)),
        latest=max(steps_left, max(0.0, room) / max(now - slack, now / 4)),
        span=span,
    )


def _goes_on(steps: Sequence[int], rooms: Sequence[float], rate: float) -> bool:
    """Whether the last points still fall, and the very last ones, as far as their noise lets that be seen."""
    changes = [after - before for before, after in pairwise(rooms)]
    usual = median(changes)
    noise = _TO_DEVIATION * median(abs(each - usual) for each in changes) / math.sqrt(2)
    size = len(steps)
    while size >= _FEWEST_LAST:
        half = size // 2
        before, after = slice(len(steps) - size, len(steps) - size + half), slice(len(steps) - half, len(steps))
        expected = rate * (median(steps[after]) - median(steps[before]))
        fell = median(rooms[before]) - median(rooms[after])
        error = _TO_ERROR_OF_MEDIAN * noise * math.sqrt(2 / half)
        if fell < expected / 2 - _SIGNIFICANT * error:
            return False
        size = half
    return True


def _bend(first: float, second: float, slack: float) -> float:
    """How many times faster the second half falls than the first; 1 if that is possible with this slack."""
    least = (second - slack) / (first + slack)
    most = (second + slack) / (first - slack) if first > slack else math.inf
    return min(_MOST_BENT, max(1 / _MOST_BENT, min(max(1.0, least), most)))


def _time_to_fall(room: float, rate: float, bend: float, half: float) -> float:
    """Steps until the room is used up, at a rate that changes by the factor ``bend`` every ``half`` steps."""
    if abs(bend - 1) < 1e-6:
        return room / rate
    growth = math.log(bend) / half
    rest = 1 + room * growth / rate
    return math.log(rest) / growth if rest > 0 else math.inf  # it levels off before
