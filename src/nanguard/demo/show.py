"""What ``nanguard demo`` shows: the progress of both runs, and the comparison."""

from __future__ import annotations

import logging
import math
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from nanguard.demo import text, training
from nanguard.demo.training import Result, TrainingProgress
from nanguard.errors import ReportError
from nanguard.guard import Guard
from nanguard.records.layout import fitted
from nanguard.records.panel import panel, repeated
from nanguard.records.run import RUN_LOG
from nanguard.step.repeats import RepeatCounter

INTRO = """
A small GPT learns to write like "Alice's Adventures in Wonderland", in fp16, twice: same weights, same data, same
order. Nothing is injected. The learning rate of its queries and keys is too high, so that their products overflow fp16,
as happens in large models after weeks. And one paragraph of the book is a row of asterisks. Cleaning turns it into an
empty document, and its mean loss is 0/0.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Both runs, the folder of the guarded one, and its report; None with a reason if there is no report."""

    seed: int
    steps: int
    run_dir: Path
    plain: Result
    guarded: Result
    report: Path | None
    no_report: str

    @property
    def has_died(self) -> bool:
        return not self.plain.weights_finite

    @property
    def has_finished(self) -> bool:
        return self.guarded.weights_finite and self.guarded.steps >= self.steps

    @property
    def status(self) -> int:
        return 0 if self.has_died and self.has_finished else 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "status": self.status,
            "seed": self.seed,
            "steps": self.steps,
            "run_dir": str(self.run_dir),
            "report": None if self.report is None else str(self.report),
            "plain": self.plain.as_dict(),
            "guarded": self.guarded.as_dict(),
        }


def compare(*, seed: int, steps: int, run_dir: Path, err: Console) -> Comparison:
    """Trains twice and shows the progress on ``err``. Raises ``NonFiniteError`` if the guarded run halts."""
    # With several threads, results would depend on the number of cores, and a busy machine would be slow.
    torch.set_num_threads(1)
    data = text.prepare(steps, torch.Generator().manual_seed(seed))

    model, optimizer = training.fresh(seed)
    plain_run = _told_in_words(training.plain_loop(model, optimizer, data), err)
    plain = training.result_of(model, _watched("plain", plain_run, steps, err), data, seed)

    model, optimizer = training.fresh(seed)
    with _without_panels(), training.guard_of(model, optimizer, run_dir) as guard:
        told = _watched("guarded", _told_by_panels(training.guarded_loop(guard, data), guard, err), steps, err)
    guarded = training.guarded_result(guard, model, told, data, seed)
    report, no_report = _report(run_dir)
    return Comparison(
        seed=seed,
        steps=steps,
        run_dir=run_dir,
        plain=plain,
        guarded=guarded,
        report=report,
        no_report=no_report,
    )


def introduce(out: Console) -> None:
    out.print(textwrap.fill(" ".join(INTRO.split()), out.width), end="\n\n", markup=False)


def conclude(comparison: Comparison, out: Console) -> None:
    """Prints the table, samples of both models, and what to look at next."""
    plain, guarded, run_dir = comparison.plain, comparison.guarded, comparison.run_dir
    out.print(table(comparison))
    out.print(Text(" plain writes    ").append(plain.sample or "nothing: every probability is NaN", style="italic"))
    out.print(Text(" guarded writes  ").append(guarded.sample or "nothing: every probability is NaN", style="italic"))
    out.print()
    rows = [
        ("run log", run_dir / RUN_LOG),
        ("report", comparison.report or comparison.no_report),
        ("next", f"nanguard explain {run_dir}"),
        ("", f"nanguard report {run_dir} --open"),
    ]
    for name, where in rows:
        out.print(f" {name:<8}  {where}", markup=False, soft_wrap=True)
    if not comparison.has_died:
        why = f"{comparison.steps} steps are too few for it to fail" if comparison.steps < 300 else "not expected"
        out.print(f"\nThe plain loop survived: {why}. This run shows nothing.", markup=False)
    if not comparison.has_finished:
        out.print("\nThe guarded run did not end with finite weights. That is a bug in nanguard.")


def table(comparison: Comparison) -> Table:
    both = (comparison.plain, comparison.guarded)
    finite = {True: "yes", False: "[bold red]no[/]"}
    rows = Table("", Column("plain", justify="right"), Column("guarded", justify="right"), box=SIMPLE_HEAD)
    rows.add_row("steps done", *(f"{r.steps} of {comparison.steps}" for r in both))
    rows.add_row("of these applied", *(str(r.applied) for r in both))
    rows.add_row("loss scale at the end", *(_number(r.scale) for r in both))
    rows.add_row("modules raised to fp32", *(str(len(r.raised)) for r in both))
    rows.add_row(f"final loss, mean of {training.LAST_STEPS}", *(f"{r.final_loss:.3f}" for r in both))
    rows.add_row("held-out loss", *(f"{r.held_out_loss:.3f}" for r in both))
    rows.add_row("weights finite", *(finite[r.weights_finite] for r in both))
    return rows


def _number(scale: float) -> str:
    return f"{scale:,.0f}" if scale >= 1 else f"{scale:.2g}"


# ---- progress of the runs --------------------------------------------------------------------------------------------


def _watched(name: str, run: Iterator[TrainingProgress], steps: int, err: Console) -> TrainingProgress:
    """Runs the loop with a progress bar and returns its last progress."""
    columns = (
        TextColumn(f" {name:<8}"),
        BarColumn(24),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  scale {task.fields[scale]}"),
        TimeElapsedColumn(),
    )
    told = TrainingProgress()
    with Progress(*columns, console=err) as bar:
        task = bar.add_task(name, total=steps, loss=math.nan, scale="")
        for told in run:
            bar.update(task, completed=len(told.losses), loss=told.losses[-1], scale=_number(told.scale))
    return told


def _told_in_words(run: Iterator[TrainingProgress], err: Console) -> Iterator[TrainingProgress]:
    """Passes on the progress of the plain loop and prints what happens to it."""

    def say(words: str) -> None:
        head, indent = f" plain  step {len(told.losses) - 1}".ljust(18), " " * 18
        lines = textwrap.wrap(words, max(err.width - len(indent), 20))
        err.print(head + f"\n{indent}".join(lines), style="red", markup=False, soft_wrap=True)

    share_of_nan, has_begun, has_stalled, told = 0.0, False, False, TrainingProgress()
    for told in run:
        is_nan = math.isnan(told.losses[-1])
        share_of_nan = 0.9 * share_of_nan + 0.1 * is_nan
        if is_nan and not has_begun:
            has_begun = True
            say(f"loss nan: the GradScaler skips the step and halves its scale to {_number(told.scale)}")
        elif share_of_nan > 0.5 and not has_stalled:
            has_stalled = True
            say(f"most losses are nan now, and each one halves the scale again: {_number(told.scale)}")
        if not told.weights_finite:
            say(
                f"the scale is down to {_number(told.scale)}, and 1/scale is Inf in fp32. Now one batch is finite: "
                "0 x Inf is NaN, the step is applied, and all weights are NaN. The loop would go on like that; the "
                "demo stops it."
            )
        yield told


def _told_by_panels(run: Iterator[TrainingProgress], guard: Guard, err: Console) -> Iterator[TrainingProgress]:
    """Passes on the progress of the guarded loop and prints its panels: in full, or one line if it is a repeat."""
    shown, repeats = 0, RepeatCounter()
    for told in run:
        for incident in guard.incidents[shown:]:
            seen = repeats.count(incident)
            again = seen.count > 1
            _show(repeated(incident, same_as=seen.step, count=seen.count) if again else panel(incident), err)
        shown = len(guard.incidents)
        yield told


def _show(text: str, err: Console) -> None:
    for number, line in enumerate(fitted(text, err.width).splitlines()):
        err.print(line, style="bold yellow" if number == 0 else None, markup=False, soft_wrap=True)


@contextmanager
def _without_panels() -> Iterator[None]:
    """Inside, the library logs everything but its panels, which are printed here."""

    def is_no_panel(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(" nanguard  step ")

    log = logging.getLogger("nanguard")
    log.addFilter(is_no_panel)
    try:
        yield
    finally:
        log.removeFilter(is_no_panel)


def _report(run_dir: Path) -> tuple[Path | None, str]:
    """The page, or None and the reason."""
    from nanguard.report.page import write_report

    try:
        return write_report([run_dir], run_dir / "report.html"), ""
    except ReportError as error:
        return None, f"none: {error}"
