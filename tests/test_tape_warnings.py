"""Warnings of torch calls that the tape notes: they name the program's line, as without nanguard."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

import nanguard
from nanguard import Guard

Shown = list[tuple[str, int, str]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    """File, line and text of what is shown. Python's own rule decides how often: once for each line."""
    seen: Shown = []

    def show(message: Any, category: Any, filename: str, lineno: int, *args: Any) -> None:
        seen.append((Path(filename).name, lineno, str(message)[:20]))

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show
        yield seen


def loss_of(model: nn.Module) -> torch.Tensor:
    out = model(torch.ones(4, 3))
    torch.tensor(out)  # a warning of torch's C++ code
    torch.tensor(out)
    F.softmax(out)  # type: ignore[call-arg]  # one that is two functions deeper
    return F.mse_loss(out, torch.zeros(4))  # one of torch's Python code


def plain(steps: int) -> None:
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def installed(steps: int) -> None:
    with nanguard.install():
        plain(steps)


def own_loop(steps: int) -> None:
    model = nn.Linear(3, 1)
    guard = Guard(model, SGD(model.parameters(), lr=0.1), precision="fp32")
    for _ in range(steps):
        with guard.autocast():
            loss = loss_of(model)
        guard.backward(loss)
        guard.update()


@pytest.mark.parametrize("train", [installed, own_loop])
def test_the_line_is_that_of_the_program_and_each_is_shown_once(train: Any, shown: Shown) -> None:
    plain(2)
    expected = list(shown)
    shown.clear()
    globals().pop("__warningregistry__")
    train(2)
    assert shown == expected
    assert len(expected) == 4
    assert {file for file, _, _ in expected} == {Path(__file__).name}


def test_filters_of_the_program_hold(shown: Shown) -> None:
    warnings.filterwarnings("ignore", module=__name__)
    installed(2)
    assert shown == []


def test_errors_are_raised() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="To copy construct"):
            installed(2)


@pytest.mark.parametrize("train", [installed, own_loop])
def test_a_program_may_show_warnings_in_its_own_way(train: Any, shown: Shown, caplog: pytest.LogCaptureFixture) -> None:
    logging.captureWarnings(True)
    train(2)
    logging.captureWarnings(False)
    assert f"{Path(__file__).name}:{loss_of.__code__.co_firstlineno + 2}: UserWarning: To copy construct" in caplog.text
    assert "tape_recorder" not in caplog.text
    warnings.warn("after all", UserWarning, stacklevel=1)
    assert [text for _, _, text in shown] == ["after all"]


def test_a_program_may_change_that_while_it_trains(shown: Shown, caplog: pytest.LogCaptureFixture) -> None:
    with nanguard.install():
        logging.captureWarnings(True)
        plain(2)
    logging.captureWarnings(False)  # puts back what was there before, which is ours
    assert "To copy construct" in caplog.text
    warnings.warn("after all", UserWarning, stacklevel=1)
    assert [text for _, _, text in shown] == ["after all"]


def test_arrays_too(shown: Shown) -> None:
    with nanguard.install():
        model = nn.Linear(3, 1)
        SGD(model.parameters(), lr=0.1).zero_grad()
        torch.tensor([np.ones(3), np.ones(3)])
    assert {file for file, _, _ in shown} <= {Path(__file__).name}
