"""A program that nobody changed, guarded by ``nanguard.install()``: the same program, and never a corrupt step."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import io
import itertools
import logging
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from typer.testing import CliRunner

import nanguard
from helpers import INF, NAN, TinyNet, differences, everything, make_batches, poisoned, same
from nanguard import Halt, Policy, Rollback, Skip
from nanguard.cli import app
from nanguard.hosted.step import HostedStep
from nanguard.report.page import make_report
from nanguard.state.training_state import CapturedUpdate
from optimizers import ALL, FUSED, NOT_FUSED

Batches = list[tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def no_autopilot_is_left() -> Iterator[None]:
    places = [
        (Optimizer, "__init__"),
        (Optimizer, "__setstate__"),
        (torch.autograd, "backward"),
        (torch.autograd, "grad"),
    ]
    places += [(torch.amp.GradScaler, "scale"), (torch.amp.GradScaler, "step")]
    before = [getattr(*place) for place in places]
    yield
    assert before == [getattr(*place) for place in places]


def program(
    make: Callable[[Any], Optimizer], batches: Batches, *, seen: list[Any] | None = None, accumulate: int = 1
) -> dict[str, Any]:
    """A plain loop; all that it leaves behind, random states too."""
    torch.manual_seed(0)
    model = TinyNet()
    optimizer = make(model.parameters())
    scheduler = (
        OneCycleLR(optimizer, 0.05, total_steps=100, cycle_momentum=False) if "lr" in optimizer.defaults else None
    )
    for number, (x, y) in enumerate(batches):
        loss = F.cross_entropy(model(x), y) / accumulate
        loss.backward()
        if (number + 1) % accumulate:
            continue
        before = everything(model, [optimizer])
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if seen is not None:
            seen.append((before, everything(model, [optimizer])))
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    more = () if scheduler is None else (scheduler,)
    return {**everything(model, [optimizer], *more), "rng": torch.get_rng_state()}


# ---- nothing changes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", ALL)
def test_a_healthy_program_is_the_plain_program(name: str, accumulate: int) -> None:
    batches = make_batches(8)
    plain = program(ALL[name], batches, accumulate=accumulate)
    with nanguard.install() as autopilot:
        guarded = program(ALL[name], batches, accumulate=accumulate)
    assert differences(plain, guarded) == []
    assert not autopilot.incidents
    assert autopilot.counts["applied"] == 8 // accumulate


@pytest.mark.parametrize("name", FUSED)
def test_so_it_is_where_the_host_learns_late(name: str) -> None:
    batches = make_batches(8)
    plain = program(FUSED[name], batches)
    with nanguard.install(sync="late") as autopilot:
        guarded = program(FUSED[name], batches)
    assert differences(plain, guarded) == []
    assert autopilot.counts["applied"] == 8


def test_accumulation_is_the_plain_programs() -> None:
    plain = program(ALL["AdamW foreach"], make_batches(8), accumulate=2)
    with nanguard.install() as autopilot:
        assert differences(plain, program(ALL["AdamW foreach"], make_batches(8), accumulate=2)) == []
    assert autopilot.counts["applied"] == 4


def test_a_traced_program_is_the_plain_program() -> None:
    batches = make_batches(6)
    plain = program(ALL["AdamW foreach"], batches)
    with nanguard.install(trace=True):
        assert differences(plain, program(ALL["AdamW foreach"], batches)) == []


def test_objects_are_what_they_were() -> None:
    signature = inspect.signature(AdamW.step)
    with nanguard.install():
        model = TinyNet()
        optimizer = AdamW(model.parameters(), lr=0.1)
        called = []
        optimizer.register_step_pre_hook(lambda *args: called.append("before"))
        optimizer.register_step_post_hook(lambda *args: called.append("after"))
        model(torch.randn(4, 6)).sum().backward()
        assert optimizer.step() is None
        assert called == ["before", "after"]
        assert type(optimizer) is AdamW
        assert inspect.signature(AdamW.step) == signature
        assert AdamW.step.__name__ == "step"
        other = AdamW(TinyNet().parameters())
        other.load_state_dict(optimizer.state_dict())
        for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert same(copied.state_dict(), optimizer.state_dict())
            assert not [key for key in vars(copied) if "nanguard" in key]
        file = io.BytesIO()
        torch.save(model, file)
        assert b"nanguard" not in file.getvalue()
    assert inspect.getfile(inspect.unwrap(AdamW.step)).startswith(str(Path(torch.__file__).parent))


def test_afterwards_everything_is_taken_back() -> None:
    step, call = SGD.step, nn.Module.__call__
    with nanguard.install():
        model = TinyNet()
        optimizer = SGD(model.parameters(), lr=0.1)
        assert SGD.step is not step
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()
        assert "__call__" in vars(TinyNet)
    assert SGD.step is step or "nanguard" not in SGD.step.__code__.co_filename
    assert "__call__" not in vars(TinyNet)
    assert TinyNet.__call__ is call
    before = model.out.weight.clone()
    optimizer.zero_grad()
    model(torch.full((4, 6), NAN)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.out.weight)  # on its own again


def test_what_the_program_lets_go_of_is_let_go() -> None:
    with nanguard.install() as autopilot:
        refs: list[Any] = []
        for _ in range(4):
            model = TinyNet()
            optimizer = AdamW(model.parameters())
            x = torch.randn(4, 6)
            model(x).sum().backward()
            optimizer.step()
            refs += [weakref.ref(optimizer), weakref.ref(model), weakref.ref(x)]
        del model, optimizer, x
        gc.collect()
        assert [ref() for ref in refs[:-3]] == [None] * 9
        assert autopilot.counts["applied"] == 4
        assert autopilot.num_optimizers == 4


def test_batches_are_let_go_of_when_a_step_is_over() -> None:
    with nanguard.install():
        model = TinyNet()
        optimizer = AdamW(model.parameters())
        refs = []
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(4):
                x = torch.randn(4, 6)
                model(x).sum().backward()
                refs.append(weakref.ref(x))
            optimizer.step()
            del x
            gc.collect()
            assert [ref() for ref in refs if ref() is not None] == []


# ---- a bad step changes nothing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, pytest.param(INF, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", NOT_FUSED)
def test_a_bad_step_changes_nothing(name: str, value: float) -> None:
    seen: list[Any] = []
    with nanguard.install(diagnose="off") as autopilot:
        program(ALL[name], poisoned(make_batches(6), 0, 3, value=value), seen=seen)
    for place, (before, after) in enumerate(seen):
        changed = [key for key in differences(before, after) if "running_" not in key and "num_batches" not in key]
        assert bool(changed) == (place not in (0, 3)), (place, changed)
    assert autopilot.counts["skipped"] == 2
    assert [incident.reading.step for incident in autopilot.incidents] == [0, 3]


@pytest.mark.parametrize("sync", ["eager", "late"])
@pytest.mark.parametrize("name", FUSED)
def test_so_it_does_on_the_device(name: str, sync: Any) -> None:
    with nanguard.install(diagnose="off", sync=sync) as autopilot:
        state = program(FUSED[name], poisoned(make_batches(8), 3))
    assert all(torch.isfinite(value).all() for value in state.values() if isinstance(value, Tensor))
    skipped = autopilot.counts["skipped"] + autopilot.counts["lost"]
    assert 1 <= skipped <= 3
    assert autopilot.counts["applied"] == 8 - skipped


def test_buffers_are_put_back() -> None:
    with nanguard.install(diagnose="off"):
        torch.manual_seed(0)
        model = TinyNet()
        optimizer = SGD(model.parameters(), lr=0.1)
        for x, _ in poisoned(make_batches(4), 2):
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            changed = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])]
            assert bool(changed) == bool(x.isfinite().all())
    assert torch.isfinite(model.norm.running_mean).all()


def test_gradients_stay_for_the_program_to_look_at() -> None:
    with nanguard.install():
        model = TinyNet()
        optimizer = AdamW(model.parameters())
        for x, y in poisoned(make_batches(3), 1):
            F.cross_entropy(model(x), y).backward()
            grads = [p.grad for p in model.parameters()]
            optimizer.step()
            assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
            optimizer.zero_grad()


def test_what_a_program_does_to_its_gradients_itself_is_its_own() -> None:
    """A loss may be finite and its gradients not; a program that repairs them does not need us."""
    with nanguard.install() as autopilot:
        weight = torch.zeros(3, requires_grad=True)
        optimizer = SGD([weight], lr=0.1)
        (weight.sqrt() * torch.tensor([1.0, 0.0, 0.0])).sum().backward()
        assert not torch.isfinite(weight.grad).all()
        weight.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()
    assert autopilot.counts["applied"] == 1


def test_a_closure_is_called_once_and_its_loss_comes_back() -> None:
    calls: list[int] = []

    def train(batches: Batches) -> dict[str, Any]:
        torch.manual_seed(0)
        model = TinyNet()
        optimizer = AdamW(model.parameters())
        for x, y in batches:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                calls.append(1)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            assert loss is None or isinstance(loss, Tensor)
        return everything(model, [optimizer])

    plain = train(make_batches(4))
    with nanguard.install() as autopilot:
        assert differences(plain, train(make_batches(4))) == []
        assert len(calls) == 8
        state = train(poisoned(make_batches(4), 2))
    assert all(torch.isfinite(value).all() for value in state.values() if isinstance(value, Tensor))
    assert autopilot.counts["skipped"] == 1


def test_lbfgs_is_let_through_and_taken_back(caplog: pytest.LogCaptureFixture) -> None:
    def train(lr: float, steps: int) -> Tensor:
        torch.manual_seed(0)
        weight = torch.tensor([1.0, 2.0], requires_grad=True)
        optimizer = torch.optim.LBFGS([weight], lr=lr, max_iter=4)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (weight.log() ** 2).sum()
            loss.backward()
            return loss

        for _ in range(steps):
            optimizer.step(closure)
        return weight.detach().clone()

    plain = train(0.1, 3)
    assert not torch.isfinite(train(50.0, 3)).all()
    with nanguard.install() as autopilot:
        assert torch.equal(plain, train(0.1, 3))
        assert not autopilot.incidents
        assert torch.isfinite(train(50.0, 3)).all()
    assert autopilot.incidents
    assert "LBFGS computes or changes gradients inside step()" in caplog.text


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("kind", ["LBFGS", "SGD with a closure", "SGD"])
def test_an_interrupt_while_a_step_is_examined_gets_out(kind: str, interrupt: type[BaseException]) -> None:
    """The step is taken back and counted before, and the program can go on after it."""

    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 3)
            self.is_bad = self.interrupts = False

        def forward(self, x: Tensor) -> Tensor:
            if self.is_bad and self.interrupts:
                raise interrupt("while examined")
            self.interrupts = self.is_bad  # from the next call on, which is not the program's
            return (self.lin(x).square() * (0.0 if self.is_bad else 1.0)).log()

    with nanguard.install() as autopilot:
        model = Logs()
        optimizer = (
            torch.optim.LBFGS(model.parameters(), max_iter=1) if kind == "LBFGS" else SGD(model.parameters(), 0.1)
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().mean()
            loss.backward()
            return loss

        def step() -> None:
            if kind == "SGD":
                closure()
                optimizer.step()
            else:
                optimizer.step(closure)

        step()
        before = everything(model, [optimizer])
        model.is_bad = True
        with pytest.raises(interrupt, match="while examined"):
            step()
        assert differences(before, everything(model, [optimizer])) == []
        model.is_bad = model.interrupts = False
        step()
    assert len(autopilot.incidents) == 1
    assert (autopilot.counts["applied"], autopilot.counts["skipped"]) == (2, 1)


def test_an_interrupt_before_it_is_known_whether_a_blind_step_was_good_takes_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    with nanguard.install() as autopilot:
        optimizer = torch.optim.LBFGS([weight], lr=50.0, max_iter=4)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (weight.log() ** 2).sum()
            loss.backward()
            return loss

        def interrupted(self: Any) -> bool:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(CapturedUpdate, "is_spoiled", interrupted)
            optimizer.step(closure)
        assert weight.tolist() == [1.0, 2.0]
        optimizer.step(closure)
    assert torch.isfinite(weight).all()
    assert len(autopilot.incidents) == 1


class SAM(Optimizer):
    """As people write it: the closure is called again on perturbed weights."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.base = SGD(self.param_groups, lr=lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.clone() for p in params]
        for p in params:
            p.add_(0.05 * p.grad.sign())
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p, old in zip(params, before, strict=True):
            p.copy_(old)
        self.base.step()
        self.zero_grad()
        return loss


def test_a_closure_that_is_called_when_the_optimizer_likes() -> None:
    def train(batches: Batches) -> dict[str, Any]:
        torch.manual_seed(0)
        model = TinyNet()
        optimizer = SAM(list(model.parameters()), lr=0.1)
        for x, y in batches:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            assert isinstance(optimizer.step(closure), Tensor)
        return everything(model, [optimizer])

    plain = train(make_batches(5))
    with nanguard.install() as autopilot:
        assert differences(plain, train(make_batches(5))) == []
        state = train(poisoned(make_batches(5), 2))
    assert all(torch.isfinite(value).all() for value in state.values() if isinstance(value, Tensor))
    assert autopilot.incidents


def test_what_a_program_does_to_gradients_in_its_step_stays() -> None:
    def train() -> dict[str, Any]:
        torch.manual_seed(0)
        model = TinyNet()
        optimizer = SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda each, *args: each.zero_grad())
        for x, y in make_batches(5):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return everything(model, [optimizer])

    plain = train()
    with nanguard.install():
        assert differences(plain, train()) == []


def test_gradients_without_a_backward_pass() -> None:
    """As evolution strategies have them. One bad step is one bad step."""
    with nanguard.install() as autopilot:
        weight = torch.zeros(3, requires_grad=True)
        optimizer = SGD([weight], lr=1.0)
        for number in range(6):
            weight.grad = torch.full((3,), NAN if number == 2 else 1.0)
            optimizer.step()
    assert torch.equal(weight, torch.full((3,), -5.0))
    assert (autopilot.counts["applied"], autopilot.counts["skipped"]) == (5, 1)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_of_optimizers_are_guarded(how: Callable[[Any], Any]) -> None:
    with nanguard.install() as autopilot:
        first = nn.Linear(6, 3)
        model, optimizer = how((first, AdamW(first.parameters())))
        for x, y in poisoned(make_batches(4), 2):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert torch.isfinite(model.weight).all()
    assert autopilot.counts["skipped"] == 1


def test_what_a_program_writes_to_buffers_between_steps_stays() -> None:
    class Annealed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TinyNet()
            self.register_buffer("temperature", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) / self.temperature

    with nanguard.install():
        model = Annealed()
        optimizer = AdamW(model.parameters())
        for number, (x, y) in enumerate(poisoned(make_batches(6), 3, 5)):
            model.temperature.fill_(1.0 + number)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            assert model.temperature == 1.0 + number
    assert torch.isfinite(model.inner.norm.running_mean).all()


def test_the_host_is_asked_at_each_step_only_if_several_optimizers_step() -> None:
    with nanguard.install(sync="late") as autopilot:
        models = [nn.Linear(6, 3) for _ in range(2)]
        optimizers = []
        for model, expected in zip(models, (["late"], ["eager", "eager"]), strict=True):
            optimizers.append(AdamW(model.parameters(), fused=True))
            for x, y in make_batches(2):
                F.cross_entropy(model(x), y).backward()
                optimizers[-1].step()
                optimizers[-1].zero_grad()
            assert [hosted.sync for hosted in autopilot._monitor.registry.hosted_steps] == expected


def test_a_program_that_sees_a_bad_loss_itself_is_not_punished_for_it() -> None:
    with nanguard.install() as autopilot:
        model = nn.Linear(6, 3)
        optimizer = AdamW(model.parameters())
        for x, y in poisoned(make_batches(6), 2):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if not torch.isfinite(loss):
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()
    (incident,) = autopilot.incidents  # it is told why; nothing is done about it
    assert incident.diagnosis is not None
    assert incident.diagnosis.cause == "input_nonfinite"
    assert incident.outcome.action.rung is None
    assert autopilot.counts["applied"] == 5


def test_a_hook_before_the_step_may_repair_gradients_or_spoil_them() -> None:
    def repair(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.nan_to_num_(0.0, 0.0, 0.0)

    def spoil(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.div_(p.grad - p.grad)

    for hook, applied in ((repair, 1), (spoil, 0)):
        with nanguard.install() as autopilot:
            weight = torch.zeros(3, requires_grad=True)
            optimizer = SGD([weight], lr=1.0)
            optimizer.register_step_pre_hook(hook)
            (weight.sqrt() * torch.tensor([1.0, 0.0, 0.0])).sum().backward()
            optimizer.step()
        assert torch.isfinite(weight).all()
        assert autopilot.counts["applied"] == applied


def test_modules_that_join_later_are_looked_after() -> None:
    with nanguard.install() as autopilot:
        model, head = TinyNet(), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        optimizer = AdamW(model.parameters())
        for number, (x, y) in enumerate(poisoned(make_batches(6), 4)):
            if number == 2:
                optimizer.add_param_group({"params": head.parameters()})
            out = model(x)
            optimizer.zero_grad()
            F.cross_entropy(head(out) if number >= 2 else out, y).backward()
            optimizer.step()
    assert torch.isfinite(head[1].running_mean).all()
    assert (autopilot.counts["applied"], autopilot.counts["skipped"]) == (5, 1)
    assert [incident.reading.step for incident in autopilot.incidents] == [4]


def test_gradients_that_are_part_of_a_graph() -> None:
    """``create_graph=True``, as for second derivatives."""

    def train(batches: Batches) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = SGD(model.parameters(), lr=0.1)
        for x, y in batches:
            optimizer.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own, of reference cycles
                F.cross_entropy(model(x), y).backward(create_graph=True)
            optimizer.step()
        return everything(model, [optimizer])

    plain = train(make_batches(4))
    with nanguard.install() as autopilot:
        assert differences(plain, train(make_batches(4))) == []
        state = train(poisoned(make_batches(4), 2))
    assert all(torch.isfinite(value).all() for value in state.values() if isinstance(value, Tensor))
    assert autopilot.counts["applied"] == 7


def test_a_mask_that_moves_is_no_fault() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 3)
            self.register_buffer("mask", torch.zeros(3))

        def forward(self, x: Tensor, place: int) -> Tensor:
            self.mask.zero_()
            self.mask[place] = -INF
            return self.inner(x) + self.mask

    with nanguard.install() as autopilot:
        model = Masked()
        optimizer = AdamW(model.parameters())
        for number, (x, _) in enumerate(make_batches(6)):
            optimizer.zero_grad()
            model(x, number % 3).softmax(-1).square().sum().backward()
            optimizer.step()
    assert autopilot.counts["applied"] == 6


def test_a_model_can_be_traced_by_fx_as_ever() -> None:
    def graph() -> str:
        model = nn.Sequential(nn.Linear(6, 3), nn.ReLU())
        optimizer = SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        return str(torch.fx.symbolic_trace(model).graph)

    plain = graph()
    with nanguard.install():
        assert graph() == plain


# ---- several optimizers ----------------------------------------------------------------------------------------------


def gan(batches: Batches, *, bad: str = "") -> tuple[dict[str, Any], list[tuple[str, bool]]]:
    torch.manual_seed(0)
    G, D = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)), TinyNet()
    opt_g, opt_d = AdamW(G.parameters(), lr=1e-3), AdamW(D.parameters(), lr=1e-3)
    moved = []
    for number, (x, _) in enumerate(batches):
        before = everything(D, [opt_d])
        z = torch.randn(len(x), 4)
        loss_d = D(x).mean() - D(G(z).detach()).mean()
        if bad == "D" and number == 2:
            loss_d = loss_d * NAN
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()
        moved.append(("D", bool(differences(before, everything(D, [opt_d])))))
        before = everything(G, [opt_g])
        loss_g = D(G(z)).mean()
        if bad == "G" and number == 2:
            loss_g = loss_g * NAN
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        moved.append(("G", bool(differences(before, everything(G, [opt_g])))))
    return {**everything(G, [opt_g]), **{f"D{k}": v for k, v in everything(D, [opt_d]).items()}}, moved


@pytest.mark.parametrize("bad", ["", "D", "G"])
def test_each_optimizer_of_a_gan_answers_for_its_own_loss(bad: str) -> None:
    batches = make_batches(5)
    plain, _ = gan(batches)
    with nanguard.install() as autopilot:
        guarded, moved = gan(batches, bad=bad)
    if not bad:
        assert differences(plain, guarded) == []
    assert all(torch.isfinite(v).all() for v in guarded.values() if isinstance(v, Tensor))
    stood_still = [place for place, (_, has_moved) in enumerate(moved) if not has_moved]
    assert stood_still == ([] if not bad else [4 if bad == "D" else 5])
    assert len(autopilot.incidents) == bool(bad)
    assert autopilot.num_optimizers == 2


@pytest.mark.parametrize("first_is_bad", [True, False])
def test_two_optimizers_of_one_loss_step_together_or_not_at_all(first_is_bad: bool) -> None:
    with nanguard.install() as autopilot:
        torch.manual_seed(0)
        body, head = nn.Linear(6, 4), nn.Linear(4, 3)
        one, two = AdamW(body.parameters()), SGD(head.parameters(), lr=0.1, momentum=0.9)
        for number, (x, y) in enumerate(make_batches(4)):
            one.zero_grad()
            two.zero_grad()
            F.cross_entropy(head(body(x)), y).backward()
            if number == 2:
                (body if first_is_bad else head).weight.grad[0, 0] = INF
            before = everything(nn.ModuleList([body, head]), [one, two])
            one.step()
            two.step()
            assert bool(differences(before, everything(nn.ModuleList([body, head]), [one, two]))) == (number != 2)
    assert autopilot.counts["skipped"] == 2
    assert len(autopilot.incidents) == 1


def test_names_are_those_of_the_program() -> None:
    with nanguard.install(diagnose="off") as autopilot:
        encoder, decoder = nn.Linear(6, 4), nn.Linear(4, 6)
        temperature = torch.ones(1, requires_grad=True)
        optimizer = AdamW([*encoder.parameters(), *decoder.parameters(), temperature])
        (decoder(encoder(torch.full((2, 6), NAN))) * temperature).sum().backward()
        optimizer.step()
    (incident,) = autopilot.incidents
    assert {"encoder.weight", "decoder.weight", "temperature"} <= set(incident.reading.gradients)


def test_names_say_which_network_of_several() -> None:
    """Both have a part of the same name; only one optimizer of two is bad."""

    def train() -> None:
        bad = torch.full((2, 6), NAN)
        generator, critic = nn.Sequential(nn.Linear(6, 6)), nn.Sequential(nn.Linear(6, 1))
        opt_g, opt_c = SGD(generator.parameters(), lr=0.1), SGD(critic.parameters(), lr=0.1)
        critic(generator(torch.ones(2, 6))).sum().backward()
        opt_g.step()
        opt_c.zero_grad()
        critic(bad).sum().backward()
        opt_c.step()

    with nanguard.install() as autopilot:
        train()
    (incident,) = autopilot.incidents
    assert incident.reading.gradients == ("critic.0.weight",)
    assert incident.diagnosis is not None
    assert incident.diagnosis.module == "critic.0"


def test_self_is_no_name() -> None:
    class Layer(nn.Linear):
        """Trains itself, as in forward-forward learning."""

        def __init__(self) -> None:
            super().__init__(6, 6)
            self.opt = SGD(self.parameters(), lr=0.1)

    with nanguard.install(diagnose="off") as autopilot:
        layers = [Layer(), Layer()]
        layers[0](torch.full((2, 6), NAN)).sum().backward()
        layers[0].opt.step()
    (incident,) = autopilot.incidents
    assert incident.reading.gradients == ("layer.weight",)


class Handed(SGD):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)


class Coders:
    """Makes its optimizer in every way that people write it."""

    def __init__(self) -> None:
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 6)
        self.scale = torch.ones(1, requires_grad=True)
        self.net = nn.ModuleDict({"encoder": self.encoder, "decoder": self.decoder})

    def groups(self) -> Optimizer:
        return AdamW([{"params": self.encoder.parameters()}, {"lr": 1, "params": self.decoder.parameters()}, {"params": [self.scale]}])  # fmt: skip # noqa: E501

    def lists(self) -> Optimizer:
        params = list(self.encoder.parameters()) + list(self.decoder.parameters())
        params.append(self.scale)
        return SGD(params, lr=0.1)

    def loop(self) -> Optimizer:
        encoder, decoder, scale = self.encoder, self.decoder, self.scale
        params = [p for part in (encoder, decoder) for p in part.parameters() if p.requires_grad]; opt = SGD(params + [scale], lr=0.1)  # fmt: skip # noqa: E501, E702, RUF005
        return opt  # noqa: RET504

    def handed(self) -> Optimizer:
        def make(things: Any) -> Optimizer:
            return Handed(things, lr=0.1)

        return make(
            itertools.chain(self.encoder.parameters(), self.decoder.parameters(), [self.scale]),
        )

    def parts(self) -> Optimizer:
        net, scale = self.net, self.scale
        opt = SGD(lr=0.1, params=[*net.encoder.parameters(), *net.decoder.parameters(), scale])
        return opt  # noqa: RET504


@pytest.mark.parametrize("way", ["groups", "lists", "loop", "handed", "parts"])
def test_names_are_read_in_the_line_that_makes_the_optimizer(way: str) -> None:
    coders = Coders()
    if way != "parts":
        del coders.net
    with nanguard.install(diagnose="off") as autopilot:
        opt = getattr(coders, way)()
        (coders.decoder(coders.encoder(torch.full((2, 6), NAN))) * coders.scale).sum().backward()
        opt.step()
        (hosted,) = autopilot._monitor.registry.hosted_steps
    (incident,) = autopilot.incidents
    prefix = "net." if way == "parts" else ""
    expected = {f"{prefix}encoder.weight", f"{prefix}decoder.weight", "scale"}
    assert expected <= set(incident.reading.gradients)
    assert hosted.name == "opt"


def test_a_name_that_may_be_wrong_is_not_given() -> None:
    def build(count: int) -> list[Tensor]:
        return [torch.ones(1, requires_grad=True) for _ in range(count)]

    with nanguard.install(diagnose="off") as autopilot:
        params = build(2)
        optimizer = SGD(params, lr=0.1)
        (params[0] * params[1] * NAN).sum().backward()
        optimizer.step()
    (incident,) = autopilot.incidents
    assert set(incident.reading.gradients) == {"params[0]", "params[1]"}


# ---- loss scaling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", ["nothing", "gradient", "loss"])
def test_a_grad_scaler_goes_on_as_ever(fused: bool, bad: str) -> None:
    def train() -> tuple[dict[str, Any], list[float]]:
        torch.manual_seed(0)
        model = TinyNet()
        optimizer = AdamW(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scales = []
        for number, (x, y) in enumerate(make_batches(6)):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x).float(), y)
            if bad == "loss" and number == 3:
                loss = loss * NAN
            scaler.scale(loss).backward()
            if bad == "gradient" and number == 3:
                model.out.weight.grad[0, 0] = INF
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return everything(model, [optimizer]), scales

    plain = train()
    with nanguard.install() as autopilot:
        guarded = train()
    assert guarded[1] == plain[1]
    # A GradScaler protects weights and not BatchNorm's statistics; from a bad loss the guard does.
    assert bad == "loss" or differences(plain[0], guarded[0]) == []
    assert all(torch.isfinite(v).all() for v in guarded[0].values() if isinstance(v, Tensor))
    assert autopilot.counts["backed_off"] == (bad == "gradient")
    assert len(autopilot.incidents) == (bad == "loss")
    assert autopilot.counts["applied"] == 6 - (bad != "nothing")


def test_losses_and_norms_are_told_in_their_true_size(tmp_path: Path) -> None:
    def train(*, scaled: bool, fused: bool, run_dir: Path) -> Any:
        with nanguard.install(run_dir=run_dir):
            torch.manual_seed(0)
            model = TinyNet()
            optimizer = SGD(model.parameters(), lr=0.1, fused=fused)
            scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, enabled=scaled)
            for x, y in make_batches(4):
                optimizer.zero_grad()
                scaler.scale(F.cross_entropy(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
        return nanguard.read_run(run_dir)

    plain = train(scaled=False, fused=False, run_dir=tmp_path / "plain")
    assert len(plain.steps) == 4
    for fused in (False, True):
        scaled = train(scaled=True, fused=fused, run_dir=tmp_path / f"scaled {fused}")
        for one, other in zip(plain.steps, scaled.steps, strict=True):
            assert other.loss == pytest.approx(one.loss, rel=1e-4)
            assert other.norms == pytest.approx(one.norms, rel=1e-3)
            assert (one.scale, other.scale) == (None, 4096.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_clipping_can_be_asked_for(fused: bool, scaled: bool) -> None:
    def train(*, clip: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model = TinyNet()
        optimizer = SGD(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
        for x, y in make_batches(4):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x * 5), y)).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        return everything(model, [optimizer])

    by_program = train(clip=True)
    with nanguard.install(max_norm=0.1):
        by_guard = train(clip=False)
    for name in by_program:
        if isinstance(by_program[name], Tensor):
            assert torch.allclose(by_program[name].double(), by_guard[name].double(), rtol=1e-4, atol=1e-6), name


# ---- programs without an optimizer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["in place", "data", "new tensors", "autograd.grad"])
def test_a_program_that_updates_its_tensors_itself(style: str, caplog: pytest.LogCaptureFixture) -> None:
    def train(lr: float) -> Tensor:
        w = torch.tensor([0.5, 0.25], requires_grad=True)
        for _ in range(8):
            loss = (torch.exp(w) * 2).sum()
            if style == "autograd.grad":
                (grad,) = torch.autograd.grad(loss, [w])
                w = (w - lr * grad).detach().requires_grad_()
                continue
            loss.backward()
            if style == "in place":
                with torch.no_grad():
                    w -= lr * w.grad
                w.grad = None
            elif style == "data":
                w.data = w.data - lr * w.grad.data
                w.grad.zero_()
            else:
                w = (w - lr * w.grad).detach().requires_grad_()
        return w.detach()

    plain = train(0.1)
    assert not torch.isfinite(train(-40.0)).all()
    with nanguard.install() as autopilot:
        assert torch.equal(plain, train(0.1))
        assert not autopilot.incidents
        assert torch.isfinite(train(-40.0)).all()
    assert autopilot.num_optimizers == 1
    known = [each.diagnosis for each in autopilot.incidents if each.diagnosis is not None and each.diagnosis.op]
    assert {(each.op, each.cause) for each in known} == {("exp", "exp_overflow")}
    assert {each.source.text for each in known if each.source} == {"loss = (torch.exp(w) * 2).sum()"}


def test_modules_that_overflow_in_the_programs_autocast_are_kept_in_fp32() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(6, 8), nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            return (self.query(x) @ self.key(x).mT).softmax(-1)

    with nanguard.install() as autopilot:
        torch.manual_seed(0)
        model = nn.Sequential(Scores(), nn.Linear(5, 1))
        optimizer = SGD(model.parameters(), lr=1e-5)
        losses = []
        for number in range(12):
            with torch.autocast("cpu", torch.float16):
                out = model(torch.randn(2, 5, 6) * (2000 if number > 2 else 1))
            loss = out.float().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert [incident.outcome.action.response for incident in autopilot.incidents] == [*["skip"] * 3, "raise_precision"]
    assert [number for number, loss in enumerate(losses) if loss != loss] == [3, 4, 5, 6]
    first = autopilot.incidents[0].diagnosis
    assert first is not None
    assert first.cause == "overflow_fp16"
    assert first.fix.worked is True


# ---- what is found out -----------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.mT).masked_fill(~mask, -INF)
        return scores.softmax(-1) @ v


def test_a_fault_in_a_module_is_found_at_once() -> None:
    with nanguard.install() as autopilot:
        model = Attention()
        optimizer = AdamW(model.parameters())
        mask = torch.ones(3, 3, dtype=torch.bool)
        for number in range(4):
            mask[1] = number != 2
            loss = model(torch.randn(2, 3, 6), mask).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (incident,) = autopilot.incidents
    diagnosis = incident.diagnosis
    assert diagnosis is not None
    assert (diagnosis.cause, diagnosis.capture) == ("masked_softmax_all_neg_inf", "tape")
    assert diagnosis.source is not None
    assert diagnosis.source.text == "return scores.softmax(-1) @ v"


def test_modules_that_are_used_by_their_parts_are_listened_to() -> None:
    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = TinyNet(), nn.Linear(3, 6)

    with nanguard.install() as autopilot:
        coder = Coder()
        optimizer = SGD(coder.parameters(), lr=0.1)
        for x, _ in poisoned(make_batches(5), 4):
            optimizer.zero_grad()
            coder.up(coder.down(x)).square().mean().backward()
            optimizer.step()
    (incident,) = autopilot.incidents
    assert incident.diagnosis is not None
    assert incident.diagnosis.capture == "tape"
    assert (incident.diagnosis.cause, incident.diagnosis.module) == ("input_nonfinite", "down.inp")


def test_with_a_trace_the_very_first_fault_in_a_loss_is_found() -> None:
    def train() -> None:
        w = torch.tensor([1.0], requires_grad=True)
        optimizer = SGD([w], lr=0.5)
        for number in range(4):
            loss = torch.log(w - w).sum() if number == 2 else torch.sqrt(w).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    with nanguard.install(trace=True) as autopilot:
        train()
    (incident,) = autopilot.incidents
    assert incident.diagnosis is not None
    assert (incident.diagnosis.op, incident.diagnosis.cause) == ("log", "log_of_zero")
    assert incident.diagnosis.is_line_traced
    with nanguard.install() as autopilot:
        train()
    (incident,) = autopilot.incidents
    assert incident.diagnosis is not None
    assert (incident.diagnosis.op, incident.diagnosis.cause) == ("log", "log_of_zero")
    assert incident.diagnosis.source is not None
    assert incident.diagnosis.source.text == "loss = torch.log(w - w).sum() if number == 2 else torch.sqrt(w).sum()"
    assert (incident.diagnosis.capture, incident.diagnosis.is_line_traced) == ("tape", True)


def neg_log(p: Tensor) -> Tensor:
    return -torch.log(p)


@pytest.mark.parametrize(
    ("compute", "op", "cause"),
    [
        (lambda w: neg_log(w - w).sum(), "log", "log_of_zero"),
        (lambda w: (w - 3).log().sum(), "log", "log_of_negative"),
        (lambda w: torch.exp(w * 200).sum(), "exp", "exp_overflow"),
        (lambda w: (w / (w - w)).sum(), "div", "div_by_zero"),
        (lambda w: ((w - w) / (w - w)).sum(), "div", "zero_over_zero"),
        (lambda w: (w / torch.zeros(2)).sum(), "div", "div_by_zero"),
        (lambda w: torch.sqrt(w * (w - 5)).sum(), "sqrt", "sqrt_of_negative"),
        (lambda w: ((w - 5) ** 0.5).sum(), "pow", "pow_negative_base"),
        (lambda w: torch.acos(w + 1).sum(), "acos", "acos_asin_domain"),
        (lambda w: (torch.exp(w * 200) * (w - w)).sum(), "exp", "exp_overflow"),
    ],
)
def test_a_loss_that_is_not_finite_is_taken_apart_before_it_is_gone(
    compute: Callable[[Tensor], Tensor], op: str, cause: str
) -> None:
    with nanguard.install() as autopilot:
        w = torch.tensor([1.0, 2.0], requires_grad=True)
        optimizer = SGD([w], lr=0.1)
        loss = compute(w)
        loss.backward()
        optimizer.step()
    (incident,) = autopilot.incidents
    assert incident.diagnosis is not None
    assert (incident.diagnosis.op, incident.diagnosis.cause) == (op, cause)
    assert torch.equal(w, torch.tensor([1.0, 2.0]))


def test_a_forked_process_is_left_alone() -> None:
    class Data(torch.utils.data.Dataset[Tensor]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Tensor:
            return torch.full((6,), float(index))

    with nanguard.install(trace=True) as autopilot:
        model = TinyNet()
        optimizer = SGD(model.parameters(), lr=0.1)
        for x in torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=1, multiprocessing_context="fork"):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert autopilot.counts["applied"] == 2


# ---- policies, arguments, and our own faults -------------------------------------------------------------------------


def test_a_policy_may_halt() -> None:
    model = TinyNet()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with nanguard.install(policy=Policy([Halt()], divergence=None)):
        optimizer = SGD(model.parameters(), lr=0.1)
        model(torch.full((4, 6), NAN)).sum().backward()
        with pytest.raises(nanguard.NonFiniteError, match="non-finite loss at step 0"):
            optimizer.step()
    assert same(before, dict(model.state_dict()))


def test_by_default_it_does_not_halt_for_bad_steps() -> None:
    with nanguard.install(diagnose="off") as autopilot:
        program(ALL["AdamW foreach"], poisoned(make_batches(40), *range(5, 40)))
    assert autopilot.counts["skipped"] == 35


def test_by_default_it_halts_when_nothing_is_learned_any_more() -> None:
    with nanguard.install(diagnose="off") as autopilot:
        model = TinyNet()
        optimizer = AdamW(model.parameters())
        with pytest.raises(nanguard.NonFiniteError, match="none of the 100 steps before it was applied"):
            for x, y in poisoned(make_batches(200), *range(5, 200)):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    assert (autopilot.counts["applied"], autopilot.counts["skipped"], autopilot.counts["halted"]) == (5, 100, 1)


def test_two_optimizers_that_are_bad_in_turn_make_no_progress_either() -> None:
    """All step or none does: each is refused every other time only, and still nothing is ever applied."""
    with nanguard.install(policy=Policy([Skip(times=None)], max_consecutive_skips=20), diagnose="off") as autopilot:
        torch.manual_seed(0)
        one, two = nn.Linear(3, 3), nn.Linear(3, 3)
        optimizers = [SGD(one.parameters(), lr=0.1), SGD(two.parameters(), lr=0.1)]
        with pytest.raises(nanguard.NonFiniteError, match="steps before it was applied"):
            for number in range(100):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                two(one(torch.ones(2, 3))).sum().backward()
                bad = (one if number % 2 else two).weight.grad
                assert bad is not None
                bad.fill_(NAN)
                for optimizer in optimizers:
                    optimizer.step()
    assert autopilot.counts["applied"] == 0


def test_damage_is_rolled_back() -> None:
    """The program itself writes NaN to a weight between two steps."""
    with nanguard.install() as autopilot:
        torch.manual_seed(0)
        model = TinyNet()
        optimizer = AdamW(model.parameters())
        for number, (x, y) in enumerate(make_batches(70)):
            if number == 60:
                model.inp.weight.data[0, 0] = NAN
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    state = everything(model, [optimizer])
    assert all(torch.isfinite(value).all() for value in state.values() if isinstance(value, Tensor))
    assert autopilot.counts["rolled_back"] == 1


@pytest.mark.parametrize("name", ["fused AdamW", "AdamW foreach"])
def test_a_halt_on_damage_leaves_the_newest_good_snapshot(name: str) -> None:
    policy = Policy([Rollback(times=1, per="run"), Halt()], divergence=None, max_norm=None)
    with nanguard.install(policy=policy, diagnose="off") as autopilot:
        torch.manual_seed(0)
        model = TinyNet()
        optimizer = ALL[name](model.parameters())

        def train() -> None:
            for number, (x, y) in enumerate(make_batches(90)):
                if number in (60, 75):
                    model.inp.weight.data[0, 0] = NAN
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        with pytest.raises(nanguard.NonFiniteError, match=r"(?s)damaged state.*Put back: .*A checkpoint saved now is"):
            train()
        state = everything(model, [optimizer])
    assert all(torch.isfinite(value).all() for value in state.values() if isinstance(value, Tensor))
    assert autopilot.counts["rolled_back"] == 1
    assert autopilot.counts["halted"] == 1


class Broken(SGD):
    """Makes NaN of finite gradients, in its last call."""

    def step(self, closure: Any = None) -> Any:
        calls = self.param_groups[0]["calls"] = self.param_groups[0].get("calls", 0) + 1
        with torch.no_grad():
            if calls == 5:
                self.param_groups[0]["params"][0].mul_(NAN)
        return super().step(closure)


def test_an_optimizer_that_is_not_torchs_is_looked_at_from_the_first_update_on() -> None:
    with nanguard.install() as autopilot:
        state = program(lambda params: Broken(params, lr=0.01), make_batches(5))
    assert all(torch.isfinite(value).all() for value in state.values() if isinstance(value, Tensor))
    (incident,) = autopilot.incidents
    assert incident.reading.found == ("update",)
    assert incident.diagnosis is not None
    assert incident.diagnosis.source is not None
    assert incident.diagnosis.source.text == 'self.param_groups[0]["params"][0].mul_(NAN)'


class KeepsBest(SGD):
    """Its state begins with Inf."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("best", torch.tensor(INF))
        return super().step(closure)


def test_state_may_begin_with_infinity() -> None:
    with nanguard.install() as autopilot:
        program(lambda params: KeepsBest(params, lr=0.01), make_batches(5))
    assert autopilot.counts["applied"] == 5


def test_optimizers_that_step_inside_backward() -> None:
    """One for each parameter, to have no gradients of the whole model at once."""

    def train(batches: Batches) -> dict[str, Any]:
        torch.manual_seed(0)
        model = TinyNet()
        optimizers = {p: AdamW([p], lr=0.01) for p in model.parameters()}

        def update(p: Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        handles = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
        for handle in handles:
            handle.remove()
        return everything(model, optimizers.values())

    plain = train(make_batches(5))
    with nanguard.install() as autopilot:
        assert differences(plain, train(make_batches(5))) == []
        state = train(poisoned(make_batches(5), 2))
    assert all(torch.isfinite(value).all() for value in state.values() if isinstance(value, Tensor))
    assert autopilot.incidents


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_whatever_the_default_dtype(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with nanguard.install() as autopilot:
            states, _ = gan([(x.to(dtype), y) for x, y in make_batches(3)], bad="D")
    finally:
        torch.set_default_dtype(before)
    assert all(torch.isfinite(value).all() for value in states.values() if isinstance(value, Tensor))
    assert len(autopilot.incidents) == 1


def test_a_fault_of_our_own_is_said_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("a bug in the guard")

    plain = program(ALL["AdamW foreach"], make_batches(4))
    monkeypatch.setattr(HostedStep, "_fill", fails)
    with nanguard.install():
        assert differences(plain, program(ALL["AdamW foreach"], make_batches(4))) == []
    assert "nanguard failed at a step of AdamW, which is not guarded from now on" in caplog.text


def test_what_a_program_raises_in_its_step_is_raised() -> None:
    class Picky(SGD):
        def step(self, closure: Any = None) -> Any:
            raise KeyError("no such state")

    with nanguard.install():
        optimizer = Picky(TinyNet().parameters(), lr=0.1)
        with pytest.raises(KeyError, match="no such state"):
            optimizer.step()


def test_what_cannot_be_guarded_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its own jit
        file = io.BytesIO()
        torch.jit.save(torch.jit.script(nn.Linear(6, 3)), file)
        file.seek(0)
        model = torch.jit.load(file)  # of one that was scripted here, the module itself would be guarded
    with nanguard.install() as autopilot:
        optimizer = SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
    assert "SGD is not guarded: the model has scripted modules" in caplog.text
    assert autopilot.num_optimizers == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "default"}, "policy must be a Policy or None, got 'default'"),
        ({"max_norm": -1.0}, "max_norm must be a finite number above zero, got -1.0"),
        ({"max_norm": NAN}, "max_norm must be a finite number above zero"),
        ({"sync": "never"}, "sync must be one of 'auto', 'eager', 'late', got 'never'"),
        ({"diagnose": True}, "diagnose must be one of"),
        ({"capture": "all"}, "capture must be one of"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nanguard.install(**options)


def test_a_cell_that_is_run_twice_goes_on_with_the_same_autopilot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with nanguard.install(max_norm=1.0, run_dir=tmp_path) as first:
        w = torch.ones(2, requires_grad=True)
        optimizer = SGD([w], lr=0.1)
        assert nanguard.install(max_norm=1.0, run_dir=tmp_path) is first
        assert "called before with the same settings" in caplog.text
        (w * NAN).sum().backward()
        optimizer.step()
    assert len(first.incidents) == 1
    assert torch.equal(w, torch.ones(2))


def test_other_settings_end_the_first_autopilot(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = SGD.step
    first = nanguard.install(run_dir=tmp_path)
    w = torch.ones(2, requires_grad=True)
    old = SGD([w], lr=0.1)
    w.sum().backward()
    old.step()
    with nanguard.install() as second:
        assert second is not first
        assert "called again with other settings" in caplog.text
        assert nanguard.read_run(tmp_path).is_over
        v = torch.ones(2, requires_grad=True)
        new = SGD([v], lr=0.1)
        for optimizer, tensor in ((new, v), (old, w)):
            (tensor * NAN).sum().backward()
            optimizer.step()
        assert torch.equal(v, torch.ones(2))
        assert w.isnan().all(), "as it is logged, an optimizer of the first one is a plain one now"
    assert (len(first.incidents), len(second.incidents)) == (0, 1)
    assert first.counts["applied"] == 1
    assert SGD.step is plain
    first.uninstall()


def test_the_run_log_tells_of_all_optimizers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    with nanguard.install(run_dir=tmp_path, policy=Policy([Skip(times=None)], divergence=None)):
        gan(make_batches(5), bad="G")
    run = nanguard.read_run(tmp_path)
    assert run.troubles == ()
    assert {step.optimizer for step in run.steps} == {"opt_g", "opt_d"}
    assert len(run.steps) == 10
    assert [(step.optimizer, step.step) for step in run.steps if step.skipped] == [("opt_g", 2)]
    assert [incident.number for incident in run.incidents] == [1]
    assert run.is_over


# ---- what is said of the schedule ----------------------------------------------------------------------------------

WITH_SCHEDULE = "weights, optimizer state, buffers and schedule, exactly as before this step"
WITHOUT = "weights, optimizer state and buffers, exactly as before this step"


@pytest.mark.parametrize(
    ("host", "said", "advanced"),
    [("run", WITHOUT, 6), ("guard that has the scheduler", WITH_SCHEDULE, 5), ("guard without one", WITHOUT, 6)],
)
def test_a_schedule_is_said_to_be_kept_only_if_it_was(
    host: str, said: str, advanced: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On the panel, in ``nanguard explain`` and in the report."""
    torch.manual_seed(0)
    model = TinyNet()
    batches = poisoned(make_batches(6), 2)

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    with contextlib.ExitStack() as stack:
        if host == "run":
            stack.enter_context(nanguard.install(run_dir=tmp_path / "run"))
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = OneCycleLR(optimizer, 0.05, total_steps=100, cycle_momentum=False)
        guard = None
        if host != "run":
            given = scheduler if host == "guard that has the scheduler" else None
            guard = stack.enter_context(nanguard.Guard(model, optimizer, scheduler=given, run_dir=tmp_path / "run"))
        for batch in batches:
            if guard is None:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
            else:
                guard.step(loss_of, batch)
            if host != "guard that has the scheduler":
                scheduler.step()
    assert scheduler.last_epoch == advanced
    explained = CliRunner().invoke(app, ["explain", str(tmp_path / "run")]).stdout
    for text in (caplog.text, explained, make_report([tmp_path / "run"]).html):
        assert said in text
        assert (WITH_SCHEDULE in text) == (said == WITH_SCHEDULE)


@pytest.mark.parametrize("host", ["run", "guard that has the scheduler", "guard without one"])
def test_so_does_a_halt(host: str) -> None:
    model, halts = nn.Linear(2, 1), Policy([Halt()])
    bad = torch.full((1, 2), NAN)
    with contextlib.ExitStack() as stack:
        if host == "run":
            stack.enter_context(nanguard.install(policy=halts))
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = OneCycleLR(optimizer, 0.05, total_steps=100, cycle_momentum=False)
        with pytest.raises(nanguard.NonFiniteError) as halted:
            if host == "run":
                model(bad).sum().backward()
                optimizer.step()
            else:
                given = scheduler if host == "guard that has the scheduler" else None
                guard = nanguard.Guard(model, optimizer, scheduler=given, policy=halts)
                guard.step(lambda m, x: m(x).sum(), bad)
    assert (WITH_SCHEDULE if host == "guard that has the scheduler" else WITHOUT) in str(halted.value)
