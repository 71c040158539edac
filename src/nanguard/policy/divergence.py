"""When a finite loss counts as diverged: far above its own past, by a rule that ignores outliers and NaN.

A single loss far out is an outlier of the data; so the rule waits until there are ``sustain`` more of them than of
others. What counts as far is measured against the *lower half* of the best part of the recent past, which neither
outliers nor a rise that is already under way move much, and by how much of all progress since the start would be lost.
While it is undecided, no loss joins the past that it is held against, and non-finite ones never do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

_EVERY = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """A loss counts as beyond its past when it is above both

    - the lower quartile of the best quarter of the last ``window`` losses plus ``deviations`` times its spread,
    - the point where ``progress`` of what the loss has come down since the start, in ratio, is lost again.

    A divergence is ``sustain`` such losses; each loss in between that is not counts as minus one. The rule needs a
    quarter of the window before it reports anything.

    With ``needs_proof`` something is done about it only if earlier good weights do better on the same batch, which
    ``guard.step`` can find out; in your own loop it is only logged.
    """

    window: int = 256
    deviations: float = 6.0
    progress: float = 0.5
    sustain: int = 8
    needs_proof: bool = True

    def __post_init__(self) -> None:
        if self.window < 16 or self.sustain < 1 or not self.deviations > 0 or not self.progress >= 0:
            raise ValueError(
                "Divergence needs window >= 16, sustain >= 1, deviations > 0 and progress >= 0, got "
                f"window={self.window!r}, sustain={self.sustain!r}, deviations={self.deviations!r}, "
                f"progress={self.progress!r}"
            )


@dataclass(frozen=True, slots=True)
class Trend:
    """The losses of applied steps so far, as far as the rule looks back: ``start`` is their first level.

    While some are ``beyond`` the ``calm`` past, more than there are others since, they are all ``undecided``. ``bar``
    is the limit they are held against: it moves slowly, and is worked out anew for every eighth loss only.
    """

    calm: tuple[float, ...] = ()
    undecided: tuple[float, ...] = ()
    beyond: int = 0
    start: float = math.nan
    bar: float = math.inf
    age: int = 0

    def after(self, loss: float, rule: Divergence) -> Trend:
        """The trend with one more loss. A non-finite one changes nothing."""
        if not math.isfinite(loss):
            return self
        undecided = (*self.undecided, loss)
        beyond = self.beyond + 1 if loss > self.bar else self.beyond - 1
        if beyond > 0:
            return replace(self, undecided=undecided, beyond=beyond)
        calm = (*self.calm, *undecided)[-rule.window :]  # outliers are part of the past, too
        if self.age % _EVERY:
            return Trend(calm, start=self.start, bar=self.bar, age=self.age + 1)
        start = _quantiles(calm)[1] if len(calm) <= rule.window // 8 else self.start
        trend = Trend(calm, start=start, age=self.age + 1)
        return replace(trend, bar=trend.limit(rule))

    def limit(self, rule: Divergence) -> float:
        """The largest loss that does not count as beyond; infinite while too little was seen."""
        if len(self.calm) < rule.window // 4:
            return math.inf
        lower, middle, upper = self._best(rule)
        # A quarter of the upper half's spread, so that losses that are mostly one value do not count as still.
        spread = max((middle - lower) / 0.6745, (upper - middle) / 1.2816 / 4)
        least = middle + 0.1 * abs(middle)  # a tenth more is nothing, however still it was
        return max(lower + rule.deviations * spread, _between(middle, self.start, rule.progress), least)

    def _best(self, rule: Divergence) -> tuple[float, float, float]:
        """Quantiles of the quarter of the window whose median is lowest: neither descent nor slow rise is in it."""
        size = rule.window // 4
        starts = range(len(self.calm) % size, len(self.calm), size)
        return min((_quantiles(self.calm[i : i + size]) for i in starts), key=lambda each: each[1])

    def has_diverged(self, rule: Divergence) -> bool:
        return self.beyond >= rule.sustain

    def as_dict(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in self.__slots__}
        return {**kept, "calm": list(self.calm), "undecided": list(self.undecided)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trend:
        return cls(**{**data, "calm": tuple(data["calm"]), "undecided": tuple(data["undecided"])})


def _quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median, and the point that a tenth is above of."""
    ordered, number = sorted(values), len(values)
    return ordered[number // 4], ordered[number // 2], ordered[number * 9 // 10]


def _between(low: float, high: float, share: float) -> float:
    """The point at this share of the way from ``low`` up to ``high``; in ratio if ``low`` is positive."""
    if high <= low:
        return low
    return low * (high / low) ** share if low > 0 else low + share * (high - low)
