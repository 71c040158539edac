"""Between ranks: a fault of one rank is examined there, and all of them have the same diagnosis."""

from __future__ import annotations

from pathlib import Path

import pytest

from launching import Case, Cases, Ranks, Result, cases, changed, needs_gloo, without_statistics

pytestmark = needs_gloo

PROGRAM = Path(__file__).parent / "ranks" / "diagnosing.py"
LINE = next(number for number, text in enumerate(PROGRAM.read_text().splitlines(), 1) if text.endswith("# breaks"))

case = Cases("diagnosing")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return case.launcher(request)


def assert_alike(results: list[Result], *, is_wrapped: bool = True) -> None:
    first, second = results
    assert first["counts"] == second["counts"]
    assert [i["diagnosis"] for i in first["incidents"]] == [i["diagnosis"] for i in second["incidents"]]
    for result in results:
        if "not examined" in result:
            assert changed(result["end"], result["not examined"]) == []
    if is_wrapped:  # else each has trained on data of its own
        assert changed(without_statistics(first["end"]), without_statistics(second["end"])) == []


@cases(
    *(
        case("examined", function=function, style=style, sync=sync)
        for function, style, sync in (
            ("log", "step", "eager"),
            ("sqrt", "step", "late"),
            ("log", "own loop", "late"),
            ("sqrt", "own loop", "eager"),
            ("sqrt", "accumulate", "eager"),
        )
    )
)
def test_all_ranks_know_what_happened_on_one_of_them(ranks: Ranks, one: Case) -> None:
    results = ranks(one)
    assert_alike(results)
    for result in results:
        (incident,) = result["incidents"]
        said = incident["diagnosis"]
        assert incident["ranks"] == [1]
        assert (said["rank"], said["op"], said["module"]) == (1, one.options["function"], "inner")
        assert (said["source"]["line"], Path(said["source"]["file"]).name) == (LINE, "diagnosing.py")
        assert said["phase"] == ("forward" if one.options["function"] == "log" else "backward")
        assert said["capture"] == ("tape" if one.options["style"] == "own loop" else "step")
        assert said["microbatch"] == (1 if one.options["style"] == "accumulate" else None)
        assert said["samples"] == [2]
        for words in ("rank 1", f"diagnosing.py:{LINE}", "inner"):
            assert words in incident["panel"]


@cases(case("examined", function="log", style="step", sync="eager", wrapped=False))
def test_without_ddp_it_is_the_same(ranks: Ranks, one: Case) -> None:
    results = ranks(one)
    assert_alike(results, is_wrapped=False)
    for result in results:
        assert (result["incidents"][0]["diagnosis"]["rank"], result["counts"]["skipped"]) == (1, 1)


@cases(
    *(
        case("examined", function="log", style=style, sync="eager", waits="in a layer", wrapped=False)
        for style in ("step", "own loop")
    ),
    *(case("examined", function="log", style="step", sync=sync, waits="in the loss") for sync in ("eager", "late")),
)
def test_what_waits_for_the_other_ranks_is_not_replayed(ranks: Ranks, one: Case) -> None:
    results = ranks(one)
    assert_alike(results, is_wrapped=one.options.get("wrapped", True))
    for result in results:
        assert [(i["step"], i["ranks"], i["diagnosis"]) for i in result["incidents"]] == [(3, [1], None)]


@cases(case("examined", function="log", style="step", sync="late", diagnose="auto", bad=[1, 2, 5]))
def test_ranks_choose_the_same_depth(ranks: Ranks, one: Case) -> None:
    results = ranks(one)
    assert_alike(results)
    assert [i["diagnosis"]["depth"] for i in results[0]["incidents"]] == ["full", "brief", "brief"]


@cases(*(case("broken", sync="eager", rank=rank) for rank in (0, 1)))
def test_a_diagnosis_that_fails_on_one_rank_leaves_no_other_waiting(ranks: Ranks, one: Case) -> None:
    results = ranks(one)
    assert_alike(results)
    for result in results:
        assert (result["counts"]["applied"], result["counts"]["skipped"]) == (7, 1)
        assert (result["incidents"][0]["diagnosis"] is None) == (one.options["rank"] == 1)


@cases(case("alone"))
def test_diagnose_by_itself_waits_for_no_other_rank(ranks: Ranks, one: Case) -> None:
    results = ranks(one)
    assert results[1]["said"] == ["log", "inner", [2]]
    for result in results:
        assert changed(result["before"], result["after"]) == []


@cases(case("alone"))
def test_diagnose_by_itself_leaves_ddp_as_it_was(ranks: Ranks, one: Case) -> None:
    assert ranks(one)[0]["hook"] == ranks(one)[1]["hook"]
