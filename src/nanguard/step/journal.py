"""What the guard remembers: counts, incidents, and the history that the policy decides by. It tells the observers."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from nanguard.errors import NonFiniteError
from nanguard.policy.divergence import Trend
from nanguard.records.healthy import SoundStep, sound_outcome, sound_reading
from nanguard.records.layout import fitted, terminal_width
from nanguard.records.panel import halt_message
from nanguard.records.steps import APPLY, Action, Incident, Incidents, Outcome, Progress, Reading, Verdict
from nanguard.records.summary import closing_line
from nanguard.step.observers import Observers

log = logging.getLogger("nanguard")

_MOST_WAITING, _LONGEST_WAIT = 16, 0.1
"""So many sound steps wait to be recorded, and so many seconds: someone may be watching the run."""


class Journal:
    """Written to once for each step the host has heard of. Only one rank ``speaks``: the others log nothing.

    ``where`` says how to read on, for the closing line.
    """

    def __init__(
        self,
        observers: Observers | None = None,
        *,
        speaks: bool = True,
        where: Callable[[], str] = lambda: "guard.incidents",
    ) -> None:
        self.observers = observers or Observers()
        self.history: list[Outcome] = []
        self._counts: Counter[str] = Counter(dict.fromkeys(("applied", "skipped", "lost", "rerun", "backed_off"), 0))
        self._last: Outcome | SoundStep | None = None
        self.trend = Trend()
        self._recent: deque[Reading | SoundStep] = deque(maxlen=64)
        self._refused_in_a_row = 0
        self._sound: list[SoundStep] = []
        self._sound_until = 0.0
        self.numbers: Iterator[int] = itertools.count(1)
        """Where incidents get their numbers from; guards that share a run share it."""
        self.num_not_kept = 0
        """Incidents that were left out on disk, since enough of their kind, or enough in all, are there."""
        self._num_summed_up = 0
        self._pid = os.getpid()
        self._numbers: list[int] = []
        self._next: int | None = None
        self._speaks = speaks
        self._where = where

    @property
    def counts(self) -> Counter[str]:
        if self._sound:
            self.catch_up()
        return self._counts

    @property
    def last(self) -> Outcome | None:
        """Of the last step that the host has heard of."""
        if self._sound:
            self.catch_up()
        if isinstance(self._last, tuple):
            self._last = sound_outcome(*self._last)
        return self._last

    @property
    def recent(self) -> list[Reading]:
        """The last healthy steps."""
        if self._sound:
            self.catch_up()
        return [sound_reading(*each) if isinstance(each, tuple) else each for each in self._recent]

    @property
    def refused_in_a_row(self) -> int:
        return 0 if self._sound else self._refused_in_a_row

    @property
    def incidents(self) -> Incidents:
        return Incidents(Incident(number=n, outcome=o) for n, o in zip(self._numbers, self.history, strict=True))

    @property
    def progress(self) -> Progress:
        """How far the run has come, as far as the host has heard; the same on all ranks."""
        return Progress(num_applied=self.counts["applied"], num_undone=self.counts["undone"])

    @property
    def next_number(self) -> int:
        """That the next incident will get."""
        if self._next is None:
            self._next = next(self.numbers)
        return self._next

    def add_sound(self, step: SoundStep) -> None:
        """A sound step, outside ``guard.epoch``. Several of them are recorded together, which takes less time."""
        sound, now = self._sound, time.monotonic()
        if not sound:
            self._sound_until = now + _LONGEST_WAIT
        sound.append(step)
        if len(sound) >= _MOST_WAITING or now > self._sound_until or not self.observers.may_wait:
            self.catch_up()

    def catch_up(self) -> None:
        """Records the sound steps that wait."""
        waiting, self._sound = self._sound, []
        if not waiting or os.getpid() != self._pid:  # a forked process has inherited them
            return
        self._recent += waiting
        self._last = waiting[-1]
        self._counts["applied"] += len(waiting)
        self._refused_in_a_row = 0
        self.observers.hear_together(waiting)

    def add_recent(self, reading: Reading) -> None:
        """One of a healthy step that ``record`` is given."""
        self.catch_up()
        self._recent.append(reading)

    def record(self, outcome: Outcome) -> None:
        """Counts, remembers, and tells the observers; raises ``NonFiniteError`` if the policy says to halt."""
        if self._sound:
            self.catch_up()
        self._last = outcome
        reading, response = outcome.verdict.reading, outcome.action.response
        if outcome.action is APPLY and not reading.dropped_microbatches:
            self._counts["applied"] += 1
            self._refused_in_a_row = 0
            self.observers.on_heard(outcome)
            return
        if not outcome.is_rollback:
            refused = {"back_off": "backed_off", "halt": "halted"}.get(response, "skipped")
            self._counts["applied" if outcome.applied else refused] += 1
        if response == "back_off":
            if self._speaks:
                told = "step %d: fp16 gradients overflowed at loss scale %g, which is lowered"
                log.info(told, reading.step, reading.scale)
        else:
            self._refused_in_a_row = 0 if outcome.applied else self._refused_in_a_row + 1 + outcome.lost
        self._counts["rerun"] += outcome.rerun
        self._counts["lost"] += outcome.lost
        self.observers.on_heard(outcome)
        if response not in ("back_off", "apply") or (response == "apply" and reading.dropped_microbatches):
            self.remember(outcome)

    def share_numbers(self, numbers: Iterator[int]) -> None:
        """Takes the numbers of incidents from here, so that several journals of one run do not use a number twice."""
        self.numbers, self._next = numbers, None

    def record_skipped_with_others(self, reading: Reading) -> None:
        """A step that was skipped because another optimizer's was refused. The incident is recorded there."""
        self.counts["skipped"] += 1
        verdict = Verdict(kind="healthy", reading=reading)
        self.observers.on_heard(Outcome(verdict=verdict, action=Action(response="skip"), applied=False))

    def remember(self, outcome: Outcome) -> None:
        """An outcome that had to be answered, whether its step has been counted already or not."""
        self.catch_up()
        incident = Incident(number=self.next_number, outcome=outcome)
        self.history.append(outcome)
        self._numbers.append(incident.number)
        self._next = None
        if outcome.is_rollback:
            self.counts["rolled_back"] += 1
        self.observers.on_incident(incident)
        if outcome.action.response == "halt":
            text = fitted(halt_message(incident, known=self._known_before()), terminal_width())
            raise NonFiniteError(text, incident)

    def lose(self, number: int) -> None:
        """So many steps that were in flight had no effect and cannot be run again."""
        self.counts["lost"] += number

    def lose_reruns(self, number: int) -> None:
        """So many steps that were to be run again were not."""
        self.counts.update(rerun=-number, lost=number)

    def undo(self, number: int) -> None:
        """A rollback has undone so many steps."""
        self.counts["undone"] += number

    def note(self, event: str, **fields: Any) -> None:
        """Tells the observers of something else."""
        self.catch_up()
        self.observers.on_event(event, fields)

    def ease(self, step: int, what: str) -> None:
        """A mitigation was taken back."""
        self.note("eased", step=step, what=what)
        if self._speaks:
            log.info("step %d: after a time without trouble, %s", step, what)

    def answer(self, step: int, outcome: Outcome) -> None:
        """A warning was answered before this step."""
        alert, action = outcome.verdict.alert, outcome.action
        assert alert is not None
        if outcome.is_rollback:
            self.counts["rolled_back"] += 1
        self.note(
            "answered",
            step=step,
            alert=alert.number,
            module=alert.module,
            response=action.response,
            rung=action.rung,
            what=action.words,
            did=outcome.did,
        )

    def _known_before(self) -> Incident | None:
        """The last incident of which a cause is known."""
        causes = (past.diagnosis is not None and past.diagnosis.cause != "unknown" for past in reversed(self.history))
        place = next((place for place, is_known in enumerate(causes, 1) if is_known), None)
        return None if place is None else Incident(number=self._numbers[-place], outcome=self.history[-place])

    def close(self, *, steps: int) -> None:
        self.observers.on_close(steps, dict(self.counts))

    def sum_up(self, look: Callable[[], Sequence[str]] | None = None) -> None:
        """Logs in one line what became of the run, if there are incidents that no such line has told of.

        ``look`` names what is not finite now. Never raises: it is called when a guard is closed, let go of, or the
        process ends.
        """
        if len(self.history) <= self._num_summed_up or not self._speaks or os.getpid() != self._pid:
            return
        self._num_summed_up = len(self.history)
        try:
            told = closing_line(
                self.counts,
                self.incidents,
                unsound=None if look is None else look(),
                refused_in_a_row=self.refused_in_a_row,
                num_not_kept=self.num_not_kept,
            )
            log.warning("%s", fitted(f"end of the run: {told}; more:\n  {self._where()}", terminal_width()))
        except Exception:
            log.exception("the summary of the run could not be made")

    def tensors(self) -> dict[str, Tensor]:
        """For a snapshot: nothing on the device."""
        return {}

    def facts(self) -> dict[str, Any]:
        """For a snapshot: the trend of the loss goes back with the run."""
        return self.trend.as_dict()

    def restore(self, facts: dict[str, Any]) -> None:
        """Puts ``facts`` back."""
        self.trend = Trend.from_dict(facts)

    def state_dict(self) -> dict[str, Any]:
        # What a diagnosis found is in the run log; how long it took would make equal runs differ.
        history = [replace(outcome, diagnosis=None).as_dict() for outcome in self.history]
        return {"counts": dict(self.counts), "history": history, "trend": self.trend.as_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._counts, self._sound = Counter(state["counts"]), []
        self.history = [Outcome.from_dict(data) for data in state["history"]]
        self._numbers = list(range(1, len(self.history) + 1))
        self.numbers, self._next = itertools.count(len(self.history) + 1), None
        self.trend = Trend.from_dict(state["trend"])
        self._num_summed_up = len(self.history)
