"""Lightning with a fused optimizer on a GPU: no step waits unless a number is needed, and all are as if it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanguard
from helpers import differences, make_batches, poisoned
from nanguard.policy.rungs import Halt, Skip

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from nanguard.integrations.lightning import GuardCallback  # noqa: E402
from nanguard.integrations.lightning_fit import GuardedFit  # noqa: E402
from test_integration_lightning import NUMBER, Batch, Net, Run, pytestmark  # noqa: E402, F401


class Fused(Net):
    interval = "step"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule, "interval": self.interval}}


class Quiet(Fused):
    """Logs one value for each step, and adds nothing up."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = self.mean = nn.Identity()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        pass


class ByEpoch(Quiet):
    interval = "epoch"


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a batch had to wait."""
    calls: list[int] = []
    settle = GuardedFit.settle

    def counted(guarded: GuardedFit) -> None:
        calls.extend([1] * bool(guarded._applied))
        settle(guarded)

    monkeypatch.setattr(GuardedFit, "settle", counted)
    return calls


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=["each", "accumulated"])
@pytest.mark.parametrize("kind", [Fused, Quiet, ByEpoch])
@pytest.mark.parametrize(
    "bad",
    [(2, 3, 5), *(pytest.param(each, marks=pytest.mark.campaign) for each in [(), (3,), (0, NUMBER - 1)])],
    ids=str,
)
def test_all_numbers_are_those_of_a_run_that_is_asked_at_once(
    tmp_path: Path, bad: tuple[int, ...], kind: type[Net], options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    batches = poisoned(make_batches(NUMBER), *bad)
    asked = Run(batches, tmp_path, guard=GuardCallback(), model=kind(), **options)
    request.getfixturevalue("as_on_a_gpu")
    late = Run(batches, tmp_path, guard=GuardCallback(), model=kind(), **options)
    assert asked.guard is not None
    assert late.guard is not None
    assert (asked.guard.guard.loop.answers_later, late.guard.guard.loop.answers_later) == (False, True)
    assert differences(asked.state(), late.state()) == []
    assert str(asked.values) == str(late.values)
    assert str(asked.logged.rows) == str(late.logged.rows)
    assert asked.guard.counts == late.guard.counts
    assert [each.reading.step for each in asked.guard.incidents] == [each.reading.step for each in late.guard.incidents]


def fit_without_logger(model: Net, *callbacks: Any) -> None:
    """One epoch with a bad batch, in which nothing asks for the result of a step but the callbacks."""
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
    )
    trainer.fit(model, torch.utils.data.DataLoader(poisoned(make_batches(NUMBER), 3), batch_size=None))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_batches_wait_only_if_a_number_is_needed(tmp_path: Path, settled: list[int]) -> None:
    Run(make_batches(NUMBER), tmp_path, guard=GuardCallback(), model=Fused(), epochs=1)
    assert len(settled) >= NUMBER, "means are added up"
    settled.clear()

    model, guard = Quiet(), GuardCallback()
    fit_without_logger(model, guard)
    assert len(settled) < NUMBER / 2, "only at the end of the epoch"
    assert guard.counts["skipped"] == 1
    assert model.schedule.last_epoch == NUMBER - 1


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_callback_of_the_programs_own_can_ask(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Own(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            seen.append(guard.last_step_was_skipped)

    guard = GuardCallback()
    Run(poisoned(make_batches(NUMBER), 3), tmp_path, guard=guard, model=Quiet(), callbacks=[Own()], epochs=1)
    assert seen == [number == 3 for number in range(NUMBER)]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_checkpoint_has_the_schedule_of_applied_steps(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=4, save_top_k=-1)
    fit_without_logger(Quiet(), saves, GuardCallback())
    (path,) = (tmp_path / "saved").glob("*step=4.ckpt")
    saved = torch.load(path, weights_only=False)
    assert saved["lr_schedulers"][0]["last_epoch"] == 3


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_policy_that_halts_ends_fit_cleanly(tmp_path: Path) -> None:
    guard = GuardCallback(policy=nanguard.Policy([Skip(times=1), Halt()]))
    run = Run(poisoned(make_batches(NUMBER), 3, 4, 5, 6), tmp_path, guard=guard, model=Quiet(), epochs=1)
    assert guard.halted is not None
    never = Run(make_batches(NUMBER)[:3], tmp_path, model=Quiet(), epochs=1)
    assert differences(never.state(), run.state()) == []
