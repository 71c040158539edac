"""What a rank does in each case of ``test_ranks_diagnosis.py``. Every function returns plain data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import nanguard
from helpers import everything
from nanguard.diagnosis.examiner import Examiner
from nanguard.records.panel import panel
from nanguard.records.plain import plain
from ranks.scenarios import digests

Result = dict[str, Any]

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"log": torch.log, "sqrt": torch.sqrt}
PATIENT = nanguard.Policy([nanguard.Skip(99)])


class Inner(nn.Module):
    """Breaks where the input is zero: forward, or in its derivative alone."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self.lin, self.function = nn.Linear(6, 6), FUNCTIONS[function]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.lin(x) * 0 + x)  # breaks


class Waiting(nn.SyncBatchNorm):
    """As the real one, which knows no CPU: waits for all ranks in each forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().nan_to_num().mean(0)
        dist.all_reduce(mean)
        return x + 0 * mean


class Net(nn.Module):
    def __init__(self, function: str, *, waits: str = "") -> None:
        super().__init__()
        self.pre, self.norm = nn.Linear(6, 6), Waiting(6) if waits == "in a layer" else nn.BatchNorm1d(6)
        self.inner = Inner(function)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.norm(self.pre(x)) * 0 + x)


def total(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum()


def of_all_ranks(model: nn.Module, x: Tensor) -> Tensor:
    """As contrastive losses do: every rank looks at what the others have."""
    out = model(x)
    others = [torch.zeros_like(out) for _ in range(dist.get_world_size())]
    dist.all_gather(others, out.detach())
    return (out - 0.1 * torch.stack(others).nan_to_num(neginf=0.0).mean(0)).sum()


def batch(step: int, bad: int) -> Tensor:
    """Positive numbers; at the bad step rank 1 has a zero in sample 2."""
    x = torch.rand(8, 6, generator=torch.Generator().manual_seed(100 * step + dist.get_rank())) + 0.1
    if step == bad and dist.get_rank() == 1:
        x[2, 0] = 0.0
    return x


def run(
    function: str,
    *,
    style: str,
    sync: str,
    diagnose: Any = "full",
    waits: str = "",
    wrapped: bool = True,
    bad: tuple[int, ...] = (3,),
) -> tuple[nanguard.Guard, dict[str, str]]:
    torch.manual_seed(0)
    model: Any = Net(function, waits=waits)
    model = DistributedDataParallel(model) if wrapped else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    accumulate = 2 if style == "accumulate" else 1
    guard = nanguard.Guard(
        model, optimizer, precision="fp32", policy=PATIENT, sync=sync, accumulate=accumulate, diagnose=diagnose
    )
    loss_fn = of_all_ranks if waits == "in the loss" else total
    for step in range(8):
        x = batch(step, step if step in bad else -1)
        if style == "own loop":
            with guard.autocast():
                loss = loss_fn(guard.model, x)
            guard.backward(loss)
            guard.update()
        else:
            guard.step(loss_fn, x)
    guard.settle()
    return guard, digests(everything(model, [optimizer]))


def told(guard: nanguard.Guard) -> list[Result]:
    return [
        {
            "step": incident.reading.step,
            "ranks": [flags.rank for flags in incident.reading.ranks],
            "panel": panel(incident),
            "diagnosis": None if incident.diagnosis is None else plain(incident.diagnosis.as_dict()),
        }
        for incident in guard.incidents
    ]


# ---- scenarios -----------------------------------------------------------------------------------------------------


def examined(*, function: str, style: str, sync: str, **options: Any) -> Result:
    """A fault on rank 1 alone, examined and not."""
    guard, end = run(function, style=style, sync=sync, **options)
    _, end_without = run(function, style=style, sync=sync, **{**options, "diagnose": "off"})
    return {"incidents": told(guard), "counts": guard.counts, "end": end, "not examined": end_without}


def broken(*, sync: str, rank: int) -> Result:
    """The diagnosis itself fails on one rank: nobody waits for it."""
    whole = Examiner.examine

    def fails(*args: Any, **options: Any) -> Any:
        if dist.get_rank() == rank:
            raise LookupError("in the diagnosis itself")
        return whole(*args, **options)

    Examiner.examine = fails  # type: ignore[method-assign]
    try:
        guard, end = run("log", style="step", sync=sync)
    finally:
        Examiner.examine = whole  # type: ignore[method-assign]
    return {"incidents": told(guard), "counts": guard.counts, "end": end}


def alone() -> Result:
    """``nanguard.diagnose`` of a wrapped model, on one rank while the other goes on; then a guard as ever."""
    model = DistributedDataParallel(Net("log"))
    before = digests(everything(model, []))
    said = None
    if dist.get_rank() == 1:
        diagnosis = nanguard.diagnose(model, total, batch(0, 0), precision="fp32")
        said = [diagnosis.op, diagnosis.module, list(diagnosis.samples)]
    after = digests(everything(model, []))
    model(torch.ones(8, 6)).sum().backward()
    return {"said": said, "before": before, "after": after, "hook": model._get_ddp_logging_data().get("comm_hook")}
