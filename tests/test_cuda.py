"""What only a GPU can show: no sync in a step, the latch for real, CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import nanguard
from helpers import INF, TinyNet, build, differences, everything, loss_fn, make_batches, own_step, poisoned
from nanguard.testing import Fault, inject

pytestmark = [pytest.mark.cuda]

FUSED = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.1, fused=True),
}


@contextmanager
def syncs_are_errors() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run(guard: nanguard.Guard, batches: list[Any], style: str) -> None:
    for batch in batches:
        if style == "step":
            guard.step(loss_fn, batch)
        else:
            own_step(guard, batch)


def test_that_the_sync_detector_detects() -> None:
    x = torch.ones((), device="cuda")
    with pytest.raises(RuntimeError), syncs_are_errors():
        x.item()


@pytest.mark.parametrize("style", ["step", "own loop"])
@pytest.mark.parametrize("clip", ["group", "global", "agc", "zscore"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", FUSED)
def test_a_guarded_step_never_syncs_healthy_or_not(optimizer: str, precision: Any, clip: str, style: str) -> None:
    model, opt = build(FUSED[optimizer], device="cuda")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 50)
    guard = nanguard.Guard(
        model,
        opt,
        scheduler=schedule,
        precision=precision,
        clip=clip,
        policy=nanguard.Policy([nanguard.Skip(9)]),
        max_norm=1.0,
        diagnose="off",  # an examination of a bad step asks the device at will
    )
    assert guard.syncs_per_step == 0
    batches = poisoned(make_batches(12, device="cuda"), 4, 5, 9)
    run(guard, batches[:2], style)
    with syncs_are_errors():
        run(guard, batches[2:], style)
        guard.settle()
    assert guard.counts["skipped"] >= 2
    assert all(torch.isfinite(t).all() for t in model.state_dict().values())


@pytest.mark.parametrize("style", ["step", "own loop"])
def test_being_ready_to_examine_a_step_does_not_sync(style: str) -> None:
    model, opt = build(FUSED["AdamW"], device="cuda")
    guard = nanguard.Guard(model, opt, precision="bf16")
    batches = make_batches(12, device="cuda")
    run(guard, batches[:2], style)
    with syncs_are_errors():
        run(guard, batches[2:], style)
        guard.settle()
    assert guard.counts["applied"] == 12


def test_dropping_microbatches_does_not_sync_either() -> None:
    model, opt = build(FUSED["AdamW"], device="cuda")
    guard = nanguard.Guard(model, opt, precision="bf16", drop_bad_microbatches=True)
    batches = poisoned(make_batches(16, device="cuda"), 5, 6)
    guard.step(loss_fn, microbatches=batches[:4])
    with syncs_are_errors():
        for start in (4, 8, 12):
            guard.step(loss_fn, microbatches=batches[start : start + 4])
        guard.settle()
    assert [i.reading.dropped_microbatches for i in guard.incidents] == [(1, 2)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", FUSED)
def test_late_and_eager_are_one_run_to_the_bit(optimizer: str, precision: Any) -> None:
    ends = {}
    for sync in ("eager", "late"):
        model, opt = build(FUSED[optimizer], device="cuda")
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.05, 60)
        guard = nanguard.Guard(
            model,
            opt,
            scheduler=schedule,
            precision=precision,
            sync=sync,
            ema=ema,
            policy=nanguard.Policy([nanguard.Skip(9)]),
        )
        batches = poisoned(poisoned(make_batches(30, device="cuda"), 0, 7, 8), 15, value=INF)
        losses = [guard.step(loss_fn, batch) for batch in guard.epoch(batches)]
        rng = torch.cuda.get_rng_state()
        ends[sync] = everything(
            model, [opt], schedule, ema, rng, guard.counts["applied"], torch.stack(losses).nan_to_num()
        )
    assert differences(ends["eager"], ends["late"]) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_healthy_guarded_run_is_the_plain_run_to_the_bit(precision: Any) -> None:
    batches = make_batches(50, device="cuda")
    model, opt = build(FUSED["AdamW"], device="cuda")
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    for batch in batches:
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            loss = loss_fn(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)
    plain = everything(model, [opt], torch.cuda.get_rng_state())
    model, opt = build(FUSED["AdamW"], device="cuda")
    guard = nanguard.Guard(model, opt, precision=precision, clip="global", max_norm=0.5)
    for batch in guard.epoch(batches):
        guard.step(loss_fn, batch)
    assert guard.counts["skipped"] == 0
    assert differences(plain, everything(model, [opt], torch.cuda.get_rng_state())) == []


def test_a_step_captured_in_a_cuda_graph_skips_correctly() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2, device="cuda"), fused=True, capturable=True)
    guard = nanguard.Guard(model, opt, precision="bf16", policy=nanguard.Policy([nanguard.Skip(9)]))
    batches = make_batches(20, device="cuda")
    static = (batches[0][0].clone(), batches[0][1].clone())

    def load(batch: Any) -> None:
        static[0].copy_(batch[0])
        static[1].copy_(batch[1])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for batch in batches[:3]:
            load(batch)
            guard.step(loss_fn, static)
    torch.cuda.current_stream().wait_stream(side)
    guard.settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        guard.step(loss_fn, static)
    for batch in batches[3:6]:
        load(batch)
        guard.replay(graph)
    guard.settle()
    before = everything(model, [opt])
    load(poisoned(batches, 6)[6])
    guard.replay(graph)
    assert differences(before, everything(model, [opt])) == []
    load(batches[7])
    guard.replay(graph)
    assert differences(before, everything(model, [opt])) == [], "latched until the host has heard"
    guard.settle()
    assert guard.counts == {"applied": 6, "skipped": 1, "lost": 1, "rerun": 0, "backed_off": 0}
    load(batches[8])
    guard.replay(graph)
    guard.settle()
    after = everything(model, [opt])
    assert differences(before, after) != []
    assert all(torch.isfinite(t).all() for t in model.state_dict().values())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_batchnorm_under_torch_compile_shows_no_trace_of_a_bad_step() -> None:
    model, opt = build(FUSED["AdamW"], device="cuda")
    compiled = torch.compile(model)
    guard = nanguard.Guard(compiled, opt, precision="bf16")
    batches = make_batches(6, device="cuda")
    run(guard, batches[:3], "step")
    guard.settle()
    before = everything(model, [opt])
    run(guard, poisoned(batches, 3)[3:4], "step")
    guard.settle()
    assert differences(before, everything(model, [opt])) == []
    assert guard.incidents[0].reading.gradients[0] in dict(TinyNet().named_parameters())


def test_precision_auto_takes_bf16_here() -> None:
    model, opt = build(FUSED["AdamW"], device="cuda")
    assert nanguard.Guard(model, opt).precision == ("bf16" if torch.cuda.is_bf16_supported(False) else "fp16")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_an_optimizer_that_is_not_fused_costs_one_sync_and_is_told_so(
    precision: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, opt = build(lambda p: torch.optim.AdamW(p, lr=1e-2), device="cuda")
    guard = nanguard.Guard(model, opt, precision=precision)
    assert guard.syncs_per_step == 1
    assert "fused=True" in caplog.text
    first, second = make_batches(2, device="cuda")
    guard.step(loss_fn, first)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchronizing") as caught:
            guard.step(loss_fn, second)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in caught if "synchronizing" in str(w.message)]) == 1


def test_overflowing_norms_are_clipped_and_not_zeroed_on_the_device() -> None:
    for dtype, value in ((torch.float16, 6e4), (torch.float32, 3e19), (torch.bfloat16, 1e37)):
        layer = nn.Linear(2, 1, bias=False).to("cuda", dtype)
        opt = torch.optim.SGD(layer.parameters(), lr=1.0, fused=True)
        guard = nanguard.Guard(layer, opt, precision="fp32", max_norm=1.0)
        with guard.autocast():
            loss = layer(torch.zeros(1, 2, device="cuda", dtype=dtype)).float().sum()
        guard.backward(loss)
        layer.weight.grad = torch.full_like(layer.weight, value)
        before = layer.weight.detach().clone()
        guard.update()
        guard.settle()
        moved = (before - layer.weight).float().norm().item()
        assert guard.counts["applied"] == 1
        assert moved == pytest.approx(1.0, rel=2e-2), (dtype, moved)


# ---- recovery ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("style", ["step", "own loop"])
def test_snapshots_never_sync(where: Any, style: str) -> None:
    model, opt = build(FUSED["AdamW"], device="cuda")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 80)
    guard = nanguard.Guard(
        model, opt, scheduler=schedule, precision="bf16", snapshots=nanguard.Snapshots(every=10, keep=2, where=where)
    )
    batches = make_batches(60, device="cuda")
    run(guard, batches[:20], style)
    with syncs_are_errors():
        run(guard, batches[20:], style)
    guard.settle()
    assert guard.snapshots == (41, 51)


def wide() -> nn.Module:
    """Its state takes 193 MiB with AdamW, its activations next to nothing."""
    return nn.Sequential(nn.Linear(6, 2048), nn.ReLU(), nn.Linear(2048, 8192), nn.ReLU(), nn.Linear(8192, 3))


@pytest.mark.parametrize("style", ["step", "own loop", "install"])
def test_snapshots_by_default_take_next_to_no_device_memory(style: str) -> None:
    """Else a run dies that would have lived: one batch may need nearly all there is."""
    peaks = {}
    for guarded in (False, True):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        outer = nanguard.install() if guarded and style == "install" else nullcontext()
        with outer:
            model, opt = build(FUSED["AdamW"], device="cuda", model=wide())
            batches = make_batches(210, device="cuda")
            if guarded and style != "install":
                guard = nanguard.Guard(model, opt, precision="fp32", max_norm=None)
                run(guard, batches, style)
                guard.settle()
                assert guard.snapshots == (101, 201)
                del guard
            else:
                for batch in batches:
                    loss_fn(model, batch).backward()
                    opt.step()
                    opt.zero_grad()
        torch.cuda.synchronize()
        peaks[guarded] = torch.cuda.max_memory_allocated() - before
        del model, opt, batches
        gc.collect()
    assert peaks[True] - peaks[False] <= 10 << 20, {k: f"{v >> 20} MiB" for k, v in peaks.items()}


def test_a_step_that_runs_out_of_memory_gets_that_of_the_snapshots(caplog: pytest.LogCaptureFixture) -> None:
    """To the bit the run in which there was enough; the next snapshots are in host memory."""
    mib = 1 << 20
    caplog.set_level("INFO", logger="nanguard")

    def trained(needy: bool) -> Any:
        ballast = [0]

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            held = torch.empty(ballast[0], dtype=torch.uint8, device="cuda")
            return loss_fn(model, batch) + 0 * held[:1].sum()

        model, opt = build(FUSED["AdamW"], device="cuda", model=wide())
        ring = nanguard.Snapshots(every=10, keep=2, where="device")
        guard = nanguard.Guard(model, opt, precision="fp32", snapshots=ring)
        batches = make_batches(70, device="cuda")
        for batch in batches[:35]:
            guard.step(loss, batch)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        limit = torch.cuda.memory_reserved() + 400 * mib
        if needy:
            torch.cuda.set_per_process_memory_fraction(limit / total)
        try:
            ballast[0] = 700 * mib if needy else 4  # 400 are free, and the ring has 577
            guard.step(loss, batches[35])
            ballast[0] = 4
            assert guard.snapshots == (() if needy else (21, 31))
            for batch in batches[36:]:
                guard.step(loss, batch)
            guard.settle()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert guard.snapshots == (51, 61)
        return everything(model, [opt], torch.cuda.get_rng_state())

    clean = trained(False)
    gc.collect()
    torch.cuda.empty_cache()
    assert "577.6 MiB" in caplog.text
    assert "on cuda:0" in caplog.text
    caplog.clear()
    assert differences(clean, trained(True)) == []
    assert caplog.text.count("runs it again") == 1
    assert "in host memory" in caplog.text


@pytest.mark.parametrize("style", ["step", "own loop"])
def test_the_run_log_never_syncs(style: str, tmp_path: Any) -> None:
    model, opt = build(FUSED["AdamW"], device="cuda")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 80)
    guard = nanguard.Guard(model, opt, scheduler=schedule, precision="bf16", run_dir=tmp_path)
    batches = make_batches(60, device="cuda")
    run(guard, batches[:20], style)
    with syncs_are_errors():
        run(guard, batches[20:], style)
    guard.close()
    assert [record.step for record in nanguard.read_run(tmp_path).steps] == list(range(60))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("where", ["device", "host", "disk"])
def test_the_same_steps_follow_a_rollback(where: Any, precision: Any, tmp_path: Any) -> None:
    model, opt = build(FUSED["AdamW"], device="cuda")
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.05, 100)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    ring = nanguard.Snapshots(every=10, keep=3, where=where)
    guard = nanguard.Guard(
        model, opt, scheduler=schedule, precision=precision, ema=ema, snapshots=ring, run_dir=tmp_path, clip="zscore"
    )
    batches = make_batches(51, device="cuda")
    run(guard, batches, "step")
    guard.settle()
    first = everything(model, [opt], ema, schedule, torch.cuda.get_rng_state())
    guard.roll_back(steps=20)
    run(guard, batches[31:], "step")
    guard.settle()
    assert differences(first, everything(model, [opt], ema, schedule, torch.cuda.get_rng_state())) == []
    guard.close()


@pytest.mark.parametrize("into", ["weight", "optimizer_state"])
def test_damage_leaves_nothing_behind(into: str) -> None:
    name = "out.weight" if into == "weight" else "out.weight.exp_avg"

    def trained(*faults: Fault) -> tuple[Any, nanguard.Guard]:
        model, opt = build(FUSED["AdamW"], device="cuda")
        guard = nanguard.Guard(model, opt, precision="bf16", snapshots=nanguard.Snapshots(every=10))
        with inject(guard, *faults):
            for batch in guard.epoch(make_batches(80, device="cuda")):
                guard.step(loss_fn, batch)
        return everything(model, [opt], torch.cuda.get_rng_state()), guard

    clean, _ = trained()
    state, guard = trained(Fault(into=into, name=name, steps=(45,), times=1))
    assert guard.counts["rolled_back"] == 1
    assert differences(clean, state) == []


def test_late_raises_the_module_that_overflows_as_eager_does() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Linear(6, 16), nn.Linear(6, 16), nn.Linear(6, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((self.q(x) * 400) @ (self.k(x) * 400).mT / 400**2).softmax(-1) @ self.v(x)

    def trained(sync: Any) -> tuple[Any, nanguard.Guard]:
        net = nn.Sequential(nn.Linear(6, 6), Scores(), nn.Linear(16, 3))
        model, opt = build(FUSED["AdamW"], device="cuda", model=net)
        guard = nanguard.Guard(model, opt, precision="fp16", sync=sync)
        for batch in guard.epoch(make_batches(40, device="cuda")):
            guard.step(loss_fn, batch)
        return everything(model, [opt]), guard

    late, guard = trained("late")
    eager, _ = trained("eager")
    assert guard.kept_fp32 == ("1",)
    assert guard.counts["applied"] == 36
    assert differences(late, eager) == []


def test_a_captured_step_is_replayed_inside_an_epoch_and_goes_back() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2, device="cuda"), fused=True, capturable=True)
    guard = nanguard.Guard(model, opt, precision="bf16", snapshots=nanguard.Snapshots(every=10, where="device"))
    batches = make_batches(60, device="cuda")
    static = (batches[0][0].clone(), batches[0][1].clone())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            guard.step(loss_fn, static)
    torch.cuda.current_stream().wait_stream(side)
    guard.settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        guard.step(loss_fn, static)
    for number, batch in enumerate(guard.epoch(poisoned(batches, 30))):
        static[0].copy_(batch[0])
        static[1].copy_(batch[1])
        if number == 45:
            torch.cuda.synchronize()
            opt.state[model[0].weight]["exp_avg"].fill_(float("nan"))
        guard.replay(graph)
    assert [i.outcome.action.response for i in guard.incidents] == ["skip", "roll_back"]
    assert all(torch.isfinite(t).all() for t in model.state_dict().values())
    assert guard.can_save()


def left_out(batches: list[Any], model: nn.Module, opt: torch.optim.Optimizer) -> None:
    """A step of a program that throws every other pass away."""
    opt.zero_grad()
    for place, batch in enumerate(batches):
        loss = loss_fn(model, batch)
        if place % 2:
            loss.backward()
    opt.step()


def test_forward_passes_that_are_left_out_cost_no_sync() -> None:
    batches = make_batches(5, device="cuda")
    with nanguard.install(sync="late") as autopilot:
        model, opt = build(FUSED["AdamW"], device="cuda")
        for _ in range(4):
            left_out(batches, model, opt)
        with syncs_are_errors():
            for _ in range(4):
                left_out(batches, model, opt)
        assert autopilot.unsound() == ()
    assert not autopilot.incidents
    assert autopilot.counts["applied"] == 8


def test_bad_passes_that_are_left_out_are_explained_and_their_buffers_put_back() -> None:
    batches = poisoned(make_batches(5, device="cuda"), 0, 2, 4)
    with nanguard.install(sync="late") as autopilot:
        model, opt = build(FUSED["AdamW"], device="cuda")
        for _ in range(8):
            left_out(batches, model, opt)
        assert autopilot.unsound() == ()
    assert autopilot.counts["applied"] == 8
    assert model.norm.num_batches_tracked == 16
    first = autopilot.incidents[0]
    assert first.outcome.did == "the program did not train on this pass"
    assert first.diagnosis is not None
    assert first.diagnosis.cause == "input_nonfinite"
