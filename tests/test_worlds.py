"""Programs as people write them. A step that runs again does so in the world it had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import nanguard
from helpers import INF, NAN, TinyNet, build, differences, everything, loss_fn, make_batches, own_step, poisoned
from nanguard.testing import Fault, inject
from optimizers import ALL

SYNCS = ["eager", "late"]


def both(run: Any) -> None:
    """``run(sync)`` returns what to compare; late must be eager, to the bit."""
    assert differences(run("eager"), run("late")) == []


# ---- a step that runs again ----------------------------------------------------------------------------------------


def test_settling_under_no_grad_runs_steps_again_all_the_same() -> None:
    def run(sync: Any) -> dict[str, Any]:
        model, opt = build(ALL["fused AdamW"])
        guard = nanguard.Guard(model, opt, precision="fp32", sync=sync)
        for batch in poisoned(make_batches(6), 4):
            guard.step(loss_fn, batch)
        with torch.no_grad():
            guard.state_dict()
        return everything(model, [opt])

    both(run)


def test_a_step_runs_again_in_the_mode_its_modules_had() -> None:
    def run(sync: Any) -> dict[str, Any]:
        model, opt = build(ALL["fused AdamW"])
        guard = nanguard.Guard(model, opt, precision="fp32", sync=sync)
        for step, batch in enumerate(poisoned(make_batches(12), 3, 7)):
            model.norm.train(step % 2 == 0)
            guard.step(loss_fn, batch)
        model.eval()
        guard.settle()
        assert not any(module.training for module in model.modules())
        return everything(model, [opt], torch.get_rng_state())

    both(run)


def test_a_loss_function_may_take_its_batch_apart() -> None:
    def popping(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        target = batch.pop("y")
        return F.cross_entropy(model(batch["x"]), target)

    def run(sync: Any) -> dict[str, Any]:
        model, opt = build(ALL["fused AdamW"])
        guard = nanguard.Guard(model, opt, precision="fp32", sync=sync)
        for x, y in poisoned(make_batches(8), 3):
            guard.step(popping, {"x": x, "y": y})
        guard.settle()
        return everything(model, [opt])

    both(run)


@pytest.mark.parametrize("scheduled", [True, False])
def test_options_the_user_sets_stay_set(scheduled: bool) -> None:
    def run(sync: Any) -> dict[str, Any]:
        model, opt = build(ALL["fused AdamW"])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20) if scheduled else None
        guard = nanguard.Guard(model, opt, scheduler=schedule, precision="fp32", sync=sync)
        for step, batch in enumerate(guard.epoch(poisoned(make_batches(10), 5))):
            if step == 6:
                opt.param_groups[0]["weight_decay"] = 0.5
            guard.step(loss_fn, batch)
        assert opt.param_groups[0]["weight_decay"] == 0.5
        return everything(model, [opt]) if not scheduled else {"group": dict(opt.param_groups[0], params=None)}

    both(run)


def test_groups_added_to_one_optimizer_do_not_mix_up_the_options_of_another() -> None:
    def run(sync: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": TinyNet(), "b": TinyNet()})
        first = torch.optim.SGD([*model["a"].inp.parameters()], lr=0.1, fused=True)
        second = torch.optim.AdamW(model["b"].parameters(), lr=1e-3, fused=True)
        guard = nanguard.Guard(model, [first, second], precision="fp32", sync=sync)
        for step, batch in enumerate(guard.epoch(poisoned(make_batches(8), 3))):
            if step == 4:
                first.add_param_group({"params": list(model["a"].out.parameters()), "lr": 0.5})
            guard.step(lambda m, b: loss_fn(m["a"], b) + loss_fn(m["b"], b), batch)
        assert [group["lr"] for group in first.param_groups] == [0.1, 0.5]
        return everything(model, [first, second])

    both(run)


def test_a_scheduler_with_nested_state_of_its_own_is_put_back() -> None:
    class Remembering(torch.optim.lr_scheduler.LRScheduler):
        def __init__(self, optimizer: Any) -> None:
            self.past: dict[str, list[int]] = {"steps": []}
            super().__init__(optimizer)

        def get_lr(self) -> list[float]:
            self.past["steps"].append(self.last_epoch)
            return [base / (1 + len(self.past["steps"])) for base in self.base_lrs]

    def run(sync: Any) -> dict[str, Any]:
        model, opt = build(ALL["fused AdamW"])
        schedule = Remembering(opt)
        guard = nanguard.Guard(model, opt, scheduler=schedule, precision="fp32", sync=sync)
        for batch in guard.epoch(poisoned(make_batches(8), 2, 5)):
            guard.step(loss_fn, batch)
        return everything(model, [opt], schedule)

    both(run)


def test_every_step_is_counted_once_even_if_running_it_again_fails() -> None:
    model, opt = build(ALL["fused AdamW"])
    guard = nanguard.Guard(model, opt, precision="fp32", sync="late")
    calls = []

    def failing(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return loss_fn(model, batch)

    batches = poisoned(make_batches(6), 0)
    guard.step(failing, batches[0])
    guard.step(failing, batches[1])
    rng = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        guard.step(failing, batches[2])
    assert torch.equal(rng, torch.get_rng_state())
    guard.settle()
    assert (guard.counts["skipped"], guard.counts["lost"], guard.counts["rerun"]) == (1, 1, 0)
    for batch in batches[2:]:
        guard.step(failing, batch)
    guard.settle()
    assert guard.counts["applied"] == 4


# ---- data ----------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(make_batches(5))


@pytest.mark.parametrize("sync", SYNCS)
def test_a_stream_without_a_length_is_a_loader_too(sync: Any) -> None:
    model, opt = build(ALL["fused AdamW"])
    guard = nanguard.Guard(model, opt, precision="fp32", accumulate=2, sync=sync)
    for batch in guard.epoch(DataLoader(Stream(), batch_size=None)):
        guard.step(loss_fn, batch)
    assert guard.counts["applied"] == 3
    assert list(guard.epoch([])) == []


@pytest.mark.parametrize("sync", SYNCS)
def test_an_epoch_left_early_is_over(sync: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, opt = build(ALL["fused AdamW"])
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    guard = nanguard.Guard(
        model, opt, scheduler=schedule, schedule_per="epoch", accumulate=2, precision="fp32", sync=sync
    )
    for _ in range(3):
        for place, batch in enumerate(guard.epoch(make_batches(9))):
            guard.step(loss_fn, batch)
            if place == 4:
                break
        assert all(p.grad is None for p in model.parameters())
        guard.state_dict()
    assert opt.param_groups[0]["lr"] == pytest.approx(1e-3 / 4), "the third ends when the next begins, or never"
    assert caplog.text.count("was left in the middle") == 3
    assert guard.counts["applied"] == 6


# ---- losses and gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("drop", [False, True])
def test_a_loss_of_shape_one_is_a_loss(sync: Any, drop: bool) -> None:
    model, opt = build(ALL["fused AdamW"])
    guard = nanguard.Guard(model, opt, precision="fp32", sync=sync, drop_bad_microbatches=drop)
    loss = guard.step(lambda m, b: loss_fn(m, b).reshape(1), microbatches=make_batches(3))
    assert loss.shape == ()
    guard.settle()
    assert guard.counts["applied"] == 1
    assert guard.last_outcome.verdict.reading.loss == pytest.approx(loss.item(), rel=1e-6)


def test_two_guards_may_take_turns_as_in_a_gan() -> None:
    def nets() -> tuple[Any, ...]:
        torch.manual_seed(0)
        net = nn.ModuleDict({"g": nn.Linear(4, 2), "d": nn.Linear(2, 1)})
        return net, *(torch.optim.Adam(net[k].parameters(), lr=1e-2) for k in "gd")

    def d_loss(net: Any, noise: Tensor) -> Tensor:
        return net["d"](net["g"](noise).detach()).square().mean() - net["d"](torch.ones(3, 2)).mean()

    def g_loss(net: Any, noise: Tensor) -> Tensor:
        return -net["d"](net["g"](noise)).mean()

    noises = [torch.randn(3, 4) for _ in range(6)]
    plain, g_opt, d_opt = nets()
    for noise in noises:
        d_opt.zero_grad()
        d_loss(plain, noise).backward()
        d_opt.step()
        g_opt.zero_grad()
        g_loss(plain, noise).backward()
        g_opt.step()
    net, g_opt, d_opt = nets()
    critic = nanguard.Guard(net, d_opt, precision="fp32", max_norm=None)
    generator = nanguard.Guard(net, g_opt, precision="fp32", max_norm=None)
    for noise in noises:
        critic.step(d_loss, noise)
        generator.step(g_loss, noise)
    assert differences(everything(plain, []), everything(net, [])) == []


@pytest.mark.parametrize("sync", SYNCS)
def test_zero_gradients_teach_zscore_nothing(sync: Any) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Linear(6, 3)})
    opt = torch.optim.AdamW([{"params": model[k].parameters()} for k in "ab"], lr=1e-2, fused=True)
    guard = nanguard.Guard(model, opt, precision="fp32", clip=nanguard.ZScore(warmup=4, window=8), sync=sync)
    for step, batch in enumerate(guard.epoch(make_batches(30))):
        weight = 0.0 if step < 20 else 1.0
        guard.step(lambda m, b, w=weight: F.cross_entropy(m["a"](b[0]) + w * m["b"](b[0]), b[1]), batch)
        if step == 19:
            guard.settle()
            before = everything(model, [])
    assert guard.counts["applied"] == 30
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert "model.b.weight" in differences(before, everything(model, []))


def test_float64_gradients_near_their_end_are_clipped_not_zeroed() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2)])
    guard = nanguard.Guard(model, torch.optim.SGD(model.parameters(), lr=1.0), precision="fp32", max_norm=1.0)
    guard.step(lambda m, _: 1e200 * (m[0].sum() + m[1].sum()), None)
    assert torch.stack([p.detach() for p in model]).norm().item() == pytest.approx(1.0)


@pytest.mark.parametrize("clip", ["group", "global", "agc"])
def test_complex_parameters_are_guarded(clip: str) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.complex64))])
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    guard = nanguard.Guard(model, opt, precision="fp32", clip=clip, max_norm=0.1)
    guard.step(lambda m, _: (m[0].conj() * m[0].conj()).sum().abs(), None)
    before = everything(model, [opt])
    guard.step(lambda m, _: (m[0].conj() * NAN).sum().abs(), None)
    assert differences(before, everything(model, [opt])) == []
    assert guard.counts == {"applied": 1, "skipped": 1, "lost": 0, "rerun": 0, "backed_off": 0}


def test_a_dropped_gradient_is_that_parameter_and_not_its_namesake() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)
            self.module = nn.ModuleDict({"fc": nn.Linear(6, 3)})

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) + self.module["fc"](x)

    model, opt = build(ALL["SGD momentum"], model=Net())
    guard = nanguard.Guard(
        model, opt, precision="fp32", policy=nanguard.Policy([nanguard.DropBadGradients(), nanguard.Skip()])
    )
    before = everything(model, [])
    handle = model.module["fc"].weight.register_hook(lambda g: g * NAN)
    guard.step(loss_fn, make_batches(1)[0])
    handle.remove()
    changed = differences(before, everything(model, []))
    assert changed == ["model.fc.bias", "model.fc.weight", "model.module.fc.bias"]
    assert guard.incidents[0].reading.dropped_gradients == ("module.fc.weight",)


# ---- loss scale ----------------------------------------------------------------------------------------------------


def test_a_floor_that_is_no_fp32_number_freezes_nothing() -> None:
    model, opt = build(ALL["fused AdamW"])
    scale = nanguard.LossScale(initial=1.0, floor=0.1)
    policy = nanguard.Policy([nanguard.Skip(99)])
    guard = nanguard.Guard(model, opt, precision="fp16", sync="late", loss_scale=scale, policy=policy)
    overflow = Fault(into="gradient", name="out.bias", value="inf", steps=tuple(range(3, 12)))
    with inject(guard, overflow):
        for batch in guard.epoch(make_batches(30)):
            own_step(guard, batch)
    assert guard.counts["skipped"] > 0, "an overflow at the floor is an incident"
    assert guard._engine.late.latch.item() == 0
    assert int(opt.state[model.out.bias]["step"]) == guard.counts["applied"]


def test_plain_sgd_loses_no_step_behind_a_back_off() -> None:
    model, opt = build(ALL["fused SGD"])
    guard = nanguard.Guard(model, opt, precision="fp16", sync="late")
    with inject(guard, Fault(into="gradient", name="out.bias", value="inf", steps=(3,))):
        for batch in guard.epoch(make_batches(8)):
            own_step(guard, batch)
    assert guard.counts == {"applied": 7, "skipped": 0, "lost": 0, "rerun": 0, "backed_off": 1}


# ---- interrupts, checkpoints, misuse -------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", SYNCS)
def test_an_interrupt_before_the_optimizer_has_stepped_leaves_no_trace(sync: Any) -> None:
    model, opt = build(ALL["fused AdamW"])
    guard = nanguard.Guard(model, opt, precision="fp32", sync=sync)
    guard.step(loss_fn, make_batches(1)[0])
    guard.settle()
    before = everything(model, [opt])

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = opt.register_step_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        guard.step(loss_fn, make_batches(2)[1])
    handle.remove()
    assert differences(before, everything(model, [opt])) == []
    assert all(p.grad is None for p in model.parameters())


def test_a_fused_optimizer_that_was_loaded_as_not_fused_says_so() -> None:
    model, opt = build(ALL["AdamW loop"])
    saved = opt.state_dict()
    model, opt = build(ALL["fused AdamW"])
    guard = nanguard.Guard(model, opt, precision="fp32", sync="late")
    opt.load_state_dict(saved)
    with pytest.raises(nanguard.ProtocolError, match="has a group that is not fused"):
        guard.step(loss_fn, make_batches(1)[0])


def test_nothing_is_left_on_the_optimizer() -> None:
    model, opt = build(ALL["fused AdamW"])
    before = set(vars(opt))
    guard = nanguard.Guard(model, opt, precision="fp32", sync="late")
    guard.step(loss_fn, make_batches(1)[0])
    guard.settle()
    assert set(vars(opt)) == before


def test_a_step_inside_a_loss_function_is_refused() -> None:
    model, opt = build(ALL["fused AdamW"])
    guard = nanguard.Guard(model, opt, precision="fp32")
    batch = make_batches(1)[0]
    with pytest.raises(nanguard.ProtocolError, match="by the loss function of another"):
        guard.step(lambda m, b: guard.step(loss_fn, b), batch)


@pytest.mark.parametrize("sync", SYNCS)
def test_a_buffer_made_in_a_bad_forward_is_gone_again(sync: Any) -> None:
    class Observer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", None)
            self.register_buffer("peak", torch.empty(0))
            self.out = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            now = x.detach().abs().amax(0)
            self.seen = now if self.seen is None else torch.maximum(self.seen, now)
            self.peak = now if self.peak.numel() == 0 else torch.maximum(self.peak, now)
            return self.out(x)

    model, opt = build(ALL["fused AdamW"], model=Observer())
    guard = nanguard.Guard(model, opt, precision="fp32", sync=sync)
    batches = poisoned(make_batches(6), 0, 3, value=INF)
    for batch in batches:
        guard.step(loss_fn, batch)
    guard.settle()
    clean = torch.stack([x.abs().amax(0) for i, (x, _) in enumerate(batches) if i not in (0, 3)]).amax(0)
    assert torch.equal(model.seen, clean)
    assert torch.equal(model.peak, clean)
    assert guard.counts["skipped"] == 2


# ---- found by trying to break it -----------------------------------------------------------------------------------


@pytest.mark.parametrize("in_ema", [False, True])
def test_an_interrupt_in_a_bad_step_freezes_nothing(in_ema: bool) -> None:
    def run(sync: Any) -> dict[str, Any]:
        class Ema(torch.optim.swa_utils.AveragedModel):
            armed = False

            def update_parameters(self, model: nn.Module) -> None:
                super().update_parameters(model)
                if self.armed:
                    raise KeyboardInterrupt

        model, opt = build(ALL["fused AdamW"])
        ema = Ema(model)
        guard = nanguard.Guard(model, opt, precision="fp32", sync=sync, ema=ema)
        batches = make_batches(8)
        guard.step(loss_fn, batches[0])
        guard.settle()

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        bad = poisoned(batches, 1)[1]
        if in_ema and sync == "late":
            ema.armed = True
            with pytest.raises(KeyboardInterrupt):
                guard.step(loss_fn, bad)
            ema.armed = False
        elif sync == "late":
            handle = opt.register_step_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                guard.step(loss_fn, bad)
            handle.remove()
        else:
            guard.step(loss_fn, bad)
        for batch in batches[2:]:
            guard.step(loss_fn, batch)
        guard.settle()
        assert guard._engine.late is None or guard._engine.late.latch.item() == 0
        assert guard.counts["applied"] == 7
        return everything(model, [opt], ema)

    both(run)


@pytest.mark.parametrize("sync", SYNCS)
def test_a_batch_that_a_module_remembers_is_never_written_to(sync: Any) -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(8, 6))
            self.out = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.last = x
            return self.out(x)

    model, opt = build(ALL["fused AdamW"], model=Remembering())
    guard = nanguard.Guard(model, opt, precision="fp32", sync=sync)
    batches = poisoned(make_batches(8), 3)
    copies = [x.clone() for x, _ in batches]
    for batch in batches:
        guard.step(loss_fn, batch)
    guard.settle()
    assert all(torch.equal(x.nan_to_num(9), c.nan_to_num(9)) for (x, _), c in zip(batches, copies, strict=True))
    assert guard.counts["applied"] == 7
    assert torch.equal(model.last, copies[-1])


@pytest.mark.parametrize("sync", SYNCS)
def test_a_buffer_that_grows_does_not_blind_the_guard_for_others(sync: Any) -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("grows", torch.zeros(1))
            self.register_buffer("other", torch.zeros(2))
            self.out = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.grows = torch.zeros(self.grows.numel() + 1)
            if len(x) == 7:
                self.other.fill_(NAN)
            return self.out(x)

    model, opt = build(ALL["fused AdamW"], model=Growing())
    guard = nanguard.Guard(model, opt, precision="fp32", sync=sync)
    for batch in (*make_batches(2), *make_batches(1, size=7), *make_batches(1)):
        guard.step(loss_fn, batch)
    guard.settle()
    assert guard.counts["skipped"] == 1
    assert torch.equal(model.other, torch.zeros(2))


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("start", [None, torch.zeros(0), torch.zeros(1).expand(6), torch.zeros(2), torch.zeros(6)])
def test_a_dropped_microbatch_leaves_no_trace_in_any_kind_of_buffer(start: Tensor | None, sync: Any) -> None:
    class Observer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("peak", start)
            self.out = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            now = x.detach().abs().amax(0)
            fits = self.peak is not None and self.peak.numel() == 6
            self.peak = torch.maximum(self.peak, now) if fits else now
            return self.out(x)

    model, opt = build(ALL["fused AdamW"], model=Observer())
    guard = nanguard.Guard(model, opt, precision="fp32", sync=sync, drop_bad_microbatches=True)
    batches = make_batches(3)
    guard.step(loss_fn, microbatches=poisoned(batches, 0))
    guard.settle()
    assert guard.counts["applied"] == 1
    assert torch.equal(model.peak, torch.stack([x.abs().amax(0) for x, _ in batches[1:]]).amax(0))


@pytest.mark.parametrize(
    "context", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)], ids=["inference mode", "autocast"]
)
def test_settling_inside_another_mode_runs_steps_again_in_their_own(context: Any) -> None:
    def run(sync: Any) -> dict[str, Any]:
        model, opt = build(ALL["fused AdamW"])
        guard = nanguard.Guard(model, opt, precision="fp32", sync=sync)
        for batch in poisoned(make_batches(6), 4):
            guard.step(loss_fn, batch)
        with context():
            guard.settle()
        return everything(model, [opt])

    both(run)


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("streams", [True, False])
def test_a_loader_that_fails_leaves_no_step_open(streams: bool, sync: Any) -> None:
    class Failing(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            yield from make_batches(10)
            raise KeyboardInterrupt

    model, opt = build(ALL["fused AdamW"])
    guard = nanguard.Guard(model, opt, precision="fp32", accumulate=4, sync=sync)
    loader = Failing(range(20))
    with pytest.raises(KeyboardInterrupt):
        for batch in guard.epoch(iter(loader) if streams else loader):
            guard.step(loss_fn, batch)
    guard.state_dict()
    assert guard.counts["applied"] == 2
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("sync", SYNCS)
def test_a_buffer_made_in_inference_mode_may_be_read(sync: Any) -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("position", None)
            self.out = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            if self.position is None:
                self.position = torch.arange(6.0)
            return self.out(x + self.position)

    model, opt = build(ALL["fused AdamW"], model=Cached())
    guard = nanguard.Guard(model, opt, precision="fp32", sync=sync)
    with torch.inference_mode():
        model(torch.zeros(1, 6))
    for batch in guard.epoch(poisoned(make_batches(5), 2)):
        guard.step(loss_fn, batch)
    assert (guard.counts["applied"], guard.counts["skipped"]) == (4, 1)


def test_modules_put_in_between_epochs_run_again_in_their_mode() -> None:
    def run(sync: Any) -> dict[str, Any]:
        model, opt = build(ALL["fused AdamW"])
        guard = nanguard.Guard(model, opt, precision="fp32", sync=sync)
        model.drop = nn.Dropout(0.5)
        for step, batch in enumerate(guard.epoch(poisoned(make_batches(9), 3, 6))):
            model.drop.train(step % 2 == 0)
            guard.step(loss_fn, batch)
        return everything(model, [opt])

    both(run)


@pytest.mark.parametrize("first", [torch.zeros(()), (1, 2)])
def test_what_is_no_loss_function_is_refused(first: Any) -> None:
    model, opt = build(ALL["fused AdamW"])
    with pytest.raises(ValueError, match="needs a function of"):
        nanguard.Guard(model, opt, precision="fp32").step(first, make_batches(1)[0])
