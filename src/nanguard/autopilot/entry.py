"""``nanguard.install()``: from here on the program is guarded, until ``uninstall()`` or its end."""

from __future__ import annotations

import atexit
import logging
import math
import multiprocessing
import multiprocessing.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from nanguard.autopilot.monitor import ProgramMonitor
from nanguard.autopilot.patches import Patches
from nanguard.diagnosis.scheduler import How
from nanguard.hosted.settings import Settings, patient_policy
from nanguard.incidents.bundle import Capture
from nanguard.policy.policy import Policy
from nanguard.records.steps import Incident
from nanguard.run_folder import RunFolder

log = logging.getLogger("nanguard")


class Autopilot:
    """A program that is guarded from outside. As a context it takes itself back at the end."""

    _installed: Autopilot | None = None

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._monitor = ProgramMonitor(settings)
        self._patches = Patches(self._monitor)

    @property
    def incidents(self) -> Sequence[Incident]:
        """Every step that had to be answered so far, as far as the host has heard."""
        return self._monitor.registry.incidents

    @property
    def counts(self) -> dict[str, int]:
        """How many steps were applied, skipped, and so on, over all optimizers."""
        return dict(self._monitor.registry.counts)

    @property
    def has_guard(self) -> bool:
        """Whether the program has a ``Guard`` of its own, whose optimizers are left to it."""
        return self._monitor.registry.has_guard

    @property
    def unguarded(self) -> tuple[str, ...]:
        """Classes of optimizers that could not be guarded."""
        return tuple(self._monitor.registry.unguarded)

    @property
    def refused_in_a_row(self) -> int:
        """How many of the last steps were not let through, of the optimizer that fares worst."""
        return self._monitor.registry.refused_in_a_row

    @property
    def num_not_kept(self) -> int:
        """How many incidents were left out on disk, since enough of their kind, or enough in all, are there."""
        return self._monitor.registry.num_not_kept

    @property
    def num_optimizers(self) -> int:
        """That have been guarded; a program that updates its tensors itself counts as one."""
        return self._monitor.registry.num_optimizers

    def unsound(self) -> tuple[str, ...]:
        """Names of weights, buffers and optimizer state that are not finite now. Syncs."""
        return self._monitor.unsound()

    @property
    def num_children(self) -> int:
        """How many processes the program has started that are not guarded, and may train."""
        return self._monitor.children.count

    @property
    def is_of_parent(self) -> bool:
        """Whether this is a forked process, which its parent's autopilot does not guard."""
        return not self._monitor.children.is_parent

    def abandon(self) -> None:
        """In a forked process, before it gets an autopilot of its own. The run log stays the parent's."""
        self._monitor.hang_up()
        self._patches.remove()
        atexit.unregister(self.uninstall)
        Autopilot._installed = None

    def uninstall(self) -> None:
        """Ends the run log and takes everything back; optimizers go on as plain ones."""
        self._monitor.close()
        self._patches.remove()
        atexit.unregister(self.uninstall)
        if Autopilot._installed is self:
            Autopilot._installed = None

    def __enter__(self) -> Autopilot:
        return self

    def __exit__(self, *error: Any) -> None:
        self.uninstall()


def install(
    *,
    policy: Policy | None = None,
    max_norm: float | None = None,
    run_dir: str | Path | None = None,
    trace: bool = False,
    sync: Literal["auto", "eager", "late"] = "auto",
    diagnose: How = "auto",
    capture: Capture = "batch",
) -> Autopilot:
    """Guards every optimizer that the program makes from now on, as ``nanguard run`` does.

    Without arguments a healthy run is the same run, bit for bit: same weights, same output. A step with a non-finite
    loss or gradient is skipped, buffers are put back, and where it came from is logged.

    If it is called again with the same settings, as in a notebook cell that is run twice, it returns the first one.
    With other settings the first one ends, as by ``uninstall()``, and a new one begins. A forked or spawned process is
    not guarded by what its parent has installed: call ``install()`` in it too.

    Args:
        policy: what to do about trouble; the default skips as long as the run makes progress, and rolls damage
            back.
        max_norm: clip every parameter group to this norm; None leaves clipping to the program.
        run_dir: where to write the run log and bad steps; None writes nothing.
        trace: follow every op from the first step on, to find the first fault at once. Slow.
        sync: as for ``Guard``; several optimizers, and a GradScaler, need the host before every step.
        diagnose: as for ``Guard``.
        capture: as for ``Guard``.
    """
    if policy is not None and not isinstance(policy, Policy):
        raise ValueError(f"policy must be a Policy or None, got {policy!r}: Policy.recipe(name) makes one by its name")
    if max_norm is not None and not (isinstance(max_norm, (int, float)) and 0 < max_norm < math.inf):
        raise ValueError(f"max_norm must be a number above 0, or None, got {max_norm!r}")
    for name, value, accepted in (
        ("sync", sync, ("auto", "eager", "late")),
        ("diagnose", diagnose, ("auto", "full", "brief", "off")),
        ("capture", capture, ("none", "meta", "batch", "full")),
    ):
        if value not in accepted:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, accepted))}, got {value!r}")
    settings = Settings(
        policy=policy or patient_policy(),
        max_norm=max_norm,
        run_dir=None if run_dir is None else RunFolder(Path(run_dir).absolute()),  # the program may go elsewhere
        trace=trace,
        sync=sync,
        diagnose=diagnose,
        capture=capture,
    )
    first = Autopilot._installed
    if first is not None and first.is_of_parent:
        first.abandon()
    elif first is not None and first.settings.script:
        log.info("nanguard.install() has nothing to do: `nanguard run` guards this program already")
        return first
    elif first is not None and first.settings == settings:
        log.info("nanguard.install() has nothing to do: it was called before with the same settings")
        return first
    elif first is not None:
        log.warning(
            "nanguard.install() was called again with other settings: the first one has ended, and optimizers made "
            "under it are not guarded any more; make them again"
        )
        first.uninstall()
    return begin(settings)


def begin(settings: Settings) -> Autopilot:
    """With settings that have been checked."""
    autopilot = Autopilot._installed = Autopilot(settings)
    atexit.register(autopilot.uninstall)
    if multiprocessing.parent_process() is not None:  # such processes end without atexit
        multiprocessing.util.Finalize(None, autopilot.uninstall, exitpriority=100)
    return autopilot
