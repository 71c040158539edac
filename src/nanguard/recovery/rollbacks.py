"""Going back to a snapshot, with the data: from where, and over which batches."""

from __future__ import annotations

from collections import deque

from nanguard.policy.rungs import Rollback
from nanguard.records.steps import Verdict
from nanguard.recovery.mitigations import ActiveMitigations
from nanguard.state.data import Data, Place
from nanguard.state.rng import RngState
from nanguard.state.snapshots.ring import SnapshotRing
from nanguard.step.parts import StepParts
from nanguard.step.pending import PendingStep

Between = tuple[Place, Place] | None


class Rollbacks:
    """Remembers which batches the last good steps had. ``ring`` is None if no snapshots are taken."""

    def __init__(self, parts: StepParts, data: Data, ring: SnapshotRing | None, mitigations: ActiveMitigations) -> None:
        self._parts, self._data, self._ring, self._mitigations = parts, data, ring, mitigations
        self._places: deque[tuple[int, Place]] = deque(maxlen=512)

    def note(self, step: int, place: Place) -> None:
        """A healthy step, and where its batch was."""
        self._places.append((step, place))

    def forget(self) -> None:
        self._places.clear()

    def hasten(self) -> str | None:
        """Has a snapshot taken at the next point between two steps; None if none are taken."""
        if self._ring is None or self._ring.is_over:
            return None
        self._ring.hasten()
        return "a snapshot is taken before the next step"

    def go_back(self, step: int, rung: Rollback, *, count: int = 1, between: Between = None) -> str:
        """Rolls back as the rung says, ``step`` being the one at which trouble showed first; what it did, in words.

        Raises ``FileNotFoundError`` or ``ValueError`` if there is nothing to go back to; nothing has changed then.
        """
        snapshot = None if self._ring is None else self._ring.choose(step, back=rung.steps, count=count)
        if self._ring is None or snapshot is None:
            raise ValueError("there is no good snapshot")
        now = self._parts.num_steps
        facts = self._ring.go_back(snapshot, step=step, now=now)
        over = rung.skip_batches if isinstance(rung.skip_batches, int) else 0
        rng = RngState.from_dict(facts["rng"])
        data = self._data.go_back(facts["data"], rng, over=over, between=between)
        self.forget()
        self._parts.journal.undo(now - facts["step"])
        raised = self._mitigations.raise_model(now, None) if rung.raise_precision else ""
        lowered = self._mitigations.lower_lr(rung.lr, now, None)
        return "; ".join(filter(None, [f"back to the state before step {facts['step']:,}", data, raised, lowered]))

    def first_sign(self, verdict: Verdict) -> int:
        """The step at which trouble showed first: of the losses beyond their past, or of the bad steps in a row."""
        first = verdict.reading.step
        if self._parts.journal.trend.beyond:
            return first - len(self._parts.journal.trend.undecided) + 1
        for past in reversed(self._parts.journal.history):
            if past.applied or past.is_rollback:
                break
            if past.verdict.reading.step + past.lost < first - 1:
                break
            first = past.verdict.reading.step
        return first

    def failed(self, pending: PendingStep, verdict: Verdict) -> Between:
        """The batches from the first sign of trouble to this step."""
        reading, first = verdict.reading, self.first_sign(verdict)
        if reading.batch is None:
            return None
        last = (reading.epoch, reading.batch if pending.last_batch is None else pending.last_batch)
        readings = [past.verdict.reading for past in self._parts.journal.history]
        places = [place for step, place in self._places if step >= first]
        places += [(r.epoch, r.batch) for r in readings if r.batch is not None and r.step >= first]
        return min([(reading.epoch, reading.batch), *places]), last
