"""What the guard says about programs with known bugs, in the zoo and beyond, judged by the zoo's own scorer."""

from __future__ import annotations

import importlib.util
import logging
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from cpu import NO_BF16_LSTM, has_bf16_lstm

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
OPEN, OWN = sorted((BENCHMARKS / "zoo" / "cases").glob("*.py")), sorted((BENCHMARKS / "zoo" / "own").glob("*.py"))

WRONG = {
    "adam_state_swapped": "step",  # the loss function swaps the moments anew at each replay, and so back
    "ckpt_average_half": "line",  # what made the weights infinite is one of several lines before training
    "cosine_lr_no_decay": "line",  # the learning rate was NaN already when it came to the optimizer
    "event_gap_log": "module",  # which is named for bad data, the first to use them, is a matter of taste
    "frozen_bn_var_shift": "line",  # the buffer was shifted before training, by a line that looks like any other
    "hw_fetch_flip": "op module line",  # a forward fault that does not repeat leaves nothing to go by
    "hw_flip_activation": "line",  # where the hook is set is named, not the line inside it
    "momentum_unfreeze": "phase cause op line",  # the loss function does it once only, so it cannot be run again
    "pad_workspace": "line",  # the memory is made in a helper, and who fills it in part is named
    "scaler_no_backoff": "line",  # a loss scale has no line in the step
    "sst_land_nan": "module",
    "stale_grad_buffer": "line",  # the memory is made in a helper, and the helper's line is named
}
"""What is known to be said wrongly, and why. All else is to stay right."""
ELSEWHERE = {"qk_growth": "step", "perceiver_growth": "step"}
"""What the scorer counts as wrong although it is right: the label's step is that of the CPU on which it was written."""


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


zoo, score = load(BENCHMARKS / "zoo.py", "zoo_of_bugs"), load(BENCHMARKS / "zoo" / "score.py", "zoo_score")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def first_bad_step(case: ModuleType) -> int | None:
    """Where the loop that the zoo is written for, without a guard, shows the first non-finite number on this CPU."""
    model, optimizer, batches, loss_fn = case.build(0)
    precision = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(case.CASE["precision"])
    for step, batch in enumerate(batches):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None):
            loss = loss_fn(model, batch)
        loss.backward()
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        if not all(tensor.isfinite().all() for tensor in (loss, *grads, *model.state_dict().values())):
            return step
    return None


REST = [path for place, path in enumerate(OWN) if place % 6]
"""Of our own programs, one in six is tried each time."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.campaign] if path in REST else (), id=path.stem) for path in OPEN + OWN],
)
def test_what_is_said_about_a_program_is_right(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if "nn.LSTM(" in path.read_text() and 'precision="bf16"' in path.read_text() and not has_bf16_lstm():
        pytest.skip(NO_BF16_LSTM)
    caplog.set_level(logging.CRITICAL, logger="nanguard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the programs are written as their authors wrote them
        said = zoo.predict(path)
    case = sys.modules[f"zoo_{path.stem}"]
    label = case.CASE
    if label["cause"] == "none":
        assert not said["detected"] or said["cause"] in label.get("cause_alt", [])
        return
    assert said["detected"]
    known = WRONG.get(path.stem, "").split()
    marks = {field: mark for field, mark in score.judge(label, said).items() if field != "remedy"}
    if not marks["step"] and "loop" not in label:  # numbers that grow leave fp16 at another step on another kind of CPU
        marks["step"] = said["step"] == first_bad_step(case)
    wrong = {field: (said.get(field), label.get(field)) for field, mark in marks.items() if mark is False}
    assert set(wrong) <= set(known), wrong
    assert len(known) < 6


def test_labels_are_read_by_the_scorer_alone() -> None:
    """Of a case the benchmark uses how to run it, never the answers."""
    source = (BENCHMARKS / "zoo.py").read_text()
    used = {word for word in ("precision", "loop") if f'facts["{word}"]' in source or f'facts.get("{word}")' in source}
    assert used == {"precision", "loop"}
    assert source.count("facts[") + source.count("facts.get(") == 2


def test_the_score_in_the_docs_is_that_of_these_tests() -> None:
    text = (BENCHMARKS.parent / "docs" / "diagnosis.md").read_text()
    for name, paths in (("cases", OPEN), ("own", OWN)):
        healthy = [path for path in paths if path.stem.startswith("healthy_")]
        counted = WRONG | ELSEWHERE
        known = [counted[path.stem] for path in paths if path.stem in counted]
        faulty, late = len(paths) - len(healthy), sum("step" in fields.split() for fields in known)
        row = f"| `{name}` | {faulty} | {faulty} | {faulty - late} | {faulty - len(known)} | 0 of {len(healthy)} |"
        assert row in text
