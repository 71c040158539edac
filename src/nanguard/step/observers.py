"""What watches a run without taking part in it: the run log, the panels, loggers, a user's own callbacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from nanguard.records.healthy import SoundStep, sound_outcome
from nanguard.records.steps import Incident, Outcome

log = logging.getLogger("nanguard")


class Observer:
    """Subclass it and override the methods you need: ``Guard(..., observers=[MyObserver()])``.

    Methods are called from the training loop, in the order of the list. They must not change the training state (draw
    no random numbers either) and should be quick. What they are given is on the host, so looking at it does not sync;
    only ``on_measured`` gets a tensor that may be on a GPU. If a method raises, the error is logged once and the
    observer is dropped; the run goes on.
    """

    wants_measurement = True
    """Whether ``on_measured`` has to be called for the open step. If no observer wants that, a CPU measures less."""

    def on_open(self, step: int) -> None:
        """Step number ``step`` begins. Nothing of it has been computed yet."""

    def on_measured(self, step: int, values: Tensor) -> None:
        """Loss, buffers and gradient norms of the step are in ``values``, on the device. Reading them syncs."""

    def on_heard(self, outcome: Outcome) -> None:
        """The host knows the result of a step. Called once for every step, applied or not."""

    def on_incident(self, incident: Incident) -> None:
        """The guard had to do something about a step. ``incident.diagnosis`` is None if there is none."""

    def on_epoch(self, epoch: int) -> None:
        """``guard.epoch`` begins an epoch."""

    def on_event(self, event: str, fields: Mapping[str, Any]) -> None:
        """Anything else worth noting: ``"run"`` (the run begins), ``"eased"``, ``"roll_back"``, ``"answered"``."""

    def on_close(self, num_steps: int, counts: Mapping[str, int]) -> None:
        """The run ends."""

    def state_dict(self) -> dict[str, Any]:
        """What ``Guard.state_dict`` is to save of this observer, as JSON can hold it; empty: nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts back what ``state_dict`` of an observer of this class has returned."""


class Observers:
    """Calls a list of observers at each point. One that raises is dropped.

    They ``may_wait`` if healthy steps may be told of by ``hear_together``, a tenth of a second later.
    """

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = list(observers)
        for observer in self._observers:
            if isinstance(observer, type):
                raise ValueError(
                    f"an observer is an object, got the class {observer.__name__}: write {observer.__name__}()"
                )
            if all(_overridden(observer, name) is None for name in _METHODS):
                raise ValueError(
                    f"an observer needs at least one of the methods {', '.join(_METHODS)}, got {observer!r}"
                )
        self._sort()

    def __iter__(self) -> Iterator[Observer]:
        return iter(self._observers)

    @property
    def wants_measurement(self) -> bool:
        """Whether any of them wants to be called with the measurement of the open step."""
        return any(getattr(each, "wants_measurement", True) for each in self.measuring)

    def state_dict(self) -> list[dict[str, Any]]:
        """The state of each observer that has one, in order."""
        states = [(type(each).__name__, each.state_dict()) for each in self._observers if isinstance(each, Observer)]
        return [{"observer": name, "state": state} for name, state in states if state]

    def load_state_dict(self, saved: Iterable[Mapping[str, Any]]) -> None:
        """Each state goes to the first observer of the same class that has not got one yet."""
        waiting = [each for each in self._observers if isinstance(each, Observer)]
        for each in saved:
            found = next((one for one in waiting if type(one).__name__ == each["observer"]), None)
            if found is not None:
                waiting.remove(found)
                found.load_state_dict(each["state"])

    def hear_together(self, steps: Sequence[SoundStep]) -> None:
        """As ``on_heard`` for each of these steps. If they all have a method of this name, that takes less time."""
        if self.may_wait:
            self._hear_together(steps)
        else:
            for each in steps:
                self.on_heard(sound_outcome(*each))

    def _sort(self) -> None:
        self.measuring = [each for each in self._observers if _overridden(each, "on_measured") is not None]
        self.opening = [each for each in self._observers if _overridden(each, "on_open") is not None]
        hearing = [each for each in self._observers if _overridden(each, "on_heard") is not None]
        self.may_wait = all(_overridden(each, "hear_together") is not None for each in hearing)
        self._hear_together = self._calling("hear_together")
        self.on_open = self._calling("on_open")
        self.on_measured = self._calling("on_measured")
        self.on_heard = self._calling("on_heard")
        self.on_incident = self._calling("on_incident")
        self.on_epoch = self._calling("on_epoch")
        self.on_event = self._calling("on_event")
        self.on_close = self._calling("on_close")

    def _calling(self, name: str) -> Callable[..., None]:
        """One function that calls all observers that have something to do at this point."""
        methods = [(each, method) for each in self._observers if (method := _overridden(each, name)) is not None]

        def call(*args: Any) -> None:
            for observer, method in methods:
                try:
                    method(*args)
                except Exception:
                    log.warning("%r failed in %s and is dropped: the run goes on", observer, name, exc_info=True)
                    self._drop(observer)

        return call

    def _drop(self, observer: Observer) -> None:
        self._observers = [each for each in self._observers if each is not observer]
        self._sort()


_METHODS = tuple(name for name in vars(Observer) if name.startswith("on_"))


def _overridden(observer: Observer, name: str) -> Callable[..., None] | None:
    """The method, None if it is absent or the empty one of ``Observer``: a step must not pay for it."""
    if getattr(type(observer), name, None) is getattr(Observer, name, None):
        return None
    method = getattr(observer, name, None)
    return method if callable(method) else None
