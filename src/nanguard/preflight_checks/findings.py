"""Collects findings: one for each place in the program, the most ordinary way to get there first."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanguard.diagnosis.causes import with_remedy
from nanguard.diagnosis.exam import Past
from nanguard.incidents.bundle import Bundles
from nanguard.preflight_checks.edges import DangerSite
from nanguard.preflight_checks.record import PreflightFinding, Reach, Severity
from nanguard.preflight_checks.step_runner import StepResult, StepRunner
from nanguard.records.diagnosis import Diagnosis
from nanguard.records.steps import Action, Outcome, Reading, Verdict
from nanguard.run_folder import RunFolder, as_seen
from nanguard.source.frames import source_of
from nanguard.step.pending import PendingStep

_MOST_REFUSED = 32

_FINITE = StepResult()

_Key = tuple[Any, ...]


class FindingList:
    """``refused`` says which inputs the program raised an error for."""

    def __init__(self, runner: StepRunner, run_dir: str | Path | RunFolder | None) -> None:
        self._runner = runner
        precision = runner.parts.precision.name
        self._bundles = None if run_dir is None else Bundles(run_dir, "full", precision=precision)
        self._findings: dict[_Key, PreflightFinding] = {}
        self.refused: list[str] = []

    def all(self) -> tuple[PreflightFinding, ...]:
        """Those that broke come first."""
        found = list(self._findings.values())
        return tuple(sorted(found, key=lambda finding: finding.severity != "broke"))

    def knows(self, line: tuple[str, int]) -> bool:
        """Whether there is a finding at this line of a file."""
        return line in self._findings

    def try_step(
        self, words: str, batch: Any, reach: Reach, past: Past, *, at: tuple[str, int] | None, is_deep: bool
    ) -> bool:
        """Whether the step is non-finite, which is then a finding. With ``at``, only if it begins at that line."""
        result = self._runner.result(batch)
        if result.error is None and not result.found:
            return False
        pending = self._runner.pending(batch)
        diagnosis = self._examined(pending, past, is_deep, result)
        if result.error is not None and (diagnosis is None or not _ends_in_nan(diagnosis)):
            if len(self.refused) < _MOST_REFUSED:
                self.refused.append(f"{words}: {type(result.error).__name__}: {result.error}"[:200])
            return False
        if diagnosis is None:
            self.add_unrepeatable(words, reach)
            return True
        if at is not None and _key(diagnosis) != at:
            return False
        severity: Severity = "broke" if reach in ("data", "input", "gradients") else "nearly"
        self._add(PreflightFinding(severity=severity, reach=reach, stress=words, diagnosis=diagnosis), pending, result)
        return True

    def _examined(self, pending: PendingStep, past: Past, is_deep: bool, result: StepResult) -> Diagnosis | None:
        """None if the step is finite now, or if the program just does not accept the input."""
        try:
            with self._runner.at_lowest_scale():
                return self._runner.diagnosis(pending, past, lambda each: is_deep and _key(each) not in self._findings)
        except Exception as error:
            if result.error is not None:
                return None
            because = f"it could not be examined: {type(error).__name__}: {error}"
            return with_remedy(Diagnosis(phase="forward", cause="unknown", because=because))

    def add_unrepeatable(self, words: str, reach: Reach) -> None:
        """A step that was non-finite once, and finite another time."""
        because = "the same step on the same data was non-finite once, and finite another time"
        diagnosis = Diagnosis(phase="forward", cause="nondeterministic_hardware_fault", because=because, repeats=False)
        finding = PreflightFinding(severity="broke", reach=reach, stress=words, diagnosis=with_remedy(diagnosis))
        self._add(finding)

    def add_nearly(self, diagnosis: Diagnosis, words: str, pending: PendingStep, reach: Reach) -> None:
        finding = PreflightFinding(severity="nearly", reach=reach, stress=words, diagnosis=diagnosis)
        self._add(finding, pending)

    def add_state(self, words: str, diagnosis: Diagnosis) -> None:
        """Something that training uses is non-finite already."""
        self._add(PreflightFinding(severity="broke", reach="data", stress=words, diagnosis=diagnosis))

    def add_update(self, words: str, pending: PendingStep) -> None:
        """The optimizer makes a non-finite update of the gradients of now."""
        diagnosis = self._runner.diagnosis_of_update(pending)
        if diagnosis is not None:
            finding = PreflightFinding(severity="broke", reach="gradients", stress=words, diagnosis=diagnosis)
            self._add(finding)

    def add_crossing(self, site: DangerSite, words: str, batch: Any) -> None:
        """A denominator has both signs: in between it is 0."""
        diagnosis = Diagnosis(
            phase="forward",
            cause="div_by_zero",
            op="div",
            source=source_of(site.place),
            because="the denominator can be negative and positive, and is 0 in between",
            confidence="likely",
        )
        self.add_nearly(with_remedy(diagnosis), words, self._runner.pending(batch), "input")

    def _add(self, finding: PreflightFinding, pending: PendingStep | None = None, result: StepResult = _FINITE) -> None:
        key = _key(finding.diagnosis)
        before = self._findings.get(key)
        if before is not None and (before.severity == "broke" or finding.severity == "nearly"):
            self._findings[key] = replace(before, also=before.also + 1)
            return
        self._findings[key] = replace(finding, bundle=self._saved(finding, pending, result))

    def _saved(self, finding: PreflightFinding, pending: PendingStep | None, result: StepResult) -> str:
        """The folder of the step; empty if steps are not saved, or this one is finite and there is nothing to run."""
        if self._bundles is None or pending is None or not (result.found or result.error):
            return ""
        parts = self._runner.parts
        scale = None if parts.precision.scaler is None else parts.precision.scaler.floor
        found = result.found or ("loss",)
        loss = math.nan if result.error is not None else result.loss
        reading = Reading(step=0, epoch=0, batch=None, loss=loss, scale=scale, found=found)
        outcome = Outcome(
            verdict=Verdict(kind="nonfinite", reading=reading),
            action=Action(response="skip", words="preflight"),
            applied=False,
            diagnosis=finding.diagnosis,
        )
        number = len(self._findings) + 1
        path = self._bundles.keep(number, outcome=outcome, pending=pending, history=(), model=parts.state.model)
        return "" if path is None else as_seen(path)


def _ends_in_nan(diagnosis: Diagnosis) -> bool:
    """Whether a program that raised had computed a NaN. An Inf may have been a mask, and an input may just not fit."""
    return bool(diagnosis.chain) and diagnosis.chain[-1].became == "NaN"


def _key(diagnosis: Diagnosis) -> _Key:
    source = diagnosis.source
    if source is not None:
        return source.file, source.line
    return diagnosis.module, diagnosis.op, diagnosis.cause
