"""In each framework, a diagnosis names the record of the dataset that is guilty, and never another one."""

from __future__ import annotations

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
from helpers import NAN
from nanguard.integrations.loaders import FollowedLoaders
from nanguard.records.steps import Incidents
from nanguard.state.batch_indices import NotedSampler

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

BAD = [5, 29]
NUMBER = 36


class Records(Dataset[dict[str, Tensor]]):
    """The inputs of two records are NaN."""

    def __len__(self) -> int:
        return NUMBER

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.full((4,), index / NUMBER)
        return {"x": x * NAN if index in BAD else x, "y": torch.tensor([float(index)])}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.linear(x) - y).square().mean()}


def make_loader(workers: int = 0) -> DataLoader[Any]:
    return DataLoader(Records(), batch_size=3, shuffle=True, num_workers=workers, persistent_workers=workers > 0)


def copied(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """As to a device."""
    return {name: value.clone() for name, value in batch.items()}


class Module(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        self.net, self.copies = Net(), copies

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return copied(batch) if self.copies else batch

    def training_step(self, batch: Any, number: int) -> Tensor:
        loss: Tensor = self.net(**batch)["loss"]
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.net(**batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def with_lightning(folder: Path, *, guarded: bool, workers: int, accumulate: int, copies: bool) -> Incidents:
    guard = for_lightning.GuardCallback() if guarded else None
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if guard is None else [guard],
        default_root_dir=folder,
    )
    loader = make_loader(workers)
    trainer.fit(Module(copies=copies), loader, DataLoader(Records(), batch_size=7))
    assert "process_dataloader" not in vars(trainer.strategy)
    assert "_get_iterator" not in vars(loader)
    return Incidents() if guard is None else guard.incidents


class CopyingTrainer(transformers.Trainer):  # type: ignore[misc]
    def _prepare_inputs(self, inputs: Any) -> Any:
        return copied(inputs)


def make_trainer(folder: Path, *, workers: int, accumulate: int, copies: bool, **options: Any) -> Any:
    torch.manual_seed(0)
    return (CopyingTrainer if copies else transformers.Trainer)(
        Net(),
        transformers.TrainingArguments(
            str(folder),
            num_train_epochs=2,
            per_device_train_batch_size=3,
            gradient_accumulation_steps=accumulate,
            dataloader_num_workers=workers,
            use_cpu=True,
            disable_tqdm=True,
            report_to=[],
            save_strategy="no",
            eval_strategy="epoch",
        ),
        train_dataset=Records(),
        eval_dataset=Records(),
        **options,
    )


def with_transformers(folder: Path, *, guarded: bool, **options: Any) -> Incidents:
    trainer = make_trainer(folder, **options)
    guard = for_transformers.attach(trainer) if guarded else None
    trainer.train()
    if guard is None:
        return Incidents()
    guard.detach()
    assert "get_train_dataloader" not in vars(trainer)
    return guard.incidents


def with_accelerate(folder: Path, *, guarded: bool, workers: int, accumulate: int, copies: bool) -> Incidents:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    net = Net()
    net, optimizer, loader, other = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=1e-3), make_loader(workers), DataLoader(Records(), batch_size=7)
    )
    guard = for_accelerate.attach(accelerator, net, optimizer) if guarded else None
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(net):
                accelerator.backward(net(**(copied(batch) if copies else batch))["loss"])
                optimizer.step()
                optimizer.zero_grad()
        for batch in other:
            with torch.no_grad():
                net(**batch)
    if guard is None:
        return Incidents()
    guard.detach()
    assert "_get_iterator" not in vars(loader.base_dataloader)
    return guard.incidents


def with_fabric(
    folder: Path, *, guarded: bool, workers: int, accumulate: int, copies: bool, loader: Any = None
) -> Incidents:
    runner = fabric.Fabric(accelerator="cpu", devices=1)
    plain = Net()
    net, optimizer = runner.setup(plain, torch.optim.SGD(plain.parameters(), lr=1e-3))
    if not workers:
        loader = loader or runner.setup_dataloaders(make_loader())
    guard = for_fabric.attach(runner, net, optimizer, loader=loader) if guarded else None
    loader = loader or runner.setup_dataloaders(make_loader(workers))
    for _ in range(2):
        for number, batch in enumerate(loader, start=1):
            runner.backward(net(**(copied(batch) if copies else batch))["loss"] / accumulate)
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    if guard is None:
        return Incidents()
    guard.detach()
    return guard.incidents


class Recipe(sb.Brain):  # type: ignore[misc]
    copies = False

    def compute_forward(self, batch: Any, stage: Any) -> Any:
        return self.modules.net(**batch)

    def compute_objectives(self, outputs: Any, batch: Any, stage: Any) -> Any:
        return outputs["loss"]

    def fit_batch(self, batch: Any) -> Any:
        return super().fit_batch(copied(batch) if self.copies else batch)


def with_speechbrain(folder: Path, *, guarded: bool, workers: int, accumulate: int, copies: bool) -> Incidents:
    logging.getLogger("speechbrain").setLevel(logging.ERROR)
    run_opts = {"device": "cpu", "noprogressbar": True, "grad_accumulation_factor": accumulate}
    brain = Recipe({"net": Net()}, opt_class=lambda params: torch.optim.SGD(params, lr=1e-3), run_opts=run_opts)
    brain.copies = copies
    guard = for_speechbrain.attach(brain) if guarded else None
    brain.fit(range(2), make_loader(workers), DataLoader(Records(), batch_size=7))
    return Incidents() if guard is None else guard.incidents


FRAMEWORKS: dict[str, Callable[..., Incidents]] = {
    "lightning": with_lightning,
    "transformers": with_transformers,
    "accelerate": with_accelerate,
    "fabric": with_fabric,
    "speechbrain": with_speechbrain,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "with workers": {"workers": 2},
    "accumulated": {"accumulate": 2},
    "copied": {"copies": True},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_record_is_named(name: str, setting: str, tmp_path: Path) -> None:
    options = {"workers": 0, "accumulate": 1, "copies": False, **SETTINGS[setting]}
    torch.manual_seed(1)
    assert_named(FRAMEWORKS[name](tmp_path, guarded=True, **options))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_under_nanguard_run(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    with nanguard.install() as autopilot:
        FRAMEWORKS[name](tmp_path, guarded=False, workers=0, accumulate=1, copies=False)
        assert_named(autopilot.incidents)


def assert_named(incidents: Incidents) -> None:
    assert incidents
    found: list[int] = []
    for incident in incidents:
        diagnosis = incident.diagnosis
        assert diagnosis is not None
        assert diagnosis.cause == "input_nonfinite"
        assert len(diagnosis.dataset_indices) == len(diagnosis.samples) > 0
        found += diagnosis.dataset_indices
    assert set(found) == set(BAD)
    assert len(found) >= 3, "two of them may be in one step"


def test_the_callback_of_transformers_names_it(tmp_path: Path) -> None:
    callback = for_transformers.GuardCallback()
    make_trainer(tmp_path, workers=0, accumulate=1, copies=False, callbacks=[callback]).train()
    assert_named(callback.guard.incidents)


class Reversing(DataLoader[Any]):
    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield {name: value.flip(0) for name, value in batch.items()}


def test_a_loader_that_changes_its_batches_is_not_trusted(tmp_path: Path) -> None:
    loader = Reversing(Records(), batch_size=3, shuffle=True)
    incidents = with_fabric(tmp_path, guarded=True, workers=0, accumulate=1, copies=False, loader=loader)
    assert len(incidents) >= 2
    for diagnosis in (incident.diagnosis for incident in incidents):
        assert diagnosis is not None
        assert diagnosis.samples
        assert diagnosis.dataset_indices == ()


def test_a_resumed_trainer_names_it_or_says_nothing(tmp_path: Path) -> None:
    """In the middle of an epoch it makes a loader that skips batches."""
    options = {"workers": 0, "accumulate": 1, "copies": False}
    trainer = make_trainer(tmp_path, **options)
    trainer.args.save_strategy, trainer.args.save_steps = "steps", 5
    trainer.train()
    again = make_trainer(tmp_path, **options)
    with for_transformers.attach(again) as guard:
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    found = [index for incident in guard.incidents for index in incident.diagnosis.dataset_indices]  # type: ignore[union-attr]
    assert found
    assert set(found) <= set(BAD)


def test_an_error_of_ours_does_not_end_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ArithmeticError("of ours")

    monkeypatch.setattr(NotedSampler, "fetched", fail)
    loader = make_loader()
    incidents = with_fabric(tmp_path, guarded=True, workers=0, accumulate=1, copies=False, loader=loader)
    assert len(incidents) >= 2
    assert "_get_iterator" not in vars(loader)


def test_batches_of_any_kind_are_let_through() -> None:
    loaders = FollowedLoaders()
    parts = [torch.ones(2), torch.nested.nested_tensor([torch.ones(2)]), torch.eye(2).to_sparse(), None, "text", 3]
    given = list(loaders.follow(DataLoader(parts, batch_size=None)))  # type: ignore[arg-type]
    assert len(given) == len(parts)
    loaders.stop()
