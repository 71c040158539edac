"""Trace some of the steps after a bad step as they run, if the bad step could not be replayed."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from nanguard import _compat_modes
from nanguard.diagnosis.graph_probe import GraphFinding, examine_if_bad
from nanguard.diagnosis.hooks import GradientHooks
from nanguard.diagnosis.provenance import BATCH
from nanguard.diagnosis.search import LONGEST_BURST, Kind, Search
from nanguard.diagnosis.trace import Trace
from nanguard.diagnosis.watched import WatchedRun, introduce, introduce_others
from nanguard.source.modules import Modules
from nanguard.state.trees import named_tensors
from nanguard.step.parts import StepParts

log = logging.getLogger("nanguard")

FOREVER = 1 << 62


class Live:
    """Traces the steps that ``search`` asks for; all of them if ``is_always``, none unless ``is_allowed``."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._run: WatchedRun | None = None
        self.is_on = False
        """True if the current step is traced."""
        self._is_armed = False
        self._is_used = False
        self._entered: float | None = None
        self._seconds = 0.0
        self.configure(search=Search(), is_always=False, is_allowed=True)

    def configure(self, *, search: Search, is_always: bool, is_allowed: bool) -> None:
        """``search`` may be shared by several optimizers."""
        self.search, self.is_always, self.is_allowed = search, is_always, is_allowed

    def forbid(self) -> None:
        """No step is traced from now on."""
        self.is_allowed = False

    @property
    def is_idle(self) -> bool:
        """True if no step is traced now, and none may be before the next incident."""
        return self._run is None and not (self._is_armed or self.is_always)

    @property
    def takes_too_long(self) -> bool:
        """True if tracing this step takes too long to go on. It may be the last step of the run."""
        now = time.perf_counter()
        return not self.is_always and self._seconds + now - (self._entered or now) > LONGEST_BURST

    def arm(self, kind: Kind, step: int) -> bool:
        """Start a search after an incident that was not located. False if an earlier search found nothing."""
        self._is_armed = self.search.begin(kind, step)
        return self._is_armed

    def take_over(self, other: Live) -> None:
        self._is_armed = other._is_armed

    def begin(self, batch: Any) -> None:
        """Start a step; ``batch`` is the last one from ``guard.epoch``."""
        if self._run is None and not (self._is_armed or self.is_always):  # is_idle, without a call
            return
        self._charge()
        if not self._is_wanted() or self._parts.is_capturing:
            return
        began = time.perf_counter()
        try:
            trace = Trace(Modules(self._parts.state.own_model, self._parts.other_networks()))
            introduce(trace, self._parts.state)
            others = introduce_others(trace, self._parts.state, self._parts.other_states())
            for name, tensor in named_tensors(batch, "batch"):
                if id(tensor) in others:
                    continue
                trace.know(name, tensor, BATCH)
            self._run, self.is_on = WatchedRun(trace), True
        except Exception:
            self.is_allowed = False
            log.warning("the step cannot be traced as it runs", exc_info=True)
        self._seconds = time.perf_counter() - began

    def _is_wanted(self) -> bool:
        if self.is_always:
            return self.is_allowed
        self._is_armed = self._is_armed and self.search.is_on
        return self._is_armed and self.is_allowed and self.search.wants_step()

    def _charge(self) -> None:
        """Count the time of the last step. Each rank may trace a different step, and all ranks wait for it."""
        if self._run is not None and self._is_used and not self.is_always:
            self.search.spent(self._seconds * self._parts.ranks.size)
        self._run, self.is_on, self._is_used, self._seconds = None, False, False, 0.0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Wrap a part of the step."""
        if self._run is None or self.takes_too_long:
            yield
            return
        with GradientHooks(self._run.trace.modules, self._run.hooks), self.following():
            yield

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Wrap code with an unknown end: it may be left from inside a torch call."""
        if self._run is None:
            yield
            return
        trace, self._is_used = self._run.trace, True
        began = self._entered = time.perf_counter()
        trace.__enter__()
        try:
            yield
        finally:
            _compat_modes.leave_mode(trace)
            self._seconds += time.perf_counter() - began
            self._entered = None

    def before_backward(self, loss: Tensor) -> GraphFinding | None:
        """The finding in the graph of a bad loss. None on a GPU: looking at the loss would sync."""
        return examine_if_bad([loss])

    def after_backward(self, loss: Tensor | None) -> WatchedRun | None:
        """Check the loss, if there is one, and gradients while they exist. None if the step was not traced. Syncs."""
        run, began = self._run, time.perf_counter()
        if run is None or not run.is_finite:
            return run
        try:
            with _compat_modes.unwatched():
                if loss is not None:
                    run.look_at_loss(loss)
                if run.is_finite:
                    run.look_at_gradients(self._parts)
                if run.is_finite:
                    run.look_at_writes(self._parts.state)
        except Exception:
            log.warning("what was traced of the step cannot be looked at", exc_info=True)
            return None
        if self._entered is None:
            self._seconds += time.perf_counter() - began
        return run
