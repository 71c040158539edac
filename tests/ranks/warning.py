"""What a rank does in each case of ``test_ranks_alerts.py``. Every function returns plain data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import nanguard
from helpers import everything, loss_fn, make_batches
from nanguard import Halt, LowerLR, Monitor, Policy, RaisePrecision, Skip
from nanguard.monitor.probe import Probe

Result = dict[str, Any]

STEPS = 140


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.gain(x))


class Net(nn.Module):
    """The second rank has a layer more, which the first does not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.out, self.extra = Mixer(), nn.Linear(8, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(self.mixer(torch.cat([x, x[:, :2]], 1)))
        return y + self.extra(y) if dist.get_rank() else y


class CountingReductions:
    """How many collectives each step makes."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.original: Callable[..., Any] = dist.all_reduce

    def __enter__(self) -> CountingReductions:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.counts:
                self.counts[-1] += 1
            return self.original(*args, **kwargs)

        dist.all_reduce = counted
        return self

    def __exit__(self, *error: object) -> None:
        dist.all_reduce = self.original


def grows_on_one_rank(*, sync: str, acts: bool, watched: str = "all", every: Any = 4, fails: bool = False) -> Result:
    """The inputs of the second rank grow. ``watched`` are the ranks with a monitor; ``fails``: one cannot probe."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=True)
    rank = dist.get_rank()
    monitor = Monitor(probe_every=every)
    is_watched = watched == "all" or (watched == "first" and rank == 0)
    rungs = [RaisePrecision(when="alert"), LowerLR(0.5, when="alert", times=1)] if acts else []
    guard = nanguard.Guard(
        model,
        optimizer,
        precision="fp16",
        loss_scale=None,
        sync=sync,  # type: ignore[arg-type]
        diagnose="off",
        policy=Policy([*rungs, Skip(times=None), Halt()], divergence=None),
        observers=[monitor] if is_watched else [],
    )
    if fails and rank == 1:
        Probe._measure_outputs = _fail  # type: ignore[method-assign]
    with CountingReductions() as reductions:
        for step, (x, y) in enumerate(make_batches(STEPS)):
            reductions.counts.append(0)
            guard.step(loss_fn, (x * 1.06**step if rank == 1 else x, y))
        guard.close()
    return {
        "alerts": [alert.as_dict() for alert in monitor.alerts],
        "watched": sorted(monitor.state_dict()["warner"]["watched"]),
        "reductions": reductions.counts,
        "kept": guard.kept_fp32,
        "lr": optimizer.param_groups[0]["lr"],
        "skipped": guard.counts["skipped"],
        "every": monitor.probe_every,
        "end": {name: str(value) for name, value in everything(model, [optimizer]).items()},
    }


def _fail(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("this rank cannot measure anything")
