"""The tape of a program under ``install``: where it begins, what it leaves out, and gradients made by hand."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.utils.data import DataLoader, TensorDataset

import nanguard
from helpers import NAN, line
from nanguard.records.diagnosis import Diagnosis
from nanguard.step.tape_recorder import TapeRecorder

BAD, STEPS = 3, 6


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert TapeRecorder.active.mode is None
    assert torch._C._len_torch_function_stack() == 0


def only(incidents: Any) -> Diagnosis:
    (incident,) = incidents
    assert incident.diagnosis is not None
    found: Diagnosis = incident.diagnosis
    return found


def at(found: Diagnosis) -> int:
    assert found.source is not None
    assert found.source.file == __file__
    return found.source.line


def inputs(bad: int | None = None, rows: int = 48) -> Tensor:
    x = torch.randn(rows, 6)
    if bad is not None:
        x[bad, 2] = NAN
    return x


# ---- where it begins -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["late", "eager"])
def test_what_a_program_does_to_a_batch_before_the_model_is_on_the_tape(sync: Any) -> None:
    """Also the sample is right, although most tensors of the step are tables with another number of rows."""
    with nanguard.install(sync=sync) as autopilot:
        model = nn.Linear(6, 2)
        optimizer = AdamW(model.parameters(), fused=True)
        one, two, three = torch.rand(50, 1), torch.rand(50, 1), torch.rand(50, 1)
        for (x,) in DataLoader(TensorDataset(inputs(bad=29)), batch_size=8):
            t = torch.randint(0, 50, (len(x),))
            noisy = one[t] * x + two[t] * torch.randn_like(x)  # noisy
            optimizer.zero_grad()
            (model(noisy).pow(2) * three[t]).mean().backward()
            optimizer.step()
    found = only(autopilot.incidents)
    assert (found.capture, found.cause, found.op, at(found)) == ("tape", "input_nonfinite", "mul", line("noisy"))
    assert (found.samples, found.dataset_indices) == ((5,), (29,))
    assert "x holds NaN at [5, 2]" in found.because


def test_without_a_loader_it_begins_with_the_end_of_the_step_before() -> None:
    with nanguard.install() as autopilot:
        model = nn.Linear(12, 2)
        optimizer = SGD(model.parameters(), lr=0.01)
        for x in [inputs(bad=1 if step == BAD else None, rows=4) for step in range(STEPS)]:
            features = torch.cat([x, x.norm(2, 1, keepdim=True) * x], dim=1)  # features
            optimizer.zero_grad()
            model(features).sum().backward()
            optimizer.step()
    found = only(autopilot.incidents)
    assert (found.capture, found.cause, at(found)) == ("tape", "input_nonfinite", line("features"))
    assert found.because.startswith("x holds"), "the argument of a method is the object, not what is in the brackets"


class Parts(nn.Module):
    """Cannot be called: the program calls its parts, or even their ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(6, 3), nn.Linear(6, 1)


def test_a_fault_in_the_very_first_step_of_a_module_without_forward() -> None:
    with nanguard.install() as autopilot:
        model = Parts()
        optimizer = Adam(model.parameters())
        for step in range(2):
            rewards = torch.tensor([1.0, NAN if step == 0 else 1.0, 0.0])
            loss = model.actor(torch.randn(3, 6)).log_softmax(-1)[:, 0]
            (loss * (rewards - rewards.mean()) + model.critic(torch.randn(3, 6))).sum().backward()  # rewards
            optimizer.step()
            optimizer.zero_grad()
    found = only(autopilot.incidents)
    assert (found.capture, found.cause, found.step, at(found)) == ("tape", "input_nonfinite", 0, line("rewards"))


# ---- what cannot be made again counts as data ------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["late", "eager"])
def test_a_buffer_that_a_program_fills_again_and_again(sync: Any) -> None:
    """Late, it has been filled again meanwhile: what it held is kept."""
    with nanguard.install(sync=sync) as autopilot:
        model = nn.Linear(6, 2)
        optimizer = AdamW(model.parameters(), fused=True)
        memory = torch.zeros(8, 6)
        for step in range(STEPS):
            memory[step] = inputs(bad=0 if step == BAD else None, rows=1)[0]
            x = memory[torch.arange(step, step + 1)] * 2  # out of memory
            loss = model(x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = only(autopilot.incidents)
    assert (found.capture, found.cause, at(found)) == ("tape", "input_nonfinite", line("out of memory"))
    assert not any("could not be made again" in note for note in found.notes)


class Moves(nn.Module):
    """Writes to what it is given, as models of particles do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x += 0.5
        return torch.as_tensor(self.layer(x))


@pytest.mark.parametrize("sync", ["late", "eager"])
@pytest.mark.parametrize("bad", [1, 13])
def test_a_model_that_writes_to_its_batch(sync: Any, bad: int) -> None:
    """In the first steps a copy of the batch is kept, and in all steps if one of them shows that it was necessary."""
    data = torch.randn(64, 6)
    data[bad * 4 + 2, 3] = NAN
    records = [torch.from_numpy(row.numpy()) for row in data]
    with nanguard.install(sync=sync) as autopilot:
        model = Moves()
        optimizer = AdamW(model.parameters(), fused=True)
        for x in DataLoader(records, batch_size=4):  # type: ignore[arg-type]
            doubled = x.detach() * 2  # first
            loss = (model(x).pow(2) + doubled).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = only(autopilot.incidents)
    assert (found.step, found.cause, at(found)) == (bad, "input_nonfinite", line("first"))
    assert found.dataset_indices == (bad * 4 + 2,)
    assert "x holds NaN at [2, 3]" in found.because


def test_no_copies_are_kept_of_a_batch_that_nothing_writes_to() -> None:
    """But for the first steps."""
    kept, data = [], [inputs() for _ in range(12)]
    with nanguard.install() as autopilot:
        model = nn.Linear(6, 2)
        optimizer = Adam(model.parameters())
        taper = autopilot._monitor.taper
        for x in data:
            loss = model(x * 2).sum()
            kept.append(any(each.kept is not None for each in taper._outside.values()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert kept[0]
    assert not any(kept[8:])


def test_an_evaluation_between_steps_is_not_held() -> None:
    """Its data are fetched with gradients on, as a tape begins; the model is called without."""
    with nanguard.install():
        model = nn.Linear(6, 2)
        optimizer = Adam(model.parameters())
        refs: list[weakref.ref[Tensor]] = []
        for _ in range(3):
            model(torch.randn(4, 6)).sum().backward()
            optimizer.step()
            for (x,) in DataLoader(TensorDataset(inputs()), batch_size=4):
                scaled = x * 2
                with torch.no_grad():
                    model(scaled)
                refs += [weakref.ref(x), weakref.ref(scaled)]
            del x, scaled
            assert [ref() for ref in refs if ref() is not None] == []


def test_steps_that_use_what_the_step_before_made_do_not_hold_all_of_them() -> None:
    """Of two optimizers the second may need the tape of the first. No tape holds more than one other."""
    with nanguard.install():
        ones, others = nn.Linear(6, 6), nn.Linear(6, 6)
        optimizers = [SGD(ones.parameters(), lr=0.1), SGD(others.parameters(), lr=0.1)]
        state, refs = torch.randn(4, 6), list[weakref.ref[Tensor]]()
        for step in range(2 * STEPS):
            given = state + 1
            refs.append(weakref.ref(given))
            made = (ones, others)[step % 2](given)
            optimizers[step % 2].zero_grad()
            made.square().mean().backward()
            optimizers[step % 2].step()
            state = made.detach() + 0
        assert sum(ref() is not None for ref in refs) < 5


# ---- gradients made by hand ------------------------------------------------------------------------------------------


def test_gradients_that_a_program_sets_itself() -> None:
    """Meta-learning: an inner step by ``autograd.grad``, and ``grad`` is assigned. Nothing calls ``backward``."""
    with nanguard.install() as autopilot:
        w = torch.randn(6, requires_grad=True)
        optimizer = Adam([w], lr=1e-3)
        for step in range(STEPS):
            total: Any = 0
            for _ in range(3):
                x, y = torch.randn(4, 6), torch.randn(4)
                (inner,) = torch.autograd.grad((x @ w - y).pow(2).mean(), w, create_graph=True)
                fast = w - 0.01 * inner
                loss = (x @ fast - y).abs().mean().mul(float(step != BAD)).log()  # meta
                (slope,) = torch.autograd.grad(loss, w)
                total = total + slope.detach()
            optimizer.zero_grad()
            w.grad = total / 3
            optimizer.step()
    found = only(autopilot.incidents)
    assert (found.capture, found.op, found.cause, at(found)) == ("tape", "log", "log_of_zero", line("meta"))


def test_a_learning_rate_far_too_high_without_a_backward_pass() -> None:
    with nanguard.install() as autopilot:
        w = torch.randn(6, requires_grad=True)
        optimizer = Adam([w], lr=1e30)
        for _ in range(2):
            (slope,) = torch.autograd.grad((torch.randn(4, 6) @ w).exp().mean(), w)
            w.grad = slope * 2
            optimizer.step()
    assert only(autopilot.incidents).cause == "learning_rate_too_high"


# ---- one sample, no batch --------------------------------------------------------------------------------------------


def test_one_sample_without_a_batch_dimension_has_no_sample_number() -> None:
    with nanguard.install() as autopilot:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            x = torch.randn(4)
            if step == BAD:
                x[1] = NAN
            F.cross_entropy(model(x), torch.tensor(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = only(autopilot.incidents)
    assert (found.cause, found.module, found.samples) == ("input_nonfinite", "0", ())


# ---- the very first step, and the end in the middle of one -----------------------------------------------------------


class Solver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x * 2)  # solver
        return out


def test_a_program_that_calls_forward_and_gives_up_in_its_first_step() -> None:
    """No loader, no module is called, no loss: the tape begins where gradients are cleared, and ends with the error."""
    x = inputs(bad=7)
    with pytest.raises(AssertionError, match="underflow"), nanguard.install() as autopilot:
        encoder, head = Solver(), nn.Linear(6, 1)
        optimizer = Adam([*encoder.parameters(), *head.parameters()])
        for _ in range(3):
            optimizer.zero_grad()
            state = encoder.forward(x).tanh()
            out = head(state)
            assert not out.isnan().any(), "underflow"
            out.sum().backward()
            optimizer.step()
    found = only(autopilot.incidents)
    assert (found.capture, found.cause, found.samples, at(found)) == ("tape", "input_nonfinite", (7,), line("solver"))


def test_a_learning_rate_of_another_network_is_told() -> None:
    """A GAN: the judge learns far too fast, and the maker's loss is the first that shows it."""
    with nanguard.install() as autopilot:
        maker, judge = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        first, second = Adam(judge.parameters(), lr=1e30), Adam(maker.parameters(), lr=1e-3)
        judge(maker(torch.randn(4, 4)).detach()).mean().backward()
        first.step()
        first.zero_grad()
        judge(maker(torch.randn(4, 4))).pow(2).mean().backward()
        second.step()
    found = only(autopilot.incidents)
    assert found.cause == "learning_rate_too_high"
    assert found.network.startswith("maker")
    assert "judge.2" in found.because or "judge.0" in found.because


@pytest.mark.parametrize("sync", ["late", "eager"])
def test_a_loss_that_is_computed_between_two_backward_passes_is_on_the_tape(sync: Any) -> None:
    """As of policy gradients: one backward pass for each step of an episode, and the optimizer steps at its end."""
    torch.manual_seed(0)
    with nanguard.install(sync=sync) as autopilot:
        model = nn.Linear(6, 3)
        optimizer = AdamW(model.parameters(), fused=sync == "late")
        for step in range(STEPS):
            chosen = [model(torch.randn(6)).softmax(-1)[0] for _ in range(3)]
            optimizer.zero_grad()
            gain = 0.0
            for place, probability in enumerate(reversed(chosen)):
                gain = (NAN if step == BAD and place == 1 else 1.0) + 0.9 * gain
                loss = -torch.log(probability) * gain  # gained
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    found = only(autopilot.incidents)
    assert (found.cause, found.op, at(found)) == ("nonfinite_constant", "mul", line("gained"))


@pytest.mark.parametrize("has_loader", [True, False])
def test_a_target_that_is_computed_with_the_model_itself_is_on_the_tape(has_loader: bool) -> None:
    """As in Q-learning: the model is called without gradients first, for a part of the same step."""
    with nanguard.install() as autopilot:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = Adam(model.parameters())
        rows = TensorDataset(torch.randn(48, 6), torch.rand(48) + 0.5)
        rows.tensors[1][29] = 0
        batches = (
            DataLoader(rows, batch_size=8) if has_loader else zip(*(t.split(8) for t in rows.tensors), strict=True)
        )
        for state, reward in batches:
            with torch.no_grad():
                target = 1 / reward + 0.9 * model(state + 1).squeeze(1).clamp(-1, 1).add(0.5)  # target
            optimizer.zero_grad()
            F.mse_loss(model(state).squeeze(1), target).backward()
            optimizer.step()
    found = only(autopilot.incidents)
    assert (found.cause, found.samples, at(found)) == ("div_by_zero", (5,), line("target"))


def test_a_second_loss_of_a_graph_that_was_retained_is_on_the_tape() -> None:
    with nanguard.install() as autopilot:
        model = nn.Linear(6, 2)
        optimizer = Adam(model.parameters())
        for step in range(STEPS):
            out = model(torch.randn(8, 6))
            optimizer.zero_grad()
            out.square().mean().backward(retain_graph=True)
            (out.abs() - float(step == BAD) * 9).sqrt().mean().backward()  # second
            optimizer.step()
    found = only(autopilot.incidents)
    assert (found.capture, found.cause, at(found)) == ("tape", "sqrt_of_negative", line("second"))


def test_what_changes_gradients_after_the_backward_pass_is_named_as_such_and_no_step_is_traced_for_it() -> None:
    with nanguard.install() as autopilot:
        model = nn.Linear(6, 2)
        optimizer = Adam(model.parameters())
        for step in range(STEPS):
            mask = torch.full((8, 1), float(step != BAD))
            optimizer.zero_grad()
            (model(torch.randn(8, 6)).square() * mask).sum().backward()
            for p in model.parameters():
                p.grad.div_(mask.sum())  # divided
            optimizer.step()
    found = only(autopilot.incidents)
    assert (found.cause, at(found), found.is_line_traced) == ("unknown", line("divided"), False)
    assert "it comes after backward()" in found.because
    assert found.fix is not None
    assert "between backward() and optimizer.step()" in found.fix.words


def test_several_lines_that_change_gradients_are_all_named() -> None:
    with nanguard.install() as autopilot:
        model = nn.Linear(6, 2)
        optimizer = Adam(model.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            (model(torch.randn(8, 6)).square() * float(step != BAD)).sum().backward()
            for p in model.parameters():
                p.grad.div_(p.grad.norm())  # made a unit vector
                p.grad.mul_(0.5)  # scaled
            optimizer.step()
    found = only(autopilot.incidents)
    lines = [f"test_program_tape.py:{line(mark)}" for mark in ("made a unit vector", "scaled")]
    assert (found.source, found.because.endswith(f"; the program changes gradients at {' and '.join(lines)}")) == (
        None,
        True,
    )


def test_data_is_named_also_if_another_argument_of_the_call_is_long() -> None:
    with nanguard.install() as autopilot:
        model = nn.Linear(6, 1)
        optimizer = SGD(model.parameters(), lr=0.1)
        for bonus in [inputs(bad=2 if step == BAD else None, rows=8) for step in range(STEPS)]:
            loss = (bonus + model(torch.ones(8, 6)).clamp(-1, 1).add(0.5).sub(0.5).mul(2)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert "bonus holds NaN at [2, 2]" in only(autopilot.incidents).because


# ---- what is not said ------------------------------------------------------------------------------------------------


def test_what_torch_func_makes_is_not_called_data() -> None:
    """Torch does not tell of its results: nothing is better than a wrong cause."""
    with nanguard.install() as autopilot:
        model = nn.Linear(6, 1)
        optimizer = SGD(model.parameters(), lr=0.1)

        def loss_of(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return (torch.func.functional_call(model, p, (x,)) - y).abs().sqrt().sum()

        for step in range(STEPS):
            x = torch.randn(4, 6)
            y = model(x).detach() if step == BAD else torch.randn(4, 1)
            params = {name: p.detach() for name, p in model.named_parameters()}
            slopes = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))(params, x, y)
            for name, p in model.named_parameters():
                p.grad = slopes[name].mean(0)
            optimizer.step()
    found = only(autopilot.incidents)
    assert found.cause == "unknown"
    assert "maybe from torch.func" in found.because
    assert found.because not in found.notes, "it is told once"


def test_a_model_that_is_only_called_by_torch_func_is_known_by_name_and_its_bad_step_is_saved(tmp_path: Path) -> None:
    """In ``functional_call`` the module does not hold its parameters, and inside ``vmap`` tensors have no values."""
    with nanguard.install(run_dir=tmp_path) as autopilot:
        model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Tanh(), nn.Linear(4, 1, bias=False))
        optimizer = SGD(model.parameters(), lr=0.1)

        def loss_of(p: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(model, p, (x,)).square().sum()

        for step in range(STEPS):
            x = torch.randn(4, 6)
            if step == BAD:
                x = x * torch.tensor([[1.0], [1.0], [0.0], [1.0]])
            params = {name: p.detach() for name, p in model.named_parameters()}
            slopes = torch.func.vmap(torch.func.grad(loss_of), (None, 0))(params, x)
            norms = torch.stack([slope.flatten(1).norm(dim=1) for slope in slopes.values()]).norm(dim=0)
            scale = 1 / norms  # scale
            for name, p in model.named_parameters():
                p.grad = torch.einsum("b,b...->...", scale, slopes[name])
            optimizer.step()
    found = only(autopilot.incidents)
    assert (found.cause, found.samples, at(found)) == ("div_by_zero", (2,), line("scale"))
    assert autopilot.incidents[0].reading.gradients == ("0.weight", "2.weight")
    assert len(list((tmp_path / "incidents").iterdir())) == 1


def other() -> Tensor:
    """Has a variable of the same name, which is another one."""
    target = torch.zeros(3)
    target[1] = NAN
    return target


def test_a_variable_of_another_function_is_another_one_and_a_constant_is_no_batch() -> None:
    other()
    with nanguard.install() as autopilot:
        model = nn.Linear(6, 3)
        optimizer = SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            target = torch.rand(8, 3).softmax(-1)
            if step == BAD:
                target[5] = torch.tensor([1.0, 0.0, 0.0])
            q = model(torch.randn(8, 6)).softmax(-1)
            optimizer.zero_grad()
            (target * (target.log() - q.log())).sum().backward()  # a target of zero
            optimizer.step()
    found = only(autopilot.incidents)
    assert (found.cause, found.op, found.samples, at(found)) == ("log_of_zero", "log", (), line("a target of zero"))
    with nanguard.install() as autopilot:
        model = nn.Linear(6, 3)
        optimizer = SGD(model.parameters(), lr=0.1)
        for target in [torch.ones(3), torch.tensor([1.0, NAN, 1.0])]:
            out = model(torch.ones(6))
            optimizer.zero_grad()
            F.mse_loss(out, target).backward()  # bad target
            optimizer.step()
    assert at(only(autopilot.incidents)) == line("bad target")
