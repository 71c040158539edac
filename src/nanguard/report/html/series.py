"""The steps of a run as curves: compact arrays that a browser decodes bit for bit.

An array is ``{"n": 3, "start": 0, "by": 1}`` if it is evenly spaced (``by`` is 0 for a constant), else
``{"n": 3, "f32": base64}``, or ``f64`` if 32 bits would lose precision. NaN and Inf are kept.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanguard.records.run import Run, StepRecord

_MOST_CURVES = 16
"""Curves of one kind. The chart must stay readable with hundreds of parameter groups."""


def curves_of(run: Run) -> dict[str, Any]:
    """The ``steps`` of each optimizer, and the curves of each panel: ``loss``, ``norm``, ``lr`` and ``scale``."""
    panels: dict[str, list[dict[str, Any]]] = {"loss": [], "norm": [], "lr": [], "scale": []}
    steps: list[dict[str, Any]] = []
    owners = sorted({record.optimizer for record in run.steps})
    for owner in owners:
        records = [record for record in run.steps if record.optimizer == owner]
        prefix = f"{owner} · " if len(owners) > 1 else ""
        for panel, label, values in _columns(records, _names(run, owner)):
            if any(map(math.isfinite, values)):
                panels[panel].append({"label": f"{prefix}{label}", "steps": len(steps), "y": packed(values)})
        steps.append(packed([float(record.step) for record in records]))
    return {"steps": steps, "panels": panels}


def all_nonfinite(run: Run) -> Iterator[str]:
    """A sentence for each curve that cannot be drawn because no value of it is finite."""
    for owner in sorted({record.optimizer for record in run.steps}):
        records = [record for record in run.steps if record.optimizer == owner]
        for panel, label, values in _columns(records, _names(run, owner)):
            if panel in ("loss", "norm") and not any(map(math.isfinite, values)):
                what = "loss" if panel == "loss" else f"gradient norm of {label}"
                yield f"The {what} is NaN or Inf in all {len(values):,} steps, so there is nothing to draw."


def _columns(records: Sequence[StepRecord], names: Sequence[str]) -> Iterator[tuple[str, str, list[float]]]:
    """Panel, label and values of each curve of one optimizer. ``names`` are those of its parameter groups."""
    yield "loss", "loss", [record.loss for record in records]
    for panel, rows in (("norm", [r.norms for r in records]), ("lr", [r.lrs for r in records])):
        number = max(map(len, rows), default=0)
        for place in range(min(number, _MOST_CURVES)):
            unnamed = "all parameters" if number == 1 else f"group {place}"
            label = names[place] if len(names) >= number else unnamed
            yield panel, label, [r[place] if place < len(r) else math.nan for r in rows]
    yield "scale", "loss scale", [math.nan if record.scale is None else record.scale for record in records]


def _names(run: Run, owner: str) -> list[str]:
    """The names of the parameter groups in the header of this optimizer."""
    more = [event.fields for event in run.events if event.event == "optimizer"]
    for header in reversed([*run.headers, *more]):
        names = header.get("groups")
        if header.get("optimizer", "") == owner and isinstance(names, (list, tuple)):
            return [name if isinstance(name, str) and name else f"group {i}" for i, name in enumerate(names)]
    return []


def packed(values: Sequence[float]) -> dict[str, Any]:
    """An array in the form that the page uses."""
    if _is_even(values):
        by = values[1] - values[0] if len(values) > 1 else 0.0
        return {"n": len(values), "start": values[0], "by": by}
    # A double beyond the range of fp32 becomes Inf, which is not equal to it. Then all values stay doubles.
    single = array("f", [_clipped(v) for v in values])
    is_exact = all(s == v or (s != s and v != v) for s, v in zip(single, values, strict=True))
    numbers = single if is_exact else array("d", values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return {"n": len(values), "f32" if is_exact else "f64": base64.b64encode(numbers.tobytes()).decode("ascii")}


def _is_even(values: Sequence[float]) -> bool:
    if not values or not math.isfinite(values[0]):
        return False
    by = values[1] - values[0] if len(values) > 1 else 0.0
    return math.isfinite(by) and all(value == values[0] + place * by for place, value in enumerate(values))


def _clipped(value: float) -> float:
    """A value that ``array("f")`` accepts: larger doubles raise there on some systems."""
    return math.copysign(math.inf, value) if abs(value) > 3.5e38 else value
