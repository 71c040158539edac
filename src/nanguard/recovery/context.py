"""What a rung acts with: the verbs of ``RungContext``, for one bad step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from nanguard.diagnosis.scheduler import DiagnosisScheduler
from nanguard.policy.rungs import Rollback
from nanguard.records.diagnosis import Diagnosis
from nanguard.records.steps import Verdict
from nanguard.recovery.mitigations import ActiveMitigations
from nanguard.recovery.rollbacks import Between, Rollbacks
from nanguard.step.dry_run import DryRun
from nanguard.step.parts import StepParts
from nanguard.step.pending import PendingStep

log = logging.getLogger("nanguard")


@dataclass(slots=True)
class StepContext:
    """Implements ``RungContext``. ``went_back``: the run is at an earlier state now."""

    _parts: StepParts
    _dry_run: DryRun
    _mitigations: ActiveMitigations
    _rollbacks: Rollbacks
    _examinations: DiagnosisScheduler
    _pending: PendingStep
    verdict: Verdict
    diagnosis: Diagnosis | None
    count: int
    went_back: bool = False

    @property
    def model(self) -> nn.Module:
        return self._parts.state.model

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return self._parts.state.optimizers

    def lower_lr(self, factor: float, *, recover_after: int | None = None) -> str:
        return self._mitigations.lower_lr(factor, self.verdict.reading.step, recover_after)

    def raise_precision(
        self, scope: Literal["module", "model"], *, verify: bool = True, retry_after: int | None = None
    ) -> str | None:
        try:
            return self._raise_precision(scope, verify, retry_after)
        except Exception:
            log.warning("step %d: precision could not be raised", self.verdict.reading.step, exc_info=True)
            return None

    def take_snapshot(self) -> str | None:
        return self._rollbacks.hasten()

    def roll_back(
        self,
        steps: int = 1,
        *,
        skip_batches: int | Literal["failed"] = 0,
        lr: float = 1.0,
        raise_precision: bool = False,
    ) -> str | None:
        rung = Rollback(steps, skip_batches=skip_batches, lr=lr, raise_precision=raise_precision)
        between = self._rollbacks.failed(self._pending, self.verdict) if skip_batches == "failed" else None
        return self._go_back(self._rollbacks.first_sign(self.verdict), rung, self.count, between)

    def restore_newest(self) -> str | None:
        return self._go_back(self.verdict.reading.step, Rollback(), 1, None)

    def is_step_finite(self) -> bool | None:
        can_run_again = self._pending.rerunnable and self._pending.microbatches
        return self._dry_run.is_sound(self._pending) if can_run_again else None

    def _go_back(self, step: int, rung: Rollback, count: int, between: Between) -> str | None:
        try:
            did = self._rollbacks.go_back(step, rung, count=count, between=between)
        except (FileNotFoundError, ValueError) as error:  # nothing has been put back by then
            log.warning("cannot go back: %s", error)
            return None
        self.went_back = True
        return did

    def _raise_precision(self, scope: Literal["module", "model"], verify: bool, retry_after: int | None) -> str | None:
        pending, step = self._pending, self.verdict.reading.step
        if self.verdict.alert is not None:
            # A kept module gives its results back in half precision: if they are what grows, that does not help.
            inside = self.verdict.alert.inside
            inside = self.verdict.alert.module if inside is None else inside
            _, inside = self._parts.ranks.share(inside)  # other ranks may have run other modules
            return self._mitigations.keep_around(inside if scope == "module" else "", step, retry_after)
        known = () if self.diagnosis is None else self.diagnosis.modules_to_keep
        if not self._mitigations.can_raise_precision and not known:
            return "everything runs in fp32 already"
        if scope == "model":
            if verify and pending.rerunnable and not self._helps_in_fp32():
                return None
            return self._mitigations.raise_model(step, retry_after)
        names = known
        if not names and pending.rerunnable and (self.diagnosis is None or self.diagnosis.depth != "full"):
            names = self._examinations.modules_that_help(pending, self.verdict.reading)
        return self._mitigations.keep_modules(names, step, retry_after) if names else None

    def _helps_in_fp32(self) -> bool:
        """Whether the step is sound with everything in fp32; nothing is cast for it."""
        with self._dry_run.in_fp32(self._pending, [""]):
            return self._dry_run.is_sound(self._pending)
