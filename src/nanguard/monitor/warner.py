"""Turns series into warnings. Pure: it sees numbers on the host, and its state is plain JSON."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from nanguard.monitor.quantities import KINDS, Quantity, Samples
from nanguard.monitor.series import Series
from nanguard.monitor.trend import FEWEST_POINTS, Forecast, forecast
from nanguard.records.alert import Alert, AlertState

TIMES_BEST = 3.0
"""A loss that stays above so many times its best counts as diverged."""

_CONFIRMED = 2
"""A forecast has to be made so many times in a row."""

HORIZON = 0.8
"""A forecast may look ahead this many times as far as its trend has been seen."""

_CALM = 3
"""A warning is withdrawn after so many looks in a row without a forecast."""

_FORGIVING = 2.0
"""A warning stays as long as its limit is within so many times the horizon."""

_MOVED = 2.0
"""A forecast is told again if the number of steps left has changed by this factor."""

_MOST_ACTIVE = 3
"""One cause shows in many modules: those that run out first are named."""

_LOSSES = 32
"""The best loss is the lowest mean of so many in a row."""

LOSS = Quantity(kind="loss", module="")
SCALE = Quantity(kind="scale", module="")


@dataclass(slots=True)
class _Watched:
    """One quantity: its past, and how often in a row there was a forecast, or none."""

    series: Series = field(default_factory=Series)
    limit: float = 1.0
    in_a_row: int = 0
    calm: int = 0


class Warner:
    """Takes what was measured, step by step, and says what changed in its warnings.

    ``kinds`` are the kinds of quantities that may raise a warning. A forecast counts if its limit is no further away
    than ``horizon`` times the length of the trend.
    """

    def __init__(self, kinds: Collection[str] = KINDS, *, horizon: float = HORIZON) -> None:
        self._kinds = frozenset(kinds)
        self._horizon = horizon
        self._watched: dict[Quantity, _Watched] = {}
        self._active: dict[Quantity, Alert] = {}
        self._num_alerts = 0
        self._recent: deque[float] = deque(maxlen=_LOSSES)
        self._since_look: list[float] = []
        self._best = math.inf

    @property
    def active(self) -> tuple[Alert, ...]:
        """The warnings that stand, the most urgent first."""
        return tuple(sorted(self._active.values(), key=lambda alert: alert.crossing))

    def rooms(self) -> dict[str, float]:
        """The least room of each module in bits, by the last look; gradients that vanish and losses are not in it."""
        least: dict[str, float] = {}
        for quantity, watched in self._watched.items():
            if quantity.kind in ("overflow", "zero") and watched.series.rooms:
                room = watched.series.rooms[-1]
                least[quantity.module] = min(room, least.get(quantity.module, math.inf))
        return least

    def room_of(self, quantity: Quantity) -> float:
        """Its room by the last look; infinite if it was not seen."""
        watched = self._watched.get(quantity)
        return watched.series.rooms[-1] if watched is not None and watched.series.rooms else math.inf

    def hear(self, loss: float) -> None:
        """The loss of a step that was applied."""
        if math.isfinite(loss):
            self._since_look.append(loss)
            self._recent.append(loss)
            if len(self._recent) == _LOSSES:
                self._best = min(self._best, math.fsum(self._recent) / _LOSSES)

    def look(self, step: int, samples: Samples) -> list[Alert]:
        """Takes what a probe has measured, and returns the warnings that were raised, updated or withdrawn."""
        seen = [*self._add(step, samples), *self._add_loss(step)]
        forecasts = {quantity: self._forecast(quantity) for quantity in seen}
        changed = [*self._follow_up(step, forecasts)]
        new = self._most_urgent(forecasts)
        if new is not None:
            self._num_alerts += 1
            alert = self._alert(new, forecasts[new], step, "raised", self._num_alerts)  # type: ignore[arg-type]
            self._active[new] = alert
            changed.append(alert)
        return changed

    def _add(self, step: int, samples: Samples) -> Iterator[Quantity]:
        for quantity, (value, limit) in samples.items():
            yield from self._add_room(step, quantity, quantity.room(value, limit), limit)

    def _add_loss(self, step: int) -> Iterator[Quantity]:
        """One point for each look, so that it is as dense as the others, and no spike. Losses below 0 have no room."""
        losses, self._since_look = self._since_look, []
        if losses and 0 < self._best < math.inf:
            room = LOSS.room(median(losses), 1.0)  # the best is taken into account later
            yield from self._add_room(step, LOSS, room, TIMES_BEST * self._best)

    def _add_room(self, step: int, quantity: Quantity, room: float, limit: float) -> Iterator[Quantity]:
        if math.isfinite(room):
            watched = self._watched.setdefault(quantity, _Watched())
            watched.limit = limit
            watched.series.add(step, room)
            yield quantity

    def _forecast(self, quantity: Quantity) -> Forecast | None:
        watched = self._watched[quantity]
        rooms, limit = watched.series.rooms, watched.limit
        found = None
        if quantity.kind in self._kinds and len(rooms) >= FEWEST_POINTS and not _is_far(rooms, quantity):
            if quantity.kind == "loss":  # the best may have changed since
                rooms = [room + math.log2(limit) for room in rooms]
            most = quantity.most(limit)
            capped = [min(room, most) for room in rooms]
            horizon = (_FORGIVING if quantity in self._active else 1.0) * self._horizon
            found = forecast(watched.series.steps, capped, horizon=horizon)
        watched.in_a_row = 0 if found is None else watched.in_a_row + 1
        watched.calm = watched.calm + 1 if found is None else 0
        return found

    def _follow_up(self, step: int, forecasts: Mapping[Quantity, Forecast | None]) -> Iterator[Alert]:
        """What became of the warnings that stand."""
        for quantity, alert in list(self._active.items()):
            found = forecasts.get(quantity)
            if quantity not in forecasts:  # it is not there any more: its module runs in another format, or not at all
                self._watched[quantity].calm += 1
            if found is None:
                if self._watched[quantity].calm >= _CALM:
                    del self._active[quantity]
                    yield replace(alert, state="withdrawn", step=step)
                continue
            expected, now = max(1, alert.crossing - step), max(1.0, found.steps_left)
            if not 1 / _MOVED <= now / expected <= _MOVED and 4 * abs(now - expected) > found.span:
                self._active[quantity] = alert = self._alert(quantity, found, step, "updated", alert.number)
                yield alert

    def _most_urgent(self, forecasts: Mapping[Quantity, Forecast | None]) -> Quantity | None:
        """The confirmed forecast with the fewest steps left, of a module that has no warning yet."""
        if len(self._active) >= _MOST_ACTIVE:
            return None
        modules = {alert.module for alert in self._active.values()}
        candidates = [
            (found.steps_left, quantity.key, quantity)
            for quantity, found in forecasts.items()
            if found is not None
            and quantity not in self._active
            and self._watched[quantity].in_a_row >= _CONFIRMED
            and self._module_of(quantity, found) not in modules
        ]
        return min(candidates)[2] if candidates else None

    def _module_of(self, quantity: Quantity, found: Forecast) -> str:
        """A rising loss has no module of its own: the one is named whose values have grown most since it rises."""
        if quantity.module or quantity.kind not in ("loss", "scale"):
            return quantity.module
        steps = self._watched[quantity].series.steps
        since = steps[-1] - found.span
        grown = {
            other: watched.series.fall(since)
            for other, watched in self._watched.items()
            if other.module and other.kind in ("overflow", "update")
        }
        return max(grown, key=lambda other: grown[other]).module if grown else ""

    def _alert(self, quantity: Quantity, found: Forecast, step: int, state: AlertState, number: int) -> Alert:
        limit = self._watched[quantity].limit
        now = quantity.value(found.room, limit)
        left = math.ceil(found.steps_left)
        return Alert(
            number=number,
            state=state,
            step=step,
            module=self._module_of(quantity, found),
            op=quantity.op,
            quantity=quantity.words,
            now=now,
            limit=limit,
            room=found.room,
            trend=-found.rate,
            crossing=step + left,
            earliest=step + math.floor(found.soonest),
            latest=step + math.ceil(max(found.latest, left)),
            reason=quantity.reason(now, limit),
            cause=quantity.cause,
            advice=quantity.advice,
            severity="critical" if 4 * left < found.span else "warning",
            kind=quantity.kind,
            form=self._coarsest_form() if quantity.kind == "gradient" else quantity.form,
            backward=quantity.backward,
        )

    def _coarsest_form(self) -> str:
        forms = {quantity.form for quantity in self._watched}
        return next((form for form in ("fp16", "bf16", "fp32", "fp64") if form in forms), "")

    # ---- to be saved ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {
            "watched": {
                quantity.key: {
                    **watched.series.state_dict(),
                    "limit": watched.limit,
                    "in_a_row": watched.in_a_row,
                    "calm": watched.calm,
                }
                for quantity, watched in self._watched.items()
            },
            "active": {quantity.key: alert.as_dict() for quantity, alert in self._active.items()},
            "num_alerts": self._num_alerts,
            "recent": list(self._recent),
            "since_look": list(self._since_look),
            "best": self._best if math.isfinite(self._best) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._watched = {
            Quantity.from_key(key): _Watched(
                Series.from_state(each), each["limit"], in_a_row=each["in_a_row"], calm=each["calm"]
            )
            for key, each in state["watched"].items()
        }
        self._active = {Quantity.from_key(key): Alert.from_dict(each) for key, each in state["active"].items()}
        self._num_alerts = state["num_alerts"]
        self._recent = deque(state["recent"], maxlen=_LOSSES)
        self._since_look = list(state["since_look"])
        self._best = math.inf if state["best"] is None else state["best"]


def _is_far(rooms: list[float], quantity: Quantity) -> bool:
    """Whether the room is so large, against all that it has ever moved, that no forecast is possible. Saves time."""
    lowest = min(rooms)
    return quantity.kind != "loss" and lowest > 8 * (max(rooms) - lowest)
