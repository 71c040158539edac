"""The named recipes, point by point, against the documents they come from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from helpers import INF, build, differences, everything, loss_fn, make_batches, poisoned
from nanguard import DropBadGradients, Guard, Halt, NonFiniteError, Policy, RaisePrecision, Rollback, Skip
from nanguard.testing import Fault, inject
from optimizers import ALL

SYNCS = ["eager", "late"]


def run(guard: Guard, batches: Any) -> None:
    for batch in guard.epoch(batches):
        guard.step(loss_fn, batch)


class TestSpeechbrain:
    @pytest.mark.parametrize("sync", SYNCS)
    @pytest.mark.parametrize("value", [float("nan"), INF])
    def test_three_an_epoch_are_skipped_and_the_fourth_halts(self, sync: Any, value: float) -> None:
        model, opt = build(ALL["fused AdamW"])
        guard = Guard(model, opt, precision="fp32", sync=sync, policy=Policy.recipe("speechbrain"))
        for _ in range(3):
            run(guard, poisoned(make_batches(8), 1, 4, 6, value=value))
        assert guard.counts["skipped"] == 9, "the count starts afresh each epoch"
        with pytest.raises(NonFiniteError) as caught:
            run(guard, poisoned(make_batches(8), 1, 2, 3, 5, value=value))
        assert caught.value.incident.reading.batch == 5
        assert all(torch.isfinite(t).all() for t in model.state_dict().values())

    def test_the_patience_can_be_set(self) -> None:
        model, opt = build(ALL["fused AdamW"])
        guard = Guard(model, opt, precision="fp32", policy=Policy.recipe("speechbrain", nonfinite_patience=0))
        with pytest.raises(NonFiniteError):
            run(guard, poisoned(make_batches(3), 1))

    def test_a_skipped_step_changes_nothing_where_the_original_only_counts(self) -> None:
        model, opt = build(ALL["fused AdamW"])
        guard = Guard(model, opt, precision="fp32", policy=Policy.recipe("speechbrain"))
        guard.step(loss_fn, make_batches(1)[0])
        before = everything(model, [opt])
        guard.step(loss_fn, poisoned(make_batches(1), 0)[0])
        assert differences(before, everything(model, [opt])) == []

    def test_single_bad_gradients_are_dropped_in_fp32(self) -> None:
        policy = Policy.recipe("speechbrain", skip_nonfinite_grads=True)
        assert policy.ladder == (DropBadGradients(), Skip(3, per="epoch"), Halt())
        model, opt = build(ALL["AdamW loop"])
        guard = Guard(model, opt, precision="fp32", policy=policy)
        before = everything(model, [opt])
        with inject(guard, Fault(into="gradient", name="out.bias", steps=(0,))):
            guard.step(loss_fn, make_batches(1)[0])
        changed = differences(before, everything(model, [opt]))
        assert "model.out.bias" not in changed
        assert "model.out.weight" in changed

    def test_and_not_under_a_scaler_with_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        model, opt = build(ALL["AdamW loop"])
        policy = Policy.recipe("speechbrain", skip_nonfinite_grads=True)
        guard = Guard(model, opt, precision="fp16", policy=policy)
        assert "DropBadGradients is ignored in fp16" in caplog.text
        before = everything(model, [opt])
        with inject(guard, Fault(into="gradient", name="out.bias", steps=(0,), value="inf")):
            guard.step(loss_fn, make_batches(1)[0])
        assert differences(before, everything(model, [opt])) == []
        assert guard.counts["backed_off"] == 1, "the scale is to blame first"


@pytest.mark.parametrize(
    ("policy", "norm"),
    [
        (Policy.recipe("speechbrain"), 5.0),
        (Policy.recipe("tts"), 1.0),
        (Policy.recipe("separation"), 5.0),
        (Policy.recipe("separation", clip_grad_norm=0.5), 0.5),
        (Policy.recipe("separation", clip_grad_norm=-1.0), None),
        (Policy.recipe("pretrain"), 1.0),
    ],
)
def test_each_clips_every_parameter_group_to_its_norm(policy: Policy, norm: float | None) -> None:
    torch.manual_seed(0)
    model, _ = build(ALL["fused SGD"])
    groups = [{"params": [*model.inp.parameters()]}, {"params": [*model.norm.parameters(), *model.out.parameters()]}]
    opt = torch.optim.SGD(groups, lr=1.0)
    guard = Guard(model, opt, precision="fp32", policy=policy)
    before = [p.detach().clone() for group in groups for p in group["params"]]
    guard.step(lambda m, b: 1e4 * loss_fn(m, b), make_batches(1)[0])
    moved = [a - b.detach() for a, b in zip(before, (p for group in groups for p in group["params"]), strict=True)]
    sizes = [torch.stack([t.norm() for t in part]).norm().item() for part in (moved[:2], moved[2:])]
    if norm is None:
        assert min(sizes) > 100, "the gate is closed: nothing is clipped, and no gradient turned round"
    else:
        assert sizes == pytest.approx([norm, norm], rel=1e-4)


def test_a_norm_given_to_the_guard_wins() -> None:
    model, opt = build(ALL["fused SGD"])
    guard = Guard(model, opt, precision="fp32", policy=Policy.recipe("tts"), max_norm=None)
    before = model.out.weight.detach().clone()
    guard.step(lambda m, b: 1e6 * loss_fn(m, b), make_batches(1)[0])
    assert (model.out.weight - before).norm() > 100


class TestLlava:
    @pytest.mark.parametrize("sync", SYNCS)
    def test_the_first_one_goes_to_fp32_with_half_the_learning_rate_once_per_run(self, sync: Any) -> None:
        model, opt = build(ALL["fused AdamW"])
        schedule = lr_scheduler.LambdaLR(opt, lambda step: 0.99**step)
        guard = Guard(
            model, opt, precision="bf16", sync=sync, scheduler=schedule, policy=Policy.recipe("llava"), max_norm=1.0
        )
        weights = list(model.parameters())
        run(guard, poisoned(make_batches(10), 4))
        assert guard.precision == "fp32"
        assert guard.counts["skipped"] == 1
        assert guard.counts["applied"] == 9
        assert opt.param_groups[0]["lr"] == pytest.approx(0.5 * 1e-3 * 0.99**9), "the next tick does not undo it"
        assert schedule.base_lrs == [pytest.approx(5e-4)]
        assert all(a is b for a, b in zip(weights, model.parameters(), strict=True))
        run(guard, poisoned(make_batches(10), 1, 4, 5, 6))
        assert guard.counts["skipped"] == 5, "every later one is skipped: the run goes on"
        assert opt.param_groups[0]["lr"] == pytest.approx(0.5 * 1e-3 * 0.99**15), "and nothing is lowered again"
        assert [i.outcome.action.response for i in guard.incidents] == ["raise_precision"] + ["skip"] * 4

    def test_only_a_run_without_progress_is_halted(self) -> None:
        model, opt = build(ALL["fused AdamW"])
        guard = Guard(model, opt, precision="bf16", policy=Policy.recipe("llava"), diagnose="off")
        with pytest.raises(NonFiniteError, match="none of the 100 steps before it was applied"):
            run(guard, poisoned(make_batches(150), *range(150)))
        assert (guard.counts["skipped"], guard.counts["halted"]) == (100, 1)

    def test_the_step_itself_is_skipped_and_its_gradients_cleared(self) -> None:
        model, opt = build(ALL["fused AdamW"])
        guard = Guard(model, opt, precision="bf16", policy=Policy.recipe("llava", lr_backoff=0.1))
        guard.step(loss_fn, make_batches(1)[0])
        before = everything(model, [opt])
        guard.step(loss_fn, poisoned(make_batches(1), 0)[0])
        assert differences(before, everything(model, [opt])) == ["optimizer0.group0"]
        assert opt.param_groups[0]["lr"] == pytest.approx(1e-4)
        assert all(p.grad is None for p in model.parameters())

    def test_half_weights_and_moments_are_cast_in_place(self) -> None:
        torch.manual_seed(0)
        model, _ = build(ALL["fused AdamW"])
        model = model.to(torch.bfloat16)
        opt = torch.optim.AdamW(model.parameters())
        guard = Guard(model, opt, precision="fp32", policy=Policy.recipe("llava"))
        weight = model.out.weight

        def loss(model: Any, batch: Any) -> Any:
            return loss_fn(model, (batch[0].to(weight.dtype), batch[1]))

        for batch in guard.epoch(poisoned(make_batches(6), 2)):
            guard.step(loss, batch)
        assert model.out.weight is weight
        assert {t.dtype for t in model.state_dict().values() if t.is_floating_point()} == {torch.float32}
        assert {t.dtype for state in opt.state.values() for t in state.values()} == {torch.float32}
        assert guard.counts["applied"] == 5

    def test_its_ladder(self) -> None:
        rung = RaisePrecision("model", lr=0.5, verify=False, times=1, per="run")
        assert Policy.recipe("llava").ladder == (rung, Skip(times=None, per="run"), Halt())


class TestPretrain:
    def test_its_numbers(self) -> None:
        assert Policy.recipe("pretrain").ladder == (
            Skip(3, per=100),
            Rollback(steps=100, skip_batches=300, times=10, per="run"),
            Halt(),
        )
        policy = Policy.recipe("pretrain", rollback_steps=50, skip_batches=500, patience=1, per=10, times=2)
        assert policy.ladder[:2] == (Skip(1, per=10), Rollback(steps=50, skip_batches=500, times=2))

    def test_repetition_goes_back_a_hundred_steps_and_over_the_next_batches(self) -> None:
        model, opt = build(ALL["fused AdamW"])
        policy = Policy.recipe("pretrain", skip_batches=200)
        guard = Guard(model, opt, precision="fp32", policy=policy)
        batches = [(*batch, place) for place, batch in enumerate(poisoned(make_batches(700), 310, 312, 314, 316))]
        seen = []
        for batch in guard.epoch(batches):
            seen.append(batch[2])
            guard.step(lambda m, b: loss_fn(m, b[:2]), batch)
        assert [i.outcome.action.response for i in guard.incidents] == ["skip"] * 3 + ["roll_back"]
        jump = next(i for i in range(1, len(seen)) if seen[i] != seen[i - 1] + 1)
        assert seen[jump] == 401, "from the snapshot before step 201, two hundred batches on"
        assert seen[jump:] == list(range(401, 700))


def test_an_unknown_recipe_or_option_says_what_there_is() -> None:
    with pytest.raises(ValueError, match="'default', 'speechbrain', 'tts', 'separation', 'llava', 'pretrain'"):
        Policy.recipe("palm")
    with pytest.raises(ValueError, match=r"lr_backof.*lr_backoff"):
        Policy.recipe("llava", lr_backof=0.5)
