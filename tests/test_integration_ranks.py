"""Lightning's own launcher with two ranks, which starts the other rank as a plain Python program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launching import needs_gloo

pytest.importorskip("lightning.pytorch")
pytestmark = needs_gloo

SCRIPT = """
import logging, sys, warnings

warnings.simplefilter("ignore")
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn


class Net(pl.LightningModule):
    def __init__(self, bad):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.bad = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), bad

    def training_step(self, batch, number):
        x = batch[0].clone()
        if self.global_rank == 1 and number == self.bad:
            x[0, 0] = float("nan")
        loss = F.cross_entropy(self.net(x), batch[1])
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(name, bad, callbacks=()):
    torch.manual_seed(1)
    data = [(torch.randn(4, 6), torch.randint(0, 3, (4,))) for _ in range(12)]
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", callbacks=list(callbacks), **quiet)
    model = Net(bad)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=None))
    schedule = trainer.lr_scheduler_configs[0].scheduler
    steps = [state["step"] for state in trainer.optimizers[0].state.values()]
    facts = {"steps": steps[0], "schedule": torch.tensor(schedule.last_epoch), "loss": trainer.callback_metrics["loss"]}
    torch.save({**model.state_dict(), **facts}, f"{name}{trainer.global_rank}.pt")


if sys.argv[1] == "run":
    fit("run-healthy", None)
    fit("run-bad", 3)
else:
    from nanguard.integrations.lightning import GuardCallback

    fit("plain", None)
    fit("healthy", None, [GuardCallback()])
    fit("bad", 3, [GuardCallback()])
"""


FABRIC = """
import sys, warnings

warnings.simplefilter("ignore")
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn

from nanguard.integrations.fabric import attach

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()


def fit(name, bad, guarded):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    plain = torch.optim.AdamW(net.parameters(), lr=0.01)
    model, optimizer = fabric.setup(net, plain)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 2)
    guard = attach(fabric, model, optimizer, schedule) if guarded else None
    torch.manual_seed(10 + fabric.global_rank)
    for number in range(6):
        x, y = torch.randn(4, 6), torch.randint(0, 3, (4,))
        if number == bad and fabric.global_rank == 1:
            x[0, 0] = float("nan")
        fabric.backward(F.cross_entropy(model(x), y))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if guard is not None:
        guard.detach()
    facts = {"steps": plain.state_dict()["state"][0]["step"], "schedule": torch.tensor(schedule.last_epoch)}
    torch.save({**net.state_dict(), **facts}, f"{name}{fabric.global_rank}.pt")


if sys.argv[1] == "run":
    fit("run-healthy", None, False)
    fit("run-bad", 3, False)
else:
    fit("plain", None, False)
    fit("healthy", None, True)
    fit("bad", 3, True)
"""


def launched(tmp_path: Path, *command: str, script: str = SCRIPT) -> str:
    (tmp_path / "train.py").write_text(script)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole = [sys.executable, *command]
    done = subprocess.run(whole, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stderr


def states(tmp_path: Path, name: str) -> list[dict[str, torch.Tensor]]:
    return [torch.load(tmp_path / f"{name}{rank}.pt") for rank in range(2)]


def changed(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [key for key in one if not torch.equal(one[key], other[key])]


def test_nanguard_run_guards_both_ranks(tmp_path: Path) -> None:
    told = launched(tmp_path, "-m", "nanguard", "run", "train.py", "run")
    assert "12 steps, 1 not applied, weights and optimizer state finite" in told
    assert "the loss of rank 1 is NaN or Inf: step skipped" in told
    for name, steps in (("run-healthy", 6), ("run-bad", 5)):
        first, second = states(tmp_path, name)
        assert (first["steps"], first["schedule"]) == (steps, steps)
        assert all(torch.isfinite(value).all() for value in (*first.values(), *second.values()))
        assert all("running" in key for key in changed(first, second)), "statistics are of each rank"


@pytest.mark.campaign
def test_the_callback_on_both_ranks(tmp_path: Path) -> None:
    launched(tmp_path, "train.py", "callback")
    launched(tmp_path, "-m", "nanguard", "run", "train.py", "run")
    plain, healthy, bad, run_healthy, run_bad = (
        states(tmp_path, name) for name in ("plain", "healthy", "bad", "run-healthy", "run-bad")
    )
    for rank in range(2):
        assert changed(plain[rank], healthy[rank]) == []
        assert changed(plain[rank], run_healthy[rank]) == []
        assert changed(bad[rank], run_bad[rank]) == []
        assert (bad[rank]["steps"], bad[rank]["schedule"]) == (5, 5)


@pytest.mark.campaign
def test_fabric_on_both_ranks(tmp_path: Path) -> None:
    told = launched(tmp_path, "train.py", "attach", script=FABRIC)
    assert told.count("end of the run: 6 steps, 1 not applied") == 1, "on the first rank only"
    launched(tmp_path, "-m", "nanguard", "run", "train.py", "run", script=FABRIC)
    for rank in range(2):
        plain, healthy, bad, run_healthy, run_bad = (
            states(tmp_path, name)[rank] for name in ("plain", "healthy", "bad", "run-healthy", "run-bad")
        )
        assert changed(plain, healthy) == []
        assert changed(plain, run_healthy) == []
        assert (bad["steps"], bad["schedule"]) == (5, 5)
        assert (run_bad["steps"], run_bad["schedule"]) == (5, 6), "the program's own schedule goes on"
