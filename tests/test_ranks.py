"""Between ranks, with real processes: whatever happens to one of them, all do the same, and know whose it was."""

from __future__ import annotations

import pytest

from launching import Case, Cases, Ranks, Result, cases, changed, needs_gloo, without_statistics

pytestmark = needs_gloo

LATE_OR_EAGER = ("eager", "late")
STYLES = ("step", "own loop")

case = Cases("scenarios")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return case.launcher(request)


# ---- comparing -----------------------------------------------------------------------------------------------------


def flags(rank: int, *, loss: bool, gradients: bool = True) -> list[Result]:
    return [{"rank": rank, "loss": loss, "gradients": gradients}]


def assert_skipped_together(results: list[Result], steps: list[int], *, faulty: int) -> None:
    """No trace of the bad steps on any rank, and the rest of the training as if they had not been."""
    for rank, result in enumerate(results):
        assert result["fired"] == (steps if rank == faulty else [])
        assert [each["step"] for each in result["incidents"]] == steps
        assert [each["response"] for each in result["incidents"]] == ["skip"] * len(steps)
        assert changed(result["before"], result["after"]) == []
        assert changed(result["end"], result["without those steps"]) == []
        assert changed(result["after"], result["end"])
        assert result["finite"]


def assert_equal_on_ranks(results: list[Result]) -> None:
    first = results[0]
    for other in results[1:]:
        for key in ("before", "after", "end"):
            if key in first:
                assert changed(without_statistics(first[key]), without_statistics(other[key])) == []
        assert changed(first["met"], other["met"]) == []


# ---- one bad rank --------------------------------------------------------------------------------------------------


@cases(
    *(
        case("skips", into=into, sync=sync, style=style, of_campaign=into == "input" and style != "step")
        for into in ("loss", "input")
        for sync in LATE_OR_EAGER
        for style in STYLES
    ),
    *(case("skips", into="loss", sync=sync, style="step", optimizer="SGD") for sync in LATE_OR_EAGER),
    case("skips", into="loss", sync="eager", style="step", optimizer="AdamW, not fused"),
)
def test_a_nan_loss_on_one_rank_leaves_no_trace_on_any(ranks: Ranks, one: Case) -> None:
    results = ranks(one)
    assert_skipped_together(results, [4, 8], faulty=1)
    assert_equal_on_ranks(results)
    for result in results:
        assert [each["ranks"] for each in result["incidents"]] == [flags(1, loss=True)] * 2
    if one.options["into"] == "input":  # which BatchNorm's statistics meet before the loss does
        assert results[1]["incidents"][0]["buffers"] == ["norm.running_mean", "norm.running_var"]


@cases(
    *(case("skips", into="gradient", sync=sync, style=style) for sync in LATE_OR_EAGER for style in STYLES),
    *(
        case("skips", into="gradient", sync=sync, style="step", ddp={"gradient_as_bucket_view": True})
        for sync in LATE_OR_EAGER
    ),
)
def test_trap_11_a_nan_gradient_on_one_rank_leaves_no_trace_on_any_and_names_it(ranks: Ranks, one: Case) -> None:
    results = ranks(one)
    assert_skipped_together(results, [4, 8], faulty=1)
    assert_equal_on_ranks(results)
    for result in results:
        assert [each["ranks"] for each in result["incidents"]] == [flags(1, loss=False)] * 2
        assert [each["gradients"] for each in result["incidents"]] == [["inp.weight"]] * 2


@cases(
    *(
        case(
            "skips",
            into="gradient",
            sync=sync,
            style=style,
            ddp=ddp,
            names=["inp.weight", "out.bias"],
            of_campaign=rest,
        )
        for ddp, rest in (
            ({"bucket_cap_mb": 1e-4}, True),
            ({"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True}, False),
        )
        for sync, style in (("eager", "own loop"), ("late", "step"))
    )
)
def test_a_nan_gradient_in_any_of_several_buckets_names_its_rank(ranks: Ranks, one: Case) -> None:
    results = ranks(one)
    assert_skipped_together(results, [4, 8], faulty=1)
    assert_equal_on_ranks(results)
    for result in results:
        assert result["buckets"] > 1
        assert [each["ranks"] for each in result["incidents"]] == [flags(1, loss=False)] * 2
        assert [each["gradients"] for each in result["incidents"]] == [["inp.weight"], ["out.bias"]]


@cases(
    *(
        case("skips", into=into, sync=sync, style="step", hook=hook)
        for into, hook in (("gradient", "allreduce"), ("loss", "fp16"))
        for sync in LATE_OR_EAGER
    )
)
def test_a_communication_hook_of_the_program_stays_and_ranks_still_agree(ranks: Ranks, one: Case) -> None:
    results = ranks(one)
    assert_skipped_together(results, [4, 8], faulty=1)
    assert_equal_on_ranks(results)
    for result in results:
        losses = [each["rank"] for each in result["incidents"][0]["ranks"] if each["loss"]]
        assert losses == ([1] if one.options["into"] == "loss" else [])


@cases(
    *(
        case("unwrapped", into=into, sync=sync, style=style, of_campaign=(into == "loss") == (style == "step"))
        for into in ("loss", "gradient")
        for sync in LATE_OR_EAGER
        for style in STYLES
    )
)
def test_without_ddp_a_nan_on_one_rank_skips_the_step_on_all(ranks: Ranks, one: Case) -> None:
    results = ranks(one)
    assert_skipped_together(results, [4, 8], faulty=0)
    assert changed(results[0]["end"], results[1]["end"])  # each has trained on data of its own
    for result in results:
        assert [each["ranks"] for each in result["incidents"]] == [flags(0, loss=one.options["into"] == "loss")] * 2


@cases(*(case("bad_buffer", sync=sync, style=style) for sync in LATE_OR_EAGER for style in STYLES))
def test_a_nan_in_a_buffer_of_one_rank_skips_the_step_on_all_and_names_it(ranks: Ranks, one: Case) -> None:
    results = ranks(one)
    assert_equal_on_ranks(results)
    for result in results:
        assert result["finite"]
        assert [each["step"] for each in result["incidents"]] == [3]
        assert [each["rank"] for each in result["incidents"][0]["ranks"]] == [1]


@cases(case("dropped_gradient"))
def test_a_gradient_dropped_for_one_rank_is_dropped_on_all(ranks: Ranks, one: Case) -> None:
    results = ranks(one)
    assert_equal_on_ranks(results)
    for result in results:
        assert result["finite"]
        assert [each["step"] for each in result["incidents"]] == [3]
        assert result["dropped"] == [["inp.weight"]]
        assert "model.module.inp.weight" not in result["changed"]
        assert "model.module.inp.bias" in result["changed"]


@cases(case("bad_buffer", sync="eager", style="step", overflow=True, drop_bad_gradients=True))
def test_a_bad_buffer_on_one_rank_keeps_all_from_dropping_gradients(ranks: Ranks, one: Case) -> None:
    results = ranks(one)
    assert_equal_on_ranks(results)
    for result in results:
        assert result["finite"]
        assert [(each["step"], each["response"]) for each in result["incidents"]] == [(3, "skip")]


@cases(case("nothing_left"))
def test_without_ddp_a_rank_with_no_gradient_left_to_keep_leaves_no_other_waiting(ranks: Ranks, one: Case) -> None:
    for result in ranks(one):
        assert result["finite"]
        assert [each["step"] for each in result["incidents"]] == [3]
        assert [each["rank"] for each in result["incidents"][0]["ranks"]] == [0]
        assert result["counts"] == ranks(one)[0]["counts"]


@cases(*(case("overflows", sync=sync, style=style) for sync in LATE_OR_EAGER for style in STYLES))
def test_trap_4_an_fp16_overflow_on_one_rank_backs_off_on_all(ranks: Ranks, one: Case) -> None:
    results = ranks(one)
    assert_equal_on_ranks(results)
    assert results[0]["scale"] == results[1]["scale"]
    for result in results:
        assert result["finite"]
        assert result["incidents"] == []
        assert result["counts"]["backed_off"] == 1


@cases(*(case("bad_buffer", sync=sync, style="step", precision="fp16", overflow=True) for sync in LATE_OR_EAGER))
def test_ranks_never_judge_one_step_differently(ranks: Ranks, one: Case) -> None:
    results = ranks(one)
    assert_equal_on_ranks(results)
    assert results[0]["kinds"] == results[1]["kinds"]
    assert results[0]["counts"] == results[1]["counts"]


# ---- halting -------------------------------------------------------------------------------------------------------

HALTS = [
    {sync: case("halts", into=into, sync=sync, style=style) for sync in LATE_OR_EAGER}
    for into in ("loss", "gradient")
    for style in STYLES
]


@pytest.mark.parametrize("pair", HALTS, ids=lambda pair: str(pair["eager"]))
def test_trap_11_when_patience_ends_all_ranks_halt_at_the_same_step_with_the_same_weights(
    ranks: Ranks, pair: dict[str, Case]
) -> None:
    ended = {}
    for sync, one in pair.items():
        results = ranks(one)
        ended[sync] = results[0]["state"]
        assert changed(without_statistics(results[0]["state"]), without_statistics(results[1]["state"])) == []
        assert results[0]["raised"]["at"] == results[1]["raised"]["at"]
        for result in results:
            assert result["finite"]
            assert result["raised"]["step"] == 5
            assert "rank 1" in result["raised"]["message"]
            assert [(each["step"], each["response"]) for each in result["incidents"]] == [(2, "skip"), (5, "halt")]
    if one.options["style"] == "step":
        assert changed(ended["eager"], ended["late"]) == []


# ---- late is eager -------------------------------------------------------------------------------------------------

SEVERAL = [
    (
        case("several", sync="eager", style=style, optimizer=optimizer),
        case("several", sync="late", style=style, optimizer=optimizer, settle_each=style == "own loop"),
    )
    for optimizer in ("AdamW", "SGD")
    for style in STYLES
]


@pytest.mark.parametrize(("eager", "late"), SEVERAL, ids=str)
def test_late_is_bit_identical_to_eager_with_faults_on_several_ranks(ranks: Ranks, eager: Case, late: Case) -> None:
    for asked, told in zip(ranks(eager), ranks(late), strict=True):
        assert [each["step"] for each in asked["incidents"]] == [0, 3, 4, 9, 11, 15]
        assert changed(asked["end"], told["end"]) == []
        assert asked["losses"] == told["losses"]
        assert asked["incidents"] == told["incidents"]
        assert asked["counts"] == told["counts"]
        assert asked["rerun"] == 0
        assert (told["rerun"] > 0) == (late.options["style"] == "step")
    assert changed(*(without_statistics(result["end"]) for result in ranks(late))) == []


@cases(case("several", sync="late", style="own loop", optimizer="AdamW"))
def test_late_in_an_own_loop_loses_the_same_steps_on_all_ranks(ranks: Ranks, one: Case) -> None:
    results = ranks(one)
    assert changed(*(without_statistics(result["end"]) for result in results)) == []
    assert results[0]["counts"] == results[1]["counts"]
    assert results[0]["counts"]["lost"] > 0


# ---- healthy -------------------------------------------------------------------------------------------------------


@cases(
    *(
        case(
            "healthy", world=world, precision=precision, style=style, of_campaign=(world == 2) == (precision == "fp32")
        )
        for world in (2, 3)
        for precision in ("fp32", "bf16")
        for style in STYLES
    ),
    case("healthy", world=3, precision="fp32", optimizer="SGD"),
    case("healthy", world=3, precision="fp32", ddp={"gradient_as_bucket_view": True}),
    case("healthy", world=3, precision="bf16", ddp={"bucket_cap_mb": 1e-4}),
    case("healthy", world=3, precision="fp32", ddp={"static_graph": True}),
    case("healthy", world=3, precision="fp32", model="Branching", ddp={"find_unused_parameters": True}),
    case("healthy", world=2, precision="fp32", hook="fp16"),
)
def test_a_healthy_guarded_run_is_bit_identical_to_plain_ddp(ranks: Ranks, one: Case) -> None:
    results = ranks(one)
    for result in results:
        assert result["clipped"] > 0
        assert changed(result["ends"]["plain"], result["ends"]["eager"]) == []
        assert changed(result["ends"]["plain"], result["ends"]["late"]) == []
        assert without_statistics(result["ends"]["plain"]) == without_statistics(results[0]["ends"]["plain"])
        if "bucket_cap_mb" in one.options.get("ddp", {}):
            assert result["buckets"] > 1


@cases(*(case("sparse", world=world) for world in (2, 3)))
def test_sparse_gradients_are_averaged_as_plain_ddp_does_and_watched(ranks: Ranks, one: Case) -> None:
    for result in ranks(one):
        assert changed(result["plain"], result["end"]) == []
        assert result["finite"]
        assert [(each["step"], each["ranks"]) for each in result["incidents"]] == [(3, flags(1, loss=False))]
        assert changed(result["hit"], ranks(one)[0]["hit"]) == []


@cases(*(case("own_group", sync=sync) for sync in LATE_OR_EAGER))
def test_gradients_are_averaged_over_the_group_ddp_was_given(ranks: Ranks, one: Case) -> None:
    for result in ranks(one):
        assert changed(result["plain"], result["end"]) == []


@cases(*(case("spare_gradient", sync=sync) for sync in LATE_OR_EAGER))
def test_a_nan_gradient_that_no_optimizer_uses_does_not_stop_later_steps(ranks: Ranks, one: Case) -> None:
    results = ranks(one)
    assert_equal_on_ranks(results)
    for rank, result in enumerate(results):
        assert result["finite"]
        assert result["fired"] >= (rank == 1)
        assert {each["step"] for each in result["incidents"]} <= {3}


@cases(*(case("backward_elsewhere", sync=sync) for sync in LATE_OR_EAGER))
def test_a_backward_pass_outside_the_guard_does_not_taint_the_next_step(ranks: Ranks, one: Case) -> None:
    for result in ranks(one):
        assert result["incidents"] == []
        assert result["counts"]["applied"] == 6


# ---- accumulation --------------------------------------------------------------------------------------------------


@cases(
    *(
        case("accumulation", sync=sync, style=style)
        for sync in LATE_OR_EAGER
        for style in ("step", "own loop", "microbatches")
    ),
    *(case("accumulation", sync=sync, style="step", loader="without a length") for sync in LATE_OR_EAGER),
    case("accumulation", world=3, sync="late", style="step"),
)
def test_accumulation_is_bit_identical_to_plain_ddp_down_to_the_smaller_last_step(ranks: Ranks, one: Case) -> None:
    results = ranks(one)
    assert_equal_on_ranks(results)
    for result in results:
        assert result["counts"]["applied"] == 8
        assert changed(result["plain"], result["end"]) == []


@cases(
    *(case("bad_microbatch", sync=sync) for sync in LATE_OR_EAGER),
    *(case("bad_microbatch", sync=sync, loader="without a length") for sync in LATE_OR_EAGER),
)
def test_a_nan_in_the_first_of_several_micro_batches_skips_their_step_on_all_ranks(ranks: Ranks, one: Case) -> None:
    results = ranks(one)
    assert_equal_on_ranks(results)
    assert [result["fired"] for result in results] == [0, 1]
    for result in results:
        assert result["finite"]
        assert result["counts"]["applied"] == 5
        assert [each["step"] for each in result["incidents"]] == [2]
        if "loader" in one.options:  # then DDP reduces all of them, and the second finds the NaN of the first
            assert flags(1, loss=False)[0] in result["incidents"][0]["ranks"]
        else:
            assert result["incidents"][0]["ranks"] == flags(1, loss=False)


# ---- the run log ---------------------------------------------------------------------------------------------------


@cases(*(case("run_log", sync=sync) for sync in LATE_OR_EAGER))
def test_only_rank_0_writes_the_run_log_and_warns_and_it_names_the_bad_rank(ranks: Ranks, one: Case) -> None:
    first, second = ranks(one)
    assert not second["exists"]
    assert second["warnings"] == []
    told = [line for line in first["lines"] if line["event"] != "step"]
    assert [line["event"] for line in told] == ["run", "incident", "end"]
    assert [line["step"] for line in first["lines"] if line["event"] == "step"] == list(range(6))
    assert [line["step"] for line in first["lines"] if line.get("skipped")] == [3]
    run, incident, _ = told
    assert run["ranks"] == 2
    assert incident["verdict"]["reading"]["step"] == 3
    assert [(each["rank"], each["gradients"]) for each in incident["verdict"]["reading"]["ranks"]] == [(1, True)]
    panel, summary = first["warnings"]
    assert "rank 1" in panel
    assert "1 not applied" in summary
    assert first["incidents"] == second["incidents"]
