"""The ladder as data: what is decided from records alone."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanguard import Divergence, DropBadGradients, Halt, LowerLR, Policy, RaisePrecision, Rollback, Skip
from nanguard.policy.divergence import Trend
from nanguard.policy.policy import recipe_names
from nanguard.records.steps import Means, Outcome, Progress, Reading, Verdict

ALL_MEANS = Means(lower_precision=True, can_run_again=True, snapshots=(1, 51))
LADDER = (
    Skip(times=2, per=10),
    RaisePrecision("module"),
    LowerLR(),
    Rollback(times=2, per="run"),
    Halt(),
)


def bad(step: int, epoch: int = 1, *, means: Means = ALL_MEANS, **fields: Any) -> Verdict:
    reading = Reading(step=step, epoch=epoch, batch=step, loss=math.nan, found=("loss", "gradients"))
    return replace(Verdict(kind="nonfinite", reading=reading, means=means), **fields)


def answers(policy: Policy, verdicts: list[Verdict]) -> list[str]:
    """What is decided one after the other, each step in between having been fine."""
    history: list[Outcome] = []
    for verdict in verdicts:
        history.append(Outcome(verdict=verdict, action=policy.decide(history, verdict), applied=False))
    return [past.action.response for past in history]


def test_a_single_bad_step_costs_one_step() -> None:
    assert answers(Policy(), [bad(100)]) == ["skip"]
    assert answers(Policy(), [bad(step) for step in range(0, 1000, 100)]) == ["skip"] * 10, "nor do rare ones climb"


def test_repetition_within_the_span_takes_the_next_rung_and_patience_starts_afresh() -> None:
    policy = Policy(LADDER)
    assert answers(policy, [bad(1), bad(3), bad(5), bad(7), bad(8), bad(9)]) == [
        "skip",
        "skip",
        "raise_precision",
        "skip",
        "skip",
        "lower_lr",
    ]
    assert answers(policy, [bad(1), bad(3), bad(15), bad(17)]) == ["skip"] * 4


def test_a_rung_that_brought_no_good_step_is_not_gone_below() -> None:
    policy = Policy(LADDER)
    assert answers(policy, [bad(step) for step in range(7)]) == [
        "skip",
        "skip",
        "raise_precision",
        "lower_lr",
        "lower_lr",
        "lower_lr",
        "roll_back",
    ]


def test_damage_goes_straight_to_what_undoes_it() -> None:
    damage = bad(5, kind="damage")
    assert answers(Policy(LADDER), [damage]) == ["roll_back"]
    assert answers(Policy(LADDER), [replace(damage, means=Means())]) == ["halt"]
    action = Policy(LADDER).decide([], replace(damage, means=Means()))
    assert action.passed == (
        "skip: a skip does not undo it",
        "raise precision of one module: precision does not undo it",
        "lower the learning rate: a smaller learning rate does not mend it",
        "roll back: there is no good snapshot",
    )


def test_a_finite_divergence_never_halts() -> None:
    diverged = bad(5, kind="divergence")
    diverged = replace(diverged, reading=replace(diverged.reading, found=(), loss=9.0))
    assert answers(Policy(LADDER), [diverged]) == ["warn"], "nothing says that the weights are to blame"
    assert answers(Policy(LADDER), [replace(diverged, cause="weights")]) == ["lower_lr"]
    assert answers(Policy(LADDER, divergence=Divergence(needs_proof=False)), [diverged]) == ["lower_lr"]
    assert answers(Policy([Skip(), Halt()]), [replace(diverged, cause="weights")]) == ["warn"]
    assert answers(Policy(LADDER), [replace(diverged, cause="batch")]) == ["apply"], "the data are harder"


def test_data_at_fault_are_skipped_by_a_rung_of_their_own() -> None:
    policy = Policy([Skip(1, per=100), Skip(50, when="data"), Halt()])
    batch = [bad(step, cause="input") for step in range(40)]
    assert answers(policy, batch) == ["skip"] * 40
    assert answers(policy, [bad(0), bad(2, cause="weights")]) == ["skip", "halt"]


def test_a_ladder_ends_in_a_halt_whether_it_says_so_or_not() -> None:
    assert answers(Policy([Skip(1)]), [bad(1), bad(3)]) == ["skip", "halt"]
    assert answers(Policy([]), [bad(1)]) == ["halt"]


def test_raising_precision_needs_something_to_raise() -> None:
    policy = Policy([RaisePrecision("module"), RaisePrecision("model"), Skip()])
    assert answers(policy, [bad(1, means=Means())]) == ["skip"]
    own_loop = Means(lower_precision=True)
    action = policy.decide([], bad(1, means=own_loop))
    assert (action.response, action.rung) == ("raise_precision", 1), "the module is found by running the step again"
    assert answers(policy, [bad(1, cause="input")]) == ["skip"], "no precision makes a NaN of the data finite"


def test_dropped_gradients_are_decided_before_they_are_dropped() -> None:
    policy = Policy([DropBadGradients(times=1), Skip()])
    reading = Reading(step=1, epoch=1, batch=1, loss=1.0, found=("gradients",), gradients=("w",))
    verdict = Verdict(kind="nonfinite", reading=reading, means=Means(can_drop_gradients=True))
    assert answers(policy, [verdict, verdict]) == ["drop_gradients", "skip"]
    assert answers(policy, [replace(verdict, reading=replace(reading, scale=1.0))]) == ["skip"]


class TestNoProgress:
    """A run in which nothing is learned any more stops, whatever rungs are left."""

    endless = Policy([Skip(times=None)])

    def test_consecutive_skips_are_counted_over_epochs(self) -> None:
        verdicts = [bad(step, epoch=1 + step // 10, cause="input") for step in range(150)]
        assert answers(self.endless, verdicts)[:101] == ["skip"] * 100 + ["halt"]
        assert answers(Policy(), verdicts)[:101] == ["skip"] * 100 + ["halt"], "proven to be the data, and all the same"

    @pytest.mark.parametrize("name", recipe_names())
    @pytest.mark.parametrize("length", [1, 3, 1000])
    @pytest.mark.parametrize("cause", ["input", "batch", "unknown"])
    def test_no_recipe_goes_on_for_ever(self, name: str, length: int, cause: Any) -> None:
        verdicts = [bad(step, epoch=step // length, cause=cause) for step in range(101)]
        assert "halt" in answers(Policy.recipe(name), verdicts)

    def test_an_applied_step_ends_the_row(self) -> None:
        verdicts = [bad(step) for step in range(400) if step % 90 != 80]
        policy = Policy([Skip(times=None)], max_skipped_share=None)
        assert set(answers(policy, verdicts)) == {"skip"}

    def test_what_was_left_out_for_another_reason_does_not_end_it(self) -> None:
        """An overflow, or another optimizer's bad step: the number of applied steps tells."""
        idle = [bad(step, progress=Progress(num_applied=7)) for step in range(0, 150, 3)]
        assert answers(self.endless, idle)[-17:] == ["skip"] + ["halt"] * 16
        moving = [bad(step, progress=Progress(num_applied=2 * step)) for step in range(0, 150, 3)]
        assert set(answers(self.endless, moving)) == {"skip"}

    def test_the_share_of_refused_steps_is_limited(self) -> None:
        two_of_three = [bad(step) for step in range(2000) if step % 3]
        assert answers(self.endless, two_of_three).index("halt") == 500
        one_of_three = [bad(step) for step in range(3000) if not step % 3]
        assert set(answers(self.endless, one_of_three)) == {"skip"}
        strict = Policy([Skip(times=None)], max_skipped_share=0.1, skipped_share_window=100)
        assert answers(strict, one_of_three).index("halt") == 10

    def test_it_says_why_and_the_limits_can_be_turned_off(self) -> None:
        history: list[Outcome] = []
        for step in range(101):
            action = self.endless.decide(history, bad(step))
            history.append(Outcome(verdict=bad(step), action=action, applied=False))
        assert "none of the 100 steps before it was applied" in action.because
        free = Policy([Skip(times=None)], max_consecutive_skips=None, max_skipped_share=None)
        assert set(answers(free, [bad(step) for step in range(2000)])) == {"skip"}

    def test_damage_and_divergence_are_the_ladders(self) -> None:
        history = [Outcome(verdict=bad(s), action=self.endless.decide([], bad(s)), applied=False) for s in range(200)]
        assert Policy(LADDER).decide(history, bad(200, kind="damage")).response == "roll_back"
        finite = bad(200, kind="divergence", cause="weights")
        finite = replace(finite, reading=replace(finite.reading, found=(), loss=9.0))
        assert Policy(LADDER).decide(history, finite).response != "halt"

    def test_going_back_and_forth_is_no_progress(self) -> None:
        """Each rollback undoes 500 steps, so a span of 400 would be over each time, and the run go round for ever."""
        policy = Policy([Rollback(times=2, per=400), Halt()])
        round_and_round = [bad(500 * n, progress=Progress(num_applied=500 * n, num_undone=500 * n)) for n in range(4)]
        assert answers(policy, round_and_round) == ["roll_back", "roll_back", "halt", "halt"]
        getting_on = [bad(500 * n, progress=Progress(num_applied=500 * n, num_undone=50 * n)) for n in range(4)]
        assert answers(policy, getting_on) == ["roll_back"] * 4


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Policy([Halt(), Skip()]),
        lambda: Policy(["skip"]),  # type: ignore[list-item]
        lambda: Policy(divergence=3),  # type: ignore[arg-type]
        lambda: Policy.recipe("speechbrian"),
        lambda: Skip(times=-1),
        lambda: Skip(per=0),
        lambda: Skip(when="monday"),  # type: ignore[arg-type]
        lambda: LowerLR(factor=2.0),
        lambda: LowerLR(factor=math.nan),
        lambda: LowerLR(recover_after=0),
        lambda: RaisePrecision("layer"),  # type: ignore[arg-type]
        lambda: RaisePrecision(lr=0.0),
        lambda: Rollback(steps=0),
        lambda: Rollback(skip_batches=-1),
        lambda: Rollback(skip_batches="all"),  # type: ignore[arg-type]
        lambda: Divergence(window=2),
        lambda: Policy(max_consecutive_skips=0),
        lambda: Policy(max_consecutive_skips=True),
        lambda: Policy(max_skipped_share=0.0),
        lambda: Policy(max_skipped_share=1.5),
        lambda: Policy(max_skipped_share=math.nan),
        lambda: Policy(max_skipped_share="half"),  # type: ignore[arg-type]
        lambda: Policy(skipped_share_window=0),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"got|there is no recipe|must be the last|needs"):
        wrong()


def test_records_survive_a_round_trip_through_json() -> None:
    verdict = bad(5, cause="batch")
    outcome = Outcome(
        verdict=verdict, action=Policy(LADDER).decide([], verdict), applied=False, rerun=1, did="so and so"
    )
    data = outcome.as_dict()
    data["verdict"]["reading"].update(loss=0.5, mean_loss=0.5)
    assert Outcome.from_dict(json.loads(json.dumps(data))) == Outcome.from_dict(data)


@given(st.lists(st.tuples(st.integers(1, 30), st.sampled_from(["nonfinite", "damage"])), max_size=25))
def test_decisions_depend_on_records_alone_and_always_come(events: list[tuple[int, Any]]) -> None:
    step, verdicts = 0, []
    for gap, kind in events:
        step += gap
        verdicts.append(bad(step, kind=kind))
    first = answers(Policy(), verdicts)
    assert first == answers(Policy(), [replace(verdict) for verdict in verdicts])
    assert set(first) <= {"skip", "raise_precision", "lower_lr", "roll_back", "halt"}


class TestDivergence:
    rule = Divergence(window=32, sustain=4)

    def trend(self, losses: list[float]) -> Trend:
        trend = Trend()
        for loss in losses:
            trend = trend.after(loss, self.rule)
        return trend

    def calm(self, number: int = 64) -> list[float]:
        return [2.0 * 0.96**i + 0.1 * math.sin(7.0 * i) + 1.0 for i in range(number)]

    def test_a_loss_that_leaves_its_past_for_good_has_diverged(self) -> None:
        assert not self.trend([*self.calm(), 9.0, 9.0, 9.0]).has_diverged(self.rule)
        assert self.trend([*self.calm(), 9.0, 9.0, 9.0, 9.0]).has_diverged(self.rule)

    def test_outliers_do_not_count(self) -> None:
        losses = self.calm()
        for i in range(20):
            losses += [50.0, 1.1]
            assert not self.trend(losses).has_diverged(self.rule), i

    def test_one_good_step_among_the_bad_does_not_hide_them(self) -> None:
        assert self.trend([*self.calm(), 9.0, 9.0, 1.1, 9.0, 9.0, 9.0]).has_diverged(self.rule)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_changes_nothing(self, value: float) -> None:
        losses = self.calm()
        poisoned = [each for loss in losses for each in (loss, value)]
        assert self.trend(poisoned) == self.trend(losses)
        assert self.trend([*poisoned, 9.0, 9.0, 9.0, 9.0]).has_diverged(self.rule)

    def test_too_little_is_no_past(self) -> None:
        assert not self.trend([1.0] * 3 + [9.0] * 5).has_diverged(self.rule)

    def test_a_little_worse_is_no_divergence(self) -> None:
        assert not self.trend([*self.calm(), *[1.4] * 50]).has_diverged(self.rule), "less than half of all progress"

    def test_a_rise_that_takes_its_time_does_not_hide_in_its_own_past(self) -> None:
        rise = [1.1 * 1.03**i for i in range(60)]
        assert self.trend([*self.calm(128), *rise]).has_diverged(self.rule)

    def test_losses_below_zero_are_looked_at_too(self) -> None:
        down = [-0.05 * i + 0.1 * math.sin(7.0 * i) for i in range(64)]
        assert not self.trend(down).has_diverged(self.rule)
        assert self.trend([*down, 9.0, 9.0, 9.0, 9.0]).has_diverged(self.rule)

    @pytest.mark.parametrize(
        "draw",
        [
            lambda r: r.gauss(2.0, 0.5),
            lambda r: r.lognormvariate(0.0, 1.0),
            lambda r: r.expovariate(1.0),
            lambda r: float(r.random() < 0.05),
            lambda r: 10.0 if r.random() < 0.25 else 1.0 + 0.1 * r.random(),
            lambda r: max(0.0, r.gauss(0.0, 1.0)),
            lambda r: -r.expovariate(1.0),
            lambda r: 1.0,
        ],
        ids=["normal", "lognormal", "exponential", "rarely 1", "two kinds of batch", "hinge", "negative", "constant"],
    )
    def test_noise_has_no_trend(self, draw: Any) -> None:
        rule = Divergence()
        for seed in range(5):
            generator, trend = random.Random(seed), Trend()
            for step in range(2000):
                trend = trend.after(draw(generator), rule)
                assert not trend.has_diverged(rule), (seed, step)

    def test_it_is_saved_as_plain_numbers(self) -> None:
        trend = self.trend([*self.calm(), 9.0, 9.0])
        assert Trend.from_dict(json.loads(json.dumps(trend.as_dict()))) == trend
