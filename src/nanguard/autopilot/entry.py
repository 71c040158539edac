"""``nanguard.install()``: guards the program from here on, until ``uninstall()`` or its end."""

from __future__ import annotations

import atexit
import gc
import logging
import multiprocessing
import multiprocessing.util
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from nanguard import _compat
from nanguard.autopilot.frameworks import Frameworks
from nanguard.autopilot.monitor import ProgramMonitor
from nanguard.autopilot.patches import Patches
from nanguard.diagnosis.scheduler import How
from nanguard.hosted.settings import Settings, patient_policy
from nanguard.hosted.trained_modules import TrainedModules
from nanguard.incidents.bundle import CaptureLevel
from nanguard.integrations.notify import Notify
from nanguard.numerics.clip import require_max_norm
from nanguard.policy.policy import Policy
from nanguard.records.steps import Incidents
from nanguard.run_folder import RunFolder
from nanguard.step.assembly import check_choice, choose_policy

log = logging.getLogger("nanguard")


class Autopilot:
    """Guards a program without changes to it. As a context manager it uninstalls itself at the end."""

    _installed: Autopilot | None = None

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._monitor = ProgramMonitor(settings)
        self._patches = Patches(self._monitor)
        self._frameworks = Frameworks(self._monitor, settings, self._monitor.made)

    @property
    def incidents(self) -> Incidents:
        """Every bad step so far, as far as the host knows."""
        return self._monitor.registry.incidents

    @property
    def counts(self) -> dict[str, int]:
        """How many steps were applied, skipped, and so on, over all optimizers."""
        return Counter(self._monitor.registry.counts)  # 0 for what has not happened

    @property
    def has_guard(self) -> bool:
        """Whether the program has its own ``Guard``. The optimizers of that one are left alone."""
        return self._monitor.registry.has_guard

    @property
    def unguarded(self) -> tuple[str, ...]:
        """Classes of optimizers that could not be guarded."""
        return tuple(self._monitor.registry.unguarded)

    @property
    def refused_in_a_row(self) -> int:
        """How many of the last steps in a row were not applied, of the optimizer with the most."""
        return self._monitor.registry.refused_in_a_row

    @property
    def refused_by(self) -> str:
        """What that optimizer trains. Empty if there is only one optimizer, or if it is not known."""
        return self._monitor.registry.refused_by

    @property
    def num_not_kept(self) -> int:
        """How many incidents were not saved to disk, because there are enough of their kind, or enough in all."""
        return self._monitor.registry.num_not_kept

    @property
    def num_optimizers(self) -> int:
        """How many have been guarded. A program that updates its tensors itself counts as one."""
        return self._monitor.registry.num_optimizers

    def end(self, leaves: SystemExit | None = None) -> None:
        """The program has ended, maybe by the error that is being handled now: examines a step that it did not make.

        ``leaves``: it has called ``sys.exit()``.
        """
        self._monitor.end(leaves or sys.exc_info()[1])

    @property
    def stopped_by(self) -> str:
        """The error after which the GPU refuses everything; empty if it runs."""
        return self._monitor.stopped.words

    @property
    def is_stop_explained(self) -> bool:
        """Whether there was an incident that says why the GPU has stopped."""
        return self._monitor.stopped.is_explained

    def unsound(self) -> tuple[str, ...] | None:
        """Names of weights, buffers and optimizer state that are not finite now, each once. Syncs.

        None if the GPU has stopped, and they cannot be read.
        """
        names, registry = self._monitor.unsound(), self._monitor.registry
        if not names:
            return names
        modules = [module for module in registry.live_modules if type(module) is not TrainedModules]
        tables = [each for module in modules for each in (_compat.parameters_of(module), _compat.buffers_of(module))]
        of_modules = {id(tensor) for table in tables for tensor in table.values() if tensor is not None}
        states = [hosted.parts.state.tensors() for hosted in registry.hosted_steps]
        kept = {name for state in states for name in names if id(state.get(name)) in of_modules}
        del states
        gc.collect()  # a tensor of an optimizer that the program no longer has is gone, unless a module has it
        kept.update(self._monitor.unsound() or ())
        return tuple(dict.fromkeys(name for name in names if name in kept))

    @property
    def num_children(self) -> int:
        """How many processes that are not guarded, and may train, the program has started."""
        return self._monitor.children.count

    @property
    def num_in_pools(self) -> int:
        """How many workers of pools, which are not guarded, the program has spawned. Most prepare data."""
        return self._monitor.children.num_in_pools

    @property
    def of_children(self) -> str:
        """What became of the processes that were guarded too, in words; empty if there were none."""
        return str(self._monitor.children.results)

    @property
    def is_of_parent(self) -> bool:
        """Whether this is a forked process, which the autopilot of its parent does not guard."""
        return not self._monitor.children.is_parent

    def abandon(self) -> None:
        """In a forked process, before it gets its own autopilot. The run log still belongs to the parent."""
        self._monitor.detach()
        self._frameworks.remove()
        self._patches.remove()
        atexit.unregister(self.uninstall)
        Autopilot._installed = None

    def uninstall(self) -> None:
        """Ends the run log and restores everything. Optimizers go on as plain ones."""
        self._monitor.close()
        self._frameworks.remove()
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
    capture: CaptureLevel = "batch",
) -> Autopilot:
    """Guards every optimizer that the program makes from now on, as ``nanguard run`` does.

    Without arguments a healthy run stays the same, bit for bit: same weights, same output. A step with a non-finite
    loss or gradient is skipped, buffers are put back, and the origin of the NaN or Inf is logged.

    If it is called again with the same settings, as in a notebook cell that is run twice, it returns the first one.
    With other settings the first one ends, as by ``uninstall()``, and a new one begins. Functions that run in a
    ``multiprocessing.Process`` are guarded there too; a process that is made by ``os.fork()`` has to call it itself.

    Args:
        policy: what to do about bad steps. The default skips them as long as the run makes progress, and rolls
            damage back.
        max_norm: clip every parameter group to this norm; None leaves clipping to the program.
        run_dir: where to write the run log and bad steps; None writes nothing.
        trace: follow every op from the first step on, to find the first fault at once. Slow.
        sync: as for ``Guard``; several optimizers, and a GradScaler, need the host before every step.
        diagnose: as for ``Guard``.
        capture: as for ``Guard``.
    """
    require_max_norm(max_norm)
    for name, value in (("sync", sync), ("diagnose", diagnose), ("capture", capture)):
        check_choice(name, value)
    settings = Settings(
        policy=choose_policy(policy, patient_policy),
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


def begin_in_child(settings: Settings) -> Autopilot | None:
    """In a process that a guarded program has started. None if it is guarded already."""
    first = Autopilot._installed
    if first is not None and not first.is_of_parent:
        return None
    if first is not None:
        first.abandon()
    return begin(settings)


def begin(settings: Settings) -> Autopilot:
    """Installs an autopilot with settings that have been checked."""
    if settings.notify:
        settings = replace(settings, notify="", observers=(*settings.observers, Notify(settings.notify)))
    autopilot = Autopilot._installed = Autopilot(settings)
    atexit.register(autopilot.uninstall)
    if multiprocessing.parent_process() is not None:  # such processes end without atexit
        multiprocessing.util.Finalize(None, autopilot.uninstall, exitpriority=100)
    return autopilot
