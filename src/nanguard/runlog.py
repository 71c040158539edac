"""The run log: ``run_dir/run.jsonl``, one JSON object a line, versioned.

Every line has ``event``. The first is ``run`` (schema version, versions, device, precision, policy); then come
``incident`` (what was found, the rung that was taken, what it did, why the ones below were passed), ``overflow`` (a
routine fp16 back-off), ``drop`` (a micro-batch or gradient left out), ``eased`` (a measure taken back), ``roll_back``
(by hand), and ``end``.
JSON has no NaN or Inf, so these floats are the strings ``"nan"``, ``"inf"`` and ``"-inf"``.
"""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path
from typing import Any

SCHEMA = 1

log = logging.getLogger("nanguard")


class RunLog:
    """Appends events, each flushed as one line. A disk that fails stops the log, with a warning, never the run."""

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / "run.jsonl"
        self._works = True
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, event: str, **fields: Any) -> None:
        if not self._works:
            return
        line = json.dumps(plain({"event": event, "time": time.time(), **fields}), allow_nan=False)
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            self._works = False
            log.warning("cannot write %s (%s): the run goes on without its log", self.path, error)


def plain(value: Any) -> Any:
    """The value with floats that JSON cannot say as strings, and tuples as lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value
