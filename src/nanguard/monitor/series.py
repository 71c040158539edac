"""The past of one quantity in bounded memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

MOST_POINTS = 192
"""If there are more, every second point of the older half is dropped."""


@dataclass(slots=True)
class Series:
    """Rooms in bits at certain steps. A value that is not finite is not added: a NaN changes nothing."""

    steps: list[int] = field(default_factory=list)
    rooms: list[float] = field(default_factory=list)

    def add(self, step: int, room: float) -> None:
        if not math.isfinite(room):
            return
        self.forget_since(step)
        self.steps.append(step)
        self.rooms.append(room)
        if len(self.steps) > MOST_POINTS:
            half = MOST_POINTS // 2
            del self.steps[1:half:2]
            del self.rooms[1:half:2]

    def forget_since(self, step: int) -> None:
        """Drops what was seen from this step on: the run has gone back."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.rooms.pop()

    def fall(self, since: int) -> float:
        """How many bits were lost since a step, from the points right after it to the last ones."""
        rooms = [room for step, room in zip(self.steps, self.rooms, strict=True) if step >= since]
        part = len(rooms) // 3
        return (sum(rooms[:part]) - sum(rooms[-part:])) / part if part else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps), "rooms": list(self.rooms)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Series:
        return cls(list(state["steps"]), list(state["rooms"]))
