"""Tracing a step as it runs, where nothing could be replayed: armed after a bad one, for the next few."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from nanguard import _compat
from nanguard.bench import Bench
from nanguard.diagnosis.batches import named_tensors
from nanguard.diagnosis.hooks import GradientHooks
from nanguard.diagnosis.inventory import Inventory
from nanguard.diagnosis.provenance import BATCH
from nanguard.diagnosis.trace import Trace
from nanguard.diagnosis.watched import Run, introduce

log = logging.getLogger("nanguard")

ARMED_STEPS = 3
FOREVER = 1 << 62


class Live:
    """``left`` says how many steps are still to be traced."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._inventory = Inventory(bench)
        self._run: Run | None = None
        self.left = 0
        self.patience = ARMED_STEPS

    @property
    def is_on(self) -> bool:
        """Whether the step that has begun is traced."""
        return self._run is not None

    def arm(self) -> None:
        """From the next step on, for as many as ``patience`` says."""
        self.left = max(self.left, self.patience)

    def has_found(self) -> None:
        """Goes on for as long as it takes to see whether it comes again."""
        if self.patience < FOREVER:
            self.left = min(self.left, ARMED_STEPS)

    def begin(self, batch: Any) -> None:
        """A step begins; ``batch`` is what ``guard.epoch`` gave last."""
        self._run = None
        if self.left <= 0 or self._bench.is_capturing:
            return
        self.left -= 1
        try:
            trace = Trace(self._inventory.module_names())
            introduce(trace, self._inventory)
            for name, tensor in named_tensors(batch, "batch"):
                trace.know(name, tensor, BATCH)
            self._run = Run(trace)
        except Exception:
            self.left = 0
            log.warning("the step cannot be traced as it runs", exc_info=True)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around a part of the step."""
        if self._run is None:
            yield
            return
        with GradientHooks(self._inventory.module_names(), self._run.hooks), self.following():
            yield

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Around code of which it is not known where it ends: it may be left from inside a call of torch's."""
        with contextlib.nullcontext() if self._run is None else self._run.trace:
            yield

    def after_backward(self, loss: Tensor) -> Run | None:
        """What showed, as long as gradients are still there; None where the step was not traced. Syncs."""
        run = self._run
        if run is None or not run.is_finite:
            return run
        try:
            with _compat.unwatched():
                run.look_at_loss(loss)
                if run.is_finite:
                    run.look_at_gradients(self._inventory, self._bench)
                if run.is_finite:
                    run.look_at_writes(self._inventory)
        except Exception:
            log.warning("what was traced of the step cannot be looked at", exc_info=True)
            return None
        return run
