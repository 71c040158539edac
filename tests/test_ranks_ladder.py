"""The ladder between ranks, with real processes: trouble on one rank, the same decisions and the same bits on all."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from launching import Case, Cases, Ranks, Result, cases, changed, marks_of, needs_gloo, without_statistics

pytestmark = needs_gloo

SYNCS = ("eager", "late")
DATA = ("sampler", "lists")

case = Cases("climbing")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return case.launcher(request)


# ---- comparing -----------------------------------------------------------------------------------------------------


def assert_alike(results: list[Result]) -> None:
    """The same decisions at the same turns of the loop, and the same state in the end."""
    first = results[0]
    for other in results[1:]:
        for key in ("turns", "climb", "counts", "snapshots", "kept"):
            assert first[key] == other[key], key
        assert changed(shared(first["end"]), shared(other["end"])) == []


def shared(state: dict[str, str]) -> dict[str, str]:
    """What ranks have in common: random numbers are each one's own."""
    return {key: value for key, value in without_statistics(state).items() if key != "rng"}


def assert_ends_as_if_nothing_had_happened(results: list[Result]) -> None:
    for result in results:
        assert changed(result["clean"], result["end"]) == []


def assert_same_either_way(eager: list[Result], late: list[Result]) -> None:
    for asked, told in zip(eager, late, strict=True):
        # Where training halts, steps in flight have drawn random numbers.
        assert [key for key in changed(asked["end"], told["end"]) if key != "rng" or not told["raised"]] == []
        assert decisions(asked) == decisions(told)


def decisions(result: Result) -> list[Any]:
    """Steps have other numbers where some were in flight behind one that took the run back."""
    return [[each[key] for key in ("kind", "cause", "found", "response", "rung", "count")] for each in result["climb"]]


def responses(result: Result) -> list[str]:
    return [each["response"] for each in result["climb"]]


def pairs(scenario: str, **options: Any) -> dict[str, Case]:
    return {sync: case(scenario, sync=sync, **options) for sync in SYNCS}


def both_ways(*made: dict[str, Case]) -> pytest.MarkDecorator:
    def named(pair: dict[str, Case]) -> str:
        return str(pair["eager"]).replace(", sync eager", "")

    return pytest.mark.parametrize(
        "pair", [pytest.param(pair, marks=marks_of(pair["eager"]), id=named(pair)) for pair in made]
    )


# ---- going back ----------------------------------------------------------------------------------------------------


@both_ways(
    *(
        pairs("rolls_back", into=into, name=name, data=data, at=at, of_campaign=at == 15)
        for into, name, data, at in (
            ("weight", "out.weight", "sampler", 24),
            ("weight", "inp.bias", "lists", 15),
            ("optimizer_state", "inp.weight.exp_avg_sq", "sampler", 15),
            ("optimizer_state", "inp.weight.exp_avg", "lists", 24),
        )
    ),
    pairs("rolls_back", into="weight", name="out.weight", data="sampler", style="own loop"),
    pairs("rolls_back", into="weight", name="out.weight", data="sampler", accumulate=2, at=12, of_campaign=True),
    pairs("rolls_back", into="weight", name="out.weight", data="lists", precision="fp16", of_campaign=True),
)
def test_damage_on_one_rank_takes_both_back_and_leaves_nothing(ranks: Ranks, pair: dict[str, Case]) -> None:
    for one in pair.values():
        results = ranks(one)
        assert [result["fired"] for result in results] == [0, 1]
        assert_alike(results)
        assert_ends_as_if_nothing_had_happened(results)
        for result in results:
            assert responses(result) == ["roll_back"]
            assert result["climb"][0]["kind"] == "damage"
            assert result["finite"]


@both_ways(pairs("rolls_back_by_hand", data="sampler"))
def test_ranks_go_back_together_by_hand(ranks: Ranks, pair: dict[str, Case]) -> None:
    for one in pair.values():
        results = ranks(one)
        assert_alike(results)
        assert_ends_as_if_nothing_had_happened(results)
        assert results[0]["did"] == results[1]["did"]
        assert results[0]["did"][0].startswith("back to the state before step ")


@both_ways(*(pairs("steps_over", data=data) for data in DATA))
def test_the_same_batches_are_stepped_over_on_both_ranks(ranks: Ranks, pair: dict[str, Case]) -> None:
    for one in pair.values():
        results = ranks(one)
        assert_alike(results)
        for result in results:
            assert responses(result) == ["skip", "skip", "roll_back"]
            assert result["climb"][2]["did"].endswith("batches 8 to 10 are skipped")
            assert result["finite"]
    assert_same_either_way(ranks(pair["eager"]), ranks(pair["late"]))


@both_ways(pairs("diverges", what="weights"))
def test_a_loss_that_explodes_on_one_rank_only_is_judged_by_the_mean(ranks: Ranks, pair: dict[str, Case]) -> None:
    for one in pair.values():
        results = ranks(one)
        assert_alike(results)
        assert_ends_as_if_nothing_had_happened(results)
        assert results[0]["largest loss"] < 3 < 20 < results[1]["largest loss"]
        for result in results:
            assert responses(result) == ["roll_back"]
            assert (result["climb"][0]["kind"], result["climb"][0]["cause"]) == ("divergence", "weights")


@both_ways(pairs("diverges", what="data"))
def test_harder_data_on_one_rank_only_are_no_divergence_on_any(ranks: Ranks, pair: dict[str, Case]) -> None:
    for one in pair.values():
        results = ranks(one)
        assert_alike(results)
        assert_ends_as_if_nothing_had_happened(results)
        assert results[0]["climb"] == []


# ---- precision -----------------------------------------------------------------------------------------------------


@both_ways(
    pairs("overflows_for_good", scope="module"),
    pairs("overflows_for_good", scope="module", ddp={"gradient_as_bucket_view": True}, of_campaign=True),
    pairs("overflows_for_good", scope="module", ddp={"static_graph": True}, of_campaign=True),
    pairs("overflows_for_good", scope="model", of_campaign=True),
)
def test_data_of_one_rank_that_fp16_cannot_hold_raise_the_same_on_both(ranks: Ranks, pair: dict[str, Case]) -> None:
    for one in pair.values():
        results = ranks(one)
        assert_alike(results)
        assert results[0]["scale"] == results[1]["scale"]
        for result in results:
            assert result["finite"]
            assert set(responses(result)) == {"skip", "raise_precision"}
            did = {each["did"] for each in result["climb"] if each["response"] == "raise_precision"}
            what = "attn" if one.options["scope"] == "module" else "the whole model"
            assert did == {f"{what} in fp32 from now on"}
            assert result["counts"]["applied"] > 15
    assert_same_either_way(ranks(pair["eager"]), ranks(pair["late"]))


@both_ways(pairs("casts"), pairs("casts", ddp={"gradient_as_bucket_view": True}, of_campaign=True))
def test_half_weights_are_cast_on_both_ranks_and_gradients_still_averaged(ranks: Ranks, pair: dict[str, Case]) -> None:
    for one in pair.values():
        results = ranks(one)
        assert_alike(results)
        assert results[0]["dtypes"] == results[1]["dtypes"]
        for result in results:
            assert result["finite"]
            assert result["kinds"] == ["torch.float32"]
            assert responses(result) == ["skip", "raise_precision", "roll_back"]
    assert_same_either_way(ranks(pair["eager"]), ranks(pair["late"]))


@both_ways(
    pairs("tries_in_vain", model="TinyNet", precision="bf16"),
    pairs("tries_in_vain", model="Centering", precision="bf16", of_campaign=True),
    pairs("tries_in_vain", model="TinyNet", precision="fp16", of_campaign=True),
    pairs("tries_in_vain", model="TinyNet", precision="bf16", ddp={"static_graph": True}, of_campaign=True),
    pairs("tries_in_vain", model="Branching", precision="bf16", ddp={"find_unused_parameters": True}, of_campaign=True),
)
def test_rungs_that_were_tried_in_vain_leave_no_trace_on_any_rank(ranks: Ranks, pair: dict[str, Case]) -> None:
    for one in pair.values():
        results = ranks(one)
        assert_alike(results)
        for result in results:
            assert set(responses(result)) == {"skip"}
            assert "raise precision of the model: it did not help just now" in result["climb"][1]["passed"]
            assert changed(result["without"]["end"], result["end"]) == []
            assert result["without"]["scale"] == result["scale"]


# ---- learning rate, data, gradients --------------------------------------------------------------------------------


@both_ways(pairs("lowers"))
def test_the_learning_rate_goes_down_and_comes_back_at_the_same_steps(ranks: Ranks, pair: dict[str, Case]) -> None:
    for one in pair.values():
        results = ranks(one)
        assert_alike(results)
        for result in results:
            assert responses(result) == ["skip", "lower_lr", "skip", "lower_lr", "skip"]
            rates = [rates[0] for _, _, _, rates, _, _ in result["turns"]]
            rises = [turn for turn, (before, after) in enumerate(itertools.pairwise(rates)) if after > 1.5 * before]
            assert len(rises) == 2
            assert result["finite"]
    assert_same_either_way(ranks(pair["eager"]), ranks(pair["late"]))


@both_ways(
    *(pairs("bad_data", value=value, of_campaign=value == "inf") for value in ("nan", "inf", "large")),
    pairs("bad_data", value="nan", style="own loop", of_campaign=True),
)
def test_bad_data_of_one_rank_are_known_to_both(ranks: Ranks, pair: dict[str, Case]) -> None:
    for one in pair.values():
        results = ranks(one)
        assert_alike(results)
        cause = "batch" if one.options["value"] == "large" else "input"
        for result in results:
            assert set(responses(result)) == {"skip"}
            assert [each["cause"] for each in result["climb"][:2]] == ["unknown", cause]
            assert [each["rung"] for each in result["climb"][:2]] == [0, 2]
            assert result["finite"]
    if "style" not in one.options:
        assert_same_either_way(ranks(pair["eager"]), ranks(pair["late"]))


@cases(case("drops_gradients"), case("drops_gradients", ddp={"bucket_cap_mb": 1e-4}))
def test_gradients_that_are_bad_on_different_ranks_are_all_dropped_on_both(ranks: Ranks, one: Case) -> None:
    results = ranks(one)
    assert_alike(results)
    for result in results:
        assert responses(result) == ["drop_gradients", "skip"]
        assert result["dropped"][0] == ["inp.weight", "out.bias"]
        stayed = {key.removeprefix("model.module.") for key in result["stayed"][5] if key.startswith("model.")}
        assert stayed == {"inp.weight", "out.bias"}
        assert len(result["stayed"][9]) > len(result["stayed"][5])
        assert result["finite"]


# ---- all rungs -----------------------------------------------------------------------------------------------------


@both_ways(
    pairs("climbs_to_the_top", style="step", data="sampler"),
    pairs("climbs_to_the_top", style="own loop", data="lists", of_campaign=True),
)
def test_both_ranks_climb_the_whole_ladder_alike_and_rank_0_writes_it_down(ranks: Ranks, pair: dict[str, Case]) -> None:
    for one in pair.values():
        results = ranks(one)
        assert_alike(results)
        first, second = results
        assert first["raised"]
        assert second["raised"]
        assert all(result["finite"] for result in results)
        assert second["log"] is None
        written = [line for line in first["log"] if line["event"] == "incident"]
        assert [line["action"]["response"] for line in written] == responses(first)
        assert [line["did"] for line in written] == [each["did"] for each in first["climb"]]
        assert all(flags["rank"] == 1 for line in written for flags in line["verdict"]["reading"]["ranks"])
        looked = ["skip"] * 3 if one.options["style"] == "step" else ["raise_precision"]
        top = ["roll_back"] * 4 + ["lower_lr"] * 2 + ["halt"]
        assert responses(first) == ["skip"] * 2 + looked + top
    assert_same_either_way(ranks(pair["eager"]), ranks(pair["late"]))


@both_ways(pairs("makes_no_progress"))
def test_without_progress_both_ranks_halt_at_the_same_step(ranks: Ranks, pair: dict[str, Case]) -> None:
    for one in pair.values():
        results = ranks(one)
        assert_alike(results)
        assert all("none of the 12 steps before it was applied" in result["raised"] for result in results)
        assert responses(results[0]) == ["skip"] * 12 + ["halt"]
    assert_same_either_way(ranks(pair["eager"]), ranks(pair["late"]))


# ---- snapshots on disk ---------------------------------------------------------------------------------------------


@both_ways(
    *(pairs("torn_and_rolled_back", data=data, number=number) for data, number in zip(DATA, (1, 2), strict=True))
)
def test_a_torn_snapshot_on_one_rank_takes_both_to_the_same_older_one(ranks: Ranks, pair: dict[str, Case]) -> None:
    for one in pair.values():
        results = ranks(one)
        assert_alike(results)
        assert_ends_as_if_nothing_had_happened(results)
        for result in results:
            assert responses(result) == ["roll_back"]
            assert result["error"] == ""


@both_ways(pairs("torn_and_rolled_back", data="lists", number=9))
def test_where_one_rank_can_read_no_snapshot_no_other_waits_for_it(ranks: Ranks, pair: dict[str, Case]) -> None:
    for one in pair.values():
        first, second = ranks(one)
        for result in (first, second):
            assert result["error"].startswith("NonFiniteError: damaged state at step 23")
            assert "roll back: it did not help just now" in result["error"]
        assert "another rank can load no snapshot; rank 0 has one" in str(first["warned"])


@both_ways(pairs("runs_out_of_memory", data="lists"))
def test_where_one_rank_has_no_memory_for_snapshots_all_decide_without(ranks: Ranks, pair: dict[str, Case]) -> None:
    for one in pair.values():
        first, second = ranks(one)
        assert len(first["there"]) == 3, "rank 0 had its own until then"
        assert list(second["there"]) == []
        assert "does not fit into memory" in str(second["warned"])
        for result in (first, second):
            assert result["error"].startswith("NonFiniteError: damaged state at step 23")
            assert "there is no good snapshot to put back" in result["error"]
            assert responses(result) == ["halt"]


@both_ways(
    *(
        pairs("torn_and_resumed", data=data, lost=lost, of_campaign=lost != "newest torn")
        for data, lost in (("sampler", "nothing"), ("sampler", "newest torn"), ("lists", "newest"))
    ),
    pairs("torn_and_resumed", data="lists", lost="newest", keep=1, of_campaign=True),
)
def test_what_one_rank_has_lost_no_rank_resumes_from(ranks: Ranks, pair: dict[str, Case]) -> None:
    for one in pair.values():
        results = ranks(one)
        assert_alike(results)
        assert_ends_as_if_nothing_had_happened(results)
        for result in results:
            assert result["error"] == ""
            if one.options["lost"] == "nothing":
                assert result["done"] == result["there"][-1]
            else:
                assert result["done"] == result["there"][-1] - 5


@both_ways(pairs("torn_and_resumed", data="lists", lost="folder"))
def test_where_one_rank_has_lost_all_every_rank_says_so(ranks: Ranks, pair: dict[str, Case]) -> None:
    for one in pair.values():
        for result in ranks(one):
            assert result["error"].startswith("FileNotFoundError: a rank has lost the snapshots that other ranks have")


@both_ways(pairs("torn_and_resumed", data="lists", lost="all but the first"))
def test_where_one_rank_had_kept_none_yet_all_begin_anew(ranks: Ranks, pair: dict[str, Case]) -> None:
    for one in pair.values():
        results = ranks(one)
        assert_alike(results)
        assert_ends_as_if_nothing_had_happened(results)
        assert [result["done"] for result in results] == [None, None]
        assert results[0]["error"] == results[1]["error"] == ""


@both_ways(pairs("torn_and_resumed", data="lists", lost="all torn"))
def test_where_one_rank_can_read_nothing_all_say_so(ranks: Ranks, pair: dict[str, Case]) -> None:
    for one in pair.values():
        first, second = ranks(one)
        assert first["error"] == "FileNotFoundError: another rank can load no snapshot; rank 0 has one"
        assert second["error"].startswith("FileNotFoundError: no snapshot in ")


@both_ways(pairs("begins_anew"))
def test_a_second_run_in_the_same_place_goes_back_to_its_own_snapshots(ranks: Ranks, pair: dict[str, Case]) -> None:
    for one in pair.values():
        results = ranks(one)
        assert_alike(results)
        assert_ends_as_if_nothing_had_happened(results)


@cases(case("killed_and_resumed"))
def test_killed_runs_go_on_in_new_processes_and_end_as_if_they_had_not_been(ranks: Ranks, one: Case) -> None:
    first, second = ranks(one)
    assert len(first) == 4
    for name in first:
        results = [first[name], second[name]]
        assert_alike(results)
        assert_ends_as_if_nothing_had_happened(results)
        assert {result["done"] for result in results} <= {11, 16}
        assert first[name]["done"] == second[name]["done"]


# ---- a part of the ranks -------------------------------------------------------------------------------------------


@both_ways(pairs("parts", world=3))
def test_only_the_ranks_that_train_together_go_back_together(ranks: Ranks, pair: dict[str, Case]) -> None:
    for one in pair.values():
        first, second, alone = ranks(one)
        assert_alike([first, second])
        assert_ends_as_if_nothing_had_happened([first, second, alone])
        assert responses(first) == ["roll_back"]
        assert responses(alone) == []
        assert first["written"] == second["written"] == ["incidents", "run.jsonl", "snapshots"]
        assert changed(shared(first["end"]), shared(alone["end"]))
