"""A run log as records: what ``read_run`` returns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from nanguard.records.steps import Incident

RUN_LOG = "run.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step. ``norms`` are gradient norms before clipping, one for each parameter group.

    ``lrs`` are learning rates, one for each group; NaN if only the device knew it. A ``skipped`` step changed nothing.
    ``optimizer`` is empty if one guard wrote the log.
    """

    step: int
    time: float
    epoch: int
    batch: int | None
    loss: float
    norms: tuple[float, ...]
    lrs: tuple[float, ...]
    scale: float | None
    skipped: bool
    optimizer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EventRecord:
    """Another event: ``overflow``, ``drop``, ``eased``, ``roll_back``, ``alert`` or ``answered``.

    ``fields`` are as written.
    """

    event: str
    time: float
    step: int | None
    fields: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class IncidentRecord(Incident):
    """An incident in a run log, with the time of its line. ``optimizer`` is empty if one guard wrote the log."""

    time: float
    optimizer: str = ""


class IncidentRecords(tuple[IncidentRecord, ...]):
    """Incidents of a run log in order. A tuple that a notebook shows as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """The HTML for a notebook."""
        from nanguard.records.notebook import incidents_html

        return incidents_html(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The contents of a run log.

    ``header`` is that of the last process that wrote the log, ``headers`` are those of all. ``steps`` are in order,
    each once. ``end`` is None if the last process did not close its log. ``troubles`` has a sentence for each line that
    could not be read.
    """

    path: Path
    header: Mapping[str, Any]
    headers: tuple[Mapping[str, Any], ...]
    steps: tuple[StepRecord, ...]
    incidents: IncidentRecords
    events: tuple[EventRecord, ...]
    end: Mapping[str, Any] | None
    troubles: tuple[str, ...]

    @property
    def is_over(self) -> bool:
        """Whether the run ended normally. False if it was killed or halted, or still runs."""
        return self.end is not None

    @property
    def halted_at(self) -> int | None:
        """The step at which training was halted; None if it was not, or if steps were applied after that."""
        last = self.incidents[-1] if self.incidents else None
        if last is None or last.outcome.action.response != "halt":
            return None
        goes_on = any(each.time > last.time and not each.skipped for each in self.steps[-1000:])
        return None if goes_on else last.reading.step

    @property
    def name(self) -> str:
        """The name of the folder."""
        folder = self.path.parent if self.path.name == RUN_LOG else self.path
        return folder.resolve().name if folder.name in ("", ".", "..") else folder.name

    def _repr_html_(self) -> str:
        """The HTML for a notebook."""
        from nanguard.records.notebook import run_html

        return run_html(self)

    def frame(self) -> Any:
        """The steps as a ``pandas.DataFrame`` with columns ``norm_0``, ... and ``lr_0``, ... for the groups."""
        try:
            pandas: Any = import_module("pandas")
        except ImportError as error:
            raise ImportError("Run.frame() needs pandas, which is not installed: pip install pandas") from error
        norms = max((len(each.norms) for each in self.steps), default=0)
        lrs = max((len(each.lrs) for each in self.steps), default=0)
        columns: dict[str, Any] = {
            "step": pandas.array([each.step for each in self.steps], dtype="int64"),
            "time": [each.time for each in self.steps],
            "epoch": pandas.array([each.epoch for each in self.steps], dtype="int64"),
            "batch": pandas.array([each.batch for each in self.steps], dtype="Int64"),
            "loss": [each.loss for each in self.steps],
            **{f"norm_{n}": [_at(each.norms, n) for each in self.steps] for n in range(norms)},
            **{f"lr_{n}": [_at(each.lrs, n) for each in self.steps] for n in range(lrs)},
            "scale": [math.nan if each.scale is None else each.scale for each in self.steps],
            "skipped": pandas.array([each.skipped for each in self.steps], dtype="bool"),
            "optimizer": [each.optimizer for each in self.steps],
        }
        return pandas.DataFrame(columns)


def can_run_again(header: Mapping[str, Any]) -> bool:
    """Whether ``nanguard replay`` finds the model of a run by running its program."""
    return bool(header.get("script")) and not header.get("is_child")


def _at(values: tuple[float, ...], place: int) -> float:
    return values[place] if place < len(values) else math.nan
