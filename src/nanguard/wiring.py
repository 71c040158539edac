"""Puts a guarded run together from its packages: what ``Guard`` and the hosted step have in common."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from nanguard import __version__
from nanguard.diagnosis.scheduler import How
from nanguard.incidents.bundle import Bundles
from nanguard.monitor.observer import Monitor
from nanguard.policy.policy import Policy
from nanguard.policy.rungs import Rung
from nanguard.records.alert import Alert
from nanguard.recovery.recovery import Recovery
from nanguard.run_folder import RunFolder, as_seen
from nanguard.runlog.observer import RunLogObserver
from nanguard.state.data import Data
from nanguard.state.snapshots.options import Snapshots
from nanguard.state.snapshots.ring import SnapshotRing
from nanguard.step.assembly import check_choice
from nanguard.step.engine import StepEngine
from nanguard.step.journal import Journal
from nanguard.step.observers import Observer, Observers
from nanguard.step.panels import PanelLogger
from nanguard.step.parts import StepParts
from nanguard.step.pending import LAG
from nanguard.step.repeats import RepeatCounter
from nanguard.step.resuming import facts_of

log = logging.getLogger("nanguard")

_PLAIN = (str, int, float, bool, type(None))


def make_journal(
    run_dir: str | Path | RunFolder | None,
    *,
    is_first: bool,
    optimizer: str = "",
    observers: Sequence[Observer] = (),
    repeats: RepeatCounter | None = None,
) -> Journal:
    """A journal with the run log and the panels on the first rank, and the user's observers on all ranks.

    ``repeats`` counts faults that come again, for several journals of a run.
    """
    if not isinstance(observers, (list, tuple)):
        raise ValueError(f"observers must be a list of observers, got {observers!r}: write observers=[...]")
    runlog = RunLogObserver(run_dir, optimizer=optimizer) if is_first and run_dir is not None else None
    ours: list[Observer] = [] if runlog is None else [runlog]
    if is_first:
        ours.append(PanelLogger(lambda: None if runlog is None else runlog.path, repeats))
    # A monitor follows one optimizer, the first: several of them number their steps on their own.
    others = [each for each in observers if not isinstance(each, Monitor) or each.claim()]
    where = "guard.incidents" if runlog is None else ""
    return Journal(
        Observers([*ours, *others]),
        speaks=is_first,
        where=lambda: where or f"nanguard explain {as_seen(Path(runlog.path).parent)}",  # type: ignore[union-attr]
    )


def make_engine(
    parts: StepParts,
    *,
    sync: str,
    accumulate: int,
    snapshots: Snapshots | None,
    diagnose: How,
    capture: str,
    run_dir: str | Path | RunFolder | None,
    snapshot_dir: Path | None,
    was_skipped: Callable[[], None] | None = None,
    host_advances: bool = False,
) -> tuple[StepEngine, Recovery]:
    """The engine of a run, and what answers bad steps in it."""
    check_choice("diagnose", diagnose)
    data = Data(parts.state.device, parts.state.rng_reader)
    ring = None
    if snapshots is not None:
        ring = SnapshotRing(
            parts.state,
            data,
            snapshots,
            ranks=parts.ranks,
            lag=LAG,
            is_calm=lambda: not parts.journal.trend.beyond,
            folder=snapshot_dir,
            run_facts=lambda: facts_of(engine),
            prepare=lambda facts: recovery.prepare(facts),
        )
    recovery = Recovery(parts, data, ring, diagnose=diagnose, bundles=_bundles(capture, run_dir, parts))
    _bind_monitors(parts, recovery)
    engine = StepEngine(
        parts,
        data,
        ring,
        recovery,
        sync=sync,
        accumulate=accumulate,
        records_calls=diagnose != "off",
        was_skipped=was_skipped,
        host_advances=host_advances,
    )
    return engine, recovery


def _bind_monitors(parts: StepParts, recovery: Recovery) -> None:
    """If each rank has a monitor, they forecast alike. Else a rank's warnings are its own, and are only shown."""
    monitors = [each for each in parts.journal.observers if isinstance(each, Monitor)]
    are_alike = parts.ranks.size > 1 and parts.ranks.lowest(int(len(monitors) == 1)) == 1
    for monitor in monitors:
        monitor.bind(
            parts.state.model,
            parts.journal.note,
            optimizers=parts.state.optimizers,
            alerted=recovery.alerts.hear if are_alike or parts.ranks.size == 1 else _only_shown,
            ranks=parts.ranks if are_alike else None,
        )


def _only_shown(alert: Alert) -> None:
    """Nothing is done about the warning."""


def _bundles(capture: Any, run_dir: str | Path | RunFolder | None, parts: StepParts) -> Bundles | None:
    """Where bad steps are saved; None if nothing is to be written."""
    check_choice("capture", capture)
    if run_dir is None or capture == "none":
        return None
    ranks = parts.ranks
    return Bundles(run_dir, capture, precision=parts.precision.name, rank=ranks.rank, world_size=ranks.size)


def introduce(
    parts: StepParts, *, asked_precision: str, sync: str, program: Mapping[str, Any] | None = None, joins: bool = False
) -> None:
    """Logs once how the run is guarded, and what would make it cheaper.

    ``program`` says what is run, if that is known; with ``joins`` the run has begun already, with other optimizers.
    """
    how = "no sync a step" if sync == "late" else "one sync a step"
    name = parts.precision.name
    log.info("guarding in %s (asked for %s) on %s, %s", name, asked_precision, parts.state.device, how)
    if parts.policy.drops_gradients and not parts.drops_gradients:
        log.warning("DropBadGradients is ignored in fp16: a scaled overflow says nothing about one parameter")
    if parts.policy.answers_alerts and not any(isinstance(each, Monitor) for each in parts.journal.observers):
        log.warning("the policy answers warnings, but nothing raises warnings: pass observers=[nanguard.Monitor()]")
    slow = parts.skippable.not_fused()
    if slow:
        level = logging.INFO if parts.state.device.type == "cpu" else logging.WARNING
        log.log(level, "%s is not fused, which costs one sync a step: pass fused=True to have none", " and ".join(slow))
    parts.journal.note(
        "optimizer" if joins else "run",
        nanguard=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        host=platform.node(),
        pid=os.getpid(),
        device=str(parts.state.device),
        precision=name,
        sync=sync,
        ranks=parts.ranks.size,
        optimizers=[type(optimizer).__name__ for optimizer in parts.state.optimizers],
        groups=_names_of_norms(parts),
        policy={**describe(parts.policy), "max_norm": parts.clipper.max_norm},  # as it is in force
        parameters=sum(p.numel() for p in parts.state.model.parameters()),
        **(program or {}),
    )


def _names_of_norms(parts: StepParts) -> list[str]:
    """One for each norm that is measured: a parameter group, or all of them together."""
    if parts.clipper.together:
        return ["all parameters"]
    names = []
    for place, optimizer in enumerate(parts.state.optimizers):
        kind = type(optimizer).__name__
        same = [type(other).__name__ for other in parts.state.optimizers].count(kind)
        whose = f"{kind} {place}" if same > 1 else kind
        for number, group in enumerate(optimizer.param_groups):
            given = group.get("name")
            names.append(given if isinstance(given, str) and given else f"{whose} group {number}")
    return names if len(names) > 1 else ["all parameters"]


def describe(policy: Policy) -> dict[str, Any]:
    """The policy in plain containers, each rung with its name, in code and in words."""
    told = {each.name: getattr(policy, each.name) for each in fields(policy)}
    divergence = None if policy.divergence is None else asdict(policy.divergence)
    return {**told, "divergence": divergence, "ladder": [_describe_rung(rung) for rung in policy.ladder]}


def _describe_rung(rung: Rung) -> dict[str, Any]:
    """A rung of the user's own may hold anything: what JSON has no type for is written as text."""
    names = [each.name for each in fields(rung)] if is_dataclass(rung) else ["times", "per"]
    values = {name: getattr(rung, name) for name in names}
    told = {name: value if isinstance(value, _PLAIN) else f"{value!r:.80}" for name, value in values.items()}
    return {"rung": type(rung).__name__, "words": rung.describe(), **told}
