"""Forward passes that a program throws away itself: what they did to buffers does not spoil the next good step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW

import nanguard
from helpers import INF, NAN, TinyNet, differences, everything, make_batches, poisoned
from nanguard import Guard
from nanguard.records.steps import Incident
from nanguard.state.readback import PendingCopy
from nanguard.state.undo import Undo
from nanguard.step.discarded import _NOT_USED

Batches = list[tuple[Tensor, Tensor]]
FUSED = {"eager": False, "late": True}


def net() -> TinyNet:
    """Without dropout: random numbers that a bad batch has drawn would make the next batches differ."""
    torch.manual_seed(0)
    model = TinyNet()
    model.drop.p = 0.0
    return model


def trained(batches: Batches, *, fused: bool = False, accumulate: int = 1, check: str = "before") -> dict[str, Any]:
    """A program that looks at its loss and leaves bad batches out, ``before`` or ``after`` the backward pass."""
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01, fused=fused)
    for first in range(0, len(batches), accumulate):
        done = 0
        for x, y in batches[first : first + accumulate]:
            loss = F.cross_entropy(model(x), y)
            if check == "before" and not torch.isfinite(loss):
                continue
            loss.backward()
            if check == "after" and not torch.isfinite(loss):
                optimizer.zero_grad()
                continue
            done += 1
        if done:
            optimizer.step()
            optimizer.zero_grad()
    return everything(model, [optimizer])


def without(batches: Batches, *places: int) -> Batches:
    return [batch for place, batch in enumerate(batches) if place not in places]


def assert_none_was_refused(incidents: Sequence[Incident]) -> None:
    """What the program leaves out itself is explained; the steps that it makes are all let through."""
    left_out = {_NOT_USED, "the program ended before its optimizer stepped"}
    assert {incident.outcome.did for incident in incidents} <= left_out


@pytest.mark.parametrize("check", ["before", "after"])
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("sync", FUSED)
def test_a_program_that_leaves_a_bad_batch_out_has_never_seen_it(sync: Any, value: float, check: str) -> None:
    batches = make_batches(8)
    plain = trained(without(batches, 0, 3, 4), fused=FUSED[sync])
    with nanguard.install(sync=sync) as autopilot:
        guarded = trained(poisoned(batches, 0, 3, 4, value=value), fused=FUSED[sync], check=check)
    assert differences(plain, guarded) == []
    assert_none_was_refused(autopilot.incidents)
    assert autopilot.counts["applied"] == 5


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("sync", FUSED)
def test_a_bad_micro_batch_that_is_left_out_does_not_spoil_its_step(sync: Any, place: int) -> None:
    """Wherever it is in the step: statistics of the good ones before and after it stay."""
    bad = poisoned(make_batches(9), 3 + place)
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01, fused=FUSED[sync])
    for number, (x, y) in enumerate(bad):
        if number != 3 + place:
            F.cross_entropy(model(x), y).backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    plain = everything(model, [optimizer])
    with nanguard.install(sync=sync) as autopilot:
        guarded = trained(bad, fused=FUSED[sync], accumulate=3)
    assert differences(plain, guarded) == []
    assert_none_was_refused(autopilot.incidents)
    assert autopilot.counts["applied"] == 3


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("sync", FUSED)
def test_a_bad_micro_batch_with_finite_gradients_was_not_left_out(sync: Any, place: int) -> None:
    """A loss over no labels is NaN and its gradients are 0. The program has not cleared them, so it uses them."""
    batches = make_batches(9)
    batches[3 + place][1].fill_(-100)
    with nanguard.install(sync=sync) as autopilot:
        model = net()
        optimizer = AdamW(model.parameters(), lr=0.01, fused=FUSED[sync])
        for number, (x, y) in enumerate(batches):
            F.cross_entropy(model(x), y).backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    (incident,) = autopilot.incidents
    assert incident.diagnosis is not None
    assert (incident.outcome.did, incident.diagnosis.cause) == ("", "all_labels_ignored")
    assert incident.reading.step == 1


def test_buffers_are_sound_before_they_are_used_or_saved() -> None:
    """The last batch was left out; the program then evaluates."""
    batches = poisoned(make_batches(4), 3)
    with nanguard.install() as autopilot:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model.train()
            for x, y in batches:
                loss = F.cross_entropy(model(x), y)
                if torch.isfinite(loss):
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            model.eval()
            with torch.no_grad():
                assert torch.isfinite(model(batches[0][0])).all()
        model.train()
        model(batches[3][0])
        assert autopilot.unsound() == ()
    assert torch.isfinite(model.norm.running_mean).all()
    assert_none_was_refused(autopilot.incidents)


def test_finite_statistics_of_a_batch_that_is_left_out_stay() -> None:
    def program() -> dict[str, Any]:
        model = net()
        optimizer = AdamW(model.parameters())
        for number, (x, y) in enumerate(make_batches(6)):
            loss = F.cross_entropy(model(x), y) / (0.0 if number == 2 else 1.0)
            if not torch.isfinite(loss):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return everything(model, [optimizer])

    plain = program()
    with nanguard.install():
        assert differences(plain, program()) == []


def test_what_a_program_writes_to_other_buffers_stays() -> None:
    class Annealed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TinyNet()
            self.register_buffer("temperature", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) / self.temperature

    with nanguard.install() as autopilot:
        model = Annealed()
        optimizer = AdamW(model.parameters())
        for number, (x, y) in enumerate(poisoned(make_batches(6), 2)):
            model.temperature.fill_(1.0 + number)
            loss = F.cross_entropy(model(x), y)
            assert model.temperature == 1.0 + number
            if not torch.isfinite(loss):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert_none_was_refused(autopilot.incidents)


class Scaled(nn.Module):
    """Autograd keeps its buffer for the backward pass; ``spoil`` makes the other one overflow, and not the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 3)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, *, spoil: bool = False) -> Tensor:
        self.seen.add_(INF if spoil else 1.0)
        return self.lin(x) * self.scale


def test_several_passes_of_one_loss_are_one_step() -> None:
    def program() -> dict[str, Any]:
        torch.manual_seed(0)
        model = Scaled()
        optimizer = SGD(model.parameters(), lr=0.1)
        for x, y in make_batches(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x) + model(-x) + model(2 * x), y).backward()
            optimizer.step()
        return everything(model, [optimizer])

    plain = program()
    with nanguard.install():
        assert differences(plain, program()) == []


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_buffer_that_a_used_pass_has_spoilt_is_still_found(accumulate: int) -> None:
    with nanguard.install() as autopilot:
        model = Scaled()
        optimizer = SGD(model.parameters(), lr=0.1)
        for number, (x, y) in enumerate(make_batches(8)):
            F.cross_entropy(model(x, spoil=number == 4), y).backward()
            if (number + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    (incident,) = autopilot.incidents
    assert incident.reading.found == ("buffers",)
    assert model.seen == 8 - accumulate


def test_a_model_whose_loss_was_left_out_while_another_went_on() -> None:
    """The other one's step does not make NaN the state that this one begins with."""
    with nanguard.install() as autopilot:
        models = [TinyNet(), TinyNet()]
        optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
        for good, (x, y) in zip(make_batches(6, seed=1), poisoned(make_batches(6), 2), strict=True):
            for model, optimizer, batch in zip(models, optimizers, (good, (x, y)), strict=True):
                loss = F.cross_entropy(model(batch[0]), batch[1])
                if torch.isfinite(loss):
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
    assert_none_was_refused(autopilot.incidents)
    assert all(torch.isfinite(model.norm.running_mean).all() for model in models)
    assert [int(model.norm.num_batches_tracked) for model in models] == [6, 5]


def test_a_line_search_that_went_too_far() -> None:
    with nanguard.install():
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        optimizer = LBFGS(model.parameters(), max_iter=4)
        (x, y), calls = make_batches(1)[0], [0]

        def closure() -> Tensor:
            calls[0] += 1
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x * (NAN if calls[0] == 2 else 1.0)), y)
            if torch.isfinite(loss):
                loss.backward()
            return loss

        optimizer.step(closure)
        optimizer.step(closure)
    assert all(torch.isfinite(buffer).all() for buffer in model.buffers())


# ---- a loop of the user's own, under Guard ---------------------------------------------------------------------------


def own_loop(batches: Batches, *, accumulate: int = 1, in_epoch: bool = False, **options: Any) -> tuple[Guard, Any]:
    model = net()
    fused = options.get("sync") == "late"
    optimizer = AdamW(model.parameters(), lr=0.01, fused=fused)
    guard = Guard(model, optimizer, precision="fp32", accumulate=accumulate, **options)
    done = 0
    for x, y in guard.epoch(batches) if in_epoch else batches:
        with guard.autocast():
            loss = F.cross_entropy(model(x), y)
        if not torch.isfinite(loss):
            continue
        guard.backward(loss)
        done += 1
        if done % accumulate == 0:
            guard.update()
    guard.settle()
    return guard, everything(model, [optimizer])


@pytest.mark.parametrize("in_epoch", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("sync", FUSED)
def test_a_guarded_loop_that_leaves_a_bad_batch_out(sync: Any, accumulate: int, in_epoch: bool) -> None:
    batches, options = make_batches(10), {"sync": sync, "accumulate": accumulate, "in_epoch": in_epoch}
    _, plain = own_loop(without(batches, 0, 3, 4, 9), **options)
    guard, guarded = own_loop(poisoned(batches, 0, 3, 4, 9), **options)
    assert differences(plain, guarded) == []
    assert_none_was_refused(guard.incidents)
    assert guard.counts["applied"] == 6 // accumulate


@pytest.mark.parametrize("how", ["under the autopilot", "in a guarded loop"])
@pytest.mark.parametrize("sync", FUSED)
def test_a_batch_that_is_left_out_is_explained(sync: Any, how: str) -> None:
    batches = poisoned(make_batches(8), 0, 3, 4)
    if how == "under the autopilot":
        with nanguard.install(sync=sync) as autopilot:
            trained(batches, fused=FUSED[sync])
        incidents = autopilot.incidents
    else:
        guard, _ = own_loop(batches, sync=sync, in_epoch=True)
        incidents = guard.incidents
    assert [incident.outcome.did for incident in incidents] == [_NOT_USED] * 3
    first = incidents[0].diagnosis
    assert first is not None
    assert (first.cause, first.op) == ("input_nonfinite", "addmm")


@pytest.mark.parametrize("sync", FUSED)
def test_a_batch_that_is_left_out_because_of_its_loss_is_explained(sync: Any) -> None:
    """The results of the model are finite: a target of CTC is too long. The program looks at the loss of each batch."""
    lengths = [1, 1, 3, 1, 1, 1]
    with nanguard.install(sync=sync) as autopilot:
        model = nn.Linear(4, 5)
        optimizer = AdamW(model.parameters(), fused=FUSED[sync])
        for length in lengths:
            logs = model(torch.randn(2, 4, 4)).log_softmax(-1)  # two frames of four samples
            targets = torch.tensor([[1, 2, 3]] * 4)
            loss = F.ctc_loss(logs, targets, torch.full((4,), 2), torch.tensor([1, 1, length, 1]))
            optimizer.zero_grad()
            if loss.item() == INF:
                continue
            loss.backward()
            optimizer.step()
    (incident,) = autopilot.incidents
    assert (incident.outcome.did, incident.reading.found) == (_NOT_USED, ("loss",))
    assert incident.diagnosis is not None
    found = incident.diagnosis
    assert (found.cause, found.op, found.samples) == ("ctc_inf", "ctc_loss", (2,))
    assert autopilot.counts["applied"] == 5


@pytest.mark.parametrize("sync", FUSED)
def test_a_number_beside_a_finite_loss_may_be_infinite_in_a_pass_that_is_left_out(sync: Any) -> None:
    """The program logs perplexities, and trains on every other batch."""
    with nanguard.install(sync=sync) as autopilot:
        model = nn.Linear(4, 5)
        optimizer = AdamW(model.parameters(), fused=FUSED[sync])
        for step in range(6):
            loss = model(torch.randn(8, 4)).square().mean() + 100.0
            perplexity = loss.exp()
            assert perplexity.item() == INF
            if step % 2:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    assert not autopilot.incidents
    assert autopilot.counts["applied"] == 3


def test_a_device_that_has_not_answered_is_asked_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PendingCopy, "has_arrived", lambda copy: False)
    guard, _ = own_loop(poisoned(make_batches(4), 1), sync="late")
    (incident,) = guard.incidents
    assert incident.outcome.did == _NOT_USED
    assert guard.counts["applied"] == 3


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("sync", FUSED)
def test_a_pass_whose_results_torch_cannot_be_asked_about_is_left_alone(sync: Any) -> None:
    class Compressed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(x).to_sparse_csr()

    model = Compressed()
    guard = Guard(model, AdamW(model.parameters(), fused=FUSED[sync]), precision="fp32", sync=sync)
    for step in range(4):
        with guard.autocast():
            out = model(torch.randn(4, 3) * (NAN if step == 1 else 1.0))
        if step != 1:
            guard.backward(out.to_dense().square().mean())
            guard.update()
        del out
    guard.settle()
    assert guard.counts["applied"] == 3


def test_a_validation_after_a_batch_that_was_left_out() -> None:
    bad = poisoned(make_batches(3), 2)
    guard, _ = own_loop(bad[:2])
    with guard.autocast():
        guard.model(bad[2][0])
    guard.model.eval()
    with torch.no_grad(), guard.autocast():
        assert torch.isfinite(guard.model(bad[0][0])).all()


# ---- the mechanism ---------------------------------------------------------------------------------------------------


def by_host(undo: Undo, flag: Tensor | None) -> None:
    undo.mend_(flag)


def by_device(undo: Undo, flag: Tensor | None) -> None:
    """As on a GPU, where nobody may be asked."""
    with torch.no_grad():
        undo._mend_by_device_(flag)


@pytest.mark.parametrize("mend", [by_host, by_device])
@pytest.mark.parametrize("flag", [None, 0.0, 1.0])
def test_only_modules_with_a_bad_buffer_are_mended(mend: Callable[..., None], flag: float | None) -> None:
    model = nn.ModuleList([nn.BatchNorm1d(3), nn.BatchNorm1d(3), Scaled()])
    model[2].register_buffer("table", torch.zeros(200, 200))
    undo = Undo(torch.device("cpu"))
    undo.watch_buffers(model)
    undo.note_()
    kept = list(model.buffers())
    versions = [buffer._version for buffer in kept]
    for norm in (model[0], model[1]):
        norm.running_mean.data.add_(1)
        norm.num_batches_tracked.data.add_(1)
    model[0].running_var.data[1] = NAN
    model[2].table[7, 7] = INF
    model[2].seen.data.add_(1)
    mend(undo, None if flag is None else torch.tensor(flag))
    is_mended = flag != 0.0
    assert bool(torch.isfinite(model[0].running_var).all()) == bool(torch.isfinite(model[2].table).all()) == is_mended
    assert [int(model[i].num_batches_tracked) for i in (0, 1)] == [0 if is_mended else 1, 1]
    assert float(model[2].seen) == (0.0 if is_mended else 1.0)
    assert torch.equal(model[1].running_mean, torch.ones(3))
    assert all(a is b for a, b in zip(kept, model.buffers(), strict=True))
    table = len(versions) - 1
    assert [b._version for b in kept][:table] == versions[:table]  # autograd may need them as they are
