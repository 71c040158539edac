"""Examine a failing step: replay it, find the op to blame, name the cause, and try what would have helped.

The training state must be the one before the failing step. It is the same afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from nanguard import _compat
from nanguard.diagnosis import authorship, blame
from nanguard.diagnosis.causes import titled, with_remedy
from nanguard.diagnosis.exam import Exam, Past, device_name, link_of, links_of, parameters_in
from nanguard.diagnosis.op_faults import op_fault
from nanguard.diagnosis.process import as_a_process, as_computed_data
from nanguard.diagnosis.provenance import Note
from nanguard.diagnosis.replay import Replay
from nanguard.diagnosis.state_faults import state_fault
from nanguard.diagnosis.trace import Trace
from nanguard.diagnosis.trials import Trials, with_shown_samples
from nanguard.diagnosis.watched import WatchedRun
from nanguard.records.diagnosis import Diagnosis, Fix, Source, Trial
from nanguard.records.steps import Reading
from nanguard.source.frames import source_of
from nanguard.step.dry_run import DryRun
from nanguard.step.parts import StepParts
from nanguard.step.pending import PendingStep

_BUDGET = 40.0
"""The time limit of all experiments together, as a multiple of the time of one replay."""

_OF_OPTIMIZER = Fix(words="look at what the optimizer divides by, and takes roots and logarithms of")
_BACKWARD_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "register_full_backward_hook")
_FORWARD_HOOKS = ("register_forward_hook", "register_forward_pre_hook")


class Examiner:
    """Examines the steps of one guarded run."""

    def __init__(self, parts: StepParts, dry_run: DryRun) -> None:
        self._parts, self._dry_run = parts, dry_run

    def examine(
        self,
        pending: PendingStep,
        reading: Reading | None,
        past: Past,
        is_deep: Callable[[Diagnosis], bool],
        *,
        update: bool = False,
    ) -> Diagnosis | None:
        """Replay the step and explain it. Waits for the device.

        ``reading`` is the measurement of the step, None if it has not run before. Experiments run if ``is_deep``
        returns True for the first diagnosis. With ``update`` the optimizers' update is traced too. Returns None if the
        replay is finite and there is no reading. Raises ``NotRepeatable``, but not without a reading.
        """
        replay = Replay(self._parts, self._dry_run, pending)
        run = replay.watched(update=update)
        if reading is None:
            run.replaced = {}  # what modules hold now is what the step begins with
        if reading is not None and reading.damaged:
            run = _before_the_damage(replay, past) or run
        exam = Exam(self._parts, pending, run, past, replay)
        if not run.is_finite:
            diagnosis = self.read(exam)
            if is_deep(diagnosis):
                diagnosis = replace(Trials(replay, _BUDGET).made(diagnosis, run), depth="full")
            else:
                diagnosis = with_shown_samples(diagnosis)
        elif reading is not None:
            diagnosis = self._of_what_does_not_repeat(exam, replay, reading)
        else:
            return None
        diagnosis = replace(diagnosis, num_replays=replay.num, seconds=round(replay.seconds, 3), capture="step")
        return self.located(diagnosis, exam, reading)

    def examine_update(self, pending: PendingStep, reading: Reading, past: Past) -> Diagnosis | None:
        """Examine the update of a step whose gradients still exist. None if the update is finite."""
        replay = Replay(self._parts, self._dry_run, pending)
        try:
            run = replay.watched_update()
        except Exception as error:  # it may have changed what it needs, such as the graph of the gradients
            kinds = ", ".join(type(optimizer).__name__ for optimizer in self._parts.state.optimizers)
            because = f"{kinds}.step() cannot be called again: {' '.join(str(error).split()):.160}"
            unknown = Diagnosis(
                phase="optimizer", cause="unknown", because=because, fix=_OF_OPTIMIZER, step=reading.step
            )
            return titled(replace(unknown, epoch=reading.epoch, batch=reading.batch))
        if run.is_finite:
            return None
        exam = Exam(self._parts, pending, run, past, None)
        diagnosis = self.located(self.read(exam), exam, reading)
        return replace(diagnosis, num_replays=1, seconds=round(replay.seconds, 3), capture="update")

    def read(self, exam: Exam) -> Diagnosis:
        """The diagnosis from a trace alone. The only experiment is a replay on older weights."""
        finding = blame.find(exam.run.trace, exam.run.ends)
        if finding is None:
            because = "a non-finite value was found, but no op was seen to make it"
            return titled(Diagnosis(phase="forward", cause="unknown", because=because))
        diagnosis = state_fault(exam, finding)
        if diagnosis is None:
            diagnosis = as_a_process(exam, op_fault(exam, finding), finding.event)
        else:
            diagnosis = as_computed_data(exam, diagnosis)
        return replace(
            with_remedy(diagnosis),
            chain=links_of(finding.chain),
            harmless=tuple(link_of(event) for event in finding.harmless),
            trail=exam.trail(finding.event),
        )

    def located(self, diagnosis: Diagnosis, exam: Exam, reading: Reading | None) -> Diagnosis:
        """The diagnosis with step, batch, rank and device."""
        pending, parts = exam.pending, self._parts
        indices = exam.dataset_indices(diagnosis.samples)
        return replace(
            diagnosis,
            dataset_indices=indices,
            is_order_assumed=bool(indices) and any(each.is_collated for each in pending.fetched),
            step=pending.step if reading is None else reading.step,
            epoch=pending.epoch,
            batch=pending.batch,
            microbatch=exam.run.microbatch if len(pending.microbatches) > 1 else None,
            rank=parts.ranks.rank,
            device=device_name(parts.state.device),
        )

    # ---- what does not repeat ------------------------------------------------------------------------------------

    def _of_what_does_not_repeat(self, exam: Exam, replay: Replay, reading: Reading) -> Diagnosis:
        """The replay is finite: the cause is hardware, a race, or a hook that is not part of the graph."""
        again = replay.is_finite()
        in_backward = "loss" not in reading.found
        module, note = _last_used(exam.run.trace, reading.gradients) if in_backward else ("", None)
        hook = _line_of_a_hook(exam, in_backward=in_backward)
        hooked = _compat.hooked_modules(exam.parts.state.own_model, backward=in_backward)
        if hook is not None and len(hooked) == 1 and not exam.run.hooks:  # the only code there that is no op
            module = hooked[0]
            note = _last_op_of(exam.run.trace, module) or note
        where = f"rank {self._parts.ranks.rank}, {device_name(self._parts.state.device)}"
        diagnosis = Diagnosis(
            phase="optimizer" if "update" in reading.found else "backward" if in_backward else "forward",
            cause="nondeterministic_hardware_fault",
            op="" if note is None else note.name,
            module=module,
            source=hook or (None if note is None else source_of(note.place)),
            because=f"with the same data and random states it is finite {1 + again} times in a row ({where})",
            evidence=() if hook is None else (f"a hook of the program runs there, set at {hook}",),
            tried=(
                Trial(what="the same step again, watched", result="finite"),
                Trial(what="the same step once more", result="finite" if again else "non-finite"),
            ),
            confidence="likely" if again else "guess",
            repeats=False,
            depth="full",
            notes=("a program that draws from generators torch does not know of would look the same",),
        )
        return with_remedy(diagnosis)


def _before_the_damage(replay: Replay, past: Past) -> WatchedRun | None:
    """The step on weights that were still good. None if there are none, or if the step is finite on them."""
    if past.older_weights is None:
        return None
    with past.older_weights() as there_are:
        run = replay.watched() if there_are else None
    return None if run is None or run.is_finite else run


def _last_op_of(trace: Trace, module: str) -> Note | None:
    return next((note for note in reversed(trace.notes) if note.module == module and note.phase == "forward"), None)


def _line_of_a_hook(exam: Exam, *, in_backward: bool) -> Source | None:
    """The line that registers a hook: seen in this step, or found in the source."""
    if exam.run.hooks and in_backward:
        return source_of(exam.run.hooks[0][0])
    names = _BACKWARD_HOOKS if in_backward else _FORWARD_HOOKS
    lines = (authorship.line_that_calls(name, exam.files()) for name in names)
    return next(filter(None, lines), None)


def _last_used(trace: Trace, names: Sequence[str]) -> tuple[str, Note | None]:
    """The module and op of the parameter that the forward pass uses last, so that backward reaches it first."""
    best: tuple[str, Note | None] = (names[0].rpartition(".")[0] if names else "", None)
    for note in trace.notes:
        if note.phase == "forward" and note.op not in ("to_copy", "clone"):
            for name in parameters_in(note):
                best = (name.rpartition(".")[0], note) if name in names else best
    return best
