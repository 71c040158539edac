"""Observers that write to TensorBoard, Weights & Biases and MLflow. A package is imported when its logger is made.

Everything they write is on the host already: nothing here syncs.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanguard.integrations.first_rank import is_first_rank
from nanguard.integrations.packages import require
from nanguard.records.alert import Alert
from nanguard.records.panel import headline, panel, repeated
from nanguard.records.steps import Incident, Outcome
from nanguard.step.observers import Observer
from nanguard.step.repeats import RepeatCounter

_PREFIX = "nanguard/"


class MetricsLogger(Observer, ABC):
    """What all loggers have in common. ``every`` is the number of steps between two points of a curve.

    A point has the mean loss and the largest gradient norm of the steps since the point before it; steps that were not
    applied are left out of both. Incidents and warnings are written at once. A fault that repeats is written the first
    three times, then the 10th, 30th, 100th time, and so on. Only rank 0 writes.
    """

    def __init__(self, *, every: int = 50) -> None:
        if not (isinstance(every, int) and every >= 1):
            raise ValueError(f"every must be a whole number of steps from 1, got {every!r}")
        self._every = every
        self._groups: Sequence[str] = ()
        self._repeats = RepeatCounter()
        self._counts = {"skipped": 0, "overflows": 0, "incidents": 0, "alerts": 0}
        self._losses: list[float] = []
        self._norms: list[tuple[float, ...]] = []
        self._last: Outcome | None = None
        self._num_heard = 0
        self._is_open = False

    # ---- what a logger has to do -----------------------------------------------------------------------------------

    @abstractmethod
    def _open(self) -> None:
        """Called once on rank 0, before anything is written."""

    @abstractmethod
    def _write_numbers(self, step: int, numbers: dict[str, float]) -> None: ...

    @abstractmethod
    def _write_text(self, step: int, what: str, title: str, text: str) -> None:
        """``what`` is ``incidents`` or ``alerts``."""

    @abstractmethod
    def _flush(self) -> None:
        """What was written is safe if the process ends now."""

    @abstractmethod
    def _close(self) -> None:
        """Only what ``_open`` has opened is closed: a writer or a run that the user made is the user's."""

    # ---- as an observer --------------------------------------------------------------------------------------------

    def on_event(self, event: str, fields: Mapping[str, Any]) -> None:
        if event == "run":
            self._groups = fields.get("groups", ())
        if not self._is_ready():
            return
        if event == "alert":
            self._tell_of_alert(Alert.from_dict(dict(fields)))
        elif event == "headroom":
            rooms = {f"headroom/{name or 'model'}": room for name, room in fields["rooms"].items()}
            self._write_numbers(fields["step"], _finite(rooms))

    def on_heard(self, outcome: Outcome) -> None:
        reading, self._last = outcome.verdict.reading, outcome
        self._num_heard += 1
        if outcome.applied:
            self._losses.append(reading.mean_loss if math.isfinite(reading.mean_loss) else reading.loss)
            self._norms.append(reading.norms)
        else:
            self._counts["overflows" if outcome.action.response == "back_off" else "skipped"] += 1
        goes_on = outcome.applied or outcome.action.response == "back_off"
        if self._num_heard >= self._every and goes_on:  # else an incident follows, and writes the point
            self._write_point()

    def on_incident(self, incident: Incident) -> None:
        self._counts["incidents"] += 1
        seen = self._repeats.count(incident)
        if not self._is_ready() or not seen.is_worth_telling:
            return
        self._write_point()
        text = panel(incident) if seen.count == 1 else repeated(incident, same_as=seen.step, count=seen.count)
        title = f"step {incident.reading.step:,}: {headline(incident.outcome)}"
        self._write_text(incident.reading.step, "incidents", title, text)
        self._flush()  # after a halt nothing else comes

    def on_close(self, num_steps: int, counts: Mapping[str, int]) -> None:
        if self._is_open:
            self._write_point()
            self._flush()
            self._close()
            self._is_open = False

    def state_dict(self) -> dict[str, Any]:
        """The counts, which go on after a resume."""
        return dict(self._counts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._counts |= state

    def _is_ready(self) -> bool:
        """Opens the logger before its first use. False on other ranks."""
        if not self._is_open and is_first_rank():
            self._open()
            self._is_open = True
        return self._is_open

    def _tell_of_alert(self, alert: Alert) -> None:
        self._counts["alerts"] += alert.state == "raised"
        where = f"{alert.module}: " if alert.module else ""
        title = f"step {alert.step:,}: {where}{alert.reason}"
        self._write_text(alert.step, "alerts", title, f"step {alert.step:,}: {where}{alert.message}")

    def _write_point(self) -> None:
        last, losses, norms = self._last, self._losses, self._norms
        self._last, self._losses, self._norms, self._num_heard = None, [], [], 0
        if last is None or not self._is_ready():
            return
        reading = last.verdict.reading
        numbers: dict[str, float | None] = dict(self._counts)
        if losses:
            numbers["loss"] = math.fsum(losses) / len(losses)
        if norms:
            numbers["grad_norm"] = max(math.hypot(*each) for each in norms)
            if len(reading.norms) > 1:
                largest = (max(of_group) for of_group in zip(*norms, strict=False))
                numbers |= {f"grad_norm/{self._group(place)}": norm for place, norm in enumerate(largest)}
        if len(reading.lrs) > 1:
            numbers |= {f"lr/{self._group(place)}": rate for place, rate in enumerate(reading.lrs)}
        elif reading.lrs:
            numbers["lr"] = reading.lrs[0]
        numbers["loss_scale"] = reading.scale
        self._write_numbers(reading.step, _finite(numbers))

    def _group(self, place: int) -> str:
        return self._groups[place] if place < len(self._groups) else f"group {place}"


class TensorBoard(MetricsLogger):
    """Writes to a ``SummaryWriter``, or to a new one in a folder: ``TensorBoard("runs/a")``."""

    def __init__(self, writer_or_dir: Any, *, every: int = 50) -> None:
        super().__init__(every=every)
        require("tensorboard", tested=("2.14", "3"), extra="tensorboard")
        is_folder = isinstance(writer_or_dir, (str, Path))
        if not is_folder and not hasattr(writer_or_dir, "add_scalar"):
            raise ValueError(f"writer_or_dir must be a folder or a SummaryWriter, got {writer_or_dir!r}")
        self._folder = str(writer_or_dir) if is_folder else None
        self._writer: Any = None if is_folder else writer_or_dir

    def _open(self) -> None:
        if self._folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._folder)

    def _write_numbers(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(_PREFIX + name, value, step)

    def _write_text(self, step: int, what: str, title: str, text: str) -> None:
        as_code = "\n".join(f"    {line}" for line in text.splitlines())  # TensorBoard shows Markdown
        self._writer.add_text(_PREFIX + what, f"**{title}**\n\n{as_code}", step)

    def _flush(self) -> None:
        self._writer.flush()

    def _close(self) -> None:
        if self._folder is not None:
            self._writer.close()


class WandB(MetricsLogger):
    """Writes to ``run``, by default the current run of Weights & Biases, or a new one if there is none.

    The numbers have an axis of their own, ``nanguard/step``. Incidents and warnings are also sent as W&B alerts.
    """

    def __init__(self, run: Any = None, *, every: int = 50) -> None:
        super().__init__(every=every)
        self._wandb: Any = require("wandb", tested=("0.16", "1"), extra="wandb")
        self._run, self._is_ours = run, False
        self._row, self._in_row = -1, dict[str, Any]()

    def _open(self) -> None:
        self._run = self._run or self._wandb.run
        if self._run is None:
            self._run, self._is_ours = self._wandb.init(), True
        self._run.define_metric(f"{_PREFIX}step")
        self._run.define_metric(f"{_PREFIX}*", step_metric=f"{_PREFIX}step")

    def _write_numbers(self, step: int, numbers: dict[str, float]) -> None:
        self._log(step, numbers)

    def _write_text(self, step: int, what: str, title: str, text: str) -> None:
        self._log(step, {what.removesuffix("s"): text})
        self._run.alert(title, text, level="WARN")

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds to the row that the user writes next. It is ended first only if it would lose something of ours.

        A row for each call would move W&B's own step on, and calls of the user with ``step=`` would be refused.
        """
        if self._run.step != self._row:
            self._in_row = {}
        elif self._in_row.keys() & values.keys():
            self._run.log({}, commit=True)
            self._in_row = {}
        self._in_row |= {**values, "step": max(step, self._in_row.get("step", step))}
        self._run.log({_PREFIX + name: value for name, value in self._in_row.items()}, commit=False)
        self._row = self._run.step

    def _flush(self) -> None:
        """W&B writes in a process of its own, which goes on if this one dies."""

    def _close(self) -> None:
        if self._is_ours:
            self._run.finish()


class MLflow(MetricsLogger):
    """Writes to the run ``run_id``, by default the active run of MLflow, or a new one if there is none.

    Numbers go to a server in the background, to a local store at once. Texts are artifacts in the folder ``nanguard``.
    """

    def __init__(self, run_id: str | None = None, *, every: int = 50) -> None:
        super().__init__(every=every)
        self._mlflow: Any = require("mlflow", tested=("2.14", "4"), extra="mlflow", package="mlflow-skinny")
        self._run_id, self._is_ours, self._is_remote = run_id, False, False
        self._num_texts = 0

    def _open(self) -> None:
        if self._run_id is None:
            active = self._mlflow.active_run()
            self._is_ours = active is None
            self._run_id = (active or self._mlflow.start_run()).info.run_id
        # In a local store, a reader may fail on a metric that another thread has half written.
        self._is_remote = self._mlflow.get_tracking_uri().startswith(("http", "databricks"))

    def _write_numbers(self, step: int, numbers: dict[str, float]) -> None:
        allowed = {_PREFIX + re.sub(r"[^\w\-./: ]", "_", name): value for name, value in numbers.items()}
        self._mlflow.log_metrics(allowed, step=step, run_id=self._run_id, synchronous=not self._is_remote)

    def _write_text(self, step: int, what: str, title: str, text: str) -> None:
        self._num_texts += 1
        file = f"{_PREFIX}{self._num_texts:04d}-step-{step}-{what.removesuffix('s')}.txt"
        self._mlflow.log_text(f"{title}\n\n{text}\n", file, run_id=self._run_id)

    def _flush(self) -> None:
        if self._is_remote:
            self._mlflow.flush_async_logging()

    def _close(self) -> None:
        if self._is_ours:
            self._mlflow.end_run()


def _finite(numbers: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}
