"""The guard's protocol: calls and their order, epochs, accumulation, halting, resuming, what it says."""

from __future__ import annotations

import gc
import json
import logging
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nanguard
from helpers import TINY_NET_LINE, TinyNet, build, differences, everything, loss_fn, make_batches, poisoned
from nanguard import DropBadGradients, NonFiniteError, Policy, ProtocolError, Skip
from nanguard.testing import Fault, inject
from optimizers import ALL, FUSED

SYNCS = ["eager", "late"]


def make_guard(**options: Any) -> tuple[nn.Module, Any, nanguard.Guard]:
    model, opt = build(ALL["fused AdamW"])
    return model, opt, nanguard.Guard(model, opt, **{"precision": "fp32", **options})


def test_what_has_not_happened_is_counted_as_0() -> None:
    _, _, guard = make_guard()
    guard.step(loss_fn, make_batches(1)[0])
    guard.settle()
    names = ("applied", "skipped", "lost", "rerun", "backed_off", "rolled_back", "undone", "halted")
    assert [guard.counts[name] for name in names] == [1, 0, 0, 0, 0, 0, 0, 0]


class Incomparable:
    """As a table of pandas: it has no truth value, and comparing it gives another of its kind."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        return self

    def __bool__(self) -> bool:
        raise ValueError("the truth value is ambiguous")


class TestOrderOfCalls:
    def test_backward_without_autocast(self) -> None:
        model, _, guard = make_guard()
        with pytest.raises(ProtocolError, match=r"guard\.backward\(\) .* without guard\.autocast\(\)"):
            guard.backward(loss_fn(model, make_batches(1)[0]))

    def test_update_without_backward(self) -> None:
        _, _, guard = make_guard()
        with pytest.raises(ProtocolError, match=r"guard\.update\(\) .* before guard\.backward\(\)"):
            guard.update()
        with guard.autocast(), pytest.raises(ProtocolError, match=r"guard\.backward\(\)"):
            guard.update()

    def test_step_inside_an_own_step(self) -> None:
        model, _, guard = make_guard()
        batch = make_batches(1)[0]
        with guard.autocast():
            loss = loss_fn(model, batch)
        guard.backward(loss)
        with pytest.raises(
            ProtocolError, match=r"guard\.step\(\) .* between guard\.backward\(\) and guard\.update\(\)"
        ):
            guard.step(loss_fn, batch)

    def test_autocast_while_step_gathers_microbatches(self) -> None:
        _, _, guard = make_guard(accumulate=2)
        guard.step(loss_fn, make_batches(1)[0])
        with pytest.raises(ProtocolError, match=r"guard\.autocast\(\) .* guard\.step\(\)"):
            guard.autocast()

    def test_replay_without_capture(self) -> None:
        _, _, guard = make_guard()
        with pytest.raises(ProtocolError, match=r"guard\.replay\(\)"):
            guard.replay(None)  # type: ignore[arg-type]

    def test_validation_in_between_disturbs_nothing(self) -> None:
        model, opt, guard = make_guard()
        for batch in make_batches(2):
            with torch.no_grad(), guard.autocast():
                loss_fn(model, batch)
            guard.step(loss_fn, batch)
        assert guard.counts["applied"] == 2

    def test_several_backwards_before_one_update_add_up(self) -> None:
        first, second = make_batches(2)
        model, opt, guard = make_guard(max_norm=None)
        for batch in (first, second):
            with guard.autocast():
                loss = loss_fn(model, batch)
            guard.backward(loss)
        guard.update()
        twin, twin_opt = build(ALL["fused AdamW"])
        for batch in (first, second):
            loss_fn(twin, batch).backward()
        twin_opt.step()
        assert differences(everything(model, [opt]), everything(twin, [twin_opt])) == []

    def test_a_dropped_microbatch_of_an_own_loop_is_made_up_for(self) -> None:
        first, second = make_batches(2)
        ends = []
        for batches in ([first, *poisoned([second], 0)], [first, first]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=1.0), nn.Linear(8, 3))
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            guard = nanguard.Guard(model, opt, precision="fp32", max_norm=None, drop_bad_microbatches=True)
            for x, y in batches:
                with guard.autocast():
                    hidden = model[1](model[0](x))
                with guard.autocast():
                    loss = torch.nn.functional.cross_entropy(model[2](hidden), y)
                guard.backward(loss)
            guard.update()
            ends.append({k: v for k, v in model.state_dict().items() if k != "1.num_batches_tracked"})
        for name, value in ends[0].items():
            torch.testing.assert_close(value, ends[1][name])

    def test_two_forward_blocks_before_one_backward_are_both_undone(self) -> None:
        model, opt, guard = make_guard()
        before = everything(model, [opt])
        good, bad = make_batches(2)
        with guard.autocast():
            first = loss_fn(model, poisoned([bad], 0)[0])
        with guard.autocast():
            second = loss_fn(model, good)
        guard.backward(first + second)
        guard.update()
        assert differences(before, everything(model, [opt])) == []

    def test_settling_in_the_middle_of_a_step_with_others_in_flight(self) -> None:
        _, _, guard = make_guard(accumulate=2, sync="late")
        batches = make_batches(5)
        for batch in batches[:3]:
            guard.step(loss_fn, batch)
        with pytest.raises(ProtocolError, match=r"guard\.settle\(\) .* in the middle of a step, after 1 backward"):
            guard.state_dict()
        guard.step(loss_fn, batches[3])
        guard.settle()
        assert guard.counts["applied"] == 2

    @pytest.mark.parametrize("sync", SYNCS)
    def test_an_epoch_left_in_the_middle_of_a_step_leaves_no_gradients(self, sync: Any) -> None:
        model, _, guard = make_guard(accumulate=2, sync=sync)
        for batch in guard.epoch(make_batches(5)):
            guard.step(loss_fn, batch)
            if guard.current_step == 1 and any(p.grad is not None for p in model.parameters()):
                break
        for batch in guard.epoch(make_batches(2)):
            guard.step(loss_fn, batch)
        assert guard.counts["applied"] == 2

    def test_validation_the_other_way_round_takes_no_step_number(self) -> None:
        model, _, guard = make_guard()
        batch = make_batches(1)[0]
        with guard.autocast(), torch.no_grad():
            loss_fn(model, batch)
        guard.step(loss_fn, batch)
        assert guard.last_outcome.verdict.reading.step == 0


class TestLoss:
    def test_aux_comes_back_beside_the_loss(self) -> None:
        _, _, guard = make_guard()
        loss, aux = guard.step(lambda m, b: (loss_fn(m, b), {"n": 8}), make_batches(1)[0])
        assert aux == {"n": 8}
        assert not loss.requires_grad
        loss, auxes = guard.step(lambda m, b: (loss_fn(m, b), len(b[0])), microbatches=make_batches(3))
        assert auxes == [8, 8, 8]

    @pytest.mark.parametrize(
        "aux",
        [np.ones(3), np.array([]), torch.ones(3), torch.tensor([]), (), [], None, 0, Incomparable()],
        ids=lambda aux: f"{type(aux).__name__} {getattr(aux, 'shape', '')}",
    )
    def test_aux_may_be_anything_and_is_never_looked_at(self, aux: Any) -> None:
        _, _, guard = make_guard()
        batches = make_batches(2)
        _, same = guard.step(lambda m, b: (loss_fn(m, b), aux), batches[0])
        assert same is aux
        _, auxes = guard.step(lambda m, b: (loss_fn(m, b), aux), microbatches=batches)
        assert [each is aux for each in auxes] == [True, True]
        _, auxes = guard.step(lambda m, b: (loss_fn(m, b), aux, aux), microbatches=batches)
        assert [[each is aux for each in both] for both in auxes] == [[True, True]] * 2
        assert isinstance(guard.step(lambda m, b: (loss_fn(m, b),), microbatches=batches), Tensor)
        assert guard.counts["applied"] == 4

    @pytest.mark.parametrize(
        ("function", "what"),
        [
            (lambda m, b: 1.0, "got float"),
            (lambda m, b: m(b[0]), r"got a tensor of shape \(8, 3\)"),
            (lambda m, b: loss_fn(m, b).detach(), "requires_grad is False"),
        ],
    )
    def test_what_is_no_loss_is_refused_and_leaves_no_trace(self, function: Any, what: str) -> None:
        model, opt, guard = make_guard()
        before = everything(model, [opt])
        with pytest.raises(ValueError, match=what):
            guard.step(function, make_batches(1)[0])
        assert differences(before, everything(model, [opt])) == []
        guard.step(loss_fn, make_batches(1)[0])
        assert guard.counts["applied"] == 1

    @pytest.mark.parametrize("sync", SYNCS)
    def test_a_step_that_raises_leaves_no_trace_and_the_next_one_works(self, sync: Any) -> None:
        model, opt, guard = make_guard(sync=sync, accumulate=2)
        batches = make_batches(4)

        def out_of_memory(model: nn.Module, batch: Any) -> Tensor:
            loss_fn(model, batch).backward()
            raise torch.OutOfMemoryError("no memory left")

        before = everything(model, [opt])
        guard.step(loss_fn, batches[0])
        with pytest.raises(torch.OutOfMemoryError):
            guard.step(out_of_memory, batches[1])
        assert differences(before, everything(model, [opt])) == []
        assert all(p.grad is None for p in model.parameters())
        for batch in batches[2:]:
            guard.step(loss_fn, batch)
        guard.settle()
        assert guard.counts["applied"] == 1

    def test_neither_or_both_of_batch_and_microbatches_is_refused(self) -> None:
        _, _, guard = make_guard()
        for arguments in ({}, {"batch": 1, "microbatches": [1]}, {"microbatches": []}):
            with pytest.raises(ValueError, match="microbatches"):
                guard.step(loss_fn, **arguments)


class TestEpochs:
    def test_patience_starts_afresh_every_epoch(self) -> None:
        _, _, guard = make_guard(policy=Policy([Skip(2)]))
        for _ in range(3):
            for batch in guard.epoch(poisoned(make_batches(5), 1, 3)):
                guard.step(loss_fn, batch)
        assert [i.outcome.action.count for i in guard.incidents] == [1, 2, 1, 2, 1, 2]

    def test_per_run_it_does_not(self) -> None:
        _, _, guard = make_guard(policy=Policy([Skip(3, per="run")]))
        with pytest.raises(NonFiniteError):
            for _ in range(3):
                for batch in guard.epoch(poisoned(make_batches(5), 1, 3)):
                    guard.step(loss_fn, batch)
        assert len(guard.incidents) == 4

    def test_an_epoch_has_the_length_of_its_loader(self) -> None:
        _, _, guard = make_guard()
        assert len(guard.epoch(make_batches(5))) == 5
        assert len(list(guard.epoch(iter(make_batches(5))))) == 5

    @pytest.mark.parametrize("sync", SYNCS)
    def test_microbatches_left_over_make_a_last_smaller_step(self, sync: Any) -> None:
        batches = make_batches(6)
        model, opt = build(ALL["fused SGD"])
        guard = nanguard.Guard(model, opt, precision="fp32", accumulate=4, sync=sync, max_norm=None)
        for batch in guard.epoch(batches):
            guard.step(loss_fn, batch)
        assert guard.counts["applied"] == 2
        twin, twin_opt = build(ALL["fused SGD"])
        for part in (batches[:4], batches[4:]):
            for batch in part:
                (loss_fn(twin, batch) / len(part)).backward()
            twin_opt.step()
            twin_opt.zero_grad()
        assert differences(everything(model, [opt]), everything(twin, [twin_opt])) == []

    def test_a_schedule_per_epoch_advances_once_an_epoch(self) -> None:
        model, opt = build(ALL["fused AdamW"])
        schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
        guard = nanguard.Guard(model, opt, scheduler=schedule, schedule_per="epoch", precision="fp32")
        for _ in range(2):
            for batch in guard.epoch(poisoned(make_batches(3), 1)):
                guard.step(loss_fn, batch)
        assert opt.param_groups[0]["lr"] == pytest.approx(1e-3 / 4)

    @pytest.mark.parametrize("sync", SYNCS)
    def test_a_schedule_counts_applied_steps_only(self, sync: Any) -> None:
        model, opt = build(ALL["fused AdamW"])
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 1.0 / (n + 1))
        guard = nanguard.Guard(model, opt, scheduler=schedule, precision="fp32", sync=sync)
        for batch in guard.epoch(poisoned(make_batches(8), 0, 4)):
            guard.step(loss_fn, batch)
        assert schedule.last_epoch == 6


class TestHalting:
    @pytest.mark.parametrize("sync", SYNCS)
    def test_the_error_says_what_where_why_and_what_to_do(self, sync: Any) -> None:
        model, opt, guard = make_guard(policy=Policy([Skip(1)]), sync=sync)
        with pytest.raises(NonFiniteError) as caught:
            for batch in guard.epoch(poisoned(make_batches(9), 2, 5)):
                guard.step(loss_fn, batch)
        message = str(caught.value)
        for part in (
            "non-finite loss at step 5 (batch 5 of epoch 1)",
            "loss NaN; gradients of inp.weight, inp.bias, norm.weight and 3 more",
            "Halted, since no rung of the ladder was left: skip: used 1 of 1 this epoch.",
            "Preserved: weights, optimizer state",
            "Next: ",
            "Policy([Skip(times=10)",
        ):
            assert part in message
        assert caught.value.incident.reading.step == 5
        assert guard.counts["applied"] == 4
        assert all(torch.isfinite(t).all() for t in model.state_dict().values())
        assert str(pickle.loads(pickle.dumps(caught.value))) == message

    def test_gradients_alone_are_named_by_parameter(self) -> None:
        _, _, guard = make_guard(policy=Policy([Skip(0)]))
        with (
            inject(guard, Fault(into="gradient", name="out.bias", steps=(0,))),
            pytest.raises(NonFiniteError) as caught,
        ):
            guard.step(loss_fn, make_batches(1)[0])
        assert "non-finite gradient at step 0" in str(caught.value)
        assert "gradients of out.bias." in str(caught.value)

    @pytest.mark.parametrize("bad", [-1, 1.5, True, "3"])
    def test_a_patience_that_makes_no_sense_is_refused(self, bad: Any) -> None:
        with pytest.raises(ValueError, match="times must be a whole number"):
            Policy([Skip(bad)])

    def test_an_unknown_window_is_refused(self) -> None:
        with pytest.raises(ValueError, match="per must be 'epoch', 'run' or a number of steps, got 'week'"):
            Skip(per="week")  # type: ignore[arg-type]


class TestGradientsDropped:
    def test_a_bad_loss_is_skipped_not_dropped(self) -> None:
        model, opt, guard = make_guard(policy=Policy([DropBadGradients(), Skip()]))
        before = everything(model, [opt])
        guard.step(loss_fn, poisoned(make_batches(1), 0)[0])
        assert differences(before, everything(model, [opt])) == []
        assert guard.counts["skipped"] == 1

    def test_where_all_gradients_are_bad_the_step_is_skipped(self) -> None:
        model, opt, guard = make_guard(policy=Policy([DropBadGradients(), Skip()]))
        before = everything(model, [opt])
        faults = [Fault(into="gradient", name=name, steps=(0,)) for name, _ in model.named_parameters()]
        with inject(guard, *faults):
            guard.step(loss_fn, make_batches(1)[0])
        assert differences(before, everything(model, [opt])) == []
        assert guard.counts["skipped"] == 1

    def test_what_is_left_of_a_smaller_last_step_is_its_mean(self) -> None:
        model, opt = build(lambda p: torch.optim.SGD(p, lr=1.0))
        policy = Policy([DropBadGradients(), Skip()])
        guard = nanguard.Guard(model, opt, precision="fp32", policy=policy, max_norm=None, accumulate=4)
        twin, twin_opt = build(lambda p: torch.optim.SGD(p, lr=1.0))
        batches = make_batches(2)
        with inject(guard, Fault(into="gradient", name="inp.weight", steps=(0,))):
            for batch in guard.epoch(batches):
                guard.step(loss_fn, batch)
        torch.manual_seed(0)
        build(lambda p: torch.optim.SGD(p, lr=1.0))
        for batch in batches:
            (loss_fn(twin, batch) / 2).backward()
        twin.inp.weight.grad = None
        twin_opt.step()
        assert differences(everything(model, []), everything(twin, [])) == []

    def test_the_norm_that_clips_is_that_of_the_good_ones(self) -> None:
        model, opt = build(lambda p: torch.optim.SGD(p, lr=1.0))
        guard = nanguard.Guard(
            model, opt, precision="fp32", policy=Policy([DropBadGradients(), Skip()]), max_norm=1e-2, clip="global"
        )
        before = {k: p.detach().clone() for k, p in model.named_parameters()}
        with inject(guard, Fault(into="gradient", name="inp.weight", value="inf", steps=(0,))):
            guard.step(loss_fn, make_batches(1)[0])
        moved = torch.stack([(p - before[k]).norm() for k, p in model.named_parameters()]).norm().item()
        assert moved == pytest.approx(1e-2, rel=1e-4)


class TestResuming:
    @pytest.mark.parametrize("sync", SYNCS)
    @pytest.mark.parametrize("precision", ["fp32", "fp16"])
    @pytest.mark.parametrize("clip", ["group", nanguard.ZScore(warmup=2, window=4, threshold=0.5)])
    def test_a_resumed_run_is_the_uninterrupted_one(self, sync: Any, precision: Any, clip: Any, tmp_path: Path) -> None:
        batches = poisoned(make_batches(24), 3, 10, 15)

        def fresh() -> tuple[Any, ...]:
            model, opt = build(ALL["fused AdamW"])
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 40)
            scale = nanguard.LossScale(interval=4) if precision == "fp16" else None
            policy = Policy([Skip(9)])
            guard = nanguard.Guard(
                model,
                opt,
                scheduler=schedule,
                precision=precision,
                clip=clip,
                sync=sync,
                loss_scale=scale,
                policy=policy,
            )
            return model, opt, schedule, guard

        def end(model: Any, opt: Any, schedule: Any, guard: Any) -> dict[str, Any]:
            state = guard.state_dict()
            state["journal"]["counts"].pop("rerun")
            return everything(model, [opt], schedule, str(state))

        model, opt, schedule, guard = fresh()
        for batch in batches:
            guard.step(loss_fn, batch)
        whole = end(model, opt, schedule, guard)

        model, opt, schedule, guard = fresh()
        for batch in batches[:12]:
            guard.step(loss_fn, batch)
        parts = {"guard": guard.state_dict(), "model": model, "opt": opt, "schedule": schedule}
        saved = {k: v if isinstance(v, dict) else v.state_dict() for k, v in parts.items()}
        torch.save(saved, tmp_path / "checkpoint.pt")
        rng = torch.get_rng_state()

        model, opt, schedule, guard = fresh()
        loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        for name, thing in (("guard", guard), ("model", model), ("opt", opt), ("schedule", schedule)):
            thing.load_state_dict(loaded[name])
        torch.set_rng_state(rng)
        for batch in batches[12:]:
            guard.step(loss_fn, batch)
        assert differences(whole, end(model, opt, schedule, guard)) == []

    def test_patience_goes_on_where_it_was(self) -> None:
        _, _, guard = make_guard(policy=Policy([Skip(1)]))
        guard.step(loss_fn, poisoned(make_batches(1), 0)[0])
        state = json.loads(json.dumps(guard.state_dict()))
        _, _, again = make_guard(policy=Policy([Skip(1)]))
        again.load_state_dict(state)
        with pytest.raises(NonFiniteError, match="at step 1"):
            again.step(loss_fn, poisoned(make_batches(1), 0)[0])

    def test_state_of_another_precision_or_version_is_refused(self) -> None:
        _, _, guard = make_guard()
        state = guard.state_dict()
        _, _, other = make_guard(precision="fp16")
        with pytest.raises(ValueError, match="without a loss scale"):
            other.load_state_dict(state)
        with pytest.raises(ValueError, match="version 2, got 7"):
            guard.load_state_dict({**state, "version": 7})


class TestWhatItSays:
    def test_the_run_is_summed_up_in_a_line(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        model, opt = build(ALL["fused AdamW"])
        with nanguard.Guard(model, opt, precision="fp32", run_dir=tmp_path) as guard:
            for batch in poisoned(make_batches(6), 2, 4):
                guard.step(loss_fn, batch)
            assert "end of the run" not in caplog.text
        (line,) = [message for message in caplog.messages if message.startswith("end of the run")]
        assert line.startswith(
            "end of the run: 6 steps, 2 not applied, weights and optimizer state finite; first known"
        )
        assert "step 2: non-finite data" in line
        assert line.endswith(f"more:\n  nanguard explain {tmp_path}"), "a command is a line of its own"
        del guard
        gc.collect()
        assert caplog.text.count("end of the run") == 1, "once"

    def test_a_healthy_run_is_not(self, caplog: pytest.LogCaptureFixture) -> None:
        with nanguard.Guard(*build(ALL["fused AdamW"]), precision="fp32") as guard:
            guard.step(loss_fn, make_batches(1)[0])
        assert "end of the run" not in caplog.text

    def test_a_guard_that_is_let_go_of_is_summed_up_too(self, caplog: pytest.LogCaptureFixture) -> None:
        guard = nanguard.Guard(*build(ALL["fused AdamW"]), precision="fp32")
        guard.step(loss_fn, poisoned(make_batches(1), 0)[0])
        there = weakref.ref(guard)
        del guard
        gc.collect()
        assert there() is None, "what is to be told does not keep it alive"
        assert "end of the run: 1 step, 1 not applied; first known at step 0" in caplog.text

    @pytest.mark.parametrize("ending", ["", "import sys; sys.exit(0)", "raise ValueError", "guard.close()"])
    def test_so_is_one_at_the_end_of_the_process(self, ending: str) -> None:
        code = f"""
import torch, nanguard
model = torch.nn.Linear(2, 1)
guard = nanguard.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp32")
guard.step(lambda m, b: m(b).sum(), torch.full((1, 2), float("nan")))
{ending}
"""
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert ended.stderr.count("end of the run: 1 step, 1 not applied") == 1

    def test_the_panel(self, caplog: pytest.LogCaptureFixture) -> None:
        _, _, guard = make_guard()
        for batch in guard.epoch(poisoned(make_batches(3), 1)):
            guard.step(loss_fn, batch)
        assert caplog.messages == [
            " nanguard  step 1  the loss is NaN: step skipped, nothing changed\n"
            f"   where     first used at helpers.py:{TINY_NET_LINE}, in inp (addmm, data, fp32)\n"
            "               return self.out(self.drop(F.relu(self.norm(self.inp(x)))))\n"
            "   why       non-finite data: batch[0] holds NaN at [0, 0]\n"
            "   sample    index 0 of the batch\n"
            "   fix       clean the data, or mask such entries before they are used\n"
            "   found     loss NaN; gradients of inp.weight, inp.bias, norm.weight and 3 more; "
            "buffers norm.running_mean and norm.running_var\n"
            "   batch     batch 1 of epoch 1\n"
            "   untouched weights, optimizer state and buffers, exactly as before this step\n"
            "   ladder    skip 1 of 3 within 100 steps, then: roll back\n"
            "   docs      docs/causes/input_nonfinite.md"
        ]

    def test_the_run_log_is_json_with_a_header_incidents_and_an_end(self, tmp_path: Path) -> None:
        model, opt = build(ALL["fused AdamW"])
        with nanguard.Guard(model, opt, precision="fp16", run_dir=tmp_path / "run") as guard:
            with inject(guard, Fault(into="gradient", name="out.bias", steps=(1,))):
                for batch in guard.epoch(poisoned(make_batches(4), 2)):
                    guard.step(loss_fn, batch)
        lines = [json.loads(line) for line in (tmp_path / "run" / "run.jsonl").read_text().splitlines()]
        assert [line["event"] for line in lines] == [
            *("run", "step", "step", "overflow", "step", "incident", "step", "end")
        ]
        assert [line["step"] for line in lines if line["event"] == "step"] == [0, 1, 2, 3]
        assert [line.get("skipped", False) for line in lines if line["event"] == "step"] == [False, True, True, False]
        lines = [line for line in lines if line["event"] != "step"]
        assert lines[0]["schema"] == 2
        assert lines[0]["policy"]["ladder"][0] == {
            "rung": "Skip",
            "words": "skip",
            "times": 3,
            "per": 100,
            "when": "any",
        }
        assert lines[0]["policy"]["max_norm"] is None
        assert lines[1]["scale"] == 65536.0
        assert lines[2]["verdict"]["reading"]["loss"] == "nan"
        assert lines[3]["counts"]["applied"] == 2

    def test_a_disk_that_fails_stops_the_log_and_not_the_run(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        model, opt = build(ALL["fused AdamW"])
        guard = nanguard.Guard(model, opt, precision="fp32", run_dir=tmp_path / "run")
        (tmp_path / "run" / "run.jsonl").unlink()
        (tmp_path / "run" / "run.jsonl").mkdir()
        for batch in poisoned(make_batches(4), 0, 1):
            guard.step(loss_fn, batch)
        guard.close()
        assert caplog.text.count("the run goes on without its log") == 1
        assert guard.counts["applied"] == 2

    def test_the_run_log_has_the_norm_that_is_clipped_to(self, tmp_path: Path) -> None:
        _, _, guard = make_guard(max_norm=1.0, run_dir=tmp_path)
        guard.step(loss_fn, make_batches(1)[0])
        guard.close()
        assert nanguard.read_run(tmp_path).header["policy"]["max_norm"] == 1.0

    def test_a_fault_in_the_telling_stops_no_run(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(*_: Any, **__: Any) -> str:
            raise IndexError("a bug of ours")

        monkeypatch.setattr("nanguard.step.panels.panel", broken)
        model, opt, guard = make_guard()
        for batch in poisoned(make_batches(3), 1):
            guard.step(loss_fn, batch)
        assert guard.counts["applied"] == 2
        assert "step 1: skip, which could not be described" in caplog.text
        assert "a bug of ours" in caplog.text

    def test_a_fusable_optimizer_is_told_once(self, caplog: pytest.LogCaptureFixture) -> None:
        model, opt = build(lambda p: torch.optim.AdamW(p))
        with caplog.at_level(logging.INFO, "nanguard"):
            guard = nanguard.Guard(model, opt)
            guard.step(loss_fn, make_batches(1)[0])
        assert caplog.text.count("pass fused=True to have none") == 1

    def test_syncs_per_step(self) -> None:
        for name in FUSED:
            model, opt = build(ALL[name])
            assert nanguard.Guard(model, opt, sync="late").syncs_per_step == 0
        model, opt = build(ALL["RMSprop"])
        assert nanguard.Guard(model, opt).syncs_per_step == 1

    def test_repr_is_short_and_true(self) -> None:
        _, _, guard = make_guard()
        guard.step(loss_fn, make_batches(1)[0])
        assert repr(guard) == (
            "Guard(precision='fp32', sync='eager', applied=1, skipped=0, lost=0, rerun=0, backed_off=0)"
        )


class TestParametersThatComeAndGo:
    @pytest.mark.parametrize("sync", SYNCS)
    def test_frozen_unused_and_added_parameters(self, sync: Any) -> None:
        torch.manual_seed(0)
        model = TinyNet()
        model.unused = nn.Linear(3, 3)
        model.inp.weight.requires_grad_(False)
        opt = torch.optim.AdamW([p for n, p in model.named_parameters() if not n.startswith("out")], fused=True)
        guard = nanguard.Guard(model, opt, precision="fp32", sync=sync, clip=nanguard.ZScore(warmup=2, window=4))
        batches = make_batches(6)
        guard.step(loss_fn, batches[0])
        opt.add_param_group({"params": list(model.out.parameters())})
        model.inp.weight.requires_grad_(True)
        guard.step(loss_fn, batches[1])
        guard.settle()
        before = everything(model, [opt])
        guard.step(loss_fn, poisoned(batches, 2)[2])
        guard.settle()
        assert differences(before, everything(model, [opt])) == []
        assert "out.bias" in guard.incidents[0].reading.gradients
        assert len(guard.last_outcome.verdict.reading.norms) == 2
        guard.step(loss_fn, batches[3])
        guard.settle()
        assert torch.equal(model.unused.weight, before["model.unused.weight"])

    def test_groups_are_clipped_one_by_one(self) -> None:
        torch.manual_seed(0)
        model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(2))})
        opt = torch.optim.SGD([{"params": [model["a"]]}, {"params": [model["b"]]}], lr=1.0)
        guard = nanguard.Guard(model, opt, precision="fp32", max_norm=1.0)
        guard.step(lambda m, _: 300 * m["a"].sum() + 0.1 * m["b"].sum(), None)
        assert model["a"].norm().item() == pytest.approx(1.0)
        assert model["b"].tolist() == pytest.approx([-0.1, -0.1])
