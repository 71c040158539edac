"""What to make of a reading, and what to do about it. Pure functions of records: the same on every rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from nanguard.policy.divergence import Divergence
from nanguard.policy.rungs import (
    DropBadGradients,
    Halt,
    LowerLR,
    RaisePrecision,
    Rollback,
    Rung,
    Skip,
    answers_alerts,
    check,
    check_count,
    check_rung,
    response_of,
    steps_back,
)
from nanguard.records.healthy import healthy_verdict
from nanguard.records.steps import APPLY, Action, Means, Outcome, Reading, Verdict, span_in_words


def _default_ladder() -> tuple[Rung, ...]:
    """docs/recovery.md says why each rung stands where it does."""
    return (
        Skip(times=3, per=100),
        RaisePrecision("module", times=4, retry_after=5000),
        RaisePrecision("model", times=1, retry_after=5000),
        Skip(times=200, per="epoch", when="data"),
        Rollback(times=1, per=1000),
        Rollback(raise_precision=True, times=1, per=1000),
        Rollback(skip_batches="failed", times=1, per=1000),
        Rollback(lr=0.25, times=3, per=1000),
        LowerLR(0.5, recover_after=1000, times=3, per=1000),
        Halt(),
    )


@dataclass(frozen=True, slots=True)
class Policy:
    """What to do about trouble: rungs from the mildest to the last, the first that fits is taken.

    A rung is not taken if it does not answer what happened, or has been used ``times`` ``per`` span already. After a
    later rung has acted, skips are counted from zero; if no step was good since, the rungs before it are not taken.
    After the last rung training halts: a corrupt update is never accepted. It also halts if it makes no progress,
    according to the three limits below, whatever rungs are left.

    Args:
        ladder: the rungs: ours, or any object with the methods and attributes of ``Rung`` (docs/recovery.md, "Write
            your own rung"). The default is our own ladder, ``Policy.recipe("default")``.
        divergence: when a finite loss counts as diverged; None: never. Only rungs that answer it are taken.
        max_norm: the gradient norm to clip to if the guard is not given one; None does not clip.
        max_consecutive_skips: how many steps in a row may end without an update, over all epochs; the next non-finite
            step halts. None: any number.
        max_skipped_share: the largest share of the last ``skipped_share_window`` steps that may be refused for being
            non-finite; the next such step halts. None: any share.
        skipped_share_window: the number of steps for ``max_skipped_share``.
    """

    ladder: Sequence[Rung] = field(default_factory=_default_ladder)
    divergence: Divergence | None = field(default_factory=Divergence)
    max_norm: float | None = None
    max_consecutive_skips: int | None = 100
    max_skipped_share: float | None = 0.5
    skipped_share_window: int = 1000

    def __post_init__(self) -> None:
        rungs = tuple(self.ladder) if isinstance(self.ladder, (list, tuple)) else (self.ladder,)
        object.__setattr__(self, "ladder", rungs)  # a list is easier to write, a tuple cannot change
        for rung in rungs:
            check_rung(rung)
            if isinstance(rung, Halt) and rung is not rungs[-1]:
                raise ValueError("Halt() must be the last rung: nothing after it would ever be reached")
        if self.divergence is not None and not isinstance(self.divergence, Divergence):
            raise ValueError(f"divergence must be a Divergence or None, got {self.divergence!r}")
        check_count("max_consecutive_skips", self.max_consecutive_skips, optional=True)
        check_count("skipped_share_window", self.skipped_share_window)
        share = self.max_skipped_share
        is_share = type(share) in (int, float) and 0 < cast(float, share) <= 1
        check("max_skipped_share", share, share is None or is_share, "a number above 0, up to 1, or None")

    @classmethod
    def recipe(cls, name: str, **options: Any) -> Policy:
        """A policy by name: ``default``, ``speechbrain``, ``tts``, ``separation``, ``llava`` or ``pretrain``.

        docs/recipes.md has their options, and where each comes from.
        """
        if name not in _RECIPES:
            raise ValueError(f"there is no recipe {name!r}; there are {', '.join(map(repr, _RECIPES))}")
        accepted = inspect.signature(_RECIPES[name]).parameters
        for option in options:
            if option not in accepted:
                raise ValueError(f"recipe {name!r} has no option {option!r}; it has {', '.join(accepted) or 'none'}")
        return _RECIPES[name](**options)

    @property
    def drops_gradients(self) -> bool:
        return any(response_of(rung) == "drop_gradients" for rung in self.ladder)

    @property
    def answers_divergence(self) -> Divergence | None:
        """The rule of divergence, if any rung answers it, or can go back."""
        others = [rung for rung in self.ladder if not answers_alerts(rung)]
        answers = any(steps_back(rung) or not rung.refuses(_DIVERGED) for rung in others)
        return self.divergence if answers else None

    @property
    def answers_alerts(self) -> bool:
        """Whether any rung answers a warning. If none does, warnings are only shown."""
        return any(answers_alerts(rung) and rung.times != 0 for rung in self.ladder)

    @property
    def _acts_without_proof(self) -> bool:
        return self.divergence is not None and not self.divergence.needs_proof

    @property
    def largest_rollback(self) -> int:
        """How many steps back the ladder may want to go; 0 if it never does."""
        return max(map(steps_back, self.ladder), default=0)

    def decide(self, history: Sequence[Outcome], verdict: Verdict) -> Action:
        """What to do, given the outcomes of the steps that needed an answer before. Pure."""
        if verdict.kind == "healthy":
            return APPLY
        if verdict.kind == "overflow":
            return Action(response="back_off")
        if verdict.kind == "divergence" and verdict.cause == "batch":
            return APPLY  # the data have become harder, the weights are as good as before
        if verdict.kind == "divergence" and verdict.cause == "unknown" and not self._acts_without_proof:
            return Action(response="warn", passed=("nothing says that the weights are to blame",))
        if no_progress := self.no_progress(history, verdict):
            return Action(response="halt", because=no_progress)
        passed: list[str] = []
        lowest = _lowest_rung(history, verdict)
        for place, rung in enumerate((*self.ladder, Halt())):
            used = _used(history, verdict, place, rung)
            why_not = "it did not help just now" if place < lowest else _refuses(rung, verdict)
            if not why_not and rung.times is not None and used >= rung.times:
                why_not = f"used {used} of {rung.times} {span_in_words(rung.per)}"
            if not why_not:
                return Action(
                    response=response_of(rung),
                    words=rung.describe(),
                    rung=place,
                    count=used + 1,
                    times=rung.times,
                    per=rung.per,
                    passed=tuple(passed),
                    then=self._then(place, rung, verdict),
                )
            passed.append(f"{rung.describe()}: {why_not}")
        return Action(response="warn", passed=tuple(passed))

    def _then(self, place: int, rung: Rung, verdict: Verdict) -> str:
        """The rung that comes when this one is used up. Empty if it never is, or if the next one does the same."""
        above = [each for each in (*self.ladder, Halt())[place + 1 :] if not _refuses(each, verdict)]
        if rung.times is None or not above or response_of(above[0]) == response_of(rung):
            return ""
        return above[0].describe()

    def no_progress(self, history: Sequence[Outcome], verdict: Verdict) -> str:
        """Why the run must stop whatever rungs are left: too many steps had no effect. Empty if it may go on. Pure."""
        if verdict.kind not in ("nonfinite", "divergence") or not verdict.reading.found:
            return ""
        idle = _num_idle(history, verdict)
        if self.max_consecutive_skips is not None and idle >= self.max_consecutive_skips:
            return f"none of the {idle:,} steps before it was applied (max_consecutive_skips is reached)"
        if self.max_skipped_share is None:
            return ""
        since = verdict.reading.step - self.skipped_share_window
        steps = [past.verdict.reading.step for past in history if not past.applied]
        refused = len({step for step in steps if step > since} | {verdict.reading.step})
        if refused <= self.max_skipped_share * self.skipped_share_window:
            return ""
        return f"{refused:,} of the last {self.skipped_share_window:,} steps were refused (max_skipped_share is passed)"


_DIVERGED = Verdict(
    kind="divergence",
    reading=Reading(step=0, epoch=0, batch=None, loss=1.0),
    cause="weights",
    means=Means(lower_precision=True, can_run_again=True, holds_schedule=True, snapshots=(0,)),
)
"""Shown to rungs before training, to learn whether any of them answers a divergence."""


def judge(reading: Reading, *, scale_floor: float | None = None) -> Verdict:
    """What a reading means by itself. Each step is judged once; recovery adds what it finds out with ``replace``.

    With a loss scale (``scale_floor`` given), non-finite gradients behind a finite loss are a routine overflow as
    long as the scale can still go down.
    """
    if not reading.found:
        return healthy_verdict(reading)
    can_back_off = scale_floor is not None and reading.scale is not None and reading.scale > scale_floor
    is_routine = can_back_off and reading.found == ("gradients",)
    return Verdict(kind="overflow" if is_routine else "nonfinite", reading=reading)


def _refuses(rung: Rung, verdict: Verdict) -> str:
    """Why the rung does not answer this; empty if it does. A warning is answered by rungs for warnings only."""
    if answers_alerts(rung) != (verdict.kind == "alert"):
        return "it answers warnings only" if answers_alerts(rung) else "it does not answer warnings"
    return rung.refuses(verdict)


def _used(history: Sequence[Outcome], verdict: Verdict, place: int, rung: Rung) -> int:
    """How often the rung was taken in its span; patience counts from the last time that a rung above it acted."""
    used = 0
    for past in reversed(history):
        if past.action.rung is None:
            continue
        if response_of(rung) == "skip" and past.action.rung > place:
            break
        used += past.action.rung == place and _is_within(past, verdict, rung)
    return used


def _is_within(past: Outcome, now: Verdict, rung: Rung) -> bool:
    then = past.verdict
    if rung.per == "run":
        return True
    if rung.per == "epoch":
        return then.reading.epoch == now.reading.epoch
    steps = now.reading.step - then.reading.step
    if past.is_rollback:  # steps that were undone are no progress: else a run could go round for ever
        steps -= now.progress.num_undone - then.progress.num_undone
    return steps < int(rung.per)


def _num_idle(history: Sequence[Outcome], verdict: Verdict) -> int:
    """How many steps right before this one had no effect, from the first refused one on.

    The number of applied steps tells; by it, steps that were left out for other reasons (an overflow, another
    optimizer's bad step) do not hide that nothing moves. Without it the numbers of the refused steps tell.
    """
    first, now, applied = verdict.reading.step, verdict, verdict.progress.num_applied
    for past in reversed(history):
        step, applied_then = past.verdict.reading.step, past.verdict.progress.num_applied
        if applied is None or applied_then is None:
            is_adjacent = now.reading.step - step - 1 - past.lost <= 0
        else:
            is_adjacent = applied_then == applied
        if past.applied or not is_adjacent:
            break
        first, now = step, past.verdict
    return verdict.reading.step - first


def _lowest_rung(history: Sequence[Outcome], verdict: Verdict) -> int:
    """Where to start: at the rung taken last, if not a single step was applied since; above it, if it did nothing.

    A rung that answered a bad step says nothing about damage that has come since.
    """
    if not history or history[-1].action.rung is None or history[-1].applied:
        return 0
    last, rung = history[-1], history[-1].action.rung
    if verdict.kind == "damage" and last.verdict.kind != "damage":
        return 0
    between = verdict.reading.step - last.verdict.reading.step - 1 - last.lost
    if between > 0:
        return 0
    return rung if last.worked else rung + 1


# ---- the named recipes -----------------------------------------------------------------------------------------------


def _default() -> Policy:
    return Policy()


def _speechbrain(
    *, nonfinite_patience: int = 3, skip_nonfinite_grads: bool = False, max_grad_norm: float = 5.0
) -> Policy:
    """SpeechBrain's tolerance for non-finite losses: three an epoch are skipped, the fourth halts."""
    drop: tuple[Rung, ...] = (DropBadGradients(),) if skip_nonfinite_grads else ()
    ladder = (*drop, Skip(times=nonfinite_patience, per="epoch"), Halt())
    return Policy(ladder, divergence=None, max_norm=max_grad_norm)


def _tts(*, nonfinite_patience: int = 3, skip_nonfinite_grads: bool = False, max_grad_norm: float = 1.0) -> Policy:
    """The same with a tight norm: attention of text-to-speech breaks on large updates."""
    return _speechbrain(
        nonfinite_patience=nonfinite_patience, skip_nonfinite_grads=skip_nonfinite_grads, max_grad_norm=max_grad_norm
    )


def _separation(*, clip_grad_norm: float = 5.0, nonfinite_patience: int = 3) -> Policy:
    """Clipping behind a gate: a negative ``clip_grad_norm`` turns it off, and is never used as a norm."""
    policy = _speechbrain(nonfinite_patience=nonfinite_patience)
    return Policy(policy.ladder, divergence=None, max_norm=None if clip_grad_norm < 0 else clip_grad_norm)


def _llava(*, lr_backoff: float = 0.5) -> Policy:
    """On the first non-finite loss all goes to fp32 with a smaller learning rate, once per run; later ones are skipped.

    As in its source the run goes on; only the limits for a run without progress stop it.
    """
    fallback = RaisePrecision("model", lr=lr_backoff, verify=False, times=1, per="run")
    ladder = (fallback, Skip(times=None, per="run"), Halt())
    return Policy(ladder, divergence=None)


def _pretrain(
    *, patience: int = 3, per: int = 100, rollback_steps: int = 100, skip_batches: int = 300, times: int = 10
) -> Policy:
    """Skip; on repetition or divergence go back about 100 steps and step over the next few hundred batches."""
    ladder = (
        Skip(times=patience, per=per),
        Rollback(steps=rollback_steps, skip_batches=skip_batches, times=times, per="run"),
        Halt(),
    )
    return Policy(ladder, divergence=Divergence(needs_proof=False), max_norm=1.0)


def recipe_names() -> tuple[str, ...]:
    """What ``Policy.recipe`` accepts."""
    return tuple(_RECIPES)


_RECIPES: dict[str, Callable[..., Policy]] = {
    "default": _default,
    "speechbrain": _speechbrain,
    "tts": _tts,
    "separation": _separation,
    "llava": _llava,
    "pretrain": _pretrain,
}
