"""The records of a healthy step are made in another way than all others, and are the same."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from nanguard.records.healthy import applied, healthy_reading, healthy_verdict
from nanguard.records.steps import APPLY, Outcome, Reading, Verdict

READING = Reading(
    step=7, epoch=2, batch=5, loss=1.5, mean_loss=1.25, norms=(0.5, 2.0), lrs=(0.1, None), num_stepped_before=3
)
VERDICT = Verdict(kind="healthy", reading=READING)
PAIRS = {
    "reading": (READING, healthy_reading(7, 2, 5, 1.5, 1.25, (0.5, 2.0), (0.1, None), 3)),
    "verdict": (VERDICT, healthy_verdict(READING)),
    "outcome": (Outcome(verdict=VERDICT, action=APPLY, applied=True), applied(VERDICT)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_it_is_the_record_that_its_class_makes(name: str) -> None:
    expected, made = PAIRS[name]
    assert type(made) is type(expected)
    assert made == expected
    assert hash(made) == hash(expected)
    assert repr(made) == repr(expected)
    assert replace(made) == expected


@pytest.mark.parametrize("name", PAIRS)
def test_it_cannot_be_written_to(name: str) -> None:
    _, made = PAIRS[name]
    with pytest.raises(FrozenInstanceError):
        setattr(made, type(made).__slots__[0], None)


def test_an_outcome_is_stored_as_any_other() -> None:
    expected, made = PAIRS["outcome"]
    assert made.as_dict() == expected.as_dict()
    assert Outcome.from_dict(made.as_dict()) == expected
