"""Finds steps that were refused in a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanguard.records.run import StepRecord

_WORTH_TELLING = 10
_FEWEST = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """Refused steps at the end of the log. ``is_all``: there was no step before them."""

    optimizer: str
    count: int
    since: int
    is_all: bool

    def __str__(self) -> str:
        whose = f" of {self.optimizer}" if self.optimizer else ""
        if self.is_all:
            return f"all {self.count:,} steps{whose} were refused: nothing was learned"
        row = f"the last {self.count:,} steps{whose} in a row were refused"
        return f"{row}: nothing was learned since step {self.since:,}"


def refused_at_end(steps: Sequence[StepRecord]) -> Refused | None:
    """The longest such row of any optimizer if it is long: ten steps or more, or most of the run. Else None.

    Every step that was not applied is in the log, so a gap means applied steps.
    """
    found = [row for owner in dict.fromkeys(record.optimizer for record in steps) if (row := _row(steps, owner))]
    return max(found, key=lambda row: row.count, default=None)


def _row(steps: Sequence[StepRecord], owner: str) -> Refused | None:
    count, since, made = 0, 0, 0
    for record in reversed(steps):
        if record.optimizer != owner:
            continue
        made = made or record.step + 1
        if not record.skipped or (count and record.step != since - 1):
            break
        count, since = count + 1, record.step
    if count < _WORTH_TELLING and (count < _FEWEST or 2 * count <= made):
        return None
    return Refused(optimizer=owner, count=count, since=since, is_all=since == 0)
