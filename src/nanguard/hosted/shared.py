"""What the optimizers of one run share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from nanguard.diagnosis.search import Search
from nanguard.step.repeats import RepeatCounter


@dataclass(frozen=True, slots=True)
class Shared:
    """``search`` decides which steps are traced, and ``numbers`` are those of incidents.

    ``repeats`` counts faults that come again: one that hits several optimizers is one fault.
    """

    search: Search = field(default_factory=Search)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    repeats: RepeatCounter = field(default_factory=lambda: RepeatCounter(skips_only=True))
