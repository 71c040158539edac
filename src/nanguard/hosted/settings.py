"""How a loop that we do not own is guarded."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from nanguard.policy.policy import Policy
from nanguard.policy.rungs import Halt, RaisePrecision, Rollback, Skip
from nanguard.run_folder import RunFolder

if TYPE_CHECKING:  # without torch: the program imports it when it likes
    from nanguard.diagnosis.scheduler import How
    from nanguard.incidents.bundle import CaptureLevel
    from nanguard.state.islands import Islands
    from nanguard.step.observers import Observer

log = logging.getLogger("nanguard")


def patient_policy() -> Policy:
    """Bad steps are skipped as long as the run makes progress; damage is rolled back.

    It halts only if nothing can be learned any more: see ``Policy.max_consecutive_skips`` and ``max_skipped_share``.

    Modules that are finite in fp32, but overflow again and again under the program's autocast, are kept in fp32.
    Divergence of a finite loss is not looked for: the losses of a GAN do so all the time.
    """
    undo = Rollback(when="damage", times=20, per=1000)
    raised = RaisePrecision("module", times=4, retry_after=5000)
    return Policy([undo, Skip(times=3, per=100), raised, Skip(times=None), Halt()], divergence=None, max_norm=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """``trace`` follows every op from the first step on, which makes a step many times slower.

    ``keep_fp32`` names modules that run in fp32, as in ``Guard.keep_fp32``.
    ``monitor`` warns before something goes wrong, for each optimizer on its own.
    ``notify`` is a command that is run when something has gone wrong.
    ``script``, ``module`` (if it is run with ``-m``) and ``argv`` are the program; if ``is_child``, it has started this
    process.
    """

    policy: Policy = field(default_factory=patient_policy)
    max_norm: float | None = None
    run_dir: RunFolder | None = None
    trace: bool = False
    monitor: bool = False
    notify: str = ""
    sync: Literal["auto", "eager", "late"] = "auto"
    diagnose: How = "auto"
    capture: CaptureLevel = "batch"
    keep_fp32: tuple[str, ...] = ()
    script: str = ""
    module: str = ""
    argv: tuple[str, ...] = ()
    is_child: bool = False
    observers: tuple[Observer, ...] = ()

    def program(self) -> dict[str, Any] | None:
        """What is run, for the header of the run log; None if that is not known."""
        if not self.script:
            return None
        further = {"module": self.module, "is_child": self.is_child}
        return {
            "script": self.script,
            "argv": list(self.argv),
            **{name: told for name, told in further.items() if told},
        }

    def fp32_fix(self, modules: Sequence[str]) -> str:
        """How the user can keep these modules in fp32, or the whole model if there are none."""
        if not modules:
            return "torch.autocast(..., enabled=False)"
        if not self.script:
            return f"torch.autocast(..., enabled=False) around {' and '.join(modules)}, with .float() inputs"
        return f"nanguard run {' '.join(f'--keep-fp32 {shlex.quote(name)}' for name in modules)} ..."

    def keep_in_fp32(self, islands: Islands, level: int) -> None:
        """Logs a name that is not there; ``level`` is low if another optimizer may train that module."""
        for name in self.keep_fp32:
            try:
                islands.keep(name)
            except ValueError as error:
                log.log(level, "%s is not kept in fp32: %s", name, error)

    def for_one_rank_alone(self) -> Settings:
        """For a rank that trains with ranks that are not guarded: nothing that would make its weights differ.

        The host decides before each step, since only non-finite gradients count.
        """
        rungs = tuple(rung for rung in self.policy.ladder if isinstance(rung, (Skip, Halt)))
        policy = replace(self.policy, ladder=rungs or (Halt(),), divergence=None, max_norm=None)
        return replace(self, policy=policy, max_norm=None, sync="eager")
