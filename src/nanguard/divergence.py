"""When a finite loss has diverged: beyond its own past by a rule that outliers do not move and NaN cannot fool.

A single loss far out is an outlier of the data; so the rule waits until there are ``sustain`` more of them than of
others. And what counts as far is measured in three ways at once: by the spread of the recent past (median and median
deviation), by its largest value, and by how much of all progress since the start would be lost. While it is undecided,
no loss joins the past that it is held against, and non-finite ones never do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """A loss counts as beyond its past when it is above all of

    - the median of the last ``window`` losses plus ``deviations`` times their spread,
    - the largest of them,
    - the point where ``progress`` of what the loss has come down since the start is lost again.

    ``sustain`` such losses, each other one in between counting against, are a divergence. Half a window must have been
    seen before the rule speaks.
    """

    window: int = 64
    deviations: float = 5.0
    progress: float = 0.5
    sustain: int = 8

    def __post_init__(self) -> None:
        if self.window < 8 or self.sustain < 1 or not self.deviations > 0 or not self.progress >= 0:
            raise ValueError(
                "Divergence needs window >= 8, sustain >= 1, deviations > 0 and progress >= 0, got "
                f"window={self.window!r}, sustain={self.sustain!r}, deviations={self.deviations!r}, "
                f"progress={self.progress!r}"
            )


@dataclass(frozen=True, slots=True)
class Trend:
    """The losses of applied steps so far, as far as the rule looks back: ``start`` is their first level.

    ``beyond`` of them, less the others since, are beyond the ``calm`` past; the first was ``since`` losses ago.
    """

    calm: tuple[float, ...] = ()
    beyond: int = 0
    since: int = 0
    start: float = math.nan

    def after(self, loss: float, rule: Divergence) -> Trend:
        """The trend with one more loss. A non-finite one changes nothing."""
        if not math.isfinite(loss):
            return self
        # The limit is no lower than the largest of the past: most losses need no median.
        if self.calm and loss > max(self.calm) and loss > self.limit(rule):
            return replace(self, beyond=self.beyond + 1, since=self.since + 1)
        if self.beyond > 1:
            return replace(self, beyond=self.beyond - 1, since=self.since + 1)
        calm = (*self.calm[-rule.window + 1 :], loss)
        start = _median(calm) if len(calm) <= rule.window // 2 else self.start
        return Trend(calm, start=start)

    def limit(self, rule: Divergence) -> float:
        """The largest loss that does not count as beyond; infinite while too little was seen."""
        if len(self.calm) < rule.window // 2:
            return math.inf
        middle = _median(self.calm)
        spread = 1.4826 * _median([abs(loss - middle) for loss in self.calm])
        lost = middle + rule.progress * max(self.start - middle, 0.0)
        return max(middle + rule.deviations * spread, max(self.calm), lost)

    def has_diverged(self, rule: Divergence) -> bool:
        return self.beyond >= rule.sustain

    def as_dict(self) -> dict[str, Any]:
        return {"calm": list(self.calm), "beyond": self.beyond, "since": self.since, "start": self.start}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trend:
        return cls(tuple(data["calm"]), data["beyond"], data["since"], data["start"])


def _median(values: Sequence[float]) -> float:
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2
