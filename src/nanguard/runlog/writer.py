"""Writes the run log ``run_dir/run.jsonl``: one JSON object per line, versioned. ``read_run`` reads it.

Every line has ``event`` and ``time``. ``run`` comes first (schema, versions, device, precision, policy); then come
``step`` (loss, norms, learning rates, loss scale), ``incident`` (what was found, the rung that was taken, what it did,
why lower rungs were not taken), ``overflow`` (a routine fp16 back-off), ``drop`` (a dropped micro-batch or gradient),
``eased`` (a mitigation that ended), ``answered`` (what a rung did about a warning), ``roll_back`` (called by the user),
and ``end``.
JSON has no NaN or Inf, so these floats are written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
import weakref
from collections import deque
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from nanguard.records.healthy import SoundStep
from nanguard.records.plain import plain
from nanguard.records.run import RUN_LOG
from nanguard.records.steps import Reading
from nanguard.run_folder import RunFolder

SCHEMA = 2

EVERY_STEP_UNTIL = 8192
"""After this step, fewer and fewer steps are written."""

AROUND = 64
"""Every step within this distance of an incident is written."""

_MOST_SURROUNDED = 500
"""After this many incidents, the steps around them are no longer written, so that the log stays small."""

_LONGEST_GAP = 60.0
"""A step is written at least every so many seconds, which shows that a slow run is alive."""

_SECONDS_UNWRITTEN = 1.0
_LINES_UNWRITTEN = 512
_SKIPPED = ',"skipped":true'
_FRAME = ("run", "optimizer", "end")
"""Events around the steps. A run with nothing else gets no folder."""

log = logging.getLogger("nanguard")

Numbers = tuple[float | None, ...]
StepFacts = tuple[float, "Reading | SoundStep", bool]


def stride(step: int) -> int:
    """One in this many steps is written around this step: a power of two that grows with the run."""
    return 1 << (step // EVERY_STEP_UNTIL).bit_length()


class RunLog:
    """Appends events. If the disk fails, the log stops with a warning and the run goes on.

    Steps are buffered and written about once a second, other events at once. The rest is written when the log is
    deleted or the interpreter exits. A forked process does not write what its parent has buffered.

    A path is created at once, a ``RunFolder`` with the first step or incident.
    """

    def __init__(self, run_dir: str | Path | RunFolder, *, optimizer: str = "") -> None:
        self._folder = run_dir if isinstance(run_dir, RunFolder) else RunFolder(run_dir)
        if self._folder is not run_dir:
            self._folder.make()
        self._pages = _Pages(self._folder, optimizer)
        weakref.finalize(self, self._pages.finish)

    @property
    def path(self) -> Path:
        return self._folder.path / RUN_LOG

    def write(self, event: str, **fields: Any) -> None:
        """Writes one event to disk. If there is no folder yet, the header waits for it."""
        self._pages.add_event(event, fields)

    def write_incident(self, event: str, **fields: Any) -> None:
        """Writes one event, and every step around it."""
        self._pages.add_neighbours()
        self._pages.add_event(event, fields)

    def write_step(self, reading: Reading, *, skipped: bool) -> None:
        """Adds a step. It is written soon, or held in case an incident follows, and then dropped."""
        self._pages.add_step(reading, skipped=skipped)

    def write_sound_steps(self, steps: Sequence[SoundStep]) -> None:
        """As ``write_step`` for each of them, in less time."""
        self._pages.add_sound_steps(steps)

    def close(self) -> None:
        """Writes what is buffered, including the last step."""
        self._pages.finish()


class _Pages:
    """The buffered lines and the held steps. It has no reference to its ``RunLog``, which may be deleted first."""

    def __init__(self, folder: RunFolder, optimizer: str) -> None:
        self._folder = folder
        self._by = {"optimizer": optimizer} if optimizer else {}
        self._by_text = f',"optimizer":{json.dumps(optimizer)}' if optimizer else ""
        self._pid = os.getpid()
        self._works = True
        self._is_worth_keeping = False
        self._is_begun = False
        self._header = b""
        self._lines: list[str | StepFacts] = []
        self._held: deque[StepFacts] = deque(maxlen=AROUND)
        self._all_for = AROUND
        self._surrounded = 0
        self._flushed_at = self._step_at = time.time()
        self._lrs: Numbers = ()
        self._now, self._start, self._rest = 0.0, "", ""

    def add_step(self, reading: Reading, *, skipped: bool) -> None:
        if self._works:
            now = time.time()
            self._leave_to_parent()
            self._add(now, reading.step, (now, reading, skipped), always=skipped)
            self._flush_if_due(now)

    def add_sound_steps(self, steps: Sequence[SoundStep]) -> None:
        if self._works:
            now = time.time()
            self._leave_to_parent()
            for each in steps:
                self._add(now, each[0], (now, each, False))
            self._flush_if_due(now)

    def _add(self, now: float, step: int, facts: StepFacts, *, always: bool = False) -> None:
        is_wanted = always or step < EVERY_STEP_UNTIL or self._all_for > 0 or step % stride(step) == 0
        if is_wanted or not 0 <= now - self._step_at < _LONGEST_GAP:  # the clock may be set back
            self._all_for -= 1
            self._step_at = now
            self._lines.append(facts)
        else:
            self._held.append(facts)

    def _flush_if_due(self, now: float) -> None:
        self._is_worth_keeping = True
        is_due = not 0 <= now - self._flushed_at < _SECONDS_UNWRITTEN or len(self._lines) >= _LINES_UNWRITTEN
        if is_due or not self._folder.is_made:
            self._flush(now)

    def add_neighbours(self) -> None:
        """Writes the steps before the incident now, and those after it as they come."""
        self._leave_to_parent()
        self._surrounded += 1
        if self._surrounded <= _MOST_SURROUNDED:
            self._lines += self._held
            self._held.clear()
            self._all_for = AROUND

    def add_event(self, event: str, fields: dict[str, Any]) -> None:
        if not self._works:
            return
        self._leave_to_parent()
        self._is_worth_keeping = self._is_worth_keeping or event not in _FRAME
        now = time.time()
        line = {"event": event, "time": round(now, 3), **fields, **self._by}
        text = json.dumps(plain(line), allow_nan=False) + "\n"
        self._lines.append(text)
        if event == "run":
            self._header = text.encode("utf-8")
        self._flush(now)

    def finish(self) -> None:
        self._leave_to_parent()
        if self._held:
            self._lines.append(self._held.pop())
        self._held.clear()
        if self._folder.is_made and not self._folder.path.exists():  # it was removed during the run
            self._lines.clear()
        self._flush(time.time())

    def _line_of(self, facts: StepFacts) -> str:
        now, reading, skipped = facts
        if isinstance(reading, tuple):
            return self._line_of_sound(now, *reading)
        rest = _SKIPPED + self._by_text if skipped else self._by_text
        at = "null" if reading.batch is None else reading.batch
        norms, lrs = ",".join(map(_number, reading.norms)), ",".join(map(_number, reading.lrs))
        return (
            f'{{"event":"step","time":{now:.3f},"step":{reading.step},"epoch":{reading.epoch},"batch":{at}'
            f',"loss":{_number(reading.loss)},"norms":[{norms}],"lrs":[{lrs}],"scale":{_number(reading.scale)}{rest}}}\n'
        )

    def _line_of_sound(self, now: float, step: int, loss: float, norms: Numbers, lrs: Numbers) -> str:
        """The same in half the time. What is the same for many steps is put together once."""
        if now != self._now or lrs != self._lrs:
            self._now, self._lrs = now, lrs
            self._start = f'{{"event":"step","time":{now:.3f},"step":'
            self._rest = f'],"lrs":[{",".join(map(_number, lrs))}],"scale":null{self._by_text}}}\n'
        norm = repr(norms[0]) if len(norms) == 1 else ",".join(map(_number, norms))
        at = '"nan"' if loss != loss else repr(loss)
        return f'{self._start}{step},"epoch":0,"batch":null,"loss":{at},"norms":[{norm}{self._rest}'

    def _leave_to_parent(self) -> None:
        """Drops what a forked process has inherited: its parent writes it."""
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self._lines.clear()
            self._held.clear()

    def _flush(self, now: float) -> None:
        self._flushed_at = now
        # If this is interrupted, lines are lost rather than written twice.
        added, self._lines = self._lines, []
        if not added or not self._works:
            return
        lines = [each if isinstance(each, str) else self._line_of(each) for each in added]
        if not self._folder.is_made and not self._is_worth_keeping:
            self._folder.hold(lines)
            return
        try:
            path = self._folder.make() / RUN_LOG
            self._append(path, "".join([*self._folder.release(), *lines]).encode("utf-8"))
        except OSError as error:
            self._works = False
            self._held.clear()
            path = self._folder.path / RUN_LOG
            log.warning("cannot write %s (%s): the run goes on without its log", path, error)

    def _append(self, path: Path, data: bytes) -> None:
        """Opens the file each time: it may have been moved, and a forked process must not inherit it."""
        with path.open("ab+", buffering=0) as file:
            if not self._is_begun:
                data = _after_torn_line(file) + data
                self._is_begun = True
            elif file.seek(0, os.SEEK_END) == 0:
                log.warning("%s was removed during the run: a new one begins here", path)
                data = self._header + data
            while data:
                data = data[file.write(data) :]


def _after_torn_line(file: FileIO) -> bytes:
    """A newline if a killed process has left half a line."""
    if file.seek(0, os.SEEK_END) == 0:
        return b""
    file.seek(-1, os.SEEK_END)
    return b"" if file.read(1) == b"\n" else b"\n"


def _number(value: float | None) -> str:
    if value is None:
        return "null"
    return repr(float(value)) if math.isfinite(value) else f'"{float(value)}"'
