"""Traps that other tools fell into, each one executed; what torch itself does is asserted where that is the point."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import nanguard
from helpers import INF, NAN, TinyNet, build, differences, everything, loss_fn, make_batches, poisoned
from nanguard.testing import Fault, inject
from optimizers import ALL


def update_with(grads: list[Tensor], *, max_norm: float = 1.0, clip: Any = "global", lr: float = 1.0) -> Any:
    """One guarded SGD update with exactly these gradients; how far each parameter moved, and the guard."""
    model = nn.ParameterList([nn.Parameter(torch.zeros_like(g)) for g in grads])
    guard = nanguard.Guard(
        model, torch.optim.SGD(model.parameters(), lr=lr), precision="fp32", max_norm=max_norm, clip=clip
    )
    with guard.autocast():
        loss = torch.stack([p.float().sum() for p in model]).sum()
    guard.backward(loss)
    for p, g in zip(model, grads, strict=True):
        p.grad = g.clone()
    guard.update()
    return [-p.detach() for p in model], guard


class TestTrap1ClipGradNorm:
    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    def test_one_bad_element_skips_the_step_and_spoils_no_other_gradient(self, bad: float) -> None:
        moved, guard = update_with([torch.tensor([1.0, bad]), torch.tensor([1.0])])
        assert guard.counts["skipped"] == 1
        assert all(torch.equal(m, torch.zeros_like(m)) for m in moved)

    @pytest.mark.parametrize("max_norm", [-1.0, 0.0, NAN, INF, True, "5"])
    def test_a_max_norm_that_makes_no_sense_is_refused(self, max_norm: Any) -> None:
        model, opt = build(ALL["AdamW loop"])
        with pytest.raises(ValueError, match="max_norm must be a finite number above zero"):
            nanguard.Guard(model, opt, max_norm=max_norm)

    @pytest.mark.parametrize("clip", ["group", "global"])
    @pytest.mark.parametrize(
        ("dtype", "value"),
        [(torch.float16, 6e4), (torch.float32, 3e19), (torch.bfloat16, 3e38), (torch.float64, 1e200)],
    )
    def test_finite_gradients_whose_norm_overflows_are_clipped_not_zeroed(
        self, dtype: torch.dtype, value: float, clip: str
    ) -> None:
        moved, guard = update_with([torch.full((2,), value, dtype=dtype)], clip=clip)
        assert guard.counts["applied"] == 1
        assert moved[0].double().norm().item() == pytest.approx(1.0, rel=1e-2)
        reading = guard.last_outcome.verdict.reading
        assert reading.norms[0] == pytest.approx(value * 2**0.5, rel=1e-2)

    def test_a_tiny_norm_does_not_underflow_to_zero(self) -> None:
        _, guard = update_with([torch.full((4,), 1e-24)])
        assert guard.last_outcome.verdict.reading.norms[0] == pytest.approx(2e-24, rel=1e-6)

    def test_a_bf16_norm_is_exact(self) -> None:
        grads = [torch.ones(300, dtype=torch.bfloat16)]
        assert torch.nn.utils.get_total_norm(grads).item() == 17.375
        _, guard = update_with(grads)
        assert guard.last_outcome.verdict.reading.norms[0] == pytest.approx(300**0.5, rel=1e-12)


class TestTrap2LossScale:
    def test_a_run_of_overflows_stops_at_the_floor_and_the_next_clean_batch_is_sound(self) -> None:
        model, opt = build(ALL["SGD momentum"])
        policy = nanguard.Policy([nanguard.Skip(1000)], max_consecutive_skips=None)
        scale = nanguard.LossScale(initial=1024.0, floor=1.0)
        guard = nanguard.Guard(model, opt, precision="fp16", policy=policy, loss_scale=scale)
        clean, bad = make_batches(2), poisoned(make_batches(1), 0)
        guard.step(loss_fn, clean[0])
        before = everything(model, [opt])
        for _ in range(160):
            guard.step(loss_fn, bad[0])
        assert differences(before, everything(model, [opt])) == []
        assert guard.state_dict()["scaler"]["scale"] == 1.0
        guard.step(loss_fn, clean[1])
        assert guard.counts["applied"] == 2
        assert all(torch.isfinite(t).all() for t in model.state_dict().values())

    def test_torchs_own_scaler_writes_nan_weights_there(self) -> None:
        model, opt = build(ALL["SGD momentum"])
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for batch in [poisoned(make_batches(1), 0)[0]] * 160 + make_batches(2):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_fn(model, batch)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        assert not all(torch.isfinite(p).all() for p in model.parameters())

    def test_a_loss_kept_in_fp16_does_not_overflow_by_scaling(self) -> None:
        layer = nn.Linear(2, 1)
        opt = torch.optim.SGD(layer.parameters(), lr=1e-3)
        guard = nanguard.Guard(layer, opt, precision="fp16")

        def half_loss(model: nn.Module, batch: Tensor) -> Tensor:
            return model(batch).half().sum() * 1e-3 + 1000

        for _ in range(3):  # 65536 itself is no fp16 number, so the first gradient overflows; 1000 * 32768 is not made
            guard.step(half_loss, torch.ones(1, 2))
        assert guard.counts["applied"] == 2
        assert guard.state_dict()["scaler"]["scale"] == 32768


def test_trap_3_a_nan_gradient_outside_the_optimizer_counts_for_nothing() -> None:
    torch.manual_seed(0)
    model = TinyNet()
    opt = torch.optim.AdamW(model.out.parameters(), lr=1e-2)
    for clip in ("group", "global"):
        guard = nanguard.Guard(model, opt, precision="fp32", clip=clip)
        before = everything(model, [opt])
        with inject(guard, Fault(into="gradient", name="inp.weight", steps=(0,))) as injector:
            guard.step(loss_fn, make_batches(1)[0])
        assert injector.fired
        assert guard.counts["applied"] == 1
        assert "model.out.weight" in differences(before, everything(model, [opt]))
        assert torch.isfinite(model.out.weight).all()
        model.zero_grad()


def test_trap_5_with_two_optimizers_all_step_or_none() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": TinyNet(), "d": TinyNet()})
    g_opt = torch.optim.AdamW(model["g"].parameters(), fused=True)
    d_opt = torch.optim.SGD(model["d"].parameters(), lr=0.1, momentum=0.9)

    def both(model: Any, batch: Any) -> Tensor:
        return loss_fn(model["g"], batch) + loss_fn(model["d"], batch)

    guard = nanguard.Guard(model, [g_opt, d_opt], precision="fp32")
    batches = make_batches(3)
    guard.step(both, batches[0])
    before = everything(model, [g_opt, d_opt])
    with inject(guard, Fault(into="gradient", name="d.out.bias", steps=(1,))):
        guard.step(both, batches[1])
    assert differences(before, everything(model, [g_opt, d_opt])) == []
    guard.step(both, batches[2])
    changed = differences(before, everything(model, [g_opt, d_opt]))
    assert {"model.g.out.bias", "model.d.out.bias"} <= set(changed)


@pytest.mark.parametrize("sync", ["eager", "late"])
def test_trap_6_a_bad_microbatch_is_left_out_and_the_rest_kept(sync: Any) -> None:
    batches = make_batches(4)
    ends = {}
    for which in ("dropped", "never there"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        guard = nanguard.Guard(model, opt, precision="fp32", drop_bad_microbatches=True, sync=sync)
        if which == "dropped":
            loss = guard.step(loss_fn, microbatches=[*poisoned(batches, 2)[:3], batches[3]])
            guard.settle()
            assert guard.incidents[0].reading.dropped_microbatches == (2,)
        else:
            loss = guard.step(loss_fn, microbatches=[batches[0], batches[1], batches[3]])
            guard.settle()
        assert torch.isfinite(loss)
        ends[which] = everything(model, [opt])
    for name, value in ends["dropped"].items():  # the mean over three, once as a sum of quarters times 4/3
        if isinstance(value, Tensor):
            torch.testing.assert_close(value, ends["never there"][name], rtol=1e-4, atol=1e-7)
    for name in ("model.1.running_mean", "model.1.running_var", "model.1.num_batches_tracked"):
        assert torch.equal(ends["dropped"][name], ends["never there"][name]), name


def test_trap_6_where_every_microbatch_is_bad_the_step_is_skipped() -> None:
    model, opt = build(ALL["fused AdamW"])
    guard = nanguard.Guard(model, opt, precision="fp32", drop_bad_microbatches=True)
    before = everything(model, [opt])
    guard.step(loss_fn, microbatches=poisoned(make_batches(3), 0, 1, 2))
    assert differences(before, everything(model, [opt])) == []
    assert guard.counts["skipped"] == 1


def test_trap_7_a_dropped_gradient_is_none_so_momentum_and_decay_do_not_move_it() -> None:
    model, opt = build(lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.5))
    guard = nanguard.Guard(
        model,
        opt,
        precision="fp32",
        policy=nanguard.Policy([nanguard.DropBadGradients(), nanguard.Skip()]),
        max_norm=1e-3,
    )
    batches = make_batches(3)
    guard.step(loss_fn, batches[0])
    before = everything(model, [opt])
    with inject(guard, Fault(into="gradient", name="inp.weight", steps=(1,), value="inf")):
        guard.step(loss_fn, batches[1])
    changed = differences(before, everything(model, [opt]))
    assert "model.inp.weight" not in changed
    assert not any(name.startswith("optimizer0.0.") for name in changed), "its moments and its step counter"
    assert {"model.inp.bias", "model.out.weight"} <= set(changed)
    assert guard.incidents[0].reading.dropped_gradients == ("inp.weight",)
    assert guard.counts["applied"] == 2
    assert all(torch.isfinite(t).all() for t in model.state_dict().values())


@pytest.mark.parametrize("sync", ["eager", "late"])
def test_trap_8_batchnorm_shows_no_trace_of_a_bad_forward_not_even_in_eval(sync: Any) -> None:
    model, opt = build(ALL["fused AdamW"])
    guard = nanguard.Guard(model, opt, precision="fp32", sync=sync)
    batches = make_batches(3)
    guard.step(loss_fn, batches[0])
    guard.settle()
    buffers = {k: v.clone() for k, v in model.named_buffers()}
    guard.step(loss_fn, poisoned(batches, 1, value=INF)[1])
    guard.settle()
    assert all(torch.equal(v, buffers[k]) for k, v in model.named_buffers())
    model.eval()
    assert torch.isfinite(model(batches[2][0])).all()


class HandWrittenNorm(nn.Module):
    """Keeps statistics that go bad while loss and gradients stay finite: the variance of a batch of one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("var", torch.ones(6))
        self.register_buffer("lowest", torch.full((1,), -INF))
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.var = 0.9 * self.var + 0.1 * x.var(0)
        return self.out(x)


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize("sync", ["eager", "late"])
def test_trap_8_a_buffer_that_goes_bad_alone_is_seen_and_put_back(sync: Any) -> None:
    model, opt = build(ALL["fused AdamW"], model=HandWrittenNorm())
    guard = nanguard.Guard(model, opt, precision="fp32", sync=sync)
    guard.step(loss_fn, make_batches(1)[0])
    guard.settle()
    before = everything(model, [opt])
    guard.step(loss_fn, make_batches(1, size=1)[0])
    guard.settle()
    assert differences(before, everything(model, [opt])) == []
    assert guard.incidents[0].reading.found == ("buffers",)
    assert guard.incidents[0].reading.buffers == ("var",), "one that was infinite from the start is meant to be"


@pytest.mark.parametrize("sync", ["eager", "late"])
def test_trap_9_an_average_never_hears_of_a_bad_step(sync: Any) -> None:
    model, opt = build(ALL["fused AdamW"])
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    guard = nanguard.Guard(model, opt, precision="fp32", ema=ema, sync=sync)
    batches = make_batches(4)
    guard.step(loss_fn, batches[0])
    guard.step(loss_fn, batches[1])
    guard.settle()
    before = everything(model, [opt], ema)
    guard.step(loss_fn, poisoned(batches, 2)[2])
    guard.settle()
    assert differences(before, everything(model, [opt], ema)) == []
    guard.step(loss_fn, batches[3])
    guard.settle()
    assert int(ema.n_averaged) == 3
    assert "more0" in differences(before, everything(model, [opt], ema))


def test_trap_10_nan_is_caught_where_comparisons_with_it_are_false() -> None:
    for value in ("nan", "inf", "-inf"):
        model, opt = build(ALL["fused AdamW"])
        guard = nanguard.Guard(model, opt, precision="fp32")
        with inject(guard, Fault(into="loss", value=value, steps=(0,))) as injector:
            guard.step(lambda m, b, i=injector: i.loss(loss_fn(m, b)), make_batches(1)[0])
        assert guard.counts["skipped"] == 1, value


def test_trap_13_scale_updates_go_on_after_a_skip() -> None:
    model, opt = build(ALL["AdamW loop"])
    guard = nanguard.Guard(model, opt, precision="fp16", loss_scale=nanguard.LossScale(initial=64.0, interval=2))
    scales = []
    for batch in poisoned(make_batches(6), 1):
        guard.step(loss_fn, batch)
        scales.append(guard.state_dict()["scaler"]["scale"])
    assert scales == [64.0, 32.0, 32.0, 64.0, 64.0, 128.0]


def test_trap_14_parameters_have_their_names() -> None:
    model, opt = build(ALL["AdamW loop"])
    guard = nanguard.Guard(model, opt, precision="fp32")
    with inject(guard, Fault(into="gradient", name="norm.bias", steps=(0,))):
        guard.step(loss_fn, make_batches(1)[0])
    assert guard.incidents[0].reading.gradients == ("norm.bias",)


def test_trap_15_after_patience_a_corrupt_update_is_never_accepted() -> None:
    model, opt = build(ALL["AdamW loop"])
    guard = nanguard.Guard(model, opt, precision="fp32", policy=nanguard.Policy([nanguard.Skip(1)]))
    before = everything(model, [opt])
    bad = poisoned(make_batches(1), 0)[0]
    guard.step(loss_fn, bad)
    for _ in range(3):
        with pytest.raises(nanguard.NonFiniteError):
            guard.step(loss_fn, bad)
    assert differences(before, everything(model, [opt])) == []
    assert F.softmax(model(make_batches(1)[0][0]), -1).isfinite().all()
