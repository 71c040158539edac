"""The tape: what a program computes outside modules can be computed again, so that a fault is found the first time."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.overrides import TorchFunctionMode

import nanguard
from helpers import TinyNet, differences, everything, line, make_batches
from nanguard.diagnosis.taped import TapedRun, inputs
from nanguard.hosted.coordinator import StepCoordinator
from nanguard.records.diagnosis import Diagnosis
from nanguard.step import module_rows, tape_recorder
from nanguard.step.module_rows import SWEEP_AFTER_CALLS
from nanguard.step.tape import CallTape, Made, Outside, Row, TapedLoss, tokens
from nanguard.step.tape_recorder import TapeRecorder

Loss = Callable[[Tensor], Tensor]
BAD, STEPS = 3, 7
HERE = __file__
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    gc.collect()  # guards of other tests
    apply = vars(torch.autograd.Function)["apply"]
    yield
    assert TapeRecorder.active.mode is None
    if vars(torch.autograd.Function)["apply"] is not apply:
        gc.collect()  # a guard that was not closed leaves nothing once it is gone
    assert vars(torch.autograd.Function)["apply"] is apply
    assert torch._C._len_torch_function_stack() == 0


def network(device: str = "cpu", width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, width)).to(device)


def fine(out: Tensor) -> Tensor:
    return out.pow(2).mean()


def own_loop(loss_of: Loss, *, device: str = "cpu", **options: Any) -> Diagnosis:
    """A loop of one's own, with one bad step."""
    model = network(device)
    guard = nanguard.Guard(model, AdamW(model.parameters(), fused=True), **{"precision": "fp32", **options})
    for step in range(STEPS):
        x = torch.randn(4, 6, device=device)
        with guard.autocast():
            loss = (loss_of if step == BAD else fine)(model(x))
        guard.backward(loss)
        guard.update()
    guard.settle()
    (incident,) = guard.incidents
    assert incident.diagnosis is not None
    assert incident.diagnosis.step == BAD
    return incident.diagnosis


def program(loss_of: Loss, *, device: str = "cpu", **options: Any) -> Diagnosis:
    """A program that nobody changed, with one bad step."""
    with nanguard.install(**options) as autopilot:
        model = network(device)
        optimizer = AdamW(model.parameters(), fused=True)
        for step in range(STEPS):
            x = torch.randn(4, 6, device=device)
            optimizer.zero_grad()
            loss = (loss_of if step == BAD else fine)(model(x))
            loss.backward()
            optimizer.step()
    (incident,) = autopilot.incidents
    assert incident.diagnosis is not None
    assert incident.diagnosis.step == BAD
    return incident.diagnosis


# ---- one-off faults in a loss are found the first time ---------------------------------------------------------------


def log_of_nothing(out: Tensor) -> Tensor:
    p = out.softmax(-1)
    p = torch.stack([p[:, 0], p[:, 1] - p[:, 1], p[:, 2]], dim=-1)
    return -p.log().mean()  # log of nothing


def mean_of_nothing(out: Tensor) -> Tensor:
    wanted = out.detach() > 1e6
    return (out * wanted).sum() / wanted.sum()  # mean of nothing


def distance_of_same(out: Tensor) -> Tensor:
    return (out - out.detach()).pow(2).sum(-1).sqrt().mean()  # distance of same


def large_exponent(out: Tensor) -> Tensor:
    scores = out.half() * 0 + 12
    return scores.exp().float().mean()  # large exponent


def masked_out(out: Tensor) -> Tensor:
    mask = torch.zeros(3, 3, dtype=torch.bool, device=out.device)
    scores = (out.T @ out).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1).sum()  # masked out


FAULTS = [
    (log_of_nothing, "log", {"log_of_zero"}, "forward"),
    (mean_of_nothing, "div", {"zero_over_zero"}, "forward"),
    (distance_of_same, "sqrt", {"sqrt_grad_at_zero"}, "backward"),
    (large_exponent, "exp", {"exp_overflow", "overflow_fp16"}, "forward"),
    (masked_out, "softmax", {"masked_softmax_all_neg_inf"}, "forward"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("run", [own_loop, program])
@pytest.mark.parametrize("sync", ["late", "eager"])
@pytest.mark.parametrize(("loss_of", "op", "causes", "phase"), FAULTS)
def test_a_fault_in_a_loss_is_found_the_first_time(
    loss_of: Any, op: str, causes: set[str], phase: str, sync: str, run: Any, device: str
) -> None:
    found = run(loss_of, sync=sync, device=device)
    assert (found.capture, found.op, found.phase, found.is_line_traced) == ("tape", op, phase, True)
    assert found.cause in causes
    assert found.source is not None
    assert (found.source.file, found.source.line) == (HERE, line(loss_of.__name__.replace("_", " ")))


@pytest.mark.parametrize("run", [own_loop, program])
def test_targets_are_data(run: Any) -> None:
    target = torch.tensor([0.0, float("nan"), 0.0, 0.0])[:, None]
    found = run(lambda out: F.mse_loss(out[:, :1], target), sync="late")
    assert (found.phase, found.cause, found.op) == ("data", "input_nonfinite", "mse_loss")
    assert "target holds NaN at [1, 0]" in found.because
    assert found.samples == (1,)


class Cube(torch.autograd.Function):
    """Its derivative is written by hand, and wrong at 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * grads[0] * x**4 / x**2  # by hand


@pytest.mark.parametrize("run", [own_loop, program])
def test_a_function_of_autograd_is_a_row_of_its_own(run: Any) -> None:
    found = run(lambda out: Cube.apply(out * 0).sum(), sync="late")
    assert (found.phase, found.op, found.cause) == ("backward", "div", "custom_backward_bug")
    assert found.source.line == line("by hand")


@pytest.mark.parametrize("run", [own_loop, program])
def test_random_numbers_are_drawn_again_as_they_were(run: Any) -> None:
    """Only one of very many draws is bad, so another draw would be finite."""
    generator = torch.Generator().manual_seed(7)

    def rare(out: Tensor) -> Tensor:
        noise, own = torch.rand(4, 3), torch.rand(4, 3, generator=generator)
        seen.append((noise, own))
        keep = F.dropout(torch.ones(4, 3), 0.5)
        return (out * keep).sum() + (noise - seen[0][0]).abs().sum().log() + (own - seen[0][1]).abs().sum().log()

    seen: list[tuple[Tensor, Tensor]] = []
    found = run(rare, sync="late")
    assert (found.capture, found.op, found.cause) == ("tape", "log", "log_of_zero")
    assert "finite" not in {trial.result for trial in found.tried if trial.what.startswith("the same")}


def test_rows_are_those_of_the_branch_that_was_taken() -> None:
    """Python is not run again: what it decided by then is on the tape."""
    turns = iter(range(100))

    def by_turns(out: Tensor) -> Tensor:
        return (out * 0).log().sum() if next(turns) == 0 else out.sum()  # by turns

    found = own_loop(by_turns, sync="late")
    assert (found.op, found.source and found.source.line) == ("log", line("by turns"))


# ---- all kinds of steps ----------------------------------------------------------------------------------------------


def test_a_gradient_penalty() -> None:
    def penalised(out: Tensor) -> Tensor:
        point = (out.detach() * 0).requires_grad_()
        (slope,) = torch.autograd.grad(point.pow(2).sum(), point, create_graph=True)
        return out.sum() + (slope.norm(dim=-1) - 1).pow(2).sum() / slope.detach().norm()  # penalised

    for run in (own_loop, program):
        found = run(penalised, sync="late")
        assert (found.capture, found.op, found.source and found.source.line) == ("tape", "div", line("penalised"))


def test_a_penalty_through_the_network() -> None:
    """The gradient of the network's output by its input, differentiated once more."""
    with nanguard.install() as autopilot:
        model = network(width=1)
        optimizer = AdamW(model.parameters(), fused=True)
        for step in range(5):
            x = torch.randn(4, 6, requires_grad=True)
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            size = (slope * (step != 2)).pow(2).sum(-1).sqrt()  # size of slope
            (out.mean() + (size - 1).pow(2).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    (incident,) = autopilot.incidents
    found = incident.diagnosis
    assert found is not None
    assert (found.capture, found.phase, found.op) == ("tape", "backward", "sqrt")
    assert found.source is not None
    assert found.source.line == line("size of slope")


@pytest.mark.parametrize("device", DEVICES)
def test_a_program_with_a_grad_scaler(device: str) -> None:
    with nanguard.install() as autopilot:
        model = network(device)
        optimizer = AdamW(model.parameters())
        scaler = torch.amp.GradScaler(device, init_scale=8.0)
        for step in range(5):
            x = torch.randn(4, 6, device=device)
            with torch.autocast(device, dtype=torch.bfloat16):
                out = model(x)
                loss = (log_of_nothing if step == 2 else fine)(out.float())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    found = autopilot.incidents[0].diagnosis
    assert found is not None
    assert (found.capture, found.op, found.source and found.source.line) == ("tape", "log", line("log of nothing"))


@pytest.mark.parametrize("sync", ["late", "eager"])
def test_the_third_of_four_backward_passes(sync: Any) -> None:
    def train() -> None:
        for step in range(3):
            for number in range(4):
                is_bad = (step, number) == (1, 2)
                (log_of_nothing if is_bad else fine)(model(torch.randn(4, 6))).backward()
            optimizer.step()
            optimizer.zero_grad()

    with nanguard.install(sync=sync) as autopilot:
        model = network()
        optimizer = AdamW(model.parameters(), fused=True)
        train()
    found = autopilot.incidents[0].diagnosis
    assert found is not None
    assert (found.capture, found.op, found.microbatch) == ("tape", "log", 2)


def test_the_fp16_scale_of_a_guard_is_part_of_the_step() -> None:
    found = own_loop(log_of_nothing, precision="fp16", sync="late")
    assert (found.capture, found.op, found.source and found.source.line) == ("tape", "log", line("log of nothing"))


def test_two_optimizers_one_of_which_uses_what_was_computed_before_the_other_has_stepped() -> None:
    """A GAN: the picture is made once, and judged again after the judge has learned."""
    with nanguard.install() as autopilot:
        maker, judge = network(width=6), network(width=1)
        first, second = AdamW(judge.parameters()), AdamW(maker.parameters())
        for step in range(4):
            made = maker(torch.randn(4, 6)).tanh()
            first.zero_grad()
            (judge(made.detach()).mean() - judge(torch.randn(4, 6)).mean()).backward()
            first.step()
            second.zero_grad()
            score = judge(made)
            loss = (score * 0).log().mean() if step == 2 else score.mean()  # of the maker
            loss.backward()
            second.step()
    found = autopilot.incidents[0].diagnosis
    assert found is not None
    assert (found.capture, found.op, found.source and found.source.line) == ("tape", "log", line("of the maker"))


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1), lambda p: AdamW(p, fused=True)])
def test_a_program_without_modules(make: Any) -> None:
    with nanguard.install() as autopilot:
        w, b = torch.randn(6, requires_grad=True), torch.zeros(1, requires_grad=True)
        optimizer = make([w, b])
        for step in range(4):
            x = torch.randn(8, 6)
            p = torch.sigmoid(x @ w + b)
            p = p.round() if step == 2 else p
            loss = -(p.log() + (1 - p).log()).mean()  # bare
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = autopilot.incidents[0].diagnosis
    assert found is not None
    assert (found.capture, found.op, found.source and found.source.line) == ("tape", "log", line("bare"))


# ---- what cannot be made again ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [own_loop, program])
def test_a_tensor_that_was_changed_since_is_noticed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is too large to keep a copy of it."""
    monkeypatch.setattr(module_rows, "_LARGEST_COPY", 0)
    target = torch.zeros(4, 3)

    def changed(out: Tensor) -> Tensor:
        loss = (out + target).mean() + (out * 0).log().mean()  # changed
        target.fill_(1.0)
        return loss

    found = run(changed, sync="late")
    assert found.capture != "tape"
    why = f"add (test_tape.py:{line('changed')}) was given a tensor that has been changed in place since"
    assert any(why in note for note in found.notes)


def test_what_torch_does_not_tell_of_is_said() -> None:
    def inside(out: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            hidden = out * 2
        return (hidden * 0).log().mean()  # hidden

    found = own_loop(inside, sync="late")
    assert found.capture != "tape"
    assert any(f"mul (test_tape.py:{line('hidden')}) was given a tensor from code" in note for note in found.notes)


def test_a_tape_that_is_too_long_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape_recorder, "_MOST_ROWS", 64)
    monkeypatch.setattr(tape_recorder, "_SWEEP_AFTER_ROWS", 64)

    def long(out: Tensor) -> Tensor:
        for _ in range(300):
            out = out + 1
        return (out * 0).log().mean()

    found = own_loop(long, sync="late")
    assert found.capture != "tape"
    assert any("could not be made again" in note for note in found.notes)


# ---- nothing is held, nothing changes --------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_no_activation_is_held(device: str) -> None:
    """Late, so that the tapes of two steps are still there."""
    refs: list[weakref.ref[Tensor]] = []
    model = network(device)
    guard = nanguard.Guard(model, AdamW(model.parameters(), fused=True), precision="fp32", sync="late")
    for _ in range(4):
        x = torch.randn(4, 6, device=device)
        with guard.autocast():
            out = model(x)
            inner = out.exp()
            loss = (inner * out).sum()
        guard.backward(loss)
        refs += map(weakref.ref, (out, inner))
        del out, inner, loss
        assert [ref() for ref in refs if ref() is not None] == []
        guard.update()
    guard.settle()


def test_a_step_that_is_over_is_forgotten() -> None:
    with nanguard.install():
        model = network()
        optimizer = AdamW(model.parameters())
        refs = []
        for _ in range(3):
            x, y = torch.randn(4, 6), torch.randn(4, 3)
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            refs += map(weakref.ref, (x, y))
            del x, y
            gc.collect()
            assert [ref() for ref in refs if ref() is not None] == []


def test_an_evaluation_with_gradients_on_does_not_pile_up() -> None:
    """A program that forgets ``no_grad``: its batches are let go of, as rows that nothing depends on."""
    with nanguard.install():
        model = network()
        optimizer = AdamW(model.parameters())
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()
        refs = []
        for _ in range(200):
            x = torch.randn(4, 6)
            refs.append(weakref.ref(x))
            model(x).softmax(-1).sum().item()
        del x
        assert sum(ref() is not None for ref in refs) <= 2 * SWEEP_AFTER_CALLS


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(getattr(func, "__name__", ""))
        result = func(*args, **(kwargs or {}))
        return result * 2 if getattr(func, "__name__", "") == "cross_entropy" else result


seen: list[str] = []


class Tagged(Tensor):
    """A subclass, as libraries have them."""


def odd_program(guarded: bool) -> dict[str, Any]:
    """What programs do with modes, subclasses, devices, threads, hooks and custom functions."""
    torch.manual_seed(0)
    seen.clear()
    model = TinyNet()
    optimizer = AdamW(model.parameters(), fused=True)
    total = torch.zeros(())
    results = []
    for x, y in make_batches(6):
        with torch.device("cpu"):
            noise = torch.randn(3)
            out = model(x) + noise
        with Doubling():
            loss = F.cross_entropy(out, y)
        out.register_hook(lambda grad: grad * 1.5)
        tagged = out.detach().as_subclass(Tagged)
        loss = loss + Cube.apply(out).mean() + tagged.as_subclass(Tensor).pow(2).mean() * 0
        out[0, 0].item()
        aside = F.dropout(out, 0.3).sum(-1)
        aside[0] = 0
        loss = loss + aside.mean() * 0.1
        thread = threading.Thread(target=lambda t: results.append((t * 2).sum()), args=(x,))
        thread.start()
        thread.join()
        with torch.no_grad():
            total += loss
        with Doubling():  # torch is left in the middle of a mode
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**everything(model, [optimizer]), "rng": torch.get_rng_state(), "total": total, "seen": list(seen)}


@pytest.mark.parametrize("sync", ["late", "eager"])
def test_a_healthy_program_is_the_same_whatever_it_does_with_modes(sync: Any) -> None:
    plain = odd_program(guarded=False)
    with nanguard.install(sync=sync) as autopilot:
        taped = odd_program(guarded=True)
    assert autopilot.counts["applied"] == 6
    assert differences(plain, taped) == []


def test_the_default_device_stays() -> None:
    with nanguard.install(sync="late") as autopilot:
        torch.set_default_device("cpu")
        try:
            model = network()
            optimizer = AdamW(model.parameters(), fused=True)
            for step in range(5):
                loss = (model(torch.randn(4, 6)) * torch.ones(3)).sum()
                (loss.detach() * 0).log().mul(loss).backward() if step == 2 else loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            torch.set_default_device(None)
    found = autopilot.incidents[0].diagnosis
    assert found is not None
    assert (found.capture, found.op) == ("tape", "log")


QUIET = pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.torch.jit.script_method. is deprecated")
"""Torch's compiler looks at the attribute, and uses the method when it is first imported."""


@QUIET
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_code_is_neither_broken_up_nor_compiled_again(device: str) -> None:
    counters = torch._dynamo.utils.counters

    def train() -> dict[str, int]:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = torch.compile(network(device), backend="eager")
        criterion = torch.compile(lambda out, y: F.mse_loss(out, y).exp(), backend="eager")
        inner = nn.Linear(3, 3).to(device)
        inner.compile(backend="eager")
        optimizer = AdamW([*model.parameters(), *inner.parameters()], fused=True)
        for _ in range(4):
            out = inner(model(torch.randn(4, 6, device=device)) * 2)
            (criterion(out, torch.zeros(4, 3, device=device)) + out.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        breaks, frames = sum(counters["graph_break"].values()), dict(counters["frames"])
        return {"breaks": breaks, **frames, "unique": counters["stats"]["unique_graphs"]}

    plain = train()
    before = torch._dynamo.eval_frame._maybe_set_eval_frame
    with nanguard.install(sync="late" if device == "cpu" else "auto"):
        guarded = train()
    assert guarded == plain
    assert plain["breaks"] == 0
    assert torch._dynamo.eval_frame._maybe_set_eval_frame is before, "nothing of ours is left in torch"


SHOWS_RESULT = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Older releases do not keep what compiled code returns where it can be seen."""


@QUIET
def test_a_compiled_loss_is_a_row() -> None:
    criterion = torch.compile(log_of_nothing, backend="eager")
    for run in (own_loop, program):
        found = run(criterion, sync="late")
        if not SHOWS_RESULT:
            assert any("made by code that torch cannot see" in note for note in found.notes)
            continue
        assert (found.capture, found.op, found.source and found.source.line) == ("tape", "log", line("log of nothing"))


def test_rows_name_the_line_and_hold_only_what_is_from_outside() -> None:
    recorder, tape = TapeRecorder(lambda: None, "cpu"), CallTape()
    x, w = torch.ones(3), torch.ones(3, requires_grad=True)
    recorder.begin(tape)
    y = torch.stack([x, w * 2]).sum(0)  # three rows
    y[0] = 0
    recorder.stop()
    rows = [Row(*raw) for raw in tape.rows.values()]
    assert [row.name for row in rows] == ["mul", "stack", "sum", "__setitem__"]
    assert {row.place[1] for row in rows[:3] if row.place} == {line("three rows")}
    held = [token.tensor for row in rows for token in tokens((row.args, row.kwargs)) if isinstance(token, Outside)]
    assert {id(tensor) for tensor in held} == {id(x), id(w)}
    recorder.forget()


def test_a_call_that_raises_leaves_the_tape_in_order() -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 5:
                raise ValueError("five")
            return super().forward(x)

    for run in ("own", "install"):
        model = Fails(6, 3)
        if run == "install":
            with nanguard.install(sync="late") as autopilot:
                optimizer = AdamW(model.parameters(), fused=True)
                for step in range(STEPS):
                    with pytest.raises(ValueError, match="five"):
                        model(torch.randn(5, 6))
                    (log_of_nothing if step == BAD else fine)(model(torch.randn(4, 6))).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            found = autopilot.incidents[0].diagnosis
        else:
            guard = nanguard.Guard(model, AdamW(model.parameters(), fused=True), precision="fp32", sync="late")
            for step in range(STEPS):
                with pytest.raises(ValueError, match="five"), guard.autocast():
                    model(torch.randn(5, 6))
                with guard.autocast():
                    loss = (log_of_nothing if step == BAD else fine)(model(torch.randn(4, 6)))
                guard.backward(loss)
                guard.update()
            guard.settle()
            found = guard.incidents[0].diagnosis
        assert found is not None
        assert (found.capture, found.op) == ("tape", "log"), run


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_a_taped_step_does_not_wait() -> None:
    """The whole program, with random numbers and penalties around the model, in the mode that the guard chooses."""
    with nanguard.install() as autopilot:
        model = network("cuda", width=8)
        optimizer = AdamW(model.parameters(), fused=True)
        batches = torch.randn(12, 16, 6, device="cuda")
        try:
            for step in range(12):
                if step == 3:
                    torch.cuda.set_sync_debug_mode("error")
                out = model(batches[step])
                keep = F.dropout(torch.ones_like(out), 0.1) + torch.randn_like(out) * 0.01
                (slope,) = torch.autograd.grad(out.pow(2).sum(), out, create_graph=True)
                loss = (out * keep).softmax(-1).log().mean() + slope.pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert autopilot.counts["applied"] == 12


@pytest.mark.cuda
def test_peak_memory_is_that_of_the_plain_program() -> None:
    def train() -> int:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16)).cuda()
        optimizer = AdamW(model.parameters(), fused=True)
        for step in range(8):
            if step == 4:
                torch.cuda.reset_peak_memory_stats()
            out = model(torch.randn(4096, 64, device="cuda")).repeat(1, 64)
            for _ in range(10):
                out = out.tanh() * 1.1
            loss = out.pow(2).mean()
            del out
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        peak = torch.cuda.max_memory_allocated()
        del model, optimizer, loss
        gc.collect()
        torch.cuda.empty_cache()
        return peak

    plain = train()
    with nanguard.install(diagnose="off"):
        untaped = train()
    with nanguard.install():
        taped = train()
    print(f"peak: plain {plain:,}, guarded {untaped:,}, taped {taped:,}")
    small = 4096 * (64 + 16) * 4  # the inputs of the model, and the gradients of its outputs, of three steps
    assert taped <= 1.005 * untaped + 3 * small


class SquareRoot(torch.autograd.Function):
    """Its derivative at 0 is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.clamp(min=0).sqrt()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Tensor:  # type: ignore[override]
        (out,) = ctx.saved_tensors
        return above / (2 * out)  # own derivative


def test_a_function_of_autograd_that_was_looked_up_before_the_model_was_called() -> None:
    """As in ``SquareRoot.apply(model(x))``: the tape of a program begins with the call of the model."""
    with nanguard.install(sync="late") as autopilot:
        model = network()
        optimizer = AdamW(model.parameters(), fused=True)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = SquareRoot.apply(model(torch.ones(2, 6)).pow(2) * (step != BAD)).mean()
            loss.backward()
            optimizer.step()
    found = autopilot.incidents[0].diagnosis
    assert found is not None
    assert (found.capture, found.phase, found.op) == ("tape", "backward", "div")
    assert found.source is not None
    assert found.source.line == line("own derivative")


def new_tensors(x: Tensor, y: Tensor) -> None:
    """``torch.autograd.grad``, and new weights each step."""
    weights = torch.zeros(3, requires_grad=True)
    for _ in range(4):
        p = torch.sigmoid(x @ weights)
        loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()
        (gradient,) = torch.autograd.grad(loss, [weights])
        weights = (weights - gradient).detach().requires_grad_()


def data_of_tensors(x: Tensor, y: Tensor) -> None:
    """Updates through ``.data``, with writes in place between the backward pass and the next forward pass."""
    weights = torch.zeros(3, requires_grad=True)
    for _ in range(4):
        p = torch.sigmoid(x @ weights)
        (-(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()).backward()
        weights.data -= weights.grad.data
        weights.grad.data.zero_()


def in_place(x: Tensor, y: Tensor) -> None:
    weights = torch.zeros(3, requires_grad=True)
    for _ in range(4):
        p = torch.sigmoid(x @ weights)
        (-(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()).backward()
        with torch.no_grad():
            weights -= weights.grad
            weights.mul_(1.0)
        weights.grad = None


def with_lbfgs(x: Tensor, y: Tensor) -> None:
    weights = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], lr=1.0, max_iter=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        p = torch.sigmoid(x @ weights)
        loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)


@pytest.mark.parametrize("program", [new_tensors, data_of_tensors, in_place, with_lbfgs])
def test_programs_without_modules_are_examined_by_the_tape(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the graph cannot be looked at without waiting. So it is not looked at here either."""
    monkeypatch.setattr(StepCoordinator, "examine_graph", lambda self, losses: None)
    torch.manual_seed(50)
    x = 100 * torch.randn(50, 3)
    y = (x[:, 0] + 40 * torch.randn(50) > 0).float()
    with nanguard.install() as autopilot:
        program(x, y)
    found = autopilot.incidents[0].diagnosis
    assert found is not None
    assert (found.cause, found.op, found.capture) == ("log_of_zero", "log", "tape")
    assert found.source is not None
    assert found.source.text.strip().startswith(("loss = -(y * torch.log(p)", "(-(y * torch.log(p)"))


def test_a_cast_by_type_is_made_again_and_its_name_alone_is_no_call() -> None:
    x, tape, recorder = torch.tensor([1.0, 0.0]), CallTape(), TapeRecorder(lambda: None, "cpu")
    recorder.begin(tape)
    try:
        wide = x.type(torch.DoubleTensor)
        kind = x.type()
    finally:
        recorder.close()
    ((row, name, given),) = inputs(TapedRun(tape, TapedLoss((Made(0, 0),), (), 0), {}, torch.device("cpu")), set())
    assert (row.name, name, given is x) == ("type", "x", True)
    assert (wide.dtype, kind) == (torch.float64, "torch.FloatTensor")
    assert list(tape.rows) == [0]
