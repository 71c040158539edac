"""How snapshots are taken: what a user chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Where = Literal["auto", "device", "host", "disk"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshots:
    """A ring of states known to be good, for ``Rollback``.

    Args:
        every: how many steps lie between two snapshots.
        keep: how many good ones are kept. Memory is needed for one more, since none is given up for one that is
            not known to be good.
        where: ``"host"`` copies to pinned host memory during the next step; ``"disk"`` from there to
            ``run_dir/snapshots``, to be resumed from by another process; ``"device"`` within the accelerator's memory,
            which is quicker, and which training may need itself. ``"auto"`` is host memory, with fewer snapshots than
            ``keep`` or none if they would take more than a quarter of what is free there.
        confirm: how many later steps must stay finite before a snapshot counts as good.
    """

    every: int = 50
    keep: int = 2
    where: Where = "auto"
    confirm: int = 3

    def __post_init__(self) -> None:
        for name in ("every", "keep", "confirm"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"Snapshots({name}=...) must be a whole number, 1 or more, got {value!r}")
        if self.where not in ("auto", "device", "host", "disk"):
            raise ValueError(f"where must be 'auto', 'device', 'host' or 'disk', got {self.where!r}")
        if self.every <= self.confirm:
            raise ValueError(
                f"every must be larger than confirm, or no snapshot is good before the next one is due: got "
                f"every={self.every}, confirm={self.confirm}"
            )
