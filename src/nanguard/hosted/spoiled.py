"""Running statistics that the program itself has made non-finite between two steps: no step is to blame for them."""

from __future__ import annotations

import logging

from nanguard.records.words import joined
from nanguard.step.parts import StepParts

log = logging.getLogger("nanguard")


class SpoiledStatistics:
    """Warns of each of them once: BatchNorm does not use them in training, so that no step fails because of them."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._told: set[str] = set()

    def look(self) -> None:
        """After a step. Not on a GPU, where it would mean to wait; there the last line of the run tells of them."""
        buffers = self._parts.buffers
        if not buffers.has_statistics or self._parts.state.device.type != "cpu":
            return
        names = [name for name in buffers.spoiled_statistics() if name not in self._told]
        if names:
            self._told.update(names)
            log.warning(
                "step %d: before this step, the program has made %s non-finite. Training does not use %s, but "
                "evaluation does: look for what writes there, and go back to a checkpoint or reset_running_stats()",
                self._parts.num_steps - 1,
                joined(names),
                "it" if len(names) == 1 else "them",
            )
