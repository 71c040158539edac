"""The Hugging Face Trainer with a fused optimizer on a GPU: no step waits, and all numbers are as if it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import nanguard
from helpers import differences
from nanguard.policy.rungs import Halt, Skip

pytest.importorskip("transformers")

from nanguard.integrations import transformers as integration
from test_integration_transformers import (
    BATCH,
    WINDOWS,
    Classifier,
    Sample,
    history_of,
    make,
    nan_in_data,
    samples,
    state_of,
)


def data_with_nan(bad: tuple[int, ...], accumulate: int) -> list[Sample]:
    data = samples(accumulate=accumulate)
    for window in bad:
        nan_in_data(data[(window + 1) * BATCH * accumulate - 1], Classifier())
    return data


def train(data: list[Sample], folder: Path, policy: nanguard.Policy | None = None, **args: Any) -> tuple[Any, Any, Any]:
    trainer = make(data, folder, fused=True, **args)
    guard = integration.attach(trainer, policy=policy)
    output = trainer.train()
    return trainer, guard, output


def found(guard: Any) -> list[Any]:
    each = [incident.outcome.diagnosis for incident in guard.incidents]
    return [(one.cause, one.op, one.module, one.source, one.microbatch, one.samples) for one in each]


ARGS: list[dict[str, Any]] = [
    {"logging_steps": 1},
    {"logging_steps": 3, "accumulate": 2},
    {"logging_steps": 100, "max_grad_norm": 0.0},
    {"logging_steps": 4, "logging_nan_inf_filter": False, "bf16": True},
    {"logging_steps": 3, "eval_strategy": "steps", "eval_steps": 2},
]


@pytest.mark.parametrize("args", ARGS, ids=str)
@pytest.mark.parametrize(
    "bad",
    [(2, 4, 5), (0, WINDOWS - 1), *(pytest.param(each, marks=pytest.mark.campaign) for each in [(), (3,), (3, 4)])],
    ids=str,
)
def test_all_numbers_are_those_of_a_run_that_is_asked_at_once(
    tmp_path: Path, bad: tuple[int, ...], args: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    data = data_with_nan(bad, args.get("accumulate", 1))
    asked, asked_guard, expected = train(data, tmp_path / "a", **args)
    assert not asked_guard.loop.answers_later
    request.getfixturevalue("as_on_a_gpu")
    late, guard, output = train(data, tmp_path / "b", **args)
    assert guard.loop.answers_later
    assert differences(state_of(asked), state_of(late)) == []
    assert history_of(asked) == history_of(late)
    assert output.training_loss == expected.training_loss
    assert late.lr_scheduler.last_epoch == WINDOWS - len(bad)
    assert guard.num_skipped == asked_guard.num_skipped == len(bad)
    assert guard.counts == asked_guard.counts
    assert [each.reading.step for each in guard.incidents] == list(bad)
    assert found(guard) == found(asked_guard)
    skips = [[entry.get(integration.SKIPPED) for entry in each.state.log_history] for each in (asked, late)]
    assert skips[0] == skips[1]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_policy_that_halts_stops_cleanly_with_a_checkpoint(tmp_path: Path) -> None:
    data = data_with_nan(tuple(range(3, WINDOWS)), 1)
    policy = nanguard.Policy([Skip(times=2), Halt()])
    trainer, guard, output = train(data, tmp_path, policy, logging_steps=100, save_strategy="steps", save_steps=100)
    assert guard.halted is not None
    assert output.training_loss == output.training_loss, "finite"
    assert trainer.lr_scheduler.last_epoch == 3
    never = make(samples()[: 3 * BATCH], tmp_path / "never", fused=True)
    never.train()
    assert differences(state_of(never), state_of(trainer)) == []


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_checkpoint_has_the_schedule_of_applied_steps(tmp_path: Path) -> None:
    data = data_with_nan((3,), 1)
    whole, _, _ = train(data, tmp_path / "whole", logging_steps=100)
    train(data, tmp_path, logging_steps=100, save_strategy="steps", save_steps=4, max_steps=4)
    again = make(data, tmp_path, fused=True, logging_steps=100)
    integration.attach(again)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert differences(state_of(whole), state_of(again)) == []
