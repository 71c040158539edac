"""The examples run and do what they say."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from frameworks import import_speechbrain

EXAMPLES = Path(__file__).parent.parent / "examples"


def output_of(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_train(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of("train.py", capsys)
    assert "applied=294, skipped=6" in out
    assert "nan" not in out


def test_gan(capsys: pytest.CaptureFixture[str]) -> None:
    assert "applied=199, skipped=1" in output_of("gan.py", capsys)


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of("explain.py", capsys)
    assert "step 4: sqrt_grad_at_zero in spectrum, sample (3,)" in out
    assert "step 8: overflow_fp16 in attention, sample (5,)" in out
    assert "attention in fp32 makes this step finite:\n               guard.keep_fp32('attention')" in out


def test_a_script_that_knows_nothing_of_us(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nanguard", "run", str(EXAMPLES / "unguarded.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert "weights finite: True" in done.stdout
    assert "attention in fp32 from now on" in done.stderr
    plain = subprocess.run([sys.executable, command[-1]], capture_output=True, text=True, check=False, timeout=300)
    assert "weights finite: False" in plain.stdout


def test_recover(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of("recover.py", capsys)
    assert "in fp32: attention" in out
    assert "rolled_back=1" in out
    assert "nan" not in out.replace("nanguard", "")


def test_observer(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output_of("observer.py", capsys).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 100", "step 150", "step 200", "step 300", "step 400"]
    assert lines[1] == "step 150: skip"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_lightning(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lightning")
    out = output_of("lightning_trainer.py", capsys)
    assert "epochs: 5, best: epoch=4" in out
    assert "applied=95, skipped=5" in out
    assert "cause: input_nonfinite, sample (13,)" in out
    assert "nan" not in out


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_fabric(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lightning")
    out = output_of("fabric_loop.py", capsys)
    assert "the schedule has counted 95 steps" in out
    assert "applied=95, skipped=5" in out
    assert "cause: input_nonfinite, record (333,)" in out
    assert "nan" not in out


def test_wandb_observer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    for name, value in {"MODE": "offline", "SILENT": "true", "CONSOLE": "off"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    try:
        assert "399 steps applied, 1 skipped" in output_of("wandb_observer.py", capsys)
    finally:
        wandb.teardown()
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 1


def test_hf_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    out = output_of("hf_trainer.py", capsys)
    assert "step 20: all_labels_ignored, samples (0, 1, 2, 3)" in out
    assert "applied=39, skipped=1" in out
    assert "global step 40, schedule at 39" in out


def test_accelerate_loop(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate")
    out = output_of("accelerate_loop.py", capsys)
    assert "applied=99, skipped=1" in out
    assert "schedule at 99" in out
    assert "nan" not in out


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_speechbrain(capsys: pytest.CaptureFixture[str]) -> None:
    import_speechbrain()
    out = output_of("speechbrain_brain.py", capsys)
    assert "177 steps applied, 3 skipped" in out
    assert "schedule at step 177, weights finite: True" in out
    assert "nan" not in out
