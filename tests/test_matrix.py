"""After a bad step nothing has changed, to the bit: optimizers x precisions x accumulation x faults x styles."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanguard
from helpers import build, differences, everything, loss_fn, make_batches, poisoned
from nanguard.testing import Fault, inject
from optimizers import ALL, FUSED, NOT_FUSED

FAULTS = ("loss", "forward", "backward", "gradient")
STYLES = ("step", "own loop")


def sqrt_at_zero(model: nn.Module, batch: Any) -> Tensor:
    """A finite loss whose backward divides by zero, on batches that say so."""
    out = model(batch[0])
    loss = F.cross_entropy(out, batch[1])
    return loss + (out * 0).abs().sqrt().sum() if len(batch) == 3 else loss


def run_step(guard: nanguard.Guard, batches: list[Any], style: str, function: Any) -> None:
    if style == "step":
        for batch in batches:
            guard.step(function, batch)
        return
    for batch in batches:
        with guard.autocast():
            loss = function(guard.model, batch)
        guard.backward(loss)
    guard.update()


def run_plain(model: nn.Module, opt: Any, batches: list[Any], precision: str, function: Any) -> None:
    """What a plain loop does to the random number generators."""
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    for batch in batches:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = function(model, batch)
        (loss * 1.0).backward()


def check_one(make: Any, precision: Any, sync: Any, accumulate: int, fault: str, style: str) -> None:
    batches = make_batches(4 * accumulate)
    good = [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]
    bad_place = accumulate // 2
    bad = list(good[2])
    if fault == "forward":
        bad = poisoned(bad, bad_place)
    elif fault == "backward":
        bad[bad_place] = (*bad[bad_place], "sqrt")

    model, opt = build(make)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.9)
    guard = nanguard.Guard(model, opt, scheduler=schedule, precision=precision, accumulate=accumulate, sync=sync)
    into = {"loss": Fault(into="loss", steps=(2,)), "gradient": Fault(into="gradient", name="inp.weight", steps=(2,))}
    with inject(guard, *([into[fault]] if fault in into else [])) as injector:

        def function(model: nn.Module, batch: Any) -> Tensor:
            return injector.loss(sqrt_at_zero(model, batch))

        run_step(guard, good[0], style, function)
        run_step(guard, good[1], style, function)
        guard.settle()
        before = everything(model, [opt], schedule)
        torch.manual_seed(1)
        run_step(guard, bad, style, function)
        rng = torch.get_rng_state()
        guard.settle()
        assert differences(before, everything(model, [opt], schedule)) == []
        assert torch.equal(rng, torch.get_rng_state())
        assert guard.counts["skipped"] + guard.counts["backed_off"] == 1
        assert all(p.grad is None for p in model.parameters())
        run_step(guard, good[3], style, function)
        guard.settle()
        after = everything(model, [opt], schedule)
    assert differences(before, after) != [], "a good step changes things"
    assert all(torch.isfinite(t).all() for t in model.state_dict().values())
    torch.manual_seed(1)
    run_plain(model, opt, good[2], precision, sqrt_at_zero)
    assert torch.equal(rng, torch.get_rng_state()), "random numbers as a plain loop leaves them"


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=[] if precision in usual else pytest.mark.campaign)
        for names, usual in ((NOT_FUSED, ("fp32",)), (FUSED, ("fp32", "fp16")))
        for name, precision in itertools.product(names, ("fp32", "bf16", "fp16"))
    ],
)
def test_a_bad_step_changes_nothing(name: str, precision: str) -> None:
    for accumulate, fault, style in itertools.product((1, 4), FAULTS, STYLES):
        check_one(ALL[name], precision, "eager", accumulate, fault, style)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.campaign), "fp16"])
@pytest.mark.parametrize("name", FUSED)
def test_a_bad_step_changes_nothing_when_the_host_learns_late(name: str, precision: str) -> None:
    for accumulate, fault, style in itertools.product((1, 4), FAULTS, STYLES):
        check_one(ALL[name], precision, "late", accumulate, fault, style)


@pytest.mark.parametrize("sync", ["eager", "late"])
@pytest.mark.parametrize("name", FUSED)
def test_the_very_first_step_may_be_bad(name: str, sync: Any) -> None:
    model, opt = build(ALL[name])
    guard = nanguard.Guard(model, opt, precision="fp32", sync=sync)
    before = everything(model, [opt])
    good, bad = make_batches(2), poisoned(make_batches(1), 0)
    guard.step(loss_fn, bad[0])
    guard.settle()
    assert differences(before, everything(model, [opt])) == [], "no optimizer state is made, none is uninitialised"
    for batch in good:
        guard.step(loss_fn, batch)
    guard.settle()
    assert all(torch.isfinite(t).all() for t in model.state_dict().values())


class SparseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(20, 4, sparse=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.emb(x).mean(1))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("drop", [False, True])
def test_sparse_gradients_are_guarded_and_clipped(accumulate: int, drop: bool) -> None:
    torch.manual_seed(0)
    model = SparseNet()
    sparse = torch.optim.SparseAdam(model.emb.parameters(), lr=1e-2)
    dense = torch.optim.AdamW(model.out.parameters(), lr=1e-2)
    guard = nanguard.Guard(
        model, [sparse, dense], precision="fp32", max_norm=1e-3, accumulate=accumulate, drop_bad_microbatches=drop
    )
    batches = [(torch.randint(0, 20, (5, 4)), torch.randint(0, 3, (5,))) for _ in range(3 * accumulate)]
    run_step(guard, batches[:accumulate], "step", loss_fn)
    before = everything(model, [sparse, dense])
    with inject(guard, Fault(into="gradient", name="emb.weight", steps=(1,))):
        run_step(guard, batches[accumulate : 2 * accumulate], "step", loss_fn)
        assert guard.counts["skipped"] == 1
    assert differences(before, everything(model, [sparse, dense])) == []
    run_step(guard, batches[2 * accumulate :], "step", loss_fn)
    assert differences(before, everything(model, [sparse, dense])) != []
    assert all(torch.isfinite(t).all() for t in model.state_dict().values())


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_is_guarded_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))
    opt = torch.optim.Muon(model.parameters(), lr=1e-2)
    guard = nanguard.Guard(model, opt, precision="fp32")
    batches = make_batches(2)
    guard.step(loss_fn, batches[0])
    before = everything(model, [opt])
    guard.step(loss_fn, poisoned(batches, 1)[1])
    assert differences(before, everything(model, [opt])) == []
    assert guard.counts["skipped"] == 1
