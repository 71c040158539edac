"""Lightning with ``GuardCallback``: after a bad batch everything is as in a run that never had it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanguard
from helpers import INF, NAN, differences, everything, make_batches, poisoned

pl = pytest.importorskip("lightning.pytorch")
torchmetrics = pytest.importorskip("torchmetrics")

from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint  # noqa: E402

from nanguard.integrations.lightning import SKIPPED, GuardCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

NUMBER, BAD = 8, 3
Batch = tuple[Tensor, Tensor]


class Net(pl.LightningModule):
    """BatchNorm, a schedule for each step, a mean, a torchmetric, and a value for each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.norm, self.out = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=3)
        self.mean = torchmetrics.MeanMetric(nan_strategy="ignore")
        self.spoil: Callable[[nn.Module, int], None] = lambda module, number: None
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.norm(self.inp(x))))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("worst", loss, on_epoch=True, on_step=False, reduce_fx="max")
        self.accuracy(logits.nan_to_num(), batch[1])
        self.mean.update(loss)
        self.log("accuracy", self.accuracy, on_epoch=True, on_step=False)
        self.log("mean", self.mean, on_epoch=True, on_step=False)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if "loss" in outputs:
            self.log("after", outputs["loss"], on_epoch=True, on_step=False)

    def on_after_backward(self) -> None:
        self.spoil(self, self.trainer.fit_loop.epoch_loop.batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule, "interval": "step"}}


class Logged(pl.loggers.logger.DummyLogger):
    """Keeps what the trainer logs."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append(dict(metrics))


class Run:
    def __init__(
        self,
        batches: Sequence[Batch],
        tmp_path: Path,
        *,
        guard: GuardCallback | None = None,
        model: Net | None = None,
        callbacks: Sequence[Any] = (),
        epochs: int = 2,
        ckpt_path: str | None = None,
        **options: Any,
    ) -> None:
        self.model = model or Net()
        self.guard, self.logged = guard, Logged()
        self.trainer = pl.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            callbacks=[*callbacks, *([guard] if guard else [])],
            logger=[self.logged],
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
            default_root_dir=str(tmp_path),
            **options,
        )
        loader = torch.utils.data.DataLoader(list(batches), batch_size=None)
        self.trainer.fit(self.model, loader, ckpt_path=ckpt_path)

    def state(self) -> dict[str, Any]:
        model = nn.ModuleList([self.model.inp, self.model.norm, self.model.out])
        return everything(model, self.trainer.optimizers, self.model.schedule)

    @property
    def values(self) -> dict[str, float]:
        """What callbacks see at the end."""
        seen = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        return {name: value for name, value in seen.items() if name != SKIPPED}

    @property
    def rows(self) -> list[dict[str, float]]:
        return [{name: value for name, value in row.items() if name != SKIPPED} for row in self.logged.rows]


def without_bad(batches: list[Batch]) -> list[Batch]:
    return batches[:BAD] + batches[BAD + 1 :]


def test_a_healthy_run_is_the_same_to_the_bit(tmp_path: Path) -> None:
    plain = Run(make_batches(NUMBER), tmp_path)
    run = Run(make_batches(NUMBER), tmp_path, guard=GuardCallback())
    assert differences(plain.state(), run.state()) == []
    assert plain.rows == run.logged.rows
    assert plain.values == run.values
    assert run.guard is not None
    assert run.guard.counts["applied"] == 2 * NUMBER
    assert run.guard.incidents == ()


def test_a_bad_batch_never_came(tmp_path: Path) -> None:
    stop = EarlyStopping("loss_epoch", patience=100, check_finite=True)
    best = ModelCheckpoint(tmp_path / "best", monitor="loss_epoch")
    batches = make_batches(NUMBER)
    run = Run(poisoned(batches, BAD), tmp_path, guard=GuardCallback(), callbacks=[stop, best])
    never = Run(without_bad(batches), tmp_path)
    assert differences(never.state(), run.state()) == []
    assert run.values == never.values
    steps = [row for row in run.rows if "loss_step" in row]
    assert steps == [row for row in never.rows if "loss_step" in row]
    assert [row for row in run.rows if "accuracy" in row] == [row for row in never.rows if "accuracy" in row]
    assert run.trainer.current_epoch == 2, "EarlyStopping has seen finite numbers"
    assert "epoch=1" in best.best_model_path, "ModelCheckpoint has compared them"
    assert run.trainer.callback_metrics[SKIPPED] == run.trainer.progress_bar_metrics[SKIPPED] == 2.0
    assert run.guard is not None
    assert run.guard.counts["skipped"] == 2
    assert run.trainer.global_step == 2 * NUMBER, "it counts all, as Lightning documents"


def inf_gradient(model: nn.Module, number: int) -> None:
    if number == BAD:
        model.get_parameter("out.bias").grad[0] = INF  # type: ignore[index]


class BadLoss(Net):
    """The loss of one batch is NaN, its gradients are finite."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + NAN if batch_idx == BAD else loss


class Lost(Net):
    """A logarithm of zero in code of the program, outside of any module."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        chances = self(batch[0]).softmax(1) * (batch[0][:, :1] != 7.0)
        loss = -chances.gather(1, batch[1][:, None]).log().mean()
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize("fault", ["inf gradient", "bad loss"])
def test_a_step_with_finite_data_never_happened(fault: str, tmp_path: Path) -> None:
    batches = make_batches(NUMBER)
    model = BadLoss() if fault == "bad loss" else Net()
    if fault == "inf gradient":
        model.spoil = inf_gradient
    run = Run(batches, tmp_path, guard=GuardCallback(), model=model, epochs=1)
    never = Run(without_bad(batches), tmp_path, epochs=1)
    assert differences(never.state(), run.state()) == []
    assert run.values == never.values
    assert run.guard is not None
    assert run.guard.counts["skipped"] == 1


def test_the_users_own_line_is_named_and_nothing_is_logged_twice(tmp_path: Path) -> None:
    batches = poisoned(make_batches(NUMBER), BAD, value=7.0)
    run = Run(batches, tmp_path, guard=GuardCallback(run_dir=tmp_path / "run"), model=Lost(), epochs=1)
    assert run.guard is not None
    (incident,) = run.guard.incidents
    diagnosis = incident.outcome.diagnosis
    assert diagnosis is not None
    assert diagnosis.cause == "log_of_zero"
    assert diagnosis.source is not None
    assert (diagnosis.source.file, diagnosis.source.function) == (__file__, "training_step")
    assert ".log().mean()" in diagnosis.source.text
    assert diagnosis.samples == (0,)
    assert len(nanguard.read_run(tmp_path / "run").incidents) == 1
    never = Run(without_bad(batches), tmp_path, model=Lost(), epochs=1)
    assert run.values == never.values
    assert differences(never.state(), run.state()) == []


@pytest.mark.parametrize("place", [2 * BAD, 2 * BAD + 1])
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}], ids=str)
def test_one_bad_micro_batch_leaves_its_step_out(place: int, options: dict[str, Any], tmp_path: Path) -> None:
    batches = make_batches(2 * NUMBER)
    options = {"accumulate_grad_batches": 2, "epochs": 1, **options}
    run = Run(poisoned(batches, place), tmp_path, guard=GuardCallback(), **options)
    never = Run(batches[: 2 * BAD] + batches[2 * BAD + 2 :], tmp_path, **options)
    assert differences(never.state(), run.state()) == []
    assert run.values == never.values
    assert run.guard is not None
    assert run.guard.counts["skipped"] == 1


class Norms(nanguard.Observer):
    def __init__(self) -> None:
        self.norms: list[float] = []
        self.steps: list[int] = []

    def on_heard(self, outcome: Any) -> None:
        self.norms.append(outcome.verdict.reading.norms[0])
        self.steps.append(outcome.verdict.reading.step)


def test_norms_are_those_before_clipping(tmp_path: Path) -> None:
    watcher = Norms()
    Run(make_batches(4), tmp_path, guard=GuardCallback(observers=[watcher]), epochs=1, gradient_clip_val=0.01)
    assert len(watcher.norms) == 4
    assert min(watcher.norms) > 0.02


def test_fp16_with_a_real_scaler(tmp_path: Path) -> None:
    """A NaN batch is skipped; an overflow by the scale alone is routine, and holds the schedule too."""
    batches = make_batches(NUMBER)

    def train(data: list[Batch], guard: GuardCallback | None, scale: float) -> tuple[Run, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)
        return Run(data, tmp_path, guard=guard, epochs=1, plugins=[plugin], gradient_clip_val=1.0), scaler

    run, scaler = train(poisoned(batches, BAD), GuardCallback(), 2.0**10)
    never, _ = train(without_bad(batches), None, 2.0**10)
    assert run.guard is not None
    assert differences(never.state(), run.state()) == []
    assert run.values == never.values
    assert scaler.get_scale() == 2.0**9, "its own rule"
    healthy, ours = train(batches, GuardCallback(), 2.0**22)
    plain, theirs = train(batches, None, 2.0**22)
    assert healthy.guard is not None
    assert ours.state_dict() == theirs.state_dict()
    assert 0 < healthy.guard.counts["backed_off"] < NUMBER
    assert healthy.guard.incidents == ()
    assert healthy.model.schedule.last_epoch == healthy.guard.counts["applied"]
    assert plain.model.schedule.last_epoch == NUMBER
    assert healthy.values["loss_epoch"] != 0


class TwoOptimizers(Net):
    """Manual optimization: two optimizers, each with a schedule that the program advances."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        first.step()
        second.step()
        for schedule in self.lr_schedulers():
            schedule.step()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        body = [*self.inp.parameters(), *self.norm.parameters()]
        both = [torch.optim.SGD(body, lr=0.1, momentum=0.9), torch.optim.AdamW(self.out.parameters(), lr=0.01)]
        schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 0.9**step) for each in both]
        self.schedule = schedules[1]
        return both, schedules


@pytest.mark.parametrize("fault", ["data", "inf gradient"])
def test_manual_optimization_with_two_optimizers(fault: str, tmp_path: Path) -> None:
    batches = make_batches(NUMBER)
    model = TwoOptimizers()
    if fault == "inf gradient":
        model.spoil = inf_gradient
    bad = batches if fault == "inf gradient" else poisoned(batches, BAD)
    run = Run(bad, tmp_path, guard=GuardCallback(), model=model, epochs=1)
    never = Run(without_bad(batches), tmp_path, model=TwoOptimizers(), epochs=1)
    assert differences(never.state(), run.state()) == []
    assert [c.scheduler.last_epoch for c in run.trainer.lr_scheduler_configs] == [NUMBER - 1] * 2
    assert run.values == never.values
    plain = Run(batches, tmp_path, model=TwoOptimizers(), epochs=1)
    healthy = Run(batches, tmp_path, guard=GuardCallback(), model=TwoOptimizers(), epochs=1)
    assert differences(plain.state(), healthy.state()) == []
    assert plain.rows == healthy.logged.rows


def test_averages_leave_the_step_out(tmp_path: Path) -> None:
    batches = make_batches(NUMBER)

    def train(data: list[Batch], guard: GuardCallback | None) -> tuple[Run, dict[str, Any]]:
        average = pl.callbacks.EMAWeightAveraging(decay=0.5)
        kept: dict[str, Any] = {}

        class Keep(pl.Callback):
            def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
                kept.update(copy.deepcopy(average._average_model.state_dict()))

        return Run(data, tmp_path, guard=guard, callbacks=[average, Keep()], epochs=1), kept

    run, average = train(poisoned(batches, BAD), GuardCallback())
    never, expected = train(without_bad(batches), None)
    assert differences(expected, average) == []
    assert differences(never.state(), run.state()) == []


@pytest.mark.parametrize("place", [BAD, NUMBER - 1])
def test_the_statistics_of_an_averaged_model_leave_the_batch_out(place: int, tmp_path: Path) -> None:
    batches = make_batches(NUMBER)

    def train(data: list[Batch], guard: GuardCallback | None) -> Run:
        average = pl.callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)
        return Run(data, tmp_path, guard=guard, callbacks=[average], model=Unscheduled(), epochs=3)

    run = train(poisoned(batches, place), GuardCallback())
    never = train([each for number, each in enumerate(batches) if number != place], None)
    changed = differences(never.state(), run.state())
    if place == BAD:
        assert changed == []
        assert differences(train(batches, None).state(), train(batches, GuardCallback()).state()) == []
    else:  # Lightning steps once more in the end, with the gradients of the last step: these are not finite
        assert [name for name in changed if "running" in name or "num_batches" in name] == []
        assert all(torch.isfinite(value).all() for value in run.model.state_dict().values())
    assert run.values["loss_epoch"] == never.values["loss_epoch"]


class Unscheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return [optimizer], [self.schedule]


def test_it_resumes_from_guarded_and_unguarded_checkpoints(tmp_path: Path) -> None:
    batches = make_batches(NUMBER)
    whole = Run(batches, tmp_path, epochs=2)
    for number, (first, second) in enumerate([(None, GuardCallback()), (GuardCallback(), None)]):
        half = Run(batches, tmp_path, guard=first, epochs=1)
        path = str(tmp_path / f"{number}.ckpt")
        half.trainer.save_checkpoint(path)
        rest = Run(batches, tmp_path, guard=second, epochs=2, ckpt_path=path)
        assert differences(whole.state(), rest.state()) == []
        assert rest.values == whole.values


def test_a_policy_that_halts_ends_fit_cleanly_with_a_good_checkpoint(tmp_path: Path) -> None:
    batches = make_batches(NUMBER)
    guard = GuardCallback(policy=nanguard.Policy([nanguard.Halt()], divergence=None))
    save = ModelCheckpoint(tmp_path / "last", save_last=True)
    run = Run(poisoned(batches, BAD), tmp_path, guard=guard, callbacks=[save], min_epochs=2)
    assert run.trainer.current_epoch == 1
    assert guard.halted is not None
    assert guard.halted.incident.outcome.verdict.reading.step == BAD
    assert (guard.counts["applied"], guard.counts["halted"]) == (BAD, 1)
    expected = Run(batches[:BAD], tmp_path, epochs=1)
    assert differences(expected.state(), run.state()) == []
    saved = torch.load(save.last_model_path, weights_only=False)["state_dict"]
    assert differences(dict(expected.model.state_dict()), dict(saved)) == []
    assert run.trainer.fit_loop.min_epochs == 2, "restored"


class Raises(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if not torch.isfinite(self.trainer.callback_metrics["loss_step"]):
            raise ArithmeticError("of the program")


def test_an_error_of_the_program_goes_on_and_its_step_is_examined(tmp_path: Path) -> None:
    guard, model = GuardCallback(), Raises()
    with pytest.raises(ArithmeticError, match="of the program"):
        Run(poisoned(make_batches(NUMBER), BAD), tmp_path, guard=guard, model=model)
    (incident,) = guard.incidents
    assert incident.outcome.diagnosis is not None
    assert incident.outcome.diagnosis.cause == "input_nonfinite"
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


def test_afterwards_everything_is_as_it_was(tmp_path: Path) -> None:
    runs = [Run(make_batches(2), tmp_path, guard=guard, epochs=1) for guard in (None, GuardCallback())]
    facts = []
    for run in runs:
        objects = [run.trainer.strategy, run.trainer.fit_loop.epoch_loop, run.trainer._logger_connector]
        objects += [run.model, run.model.schedule, *run.trainer.optimizers]
        facts.append([sorted(vars(each)) for each in objects])
    assert facts[0] == facts[1]
    assert runs[0].trainer.optimizers[0].step.__qualname__ == runs[1].trainer.optimizers[0].step.__qualname__


def test_what_is_not_supported_is_refused(tmp_path: Path) -> None:
    guard = GuardCallback()
    with pytest.raises(RuntimeError, match="has no guard before"):
        _ = guard.guard
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[guard])
    trainer.strategy.__class__ = type("FSDPStrategy", (type(trainer.strategy),), {})
    with pytest.raises(ValueError, match="does not support FSDPStrategy yet"):
        trainer.fit(Net(), torch.utils.data.DataLoader(make_batches(2), batch_size=None))


class Stubborn(torch.optim.SGD):
    """As optimizers of other packages are: nothing is known about its closure."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class OfOthers(Net):
    def configure_optimizers(self) -> Any:
        optimizer = Stubborn(self.parameters(), lr=0.01, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule, "interval": "step"}}


def test_optimizers_of_other_packages_and_steps_that_the_program_leaves_out(tmp_path: Path) -> None:
    class Chooses(OfOthers):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:  # type: ignore[override]
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    batches = make_batches(NUMBER)
    plain, healthy = (
        Run(batches, tmp_path, model=Chooses()),
        Run(batches, tmp_path, model=Chooses(), guard=GuardCallback()),
    )
    assert differences(plain.state(), healthy.state()) == []
    run = Run(poisoned(batches, BAD), tmp_path, model=OfOthers(), guard=GuardCallback(), epochs=1)
    never = Run(without_bad(batches), tmp_path, model=OfOthers(), epochs=1)
    assert differences(never.state(), run.state()) == []


def test_the_other_package_works_too() -> None:
    old = pytest.importorskip("pytorch_lightning")

    class Plain(old.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_epoch=True, on_step=False)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    guard = GuardCallback()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = old.Trainer(max_epochs=1, accelerator="cpu", callbacks=[guard], **quiet)
    trainer.fit(Plain(), torch.utils.data.DataLoader(poisoned(make_batches(NUMBER), BAD), batch_size=None))
    assert (guard.counts["applied"], guard.counts["skipped"]) == (NUMBER - 1, 1)
    assert torch.isfinite(trainer.callback_metrics["loss"])
    diagnosis = guard.incidents[0].outcome.diagnosis
    assert diagnosis is not None
    assert diagnosis.cause == "input_nonfinite"


class Validated(Net):
    """Validation in the middle of an epoch, a schedule that is told a metric of each step, an output that is a dict."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "more": 1}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(make_batches(2, seed=3), batch_size=None)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        told = {"scheduler": self.schedule, "interval": "step", "monitor": "loss_step"}
        return {"optimizer": optimizer, "lr_scheduler": told}


def test_validation_and_a_schedule_that_is_told_a_metric(tmp_path: Path) -> None:
    batches = make_batches(NUMBER)
    plain = Run(batches, tmp_path, model=Validated(), val_check_interval=0.5)
    healthy = Run(batches, tmp_path, model=Validated(), guard=GuardCallback(), val_check_interval=0.5)
    assert differences(plain.state(), healthy.state()) == []
    assert plain.rows == healthy.logged.rows
    run = Run(poisoned(batches, BAD), tmp_path, model=Validated(), guard=GuardCallback(), epochs=1)
    never = Run(without_bad(batches), tmp_path, model=Validated(), epochs=1)
    assert differences(never.state(), run.state()) == []
    assert run.values == never.values


class Quiet(Net):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        pass


class Fetches(Quiet):
    """Takes its batches itself: it cannot be run again without taking others."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return F.cross_entropy(self(batch[0]), batch[1])


class Compiled(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.compile(nn.Sequential(self.inp, self.norm, self.out), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.compiled(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Fetches, Compiled])
def test_a_step_that_fetches_its_batch_and_a_compiled_model(kind: type[Net], tmp_path: Path) -> None:
    batches = make_batches(NUMBER)
    run = Run(poisoned(batches, BAD), tmp_path, model=kind(), guard=GuardCallback(), epochs=1)
    never = Run(without_bad(batches), tmp_path, model=kind(), epochs=1)
    assert differences(never.state(), run.state()) == []
    assert run.guard is not None
    diagnosis = run.guard.incidents[0].outcome.diagnosis
    assert diagnosis is not None
    assert diagnosis.cause == "input_nonfinite"


# ---- under nanguard run ----------------------------------------------------------------------------------------------


def test_nanguard_run_uses_the_adapter(tmp_path: Path) -> None:
    batches = make_batches(NUMBER)
    fit = pl.Trainer._run
    with nanguard.install(run_dir=tmp_path / "run") as autopilot:
        run = Run(poisoned(batches, BAD), tmp_path, epochs=1)
        healthy = Run(batches, tmp_path, epochs=1)
        assert not any(isinstance(each, GuardCallback) for each in run.trainer.callbacks)
        assert (autopilot.counts["applied"], autopilot.counts["skipped"]) == (2 * NUMBER - 1, 1)
        assert autopilot.num_optimizers == 2
        assert autopilot.unsound() == ()
        (incident,) = autopilot.incidents
        guarded = Run(poisoned(batches, BAD), tmp_path, guard=GuardCallback(), epochs=1)
        assert guarded.guard is not None
        assert guarded.guard.counts["skipped"] == 1, "the program's own is left alone"
        assert len(autopilot.incidents) == 1
    assert pl.Trainer._run is fit
    assert incident.outcome.diagnosis is not None
    assert incident.outcome.diagnosis.capture == "step", "training_step was run again"
    never, plain = Run(without_bad(batches), tmp_path, epochs=1), Run(batches, tmp_path, epochs=1)
    assert differences(never.state(), run.state()) == []
    assert run.values == never.values
    assert differences(plain.state(), healthy.state()) == []
    assert plain.rows == healthy.logged.rows
    log = nanguard.read_run(tmp_path / "run")
    assert (len(log.headers), len(log.steps), len(log.incidents)) == (1, 2 * NUMBER, 1)


class Searches(Net):
    """LBFGS, which adapters refuse."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule, "interval": "step"}}


def test_what_the_adapter_refuses_is_guarded_by_the_patches(tmp_path: Path) -> None:
    batches = make_batches(3)
    with nanguard.install() as autopilot:
        run = Run(poisoned(batches, 1), tmp_path, model=Searches(), epochs=1)
        assert autopilot.num_optimizers == 1
        assert len(autopilot.incidents) == 1
    assert all(torch.isfinite(value).all() for value in run.model.state_dict().values())


def test_an_error_under_nanguard_run_is_examined_and_goes_on(tmp_path: Path) -> None:
    with nanguard.install() as autopilot:
        with pytest.raises(ArithmeticError, match="of the program"):
            Run(poisoned(make_batches(NUMBER), BAD), tmp_path, model=Raises())
        assert len(autopilot.incidents) == 1
