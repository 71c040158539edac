"""Tiny real models, data and comparisons that many tests share."""

from __future__ import annotations

import copy
import linecache
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

NAN, INF = float("nan"), float("inf")


class TinyNet(nn.Module):
    """Linear, BatchNorm, dropout: parameters, float and integer buffers, and a use of random numbers."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.inp = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(F.relu(self.norm(self.inp(x)))))


TINY_NET_LINE = TinyNet.forward.__code__.co_firstlineno + 1


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def line(mark: str) -> int:
    """The number of the line of the calling file that ends with this comment."""
    lines = linecache.getlines(sys._getframe(1).f_code.co_filename)
    found = [number for number, text in enumerate(lines, start=1) if text.rstrip().endswith(f"# {mark}")]
    assert len(found) == 1, f"{mark!r} marks {len(found)} lines"
    return found[0]


def own_step(guard: Any, batch: Any) -> None:
    """One step of a loop of the user's own."""
    with guard.autocast():
        loss = loss_fn(guard.model, batch)
    guard.backward(loss)
    guard.update()


def make_batches(number: int, *, size: int = 8, seed: int = 0, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 6, generator=g).to(device), torch.randint(0, 3, (size,), generator=g).to(device))
        for _ in range(number)
    ]


def poisoned(batches: list[tuple[Tensor, Tensor]], *places: int, value: float = NAN) -> list[tuple[Tensor, Tensor]]:
    """The batches with one bad element in the inputs of those at ``places``."""
    batches = list(batches)
    for place in places:
        x = batches[place][0].clone()
        x[0, 0] = value
        batches[place] = (x, batches[place][1])
    return batches


def everything(model: nn.Module, optimizers: Iterable[Optimizer], *more: Any) -> dict[str, Any]:
    """A deep copy of all that a step may change: parameters, buffers, optimizer state, options, and ``more``."""
    state: dict[str, Any] = {f"model.{name}": t.detach().clone() for name, t in model.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        for place, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            for key, value in optimizer.state.get(p, {}).items():
                state[f"optimizer{number}.{place}.{key}"] = copy.deepcopy(value)
        for place, group in enumerate(optimizer.param_groups):
            state[f"optimizer{number}.group{place}"] = copy.deepcopy({k: v for k, v in group.items() if k != "params"})
    for number, thing in enumerate(more):
        state[f"more{number}"] = copy.deepcopy(thing.state_dict() if hasattr(thing, "state_dict") else thing)
    return state


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, through containers."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) and type(a) is type(b)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what differs, in either direction."""
    return sorted(
        k for k in before.keys() | after.keys() if k not in before or k not in after or not same(before[k], after[k])
    )


def build(
    make_optimizer: Callable[[Any], Optimizer], *, seed: int = 0, device: str = "cpu", model: nn.Module | None = None
) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    model = (model or TinyNet()).to(device)
    return model, make_optimizer(model.parameters())
