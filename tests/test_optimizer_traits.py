"""Everything nanguard knows about optimizer classes is in one table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import nanguard
from helpers import TinyNet
from nanguard.checkup import loop
from nanguard.state.optimizer_traits import TRAITS, OptimizerTraits, full_name, names_of_optimizers, traits_of
from nanguard.state.snapshots import memory
from nanguard.step.optimizers import SkippableOptimizers
from optimizers import ALL


class Stubborn(Optimizer):
    """Its ``step()`` looks as if it could do without a closure."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "history": True})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("not called here")


class Renamed(torch.optim.AdamW):
    pass


class OwnStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


def test_a_row_for_a_class_of_the_program_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyNet()
    optimizer = Stubborn(model.parameters())
    assert traits_of(optimizer) == OptimizerTraits()
    assert nanguard.Guard(model, optimizer) is not None
    row = OptimizerTraits(needs_closure=True, can_be_fused=True, num_state_tensors=3, state_options=("history",))
    monkeypatch.setitem(TRAITS, full_name(Stubborn), row)
    assert traits_of(optimizer) is row
    assert SkippableOptimizers([optimizer]).not_fused() == ["Stubborn"]
    assert memory._tensors_to_come(optimizer, optimizer.param_groups[0]) == 4
    with pytest.raises(ValueError, match="Stubborn calls its closure several times"):
        nanguard.Guard(model, optimizer)


@pytest.mark.parametrize("name", sorted(TRAITS))
def test_every_row_is_a_class_of_torch_and_tells_the_truth(name: str) -> None:
    kind = getattr(torch.optim, name.rpartition(".")[2])
    optimizer = kind(TinyNet().parameters(), lr=0.1)
    traits = traits_of(optimizer)
    assert full_name(kind) == name
    assert traits is TRAITS[name]
    assert traits.can_be_fused == ("fused" in optimizer.defaults)
    assert (traits.eps is None) == ("eps" not in optimizer.defaults)
    assert set(traits.state_options) <= optimizer.defaults.keys() | {"amsgrad"}
    assert traits.needs_closure == (name == "torch.optim.LBFGS")
    smallest = torch.tensor(optimizer.defaults.get("eps", 1.0), dtype=torch.float16)
    assert not traits.loses_eps_in_fp16 or smallest == 0


@pytest.mark.parametrize("name", sorted(name for name in ALL if not name.startswith("fused")))
def test_the_state_that_an_optimizer_will_make_is_known_before(name: str) -> None:
    weight = torch.nn.Parameter(torch.ones(64, 32))
    optimizer = ALL[name]([weight])
    expected = memory._tensors_to_come(optimizer, optimizer.param_groups[0])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    made = [v for v in optimizer.state[weight].values() if isinstance(v, torch.Tensor) and v.shape == weight.shape]
    assert len(made) <= expected


def test_a_subclass_has_the_traits_of_the_step_it_runs() -> None:
    renamed, own = Renamed(TinyNet().parameters()), OwnStep(TinyNet().parameters(), lr=0.1)
    adamw = asdict(TRAITS["torch.optim.AdamW"])
    assert asdict(traits_of(renamed)) == {**adamw, "can_be_fused": False}, "its constructor may not take fused"
    assert not traits_of(own).update_is_finite
    assert not traits_of(own).calls_closure_once
    assert traits_of(own).num_state_tensors == 0, "it still keeps what SGD keeps"


def test_torchs_optimizers_without_a_row_are_trusted() -> None:
    traits = traits_of(torch.optim.Rprop(TinyNet().parameters()))
    assert traits.update_is_finite
    assert traits.calls_closure_once
    assert not traits.needs_closure


def test_the_checks_of_scripts_use_the_same_table() -> None:
    assert set(loop.FUSABLE) == {f"torch.optim.{name}" for name in ("Adam", "AdamW", "SGD", "Adagrad")}
    assert names_of_optimizers("loses_eps_in_fp16") == tuple(n for n, row in TRAITS.items() if row.loses_eps_in_fp16)
