"""A GPU that has stopped: an assertion in a kernel failed, or a kernel asked for memory that is not the program's.

From then on CUDA refuses everything until the process ends, so the step cannot be looked at or made again. But the host
still has what the last steps were given, and that is often the reason: NaN that became an index, or that reached a loss
that asks for numbers between 0 and 1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from nanguard import _compat
from nanguard.autopilot.registry import Registry
from nanguard.diagnosis.host_data import bad_data
from nanguard.hosted.iteration import Iteration
from nanguard.hosted.step import HostedStep
from nanguard.records.diagnosis import Diagnosis
from nanguard.records.steps import Action, Outcome, Reading
from nanguard.state.batch_indices import FetchedBatch
from nanguard.step.parts import StepParts
from nanguard.step.tape import CallTape

log = logging.getLogger("nanguard")

_MOST_BEHIND = 8


class StoppedDevice:
    """``words`` is how CUDA puts it; empty as long as the device runs. ``is_explained``: there was an incident."""

    def __init__(self, registry: Registry, this: Callable[[], Iteration], leave_alone: Callable[[], None]) -> None:
        self._registry, self._this, self._leave_alone = registry, this, leave_alone
        self.words = ""
        self.is_explained = False

    def hear(self, error: BaseException | None) -> bool:
        """Whether ``error``, or one behind it, says that the device has stopped.

        Then that is explained as far as possible, and the program is left alone from now on.
        """
        said = _said_of_device(error)
        if said and not self.words:
            self.words = said
            try:
                self._explain(self._this(), self._registry.hosted_steps)
            except Exception:
                log.exception("what has stopped the GPU could not be looked for")
            self._leave_alone()
            self._registry.close_logs()
            for hosted in self._registry.hosted_steps:
                _compat.never_free([hosted, *hosted.parts.state.tensors().values()])  # snapshots may have read them
        return bool(said)

    def _explain(self, this: Iteration, hosted_steps: Sequence[HostedStep]) -> None:
        """Looks for bad data among what the last steps were given, the oldest first. Never asks the device."""
        for hosted, step, tape, fetched in _last_steps(this, hosted_steps):
            diagnosis = bad_data(tape, fetched)
            if diagnosis is not None:
                self.is_explained = True
                _remember(hosted.parts, replace(diagnosis, step=step), self.words)
                return


def _said_of_device(error: BaseException | None) -> str:
    """What CUDA says if the device has stopped. Empty if it runs."""
    for _ in range(_MOST_BEHIND):
        if error is None:
            break
        if _compat.stops_device(error):
            return str(error).strip().splitlines()[0]
        error = error.__cause__ or error.__context__
    return ""


def _remember(parts: StepParts, diagnosis: Diagnosis, words: str) -> None:
    reading = Reading(step=diagnosis.step or 0, epoch=0, batch=None, loss=math.nan, found=("input",))
    outcome = Outcome(
        verdict=replace(parts.judge(reading), progress=parts.journal.progress),
        action=Action(response="skip"),
        applied=False,
        did=f"{words}. A GPU checks that indices exist and that probabilities lie between 0 and 1: NaN fails both",
        diagnosis=diagnosis,
        lost_device=True,
    )
    parts.journal.remember(outcome)


def _last_steps(
    this: Iteration, hosted_steps: Sequence[HostedStep]
) -> Iterator[tuple[HostedStep, int, CallTape, Sequence[FetchedBatch]]]:
    """Those that the host has not heard of, and the one under way: its number, its tape and its batches."""
    for hosted in hosted_steps:
        late = hosted.engine.late
        for pending in () if late is None else late.in_flight:
            pending.complete()
            if pending.tape is not None:
                yield hosted, pending.step, pending.tape, pending.fetched
    for hosted in sorted(hosted_steps, key=lambda each: each not in this.noted)[:1]:
        yield hosted, hosted.parts.num_steps - (hosted in this.stepped), this.tape, this.fetched
