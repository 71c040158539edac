"""Reads run logs: ``read_run(path)``, and ``Tape`` for one that is still being written.

Everything is checked. A line that cannot be read is skipped and listed in ``troubles``: a log that was cut off or
edited by hand is still useful. Half a line at the end is what a killed process leaves, and is ignored.
"""

from __future__ import annotations

import json
import math
from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanguard.errors import RunLogError
from nanguard.records.rebuild import built
from nanguard.records.run import RUN_LOG, EventRecord, IncidentRecord, IncidentRecords, Run, StepRecord
from nanguard.records.steps import Outcome
from nanguard.runlog.writer import SCHEMA

_CHUNK = 1 << 20
_LONGEST_LINE = 64 << 20
_LARGEST = 2**63
_MOST_TROUBLES = 1000
_WRONG = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def read_run(path: str | Path) -> Run:
    """Reads the log of a run: its folder, or the ``run.jsonl`` in it.

    Raises ``RunLogError`` if there is no such file, it cannot be read, or it is not a run log.
    """
    file = log_of(path)
    tape = Tape(file)
    try:
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                tape.feed(chunk)
    except FileNotFoundError:
        raise RunLogError(
            f"{path}: there is no run log here. Give the folder of a run, as in nanguard-runs/train, or its {RUN_LOG}"
        ) from None
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        raise RunLogError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    tape.feed_last()
    if not tape.num_read:
        why = tape.troubles[0] if tape.troubles else "it is empty or was cut off in its first line"
        raise RunLogError(f"{file} is not a run log that nanguard wrote: {why}")
    return tape.run()


def log_of(path: str | Path) -> Path:
    """The log file of a run. ``path`` is that file or the folder of the run."""
    path = Path(path)
    try:
        return path / RUN_LOG if path.is_dir() else path
    except (OSError, ValueError) as error:
        raise RunLogError(f"{str(path)!r} cannot be a path: {getattr(error, 'strerror', None) or error}") from None


@dataclass(slots=True)
class Tape:
    """Reads a run log piece by piece: ``feed`` takes more bytes, ``run`` returns what was read so far.

    If a process continued from a snapshot, the steps that it made again replace the earlier ones. If it started again
    at step 0, everything before is dropped.
    """

    path: Path
    headers: list[Mapping[str, Any]] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    incidents: list[IncidentRecord] = field(default_factory=list)
    events: list[EventRecord] = field(default_factory=list)
    end: Mapping[str, Any] | None = None
    troubles: list[str] = field(default_factory=list)
    num_read: int = 0
    _rest: bytes = b""
    _is_overlong: bool = False
    _line: int = 0
    _num_troubles: int = 0
    _went_on: set[str] = field(default_factory=set)

    def feed(self, data: bytes) -> None:
        """Takes more bytes of the file. Bytes after the last newline wait for the rest of their line."""
        *lines, rest = (self._rest + data).split(b"\n") if b"\n" in data else (self._rest + data,)
        for line in lines:
            self._line += 1
            if not self._is_overlong:
                self._read(line)
            self._is_overlong = False
        if len(rest) > _LONGEST_LINE and not self._is_overlong:
            self._trouble(f"it is longer than {_LONGEST_LINE:,} bytes", self._line + 1)
            self._is_overlong = True
        self._rest = b"" if self._is_overlong else rest

    def feed_last(self) -> None:
        """Call at the end of the file. A last line without a newline counts if it is complete, else it is ignored."""
        rest, self._rest = self._rest, b""
        if _is_whole(rest):
            self._line += 1
            self._read(rest)

    def run(self) -> Run:
        more = self._num_troubles - len(self.troubles)
        told = (*self.troubles, f"{more:,} more lines could not be read") if more else tuple(self.troubles)
        return Run(
            path=self.path,
            header=self.headers[-1] if self.headers else {},
            headers=tuple(self.headers),
            steps=tuple(self.steps),
            incidents=IncidentRecords(self.incidents),
            events=tuple(self.events),
            end=self.end,
            troubles=told,
        )

    def _trouble(self, why: str, line: int) -> None:
        self._num_troubles += 1
        if self._num_troubles <= _MOST_TROUBLES:
            self.troubles.append(f"line {line:,}: {why}")

    def _read(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            self._take(_parsed(line))
        except _WRONG as error:
            self._trouble(_reason(error), self._line)

    def _take(self, data: dict[str, Any]) -> None:
        event, time = built(str, data.pop("event", None), "event"), _time(data)
        if event == "step":
            self._take_step(_step(data, time))
        elif event == "run":
            self._take_header(data, time)
        elif event == "incident":
            self.incidents.append(_incident(data, time))
        elif event == "end":
            self.end = {**data, "time": time}
        else:
            step = data.pop("step", None)
            if event == "drop":
                step = built(Outcome, data, event).verdict.reading.step
            step = None if step is None else _whole(step, "step")
            self.events.append(EventRecord(event=event, time=time, step=step, fields=data))
        self.num_read += 1

    def _take_header(self, data: dict[str, Any], time: float) -> None:
        schema = data.get("schema")
        if isinstance(schema, int) and schema > SCHEMA:
            self._trouble(
                f"a newer nanguard wrote this log (schema {schema!r:.20}, this one reads {SCHEMA}); what is new in it "
                "is not shown",
                self._line,
            )
        self.headers.append({**data, "time": time})
        self.end = None
        self._went_on.clear()

    def _take_step(self, record: StepRecord) -> None:
        mine = record.optimizer
        if mine not in self._went_on:
            self._went_on.add(mine)
            if any(each.optimizer == mine for each in self.steps):
                self._go_back(record.step, mine)
        if self.steps and record.step < self.steps[-1].step:
            insort(self.steps, record, key=_order)  # a step near an incident, written after later steps
        else:
            self.steps.append(record)

    def _go_back(self, step: int, optimizer: str) -> None:
        """Drops the steps from this one on: they are made again."""
        self.steps = [each for each in self.steps if each.optimizer != optimizer or each.step < step]
        if step == 0:
            since = self.headers[-1]["time"] if self.headers else math.inf
            self.headers = self.headers[-1:]
            self.incidents = [each for each in self.incidents if each.optimizer != optimizer or each.time >= since]
            self.events = [e for e in self.events if e.fields.get("optimizer", "") != optimizer or e.time >= since]


def _order(record: StepRecord) -> int:
    return record.step


def _is_whole(line: bytes) -> bool:
    try:
        return bool(_parsed(line))
    except _WRONG:
        return False


def _parsed(line: bytes) -> dict[str, Any]:
    data = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
    if not isinstance(data, dict) or "event" not in data:
        raise ValueError("it is not a line of nanguard: not an object with an event")
    return data


def _step(data: dict[str, Any], time: float) -> StepRecord:
    batch = data.get("batch")
    return StepRecord(
        step=_whole(data.get("step"), "step"),
        time=time,
        epoch=_whole(data.get("epoch"), "epoch"),
        batch=None if batch is None else _whole(batch, "batch"),
        loss=built(float, data.get("loss"), "loss"),
        norms=built(tuple[float, ...], data.get("norms"), "norms"),
        lrs=tuple(math.nan if lr is None else built(float, lr, "lrs") for lr in _list(data.get("lrs"), "lrs")),
        scale=built(float | None, data.get("scale"), "scale"),
        skipped=built(bool, data.get("skipped", False), "skipped"),
        optimizer=built(str, data.get("optimizer", ""), "optimizer"),
    )


def _incident(data: dict[str, Any], time: float) -> IncidentRecord:
    return IncidentRecord(
        number=_whole(data.get("number"), "number"),
        time=time,
        outcome=built(Outcome, data, "incident"),
        optimizer=built(str, data.get("optimizer", ""), "optimizer"),
    )


def _time(data: dict[str, Any]) -> float:
    time: float = built(float, data.pop("time", None), "time")
    if not math.isfinite(time):
        raise ValueError(f"time: expected a finite number, got {time}")
    return time


def _whole(value: Any, at: str) -> int:
    number: int = built(int, value, at)
    if not 0 <= number < _LARGEST:
        raise ValueError(f"{at}: expected a whole number from 0 to 2**63 - 1, got {number!r:.60}")
    return number


def _list(value: Any, at: str) -> Iterator[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{at}: expected a list, got {value!r:.60}")
    return iter(value)


def _no_constant(text: str) -> Any:
    raise ValueError(f"it holds {text}, which is no JSON")


def _reason(error: BaseException) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"it is incomplete or not JSON ({error.msg} at column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error) if isinstance(error, ValueError) and str(error) else f"{type(error).__name__}: {error}"
