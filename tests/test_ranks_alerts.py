"""Warnings between ranks, with real processes: all of them warn and act alike, and no step has a collective more."""

from __future__ import annotations

from collections import Counter

import pytest

from launching import Case, Cases, Ranks, cases, needs_gloo

pytestmark = needs_gloo

case = Cases("warning")
UNWATCHED = case("grows_on_one_rank", sync="late", acts=False, watched="none")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return case.launcher(request)


@cases(*(case("grows_on_one_rank", sync=sync, acts=True) for sync in ("eager", "late")))
def test_what_grows_on_one_rank_is_warned_of_and_answered_on_all(ranks: Ranks, one: Case) -> None:
    first, second = ranks(one)
    assert first["alerts"], "the first rank sees nothing grow by itself"
    assert first["alerts"][0]["module"] == "mixer.gain"
    assert first["alerts"] == second["alerts"]
    assert first["watched"] == second["watched"]
    assert not any(key.startswith("overflow|extra") for key in first["watched"]), "the first rank does not run it"
    assert first["kept"] == second["kept"] == ["mixer"]
    assert first["end"] == second["end"]


@cases(
    case("grows_on_one_rank", sync="late", acts=False), case("grows_on_one_rank", sync="late", acts=False, every="auto")
)
def test_the_maxima_are_reduced_with_what_a_step_reduces_anyway(ranks: Ranks, one: Case) -> None:
    """But for two probes: after the first one the list of quantities is sent, and once more if it has grown."""
    plain, watched = ranks(UNWATCHED), ranks(one)
    for before, after in zip(plain, watched, strict=True):
        usual = Counter(before["reductions"]).most_common(1)[0][0]
        assert before["end"] == after["end"], "watching changes nothing"
        assert sum(count != usual for count in after["reductions"]) <= 2
    assert watched[0]["alerts"] == watched[1]["alerts"]
    assert watched[0]["every"] == watched[1]["every"]


@cases(
    case("grows_on_one_rank", sync="late", acts=True, fails=True),
    case("grows_on_one_rank", sync="late", acts=True, watched="first"),
)
def test_a_rank_that_cannot_probe_or_has_no_monitor_does_not_hold_up_the_others(ranks: Ranks, one: Case) -> None:
    first, second = ranks(one)
    assert first["end"] == second["end"]
    assert first["kept"] == second["kept"] == []
    assert first["lr"] == second["lr"]
    assert first["watched"]
