"""The demo tells a story; here is that it is true."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import nanguard
from nanguard.cli import app
from nanguard.demo import gpt, show, text, training
from nanguard.demo.text import TextData

STEPS = 300
"""Enough for the plain loop to die with every seed that is tried here."""

SLICE = 24


def compare(run_dir: Path, *, seed: int = 0, steps: int = SLICE) -> show.Comparison:
    return show.compare(seed=seed, steps=steps, run_dir=run_dir, err=Console(stderr=True, quiet=True))


def data_of(seed: int, steps: int) -> TextData:
    return text.prepare(steps, torch.Generator().manual_seed(seed))


def empty_steps(seed: int, steps: int) -> list[int]:
    """Which steps are given the document without text, from the data alone."""
    batches = [batch for epoch in data_of(seed, steps).epochs for batch in epoch]
    return [step for step, (_, lengths) in enumerate(batches) if (lengths == 0).any()]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def whole(run_dir: Path) -> show.Comparison:
    return compare(run_dir, steps=STEPS)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


# ---- the data and the model ------------------------------------------------------------------------------------------


def test_one_document_is_empty_and_every_other_has_something_to_foretell() -> None:
    lengths = [len(document) for document in text.documents()]
    assert lengths.count(0) == 1
    assert [length for length in lengths if length == 1] == []
    assert max(lengths) == text.CONTEXT + 1


def test_the_empty_document_is_the_row_of_asterisks_that_the_book_has() -> None:
    book = files("nanguard.demo").joinpath("alice.txt").read_text(encoding="utf-8")
    rows = [line for line in book.splitlines() if line.strip() and not set(line) - set("* ")]
    assert len(rows) == 1
    assert len(book) > 20_000


def test_an_epoch_has_every_document_once_and_none_that_is_held_out() -> None:
    data = data_of(0, 400)
    first = [tuple(row[:n].tolist()) for rows, ns in data.epochs[0] for row, n in zip(rows, ns, strict=True)]
    second = [tuple(row[:n].tolist()) for rows, ns in data.epochs[1] for row, n in zip(rows, ns, strict=True)]
    held_out = {tuple(row[:n].tolist()) for row, n in zip(*data.held_out, strict=True)}
    assert sorted(first) == sorted(second)
    assert first != second
    assert not held_out & set(first)
    assert len(first) + text.HELD_OUT >= len(text.documents())
    assert sum(map(len, data.epochs)) == 400


def test_attention_does_not_look_ahead() -> None:
    model, _ = training.fresh(0)
    documents = torch.randint(1, text.VOCABULARY, (2, 20))
    changed = documents.clone()
    changed[:, 12:] = 1
    assert torch.equal(model(documents)[:, :12], model(changed)[:, :12])
    assert not torch.equal(model(documents)[:, 12:], model(changed)[:, 12:])


def test_the_loss_is_the_mean_over_documents_of_the_mean_over_their_text() -> None:
    model, _ = training.fresh(0)
    short, long = text.as_batch(["alice"]), text.as_batch(["the queen of hearts"])
    both = text.as_batch(["alice", "the queen of hearts"])
    mean = (gpt.loss_fn(model, short) + gpt.loss_fn(model, long)) / 2
    torch.testing.assert_close(gpt.loss_fn(model, both), mean)
    assert gpt.loss_fn(model, text.as_batch(["alice", ""])).isnan()


# ---- the story -------------------------------------------------------------------------------------------------------


def test_the_plain_loop_dies_of_a_scale_that_has_come_down_to_nothing(whole: show.Comparison) -> None:
    plain = whole.plain
    assert not plain.weights_finite
    assert plain.steps < STEPS
    assert math.isfinite(plain.losses[-1])  # the batch that kills it is a good one
    assert torch.tensor(plain.scale).reciprocal().isinf()
    assert sum(map(math.isnan, plain.losses)) > 100
    assert math.isnan(plain.held_out_loss)
    assert plain.sample == ""


def test_the_guarded_run_finishes_and_has_learned(whole: show.Comparison) -> None:
    guarded = whole.guarded
    assert (guarded.steps, guarded.weights_finite) == (STEPS, True)
    assert guarded.applied > 0.9 * STEPS
    assert guarded.final_loss < 0.75 * guarded.losses[0]
    assert guarded.held_out_loss < 2.6
    assert guarded.sample.startswith(training.PROMPT)
    assert len(guarded.sample) == 60
    assert guarded.raised == ("blocks.0.attention", "blocks.1.attention")
    assert whole.status == 0


def test_both_runs_are_the_same_to_the_bit_until_the_first_bad_step(whole: show.Comparison) -> None:
    first = whole.guarded.skipped[0]
    assert first > 20
    assert whole.plain.losses[:first] == whole.guarded.losses[:first]


def test_every_incident_is_explained_rightly(whole: show.Comparison) -> None:
    run = nanguard.read_run(whole.run_dir)
    empty = empty_steps(0, STEPS)
    assert set(empty) <= {incident.reading.step for incident in run.incidents}
    for incident in run.incidents:
        diagnosis = incident.diagnosis
        assert diagnosis is not None
        assert diagnosis.source is not None
        assert diagnosis.source.file.endswith("gpt.py")
        if incident.reading.step in empty:
            assert diagnosis.cause == "zero_over_zero"
            assert "losses.sum(dim=1) / is_text.sum(dim=1)" in diagnosis.source.text
        else:
            assert diagnosis.cause in ("attention_logit_growth", "overflow_fp16")
            assert "q @ k.mT" in diagnosis.source.text


def test_the_run_is_kept_whole_and_alone(whole: show.Comparison) -> None:
    run = nanguard.read_run(whole.run_dir)
    assert len(run.headers) == 1
    assert run.is_over
    assert run.troubles == ()
    assert [step.loss for step in run.steps] == pytest.approx(list(whole.guarded.losses), nan_ok=True)
    assert whole.report == whole.run_dir / "report.html"
    assert whole.report.stat().st_size > 10_000


def test_the_same_seed_gives_the_same_result_and_another_does_not(tmp_path: Path) -> None:
    first, again = compare(tmp_path / "a"), compare(tmp_path / "b")
    other = compare(tmp_path / "c", seed=1)
    assert first.plain == again.plain
    assert first.guarded == again.guarded
    assert first.guarded.losses != other.guarded.losses


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_few_steps_will_do(steps: int, tmp_path: Path) -> None:
    comparison = compare(tmp_path, steps=steps)
    assert (comparison.plain.steps, comparison.guarded.steps) == (steps, steps)
    assert comparison.status == 1  # nothing has died


def test_a_known_panel_is_shown_in_one_line_and_others_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = text.as_batch(["alice was", ""])
    good = text.as_batch(["alice was", "beginning"])
    data = TextData(epochs=((good, empty, good, empty, good),), held_out=good)
    monkeypatch.setattr(text, "prepare", lambda steps, generator: data)
    err = Console(stderr=True, width=100, highlight=False)
    show.compare(seed=0, steps=5, run_dir=tmp_path, err=err)
    told = capsys.readouterr().err
    assert told.count(" nanguard  step ") == 2
    assert told.count("   why ") == 1
    assert "same as step 1: step skipped (2 times now)" in told
    assert "loss nan: the GradScaler skips the step" in told


def test_other_words_of_the_library_are_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("nanguard")
    with show._without_panels(), caplog.at_level(logging.WARNING, "nanguard"):
        log.warning(" nanguard  step 3  non-finite loss")
        log.warning("cannot write run.jsonl")
    log.warning(" nanguard  step 4  non-finite loss")
    assert [record.getMessage()[:14] for record in caplog.records] == ["cannot write r", " nanguard  ste"]


# ---- the command -----------------------------------------------------------------------------------------------------


def run_in_a_pipe(*arguments: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(nanguard.__file__).parents[1])
    # What forces colour in a pipe is the caller's wish; here nobody wishes for it.
    env = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")}
    env |= {"PYTHONPATH": source, "COLUMNS": "80", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "nanguard", "demo", *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=env, timeout=300, check=False)


def test_in_a_pipe_it_is_plain_text_of_80_columns(tmp_path: Path) -> None:
    done = run_in_a_pipe("--steps", "6", "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 1, done.stderr
    for told in (done.stdout, done.stderr):
        assert not [c for c in told if c != "\n" and not c.isprintable()]
    lines = (done.stdout + done.stderr).splitlines()
    assert [line for line in lines if len(line) > 80 and str(tmp_path) not in line] == []
    assert done.stderr.count("6/6") == 2  # each bar once, not once a step
    assert done.stdout.startswith("A small GPT learns")
    rows = {tuple(line.split()) for line in done.stdout.splitlines()}
    assert {("steps", "done", *["6", "of", "6", "6", "of", "6"]), ("weights", "finite", "yes", "yes")} <= rows
    assert str(tmp_path / "run" / "run.jsonl") in done.stdout
    assert str(tmp_path / "run" / "report.html") in done.stdout
    assert "6 steps are too few" in done.stdout


def test_quiet_prints_the_comparison_only(tmp_path: Path) -> None:
    done = run_in_a_pipe("--steps", "2", "--quiet", "--run-dir", str(tmp_path))
    assert done.stderr == ""
    assert "held-out loss" in done.stdout
    assert "A small GPT" not in done.stdout


def test_json_is_one_object_and_a_second_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    wanted = tmp_path / "demo"
    arguments = ["demo", "--steps", "2", "--quiet", "--json", "--run-dir", str(wanted)]
    told = [json.loads(CliRunner().invoke(app, arguments).stdout) for _ in range(3)]
    assert [Path(each["run_dir"]) for each in told] == [wanted, tmp_path / "demo-2", tmp_path / "demo-3"]
    assert [each["guarded"] for each in told] == [told[0]["guarded"]] * 3
    assert [len(nanguard.read_run(each["run_dir"]).headers) for each in told] == [1, 1, 1]
    assert told[0]["status"] == 1
    assert told[0]["report"] == str(wanted / "report.html")


def test_nan_is_a_string_in_json(whole: show.Comparison) -> None:
    from nanguard.records.plain import plain

    told = json.loads(json.dumps(plain(whole.as_dict()), allow_nan=False))
    assert told["plain"]["final_loss"] == "nan"
    assert told["guarded"]["weights_finite"] is True
    assert "losses" not in told["plain"]


def test_a_run_dir_that_cannot_be_made_is_said_before_any_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["demo", "--run-dir", str(tmp_path / "file" / "runs")])
    assert result.exit_code == 2
    assert "cannot write to --run-dir" in result.output


def test_a_run_without_a_report_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanguard.errors import ReportError
    from nanguard.report import page

    def refuse(runs: object, out: object) -> Path:
        raise ReportError("plotly is not installed: pip install plotly")

    monkeypatch.setattr(page, "write_report", refuse)
    result = CliRunner().invoke(app, ["demo", "--steps", "1", "--quiet", "--run-dir", str(tmp_path)])
    assert "none: plotly is not installed: pip install plotly" in result.output
    assert result.exit_code == 1


def test_the_text_travels_with_the_package_and_says_where_it_is_from() -> None:
    assert "public domain" in " ".join(files("nanguard.demo").joinpath("alice.md").read_text(encoding="utf-8").split())
    project = (Path(nanguard.__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert '"demo/alice.txt", "demo/alice.md"' in project
