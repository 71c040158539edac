"""Experiments: find out what would have made the failing step finite, by trying it on that step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from nanguard.diagnosis.exam import has_no_samples
from nanguard.diagnosis.replay import Replay
from nanguard.diagnosis.taped import holds_samples
from nanguard.diagnosis.watched import WatchedRun
from nanguard.records.diagnosis import OF_EARLIER_STEPS, Diagnosis, Trial
from nanguard.state.batch_indices import num_samples_of
from nanguard.state.batches import filled
from nanguard.state.casts import has_half_weights

_HALF = ("torch.float16", "torch.bfloat16")
_MOST_MODULES = 4
_MOST_OTHERS = 4
_ALWAYS_MAY = 2.0
"""In seconds. Measured times of very short steps are too noisy for a limit."""


class Trials:
    """Experiments on one step. ``budget`` limits their time, in multiples of one replay, but to no less than 2 s."""

    def __init__(self, replay: Replay, budget: float) -> None:
        self._replay = replay
        self._budget = budget
        self._microbatch = 0
        self._done: list[Trial] = []
        self._unit = 0.0
        self._spent = 0.0

    def made(self, diagnosis: Diagnosis, run: WatchedRun) -> Diagnosis:
        """The diagnosis with the experiments and, if one was found, the fix that works."""
        self._microbatch = run.microbatch
        diagnosis = self._precision(diagnosis, run)
        has_none = has_no_samples(run.trace, self._replay.parts, self._replay.pending)
        if not (diagnosis.cause == "ctc_inf" and diagnosis.samples):  # the op itself shows them
            diagnosis = replace(diagnosis, samples=()) if has_none else self._samples(diagnosis)
        confirmed = diagnosis.cause.startswith("overflow") and any(
            trial.result == "finite" and "fp32" in trial.what for trial in self._done
        )
        return replace(
            diagnosis,
            tried=(*diagnosis.tried, *self._done),
            confidence="certain" if confirmed else diagnosis.confidence,
        )

    # ---- precision -----------------------------------------------------------------------------------------------

    def _precision(self, diagnosis: Diagnosis, run: WatchedRun) -> Diagnosis:
        parts = self._replay.parts
        micros = self._replay.pending.microbatches
        runs_low = parts.precision.dtype is not None or has_half_weights(parts.state.model)
        runs_low = runs_low or any(micro.autocast[0] for micro in micros)
        runs_low = runs_low or any(note.dtype in _HALF for note in run.trace.notes)  # a host may turn autocast on
        fix, helps = diagnosis.fix, diagnosis.remedies
        if not runs_low or diagnosis.phase not in ("forward", "backward"):
            return diagnosis
        if not self._try("the whole step in fp32", lambda: self._replay.is_finite(fp32=[""])):
            return diagnosis
        names = self._fewest_modules(diagnosis, run)
        return replace(
            diagnosis,
            modules_to_keep=names,
            fix=replace(fix, code=parts.fp32_fix(names), worked=True),
            remedies=tuple(dict.fromkeys(("fp32", *helps))),
        )

    def _fewest_modules(self, diagnosis: Diagnosis, run: WatchedRun) -> tuple[str, ...]:
        """A smallest set of a few modules that make the step finite in fp32. Empty if there is no such set."""
        suspects = self._suspects(diagnosis, run)
        for size in range(1, min(_MOST_MODULES, len(suspects)) + 1):
            names = suspects[:size]
            if self._helps(names):
                return self._shrunk(names)
        everything = self._all_called(run)
        if len(everything) > 1 and self._helps(everything):
            few = self._shrunk(everything)
            return few if len(few) <= _MOST_MODULES else ()
        return ()

    def _helps(self, names: Sequence[str]) -> bool:
        what = f"{', '.join(names)} in fp32" if len(names) <= _MOST_MODULES else f"{len(names)} modules in fp32"
        return self._try(what, lambda: self._replay.is_finite(fp32=list(names)))

    def _shrunk(self, names: Sequence[str]) -> tuple[str, ...]:
        """Leave out every module that is not needed: first by halves, then one by one."""
        kept = list(names)
        chunk = len(kept) // 2
        while chunk >= 1 and len(kept) > 1:
            place = 0
            while place < len(kept) and len(kept) > 1:
                rest = kept[:place] + kept[place + chunk :]
                if rest and self._can_afford() and self._helps(rest):
                    kept = rest
                else:
                    place += chunk
            chunk //= 2
        return tuple(kept)

    def _suspects(self, diagnosis: Diagnosis, run: WatchedRun) -> list[str]:
        """The module of the diagnosis and its parents, then the modules of other births."""
        islands, names = self._replay.parts.islands, list[str]()
        births = [event.note.module for event in run.trace.events if event.kind == "birth"]
        for module in [diagnosis.module, *births]:
            while module:
                if islands.can_keep(module) and module not in names and module not in islands.names:
                    names.append(module)
                    break
                module = module.rpartition(".")[0]
        parent = diagnosis.module.rpartition(".")[0]
        if parent and islands.can_keep(parent) and parent not in names:
            names.append(parent)
        return names

    def _all_called(self, run: WatchedRun) -> list[str]:
        islands = self._replay.parts.islands
        called = dict.fromkeys(note.module for note in run.trace.notes if note.phase == "forward" and note.module)
        return [name for name in called if islands.can_keep(name) and name not in islands.names]

    # ---- samples -------------------------------------------------------------------------------------------------

    def _samples(self, diagnosis: Diagnosis) -> Diagnosis:
        """Name the samples that make the failing micro-batch non-finite, if experiments with it alone show it."""
        pending = self._replay.pending
        batches = [micro.batch for micro in pending.microbatches]
        num = num_samples_of(batches[self._microbatch], pending.fetched) if batches else None
        is_of_past = diagnosis.phase in ("parameter", "optimizer") or diagnosis.cause in OF_EARLIER_STEPS
        if num is None or num < 2 or is_of_past:
            return with_shown_samples(diagnosis)
        suspects = [sample for sample in diagnosis.samples if sample < num]
        if len(suspects) == num:
            if diagnosis.cause == "all_labels_ignored":
                return diagnosis
            suspects = []
        if not suspects:
            return replace(diagnosis, samples=self._bisected(num) if self._holds_samples(num) else ())
        alone = self._on(f"{_samples_in_words(suspects)} alone", suspects, num)
        others = [sample for sample in range(num) if sample not in suspects]
        without = self._without(suspects, num)
        if alone is without is None:
            return with_shown_samples(diagnosis)
        is_guilty = alone is not True and without is True
        if alone is False and not without:  # every sample may cause it, for example if a factor on the loss is wrong
            some = others[:: max(1, len(others) // _MOST_OTHERS)]
            is_guilty = any(self._on(f"sample {sample} alone", [sample], num) for sample in some)
        return replace(diagnosis, samples=tuple(suspects) if is_guilty else ())

    def _holds_samples(self, num: int) -> bool:
        pending = self._replay.pending
        return holds_samples(pending.microbatches[self._microbatch], num, is_fetched=bool(pending.fetched))

    def _without(self, suspects: Sequence[int], num: int) -> bool | None:
        others = [sample for sample in range(num) if sample not in suspects]
        return self._on(f"the batch without {_samples_in_words(suspects)}", others, num)

    def _bisected(self, num: int) -> tuple[int, ...]:
        """A few samples that are non-finite alone, found by halves, without which the batch is finite.

        Empty if there are no such samples: if there are too many, say, or if it takes several together.
        """
        found: list[int] = []
        while len(found) < min(_MOST_OTHERS, num - 1):
            left = [sample for sample in range(num) if sample not in found]
            while len(left) > 1:
                half = len(left) // 2
                for part in (left[:half], left[half:]):
                    if self._on(f"{_samples_in_words(part)} alone", part, num) is False:
                        left = part
                        break
                else:
                    return ()
            found = sorted([*found, *left])
            without = self._without(found, num)
            if without is not False:
                return tuple(found) if without else ()
        return ()

    def _on(self, what: str, samples: Sequence[int], num: int) -> bool | None:
        """None if this could not be tried. A program for batches of one size gets the samples several times over."""
        before = len(self._done)
        for batch in (samples, filled(samples, num)):
            run = functools.partial(self._replay.is_finite, samples=batch, num=num, microbatch=self._microbatch)
            result = self._try(what, run)
            made = self._done[before:]
            if made and made[-1].result is not None:
                del self._done[before:-1]
                return result
            if not made or not made[-1].detail.startswith("raises"):
                break
        del self._done[before + 1 :]
        return None

    # ---- one trial -----------------------------------------------------------------------------------------------

    def _can_afford(self) -> bool:
        return self._spent + self._unit <= max(self._budget * self._unit, _ALWAYS_MAY)

    def _try(self, what: str, is_finite: Callable[[], bool]) -> bool:
        if not self._can_afford():
            if not any(trial.detail.startswith("the budget") for trial in self._done):
                self._done.append(Trial(what=what, result=None, detail="the budget of time was used up"))
            return False
        try:
            finite = is_finite()
        except torch.OutOfMemoryError:
            self._done.append(Trial(what=what, result=None, detail="not enough memory"))
            return False
        except Exception as error:
            self._done.append(Trial(what=what, result=None, detail=f"raises {type(error).__name__}: {error!s:.80}"))
            return False
        finally:
            self._unit = self._unit or self._replay.seconds_of_last
            self._spent += self._replay.seconds_of_last
        self._done.append(Trial(what=what, result="finite" if finite else "non-finite"))
        return finite


def with_shown_samples(diagnosis: Diagnosis) -> Diagnosis:
    """Without experiments, samples are named only if the batch itself shows them: by its values or its labels."""
    is_shown = diagnosis.cause in ("all_labels_ignored", "ctc_inf")
    is_known = diagnosis.phase == "data" and diagnosis.confidence == "certain"
    is_shown = is_shown or (is_known and " holds " in diagnosis.because)
    are_all = is_known and diagnosis.shape[:1] == (len(diagnosis.samples),) and len(diagnosis.samples) > 1
    return diagnosis if is_shown and not are_all else replace(diagnosis, samples=())


def _samples_in_words(samples: Sequence[int]) -> str:
    if len(samples) == 1:
        return f"sample {samples[0]}"
    if len(samples) > 2 and list(samples) == list(range(samples[0], samples[-1] + 1)):
        return f"samples {samples[0]} to {samples[-1]}"
    return "samples " + ", ".join(map(str, samples[:8])) + (" ..." if len(samples) > 8 else "")
