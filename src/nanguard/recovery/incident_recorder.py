"""What is found out and kept about a bad step before anything is done about it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from nanguard.diagnosis import authorship, lines_in_place
from nanguard.diagnosis.causes import with_remedy
from nanguard.diagnosis.exam import Past
from nanguard.diagnosis.scheduler import DiagnosisScheduler
from nanguard.diagnosis.state_faults import absurd_rate
from nanguard.diagnosis.taped import repeatable
from nanguard.incidents.bundle import Bundles, Kept
from nanguard.incidents.tape_writer import RepeatableTape
from nanguard.records.diagnosis import Diagnosis
from nanguard.records.steps import Outcome, Reading
from nanguard.records.words import listed
from nanguard.run_folder import as_seen
from nanguard.source.frames import user_files
from nanguard.state.optimizer_state import impossible
from nanguard.state.parameter_sizes import ParameterSizes
from nanguard.state.snapshots.ring import SnapshotRing
from nanguard.step.parts import StepParts
from nanguard.step.pending import PendingStep

_CHECKED_FROM_NOW = "updates are checked from now on: if it happens again, it is caught and explained"


class IncidentRecorder:
    """``bundles`` is None if bad steps are not saved to disk, ``ring`` if no snapshots are taken."""

    def __init__(
        self, parts: StepParts, examinations: DiagnosisScheduler, ring: SnapshotRing | None, bundles: Bundles | None
    ) -> None:
        self._parts, self._examinations, self._ring, self._bundles = parts, examinations, ring, bundles
        parts.first_sizes = ParameterSizes(parts.state.parameters())

    def examine(self, pending: PendingStep, reading: Reading, *, is_last: bool = False) -> Diagnosis | None:
        """Where it came from and why; the same on all ranks. The last step of a run is never taken for a repeat."""
        ring = self._ring
        past = Past(
            readings=tuple(self._parts.journal.recent),
            older_weights=None if ring is None else ring.weights_of_oldest,
            oldest_step=ring.steps[0] if ring is not None and ring.steps else None,
            first_sizes=self._parts.first_sizes,
            num_applied=self._parts.journal.counts["applied"],
        )
        diagnosis = self._examinations.examine(
            pending, reading, past, update="update" in reading.found, is_last=is_last
        )
        if diagnosis is None or not reading.damaged:
            return diagnosis
        return self._of_damage(diagnosis, pending, reading, past)

    def gather(
        self, pending: PendingStep, reading: Reading, diagnosis: Diagnosis | None, *, is_last: bool = False
    ) -> Kept | None:
        """Gathers the contents of a bundle, on the ranks that saw the fault. None if enough bundles are kept."""
        parts, ranks = self._parts, [flags.rank for flags in reading.ranks]
        if self._bundles is None or parts.ranks.rank not in (ranks or [0]):
            return None
        kept = self._bundles.gather(
            diagnosis,
            pending,
            parts.journal.recent,
            parts.state.model,
            precision=parts.precision.name,
            kept_fp32=parts.islands.names,
            found=reading.found,
            in_any_case=is_last,
            repeatable=self._tape_of(pending),
        )
        parts.journal.num_not_kept = self._bundles.num_left_out
        return kept

    def _tape_of(self, pending: PendingStep) -> RepeatableTape | None:
        tape, state = pending.tape, self._parts.state
        if tape is None:
            return None
        trained = (*state.parameters().values(), *state.buffers().values())
        return lambda from_calls_on: repeatable(tape, trained, state.device, from_calls_on=from_calls_on)

    def write(self, outcome: Outcome, kept: Kept | None) -> str:
        """Writes the bundle with the outcome of the step. Returns its folder, ``""`` if there is none."""
        if self._bundles is None or kept is None:
            return ""
        path = self._bundles.write(self._parts.journal.next_number, outcome, kept)
        self._parts.journal.num_not_kept = self._bundles.num_left_out
        return "" if path is None else as_seen(path)

    def _of_damage(self, diagnosis: Diagnosis, pending: PendingStep, reading: Reading, past: Past) -> Diagnosis:
        """The diagnosis of damage that happened after the step before, which still saw finite weights."""
        is_seen = "update" in reading.found or diagnosis.confidence == "certain"
        if diagnosis.phase not in ("parameter", "optimizer") or is_seen:
            return diagnosis  # the update, or the program, was seen to write to them in this very step
        names = listed(reading.damaged)
        last = reading.step - 1
        is_by_program, files = self._parts.update_checks.had(last), self._files(pending)
        lines = lines_in_place.lines_that_write(files)
        line = lines[0] if is_by_program and len(lines) == 1 else None
        by = "by its update, or by the program"
        if is_by_program:
            by = "by the program, since the update of that step was finite"
        because = f"{names} became non-finite after step {last:,}: {by}{lines_in_place.in_words(lines)}"
        known = [each.lrs for each in past.readings if each.step <= last and each.lrs]
        rates = [rate for rate in known[-1] if rate is not None] if known else []
        rate, cause = next((rate for rate in rates if not math.isfinite(rate)), None), "parameter_corrupted"
        if rate is not None:
            setters, cause = authorship.lines_that_set_entry("lr", files), "nonfinite_constant"
            line = setters[0] if len(setters) == 1 else None  # else a schedule, or another line
            because = f"the learning rate of step {last:,} was {rate}, and its update made {names} non-finite"
        elif (absurd := absurd_rate(rates)) is not None:
            cause = "learning_rate_too_high"
            because = f"{names} became non-finite after step {last:,}, which had a learning rate of {absurd:g}"
        elif found := self._impossible_state(reading.damaged):
            key, why = found
            cause, because = "optimizer_state_corrupted", f"{names} became non-finite after step {last:,}, since {why}"
            line = next(reversed(authorship.lines_that_set_entry(key, files)), None)
        damaged = replace(
            diagnosis,
            phase="optimizer" if cause == "optimizer_state_corrupted" else diagnosis.phase,
            cause=cause,
            source=line,
            is_line_traced=False,
            op="",
            batch=None if reading.batch is None else max(0, reading.batch - 1),
            since_step=max(0, last),
            because=because,
            notes=diagnosis.notes if is_by_program else (*diagnosis.notes, _CHECKED_FROM_NOW),
            confidence="guess" if rate is None else "likely",
        )
        return with_remedy(damaged)

    def _impossible_state(self, names: Sequence[str]) -> tuple[str, str] | None:
        """What the optimizer's state of these parameters cannot have come to by itself, and why not.

        A checkpoint may hold it, or the program may have written it.
        """
        for optimizer in self._parts.skippable.optimizers:
            for param in (param for group in optimizer.param_groups for param in group["params"]):
                name = self._parts.state.name_of(param)
                key, why = impossible(optimizer.state.get(param, {})) if f"model.{name}" in names else ("", "")
                if why:
                    return key, f"{key} of {name} {why}"
        return None

    def _files(self, pending: PendingStep) -> list[str]:
        """Of the program."""
        taped = pending.tape.functions if pending.tape is not None else ()
        functions = [micro.loss_fn for micro in pending.microbatches]
        files = user_files([*functions, *map(type, self._parts.state.own_model.modules())])
        return list(dict.fromkeys([*files, *(file for file, _ in taped)]))

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C, or an exit, came while the step was examined."""
        return self._examinations.interrupt is not None

    @contextlib.contextmanager
    def letting_interrupts_out(self) -> Iterator[None]:
        """Wraps answering and recording a step. What interrupted its examination is raised at the end."""
        try:
            yield
        finally:
            interrupt, self._examinations.interrupt = self._examinations.interrupt, None
            if interrupt is not None:
                raise interrupt
