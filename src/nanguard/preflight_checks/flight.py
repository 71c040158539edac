"""``nanguard.preflight``: stresses a model for some minutes, and puts everything back."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanguard.diagnosis.exam import Past
from nanguard.preflight_checks.findings import FindingList
from nanguard.preflight_checks.headroom import without_room
from nanguard.preflight_checks.record import PreflightReport, Reach
from nanguard.preflight_checks.search import Searcher
from nanguard.preflight_checks.step_runner import StepRunner
from nanguard.preflight_checks.stresses import LegalBatches
from nanguard.run_folder import RunFolder
from nanguard.standalone import check_arguments
from nanguard.state.parameter_sizes import ParameterSizes
from nanguard.step.pending import LossFn
from nanguard.step.precision import LossScale

Progress = Callable[[str, float], None]
"""Is told what is being done, and how far it is, from 0 to 1: by the stages, or by the time if that is further."""

_STEPS = 20
_DRAWS = 16
_MOST_BATCHES = 64
GRADIENTS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "gradients that are all 0": (torch.zeros_like, 1),
    "gradients as small as they get": (lambda p: torch.full_like(p, torch.finfo(p.dtype).smallest_normal), 1),
    "the same gradients again and again": (lambda p: torch.linspace(0.1, 1, p.numel()).to(p).view_as(p), 64),
}
"""Gradients that a layer may get, and how many times: of a dead layer, of one far from the loss, of a bias."""

FACTOR = 10.0
"""By which learning rate and loss are raised."""


def preflight(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    more_batches: Sequence[Any] = (),
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
    loss_scale: LossScale | None = None,
    minutes: float = 3.0,
    run_dir: str | Path | RunFolder | None = None,
    progress: Progress | None = None,
) -> PreflightReport:
    """Looks for inputs, settings and weights on which training would become non-finite, before the run.

    ``loss_fn(model, batch)`` returns the loss, or ``(loss, aux)``. ``batch`` and ``more_batches`` are healthy ones;
    what counts as a legal input is derived from them, so several are better than one. With an ``optimizer`` its
    updates are tried too, and a learning rate that is ten times higher. ``loss_scale`` is that of fp16 training.

    Each finding says where, why and what to do, and is saved to ``run_dir`` for ``nanguard replay``, unless that is
    None. Stops after ``minutes``, which all stages share. Weights, optimizer state, buffers, gradients and random
    states are afterwards as they were. Waits for the device. Raises what ``loss_fn`` raises on the given batch.
    """
    check_arguments("preflight", model, loss_fn)
    if not minutes > 0:
        raise ValueError(f"minutes must be above 0, got {minutes!r}")
    runner = StepRunner(model, loss_fn, optimizer, precision, loss_scale)
    batches = [batch, *itertools.islice(more_batches, _MOST_BATCHES - 1)]
    return _Flight(runner, batches, minutes * 60, run_dir, progress or (lambda words, share: None)).report()


class _Flight:
    def __init__(
        self,
        runner: StepRunner,
        batches: Sequence[Any],
        seconds: float,
        run_dir: str | Path | RunFolder | None,
        progress: Progress,
    ) -> None:
        self._runner, self._batches = runner, batches
        self._seconds, self._began, self._progress = seconds, time.monotonic(), progress
        self._findings = FindingList(runner, run_dir)
        self._legal = LegalBatches(batches)
        self._cut_short: list[str] = []

    def report(self) -> PreflightReport:
        stages = self._stages()
        for place, (words, stage) in enumerate(stages.items()):
            left = self._seconds - self._used
            until = self._used + left / (len(stages) - place)  # what a stage does not need is left for the others
            if left <= 0 and place:
                self._cut_short.append(words)
                continue
            with self._runner.untouched(), contextlib.closing(stage()) as steps:
                for _ in steps:
                    self._progress(words, min(1.0, max(place / len(stages), self._used / self._seconds)))
                    if self._used > until:
                        self._cut_short.append(words)
                        break
        return PreflightReport(
            findings=self._findings.all(),
            num_steps=self._runner.num_steps,
            seconds=round(self._used, 1),
            cut_short=tuple(self._cut_short),
            refused=tuple(self._findings.refused),
        )

    def _stages(self) -> dict[str, Callable[[], Generator[None, None, None]]]:
        """What to do, in order: what needs least to happen comes first."""
        precision, with_optimizer = self._runner.parts.precision, self._runner.has_optimizer
        return {
            "training on the given batches": self._train,
            "extreme inputs": self._stress,
            "other random numbers": self._draw,
            **({"extreme gradients": self._update} if with_optimizer else {}),
            "a search for inputs": self._search_inputs,
            **({"a higher learning rate": self._raise_learning_rate} if with_optimizer else {}),
            **({"a larger loss": self._raise_loss} if precision.name == "fp16" and precision.scaler is None else {}),
            "a search for weights": self._search_weights,
        }

    @property
    def _used(self) -> float:
        return time.monotonic() - self._began

    # ---- the stages: each yields after some steps, so that the time can be looked at --------------------------------

    def _train(self) -> Generator[None, None, None]:
        """A few steps as they are, with every op watched in the first."""
        result = self._runner.result(self._batches[0])
        if result.error is not None and not self._try("the first batch", self._batches[0], "data"):
            raise result.error
        yield
        if result.error is None:
            self._legal.widen(self._runner.embedded(self._batches[0]))
        self._watch("the first batch", self._batches[0], "data", is_first=True)
        yield
        yield from self._steps("of training on the given batches", "data")

    def _steps(self, words: str, reach: Reach) -> Generator[None, None, None]:
        sizes = ParameterSizes(self._runner.parts.state.parameters())
        for step in range(max(_STEPS, len(self._batches))):
            batch = self._batches[step % len(self._batches)]
            past = Past(first_sizes=sizes, num_applied=step)
            if self._try(f"step {step} {words}", batch, reach, past):
                return
            if not self._runner.train_on(batch):
                self._findings.add_unrepeatable(f"step {step} {words}", reach)
                return
            yield

    def _stress(self) -> Generator[None, None, None]:
        for stress in self._legal:
            reach: Reach = "larger" if stress.is_larger else "input"
            self._try(stress.words, stress.batch, reach)
            if stress.is_larger:
                self._watch(stress.words, stress.batch, reach)
            yield

    def _draw(self) -> Generator[None, None, None]:
        """The same batch with other random numbers, if the program draws any."""
        if not self._runner.draws(self._batches[0]):
            return
        for number in range(_DRAWS):
            torch.manual_seed(number)
            self._try(f"torch.manual_seed({number})", self._batches[number % len(self._batches)], "data")
            yield

    def _update(self) -> Generator[None, None, None]:
        """The optimizer alone, with gradients that a layer may get."""
        runner = self._runner
        for words, (fill, times) in GRADIENTS.items():
            if not runner.survives(fill, times):
                with runner.untouched(), runner.with_gradients(fill) as pending:
                    for _ in range(times):
                        if runner.is_update_bad():
                            self._findings.add_update(words, pending)
                            break
                        runner.update()
            yield

    def _search_inputs(self) -> Generator[None, None, None]:
        searcher = Searcher(self._runner, self._batches[0], self._legal.ranges)
        for site in searcher.sites(in_weights=False):
            words = f"an input that was searched for, to bring {site.op} to its edge"
            for pushed in searcher.push(site, in_weights=False):
                if self._try(words, pushed.batch, "input"):
                    break
                if pushed.crosses:
                    self._findings.add_crossing(site, words, pushed.batch)
                    break
                yield

    def _raise_learning_rate(self) -> Generator[None, None, None]:
        for optimizer in self._runner.parts.state.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * FACTOR
        yield from self._steps(f"with a learning rate that is {FACTOR:g} times higher", "settings")

    def _raise_loss(self) -> Generator[None, None, None]:
        """In fp16 without a loss scale that adapts itself."""
        with self._runner.scaled(FACTOR):
            for batch in self._batches[:4]:
                self._try(f"a loss, or loss scale, that is {FACTOR:g} times larger", batch, "settings")
                yield

    def _search_weights(self) -> Generator[None, None, None]:
        searcher = Searcher(self._runner, self._batches[0], self._legal.ranges)
        for site in searcher.sites(in_weights=True):
            words = f"weights that were searched for, to bring {site.op} to its edge"
            if self._findings.knows(site.line):
                continue
            with self._runner.untouched():
                for pushed in searcher.push(site, in_weights=True):
                    if self._try(words, pushed.batch, "weights", at=site.line):
                        break
                    yield

    # ---- one step ------------------------------------------------------------------------------------------------

    def _try(
        self, words: str, batch: Any, reach: Reach, past: Past | None = None, at: tuple[str, int] | None = None
    ) -> bool:
        """Whether the step on this batch is non-finite, which is then a finding."""
        return self._findings.try_step(words, batch, reach, past or Past(), at=at, is_deep=self._used < self._seconds)

    def _watch(self, words: str, batch: Any, reach: Reach, *, is_first: bool = False) -> None:
        pending = self._runner.pending(batch)
        try:
            run = self._runner.watched(pending)
        except Exception:  # the program does not accept this batch; result() has noted it
            return
        if is_first:
            for diagnosis in self._runner.state_faults(pending, run):
                self._findings.add_state("before any step, even if this batch does not use it", diagnosis)
        if run.is_finite:
            for number, diagnosis in without_room(run, self._runner.scale):
                if self._runner.is_harmful(pending, number):
                    self._findings.add_nearly(diagnosis, words, pending, reach)
