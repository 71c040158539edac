"""The demo tells a story; here is that it is true."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import nanguard
from nanguard import demo
from nanguard.cli import app

STEPS = 60
Pair = tuple[demo.Result, demo.Result]


def compare(run_dir: Path, *, seed: int = 0, steps: int = STEPS) -> Pair:
    torch.set_num_threads(1)
    return demo.compare(seed=seed, steps=steps, run_dir=run_dir, console=Console(stderr=True, quiet=True))


def bad_steps(seed: int, steps: int = STEPS) -> list[int]:
    """Which batches cannot be normalised, from the data alone."""
    batches = demo.training_data(steps, torch.Generator().manual_seed(seed))
    return [step for step, (clips, _) in enumerate(batches) if not demo.log_energies(clips).isfinite().all()]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def pair(run_dir: Path) -> Pair:
    return compare(run_dir)


def test_one_clip_is_silent_and_one_holds_an_inf_and_all_others_are_sound() -> None:
    batches = demo.training_data(STEPS, torch.Generator().manual_seed(0))
    clips = torch.cat([clips for clips, _ in batches])
    assert int((clips == 0).all(dim=1).sum()) == 1
    assert int(clips.isinf().any(dim=1).sum()) == 1
    assert int((~demo.log_energies(clips).isfinite().all(dim=3).all(dim=2)).sum()) == 2
    assert not clips.isnan().any()  # the NaN is made by the normalisation, not planted


def test_the_plain_loop_dies_on_the_first_bad_batch_and_never_recovers(pair: Pair) -> None:
    plain, _ = pair
    first = bad_steps(0)[0]
    assert all(map(math.isfinite, plain.losses[:first]))
    assert not any(map(math.isfinite, plain.losses[first:]))
    assert len(plain.losses) == STEPS
    assert not plain.weights_finite
    assert not plain.statistics_finite


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_exactly_the_bad_batches_are_skipped(seed: int, tmp_path: Path, pair: Pair) -> None:
    steps = STEPS if seed == 0 else 16
    _, guarded = pair if seed == 0 else compare(tmp_path, seed=seed, steps=steps)
    bad = bad_steps(seed, steps)
    assert len(bad) == 2
    assert list(guarded.skipped) == bad
    assert [step for step, loss in enumerate(guarded.losses) if not math.isfinite(loss)] == bad
    assert guarded.weights_finite
    assert guarded.statistics_finite


def test_the_guarded_run_learns_where_the_plain_one_is_left_guessing(pair: Pair) -> None:
    plain, guarded = pair
    assert guarded.losses[-1] < 0.75 * guarded.losses[0]
    assert guarded.accuracy > plain.accuracy + 0.2


def test_both_runs_are_the_same_to_the_bit_until_the_first_bad_batch(pair: Pair) -> None:
    plain, guarded = pair
    first = bad_steps(0)[0]
    assert first > 0
    assert plain.losses[:first] == guarded.losses[:first]


def test_the_same_seed_gives_the_same_result_and_another_does_not(pair: Pair, tmp_path: Path) -> None:
    again, other = compare(tmp_path), compare(tmp_path, seed=1)
    assert repr(again) == repr(pair)  # repr: NaN is not equal to itself
    assert repr(other) != repr(pair)


def test_the_run_log_tells_of_both_incidents(pair: Pair, run_dir: Path) -> None:
    events = [json.loads(line) for line in (run_dir / "run.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["run", "incident", "incident", "end"]
    assert events[-1]["counts"]["applied"] == STEPS - 2


@pytest.mark.parametrize("steps", [8, 9, 11])
def test_few_steps_will_do(steps: int, tmp_path: Path) -> None:
    plain, guarded = compare(tmp_path, steps=steps)
    assert list(guarded.skipped) == bad_steps(0, steps)
    assert len(guarded.skipped) == 2
    assert (plain.weights_finite, guarded.weights_finite) == (False, True)


def run_in_a_pipe(*arguments: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(nanguard.__file__).parents[1])
    # What forces colour in a pipe is the caller's wish; here nobody wishes for it.
    env = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")}
    env |= {"PYTHONPATH": source, "COLUMNS": "80", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "nanguard", *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=env, timeout=120, check=False)


def test_in_a_pipe_it_is_plain_text_of_80_columns(tmp_path: Path) -> None:
    done = run_in_a_pipe("demo", "--steps", "24", "--run-dir", str(tmp_path))
    first, second = bad_steps(0, 24)
    assert done.returncode == 0, done.stderr
    for text in (done.stdout, done.stderr):
        assert not [c for c in text if c != "\n" and not c.isprintable()]
    lines = (done.stdout + done.stderr).splitlines()
    assert [line for line in lines if len(line) > 80 and str(tmp_path) not in line] == []
    assert f"step {first}  loss nan" in done.stderr
    assert f"nanguard  step {first}  non-finite loss: step skipped" in done.stderr
    assert f"nanguard  step {second}  non-finite loss: step skipped" in done.stderr
    assert done.stderr.count("24/24") == 2  # each bar once, not once a step
    assert done.stdout.startswith("A small net learns")
    rows = {tuple(line.split()) for line in done.stdout.splitlines()}
    assert {("steps", "24", "24"), ("steps", "skipped", "0", "2"), ("weights", "finite", "no", "yes")} <= rows
    assert ("BatchNorm", "statistics", "finite", "no", "yes") in rows
    assert str(tmp_path / "run.jsonl") in done.stdout


def test_quiet_prints_the_comparison_only(tmp_path: Path) -> None:
    done = run_in_a_pipe("demo", "--steps", "8", "--quiet", "--run-dir", str(tmp_path))
    assert done.returncode == 0
    assert done.stderr == ""
    assert "held-out accuracy" in done.stdout
    assert "A small net" not in done.stdout


def test_a_run_that_does_not_go_as_told_ends_with_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sound(steps: int, generator: torch.Generator) -> list[demo.Batch]:
        return [demo.record(demo.BATCH_SIZE, generator) for _ in range(steps)]

    monkeypatch.setattr(demo, "training_data", sound)
    result = CliRunner().invoke(app, ["demo", "--steps", "8", "--run-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "plain loop survived" in result.output


def test_a_run_dir_that_cannot_be_made_is_said_before_any_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["demo", "--run-dir", str(tmp_path / "file" / "runs")])
    assert result.exit_code == 1
    assert "cannot write to --run-dir" in result.output


def test_version_and_help() -> None:
    assert CliRunner().invoke(app, ["--version"]).output.strip() == f"nanguard {nanguard.__version__}"
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "nanguard demo" in result.output
