"""Modules that the recovery keeps in fp32 stay so after a resume: the checkpoints of each framework hold that."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import nanguard
from frameworks import import_speechbrain
from nanguard.records.steps import Incidents

pl = pytest.importorskip("lightning.pytorch")
fabric = pytest.importorskip("lightning.fabric")
accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
sb = import_speechbrain()

from nanguard.integrations import accelerate as for_accelerate  # noqa: E402
from nanguard.integrations import fabric as for_fabric  # noqa: E402
from nanguard.integrations import lightning as for_lightning  # noqa: E402
from nanguard.integrations import speechbrain as for_speechbrain  # noqa: E402
from nanguard.integrations import transformers as for_transformers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

LARGE = {7, 16, 31}
NUMBER = 40
"""Of the records, two at a time. A run is stopped at half of them."""


class Records(Dataset[dict[str, Tensor]]):
    """Some are so large that ``inner`` overflows in fp16. They are in the way of guarded runs only."""

    def __init__(self, *, guarded: bool) -> None:
        self.large = LARGE if guarded else ()

    def __len__(self) -> int:
        return NUMBER

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((4,), 3e5 if index in self.large else 1.0)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.autocast("cpu", dtype=torch.float16):
            hidden = self.inner(x)
        return {"loss": self.outer(torch.tanh(hidden.float())).square().mean()}


def policy() -> nanguard.Policy:
    return nanguard.Policy([nanguard.RaisePrecision("module", times=9), nanguard.Skip(times=None)], divergence=None)


def make_loader(*, guarded: bool, half: bool) -> DataLoader[Any]:
    records = [Records(guarded=guarded)[index] for index in range(NUMBER // 2 if half else NUMBER)]
    return DataLoader(records, batch_size=2)  # type: ignore[arg-type]


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=1e-3)


class Module(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, number: int) -> Tensor:
        loss: Tensor = self.net(**batch)["loss"]
        return loss

    def configure_optimizers(self) -> Any:
        return optimizer_of(self)


def with_lightning(folder: Path, *, resumes: bool, guarded: bool) -> Incidents:
    guard = for_lightning.GuardCallback(policy=policy())
    trainer = pl.Trainer(
        max_epochs=2 if resumes else 1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[guard] if guarded else [],
        default_root_dir=folder,
    )
    last = folder / "last.ckpt"
    trainer.fit(Module(), make_loader(guarded=guarded, half=not resumes), ckpt_path=last if resumes else None)
    trainer.save_checkpoint(last)
    if not resumes:
        saved = torch.load(last, weights_only=True)["callbacks"]
        assert ("GuardCallback" in saved) == guarded
    return guard.incidents if guarded else Incidents()


def with_transformers(folder: Path, *, resumes: bool, guarded: bool, callback: bool = False) -> Incidents:
    own = for_transformers.GuardCallback(policy=policy()) if callback and guarded else None
    trainer = transformers.Trainer(
        Net(),
        transformers.TrainingArguments(
            str(folder),
            max_steps=NUMBER // 2 if resumes else NUMBER // 4,
            per_device_train_batch_size=2,
            save_steps=NUMBER // 4,
            use_cpu=True,
            disable_tqdm=True,
            report_to=[],
        ),
        train_dataset=Records(guarded=guarded),
        callbacks=[] if own is None else [own],
    )
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(range(NUMBER))
    guard = None if own is not None or not guarded else for_transformers.attach(trainer, policy=policy())
    trainer.train(resume_from_checkpoint=resumes)
    state = json.loads((folder / f"checkpoint-{NUMBER // 4}" / "trainer_state.json").read_text())
    assert ("nanguard" in state["stateful_callbacks"]) == guarded or resumes
    return own.guard.incidents if own is not None else guard.incidents if guard is not None else Incidents()


def with_the_callback(folder: Path, **options: Any) -> Incidents:
    return with_transformers(folder, callback=True, **options)


def with_accelerate(folder: Path, *, resumes: bool, guarded: bool) -> Incidents:
    accelerator = accelerate.Accelerator(cpu=True)
    net, optimizer = accelerator.prepare(net := Net(), optimizer_of(net))
    guard = for_accelerate.attach(accelerator, net, optimizer, policy=policy()) if guarded else None
    if resumes:
        accelerator.load_state(folder / "saved")
    for batch in make_loader(guarded=guarded, half=not resumes):
        accelerator.backward(net(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(folder / "saved")
    assert (folder / "saved" / "nanguard.json").exists() == guarded or resumes
    if guard is None:
        return Incidents()
    guard.detach()
    return guard.incidents


def with_fabric(folder: Path, *, resumes: bool, guarded: bool) -> Incidents:
    runner = fabric.Fabric(accelerator="cpu", devices=1)
    net, optimizer = runner.setup(plain := Net(), optimizer_of(plain))
    guard = for_fabric.attach(runner, net, optimizer, policy=policy()) if guarded else None
    state = {"net": net, "optimizer": optimizer, "epoch": 0}
    if resumes:
        remainder = runner.load(folder / "saved.ckpt", state)
        assert remainder == {} or not guarded
    for batch in make_loader(guarded=guarded, half=not resumes):
        runner.backward(net(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    runner.save(folder / "saved.ckpt", state)
    assert list(state) == ["net", "optimizer", "epoch"]
    if guard is None:
        return Incidents()
    guard.detach()
    assert not {"save", "load"} & set(vars(runner))
    return guard.incidents


class Recipe(sb.Brain):  # type: ignore[misc]
    def compute_forward(self, batch: Any, stage: Any) -> Any:
        return self.modules.net(**batch)

    def compute_objectives(self, outputs: Any, batch: Any, stage: Any) -> Any:
        return outputs["loss"]

    def on_stage_end(self, stage: Any, stage_loss: float, epoch: int | None = None) -> None:
        self.checkpointer.save_checkpoint()


def with_speechbrain(folder: Path, *, resumes: bool, guarded: bool) -> Incidents:
    logging.getLogger("speechbrain").setLevel(logging.ERROR)
    net = Net()
    checkpointer = sb.utils.checkpoints.Checkpointer(folder, {"net": net})
    run_opts = {"device": "cpu", "noprogressbar": True, "nonfinite_patience": 99}
    brain = Recipe(
        {"net": net},
        opt_class=lambda params: torch.optim.SGD(params, lr=1e-3),
        run_opts=run_opts,
        checkpointer=checkpointer,
    )
    guard = for_speechbrain.attach(brain, policy=policy()) if guarded else None
    brain.fit(range(1), make_loader(guarded=guarded, half=not resumes))
    if guard is None:
        return Incidents()
    guard.detach()
    assert "save_checkpoint" not in vars(checkpointer)
    return guard.incidents


FRAMEWORKS: dict[str, Callable[..., Incidents]] = {
    "lightning": with_lightning,
    "transformers": with_transformers,
    "transformers, callback": with_the_callback,
    "accelerate": with_accelerate,
    "fabric": with_fabric,
    "speechbrain": with_speechbrain,
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_resumed_run_keeps_the_same_modules_in_fp32(name: str, tmp_path: Path) -> None:
    train = FRAMEWORKS[name]
    before = train(tmp_path, resumes=False, guarded=True)
    assert [incident.outcome.did for incident in before][:1] == [f"{inner_of(name)} in fp32 from now on"]
    assert len(before) == 1
    assert train(tmp_path, resumes=True, guarded=True) == ()


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_guarded_and_unguarded_runs_load_each_others_checkpoints(name: str, tmp_path: Path) -> None:
    train = FRAMEWORKS[name]
    train(tmp_path / "1", resumes=False, guarded=True)
    train(tmp_path / "1", resumes=True, guarded=False)
    train(tmp_path / "2", resumes=False, guarded=False)
    assert len(train(tmp_path / "2", resumes=True, guarded=True)) >= 1


def inner_of(name: str) -> str:
    return {"lightning": "net.inner", "speechbrain": "net.inner"}.get(name, "inner")
