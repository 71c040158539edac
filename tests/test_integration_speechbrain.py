"""SpeechBrain's own loop, guarded: after a bad step everything is as in a run that never had its batches."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader

import nanguard
from frameworks import import_speechbrain
from helpers import INF, NAN, differences, everything
from launching import Case, Cases, Ranks, cases, needs_gloo
from nanguard.integrations.speechbrain import attach

sb = import_speechbrain()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from speechbrain.nnet.schedulers import NoamScheduler
    from speechbrain.processing.features import InputNormalization
    from speechbrain.utils.checkpoints import Checkpointer
    from speechbrain.utils.metric_stats import MetricStats

Batch = tuple[Tensor, Tensor, str]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("speechbrain").setLevel(logging.ERROR)


def make_batches(number: int = 8) -> list[Batch]:
    g = torch.Generator().manual_seed(0)
    return [
        (torch.randn(4, 5, 6, generator=g), torch.randint(0, 3, (4,), generator=g), f"batch {place}")
        for place in range(number)
    ]


def spoiled(batches: Sequence[Batch], place: int, fault: str) -> list[Batch]:
    batches = list(batches)
    x, y, name = batches[place]
    if fault == "nan batch":
        x = x.clone()
        x[2, 0, 0] = NAN
    batches[place] = (x, y, f"{name} {fault}")
    return batches


class Recipe(sb.Brain):  # type: ignore[misc]
    """As recipes are: features are normalized, metrics collected, the schedule advanced in ``on_fit_batch_end``."""

    def compute_forward(self, batch: Batch, stage: Any) -> Tensor:
        x = self.modules.normalize(batch[0], torch.ones(len(batch[0])))
        predictions: Tensor = self.modules.net(x.mean(dim=1))
        if "inf gradient" in batch[2]:
            predictions.register_hook(lambda gradient: gradient * INF)
        return predictions

    def compute_objectives(self, predictions: Tensor, batch: Batch, stage: Any) -> Tensor:
        if stage is sb.Stage.TRAIN:
            names = [f"{batch[2]}, {place}" for place in range(len(batch[1]))]
            self.metrics.append(names, predictions, batch[1])
            self.num_objectives += 1
        loss = F.cross_entropy(predictions, batch[1])
        return loss + NAN if "nan loss" in batch[2] else loss

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.average = torch.optim.swa_utils.AveragedModel(
            self.modules, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        self.told: list[Any] = []

    def on_stage_start(self, stage: Any, epoch: int | None = None) -> None:
        self.num_objectives = 0
        self.metrics = MetricStats(metric=lambda p, y: F.cross_entropy(p, y, reduction="none"))

    def on_fit_batch_end(self, batch: Batch, outputs: Any, loss: Tensor, should_step: bool) -> None:
        if should_step:
            self.hparams.schedule(self.optimizer)
            self.average.update_parameters(self.modules)

    def on_stage_end(self, stage: Any, stage_loss: float, epoch: int | None = None) -> None:
        metrics = (self.metrics.ids, torch.stack(self.metrics.scores)) if stage is sb.Stage.TRAIN else ()
        self.told.append((stage.name, stage_loss, copy.deepcopy(metrics)))


def make(kind: type[Recipe] = Recipe, *, folder: Path | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    modules = {"normalize": InputNormalization(norm_type="global"), "net": net}
    schedule = NoamScheduler(lr_initial=0.05, n_warmup_steps=3)
    recoverables = {"net": net, "normalize": modules["normalize"], "schedule": schedule}
    checkpointer = None if folder is None else Checkpointer(folder, recoverables)
    return kind(
        modules,
        opt_class=lambda params: torch.optim.AdamW(params, lr=0.05),
        hparams={"schedule": schedule},
        run_opts={"device": "cpu", "noprogressbar": True, **options},
        checkpointer=checkpointer,
    )


def fit(brain: Any, *epochs: Sequence[Batch]) -> Any:
    """Each epoch may have other batches, so that a hand-made perfect run can leave some out."""
    left = list(epochs)

    class Data:
        def __len__(self) -> int:
            return len(left[0])

        def __getitem__(self, place: int) -> Batch:
            return left[0][place]

    class Epochs:
        def __iter__(self) -> Any:
            for number in range(1, len(epochs) + 1):
                yield number
                left.pop(0)

    class Places:
        def __iter__(self) -> Any:
            return iter(range(len(left[0])))

        def __len__(self) -> int:
            return len(left[0])

    valid = DataLoader(make_batches(2), batch_size=None)
    brain.fit(Epochs(), DataLoader(Data(), batch_size=None, sampler=Places()), valid)
    return brain


def facts(brain: Any) -> dict[str, Any]:
    normalize = brain.modules.normalize
    means = {"mean": normalize.glob_mean, "std": normalize.glob_std, "count": normalize.count}
    more = {"schedule": (brain.hparams.schedule.n_steps, brain.hparams.schedule.current_lr)}
    counts = {"optimizer_step": brain.optimizer_step, "nonfinite_count": brain.nonfinite_count}
    told = [(stage, loss, *metrics) for stage, loss, metrics in brain.told]
    return {**everything(brain.modules, [brain.optimizer], brain.average), **means, **more, **counts, "told": told}


def test_the_progress_bar_shows_skips(capsys: pytest.CaptureFixture[str]) -> None:
    brain = make(noprogressbar=False)
    batches = make_batches()
    with attach(brain) as guard:
        fit(brain, spoiled(spoiled(batches, 2, "nan batch"), 5, "inf gradient"), batches)
        assert guard.num_skipped == 2
    shown = capsys.readouterr().err
    assert "skipped=1, train_loss=" in shown
    assert "skipped=2, train_loss=" in shown
    fit(make(noprogressbar=False), batches)
    assert "skipped" not in capsys.readouterr().err


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"grad_accumulation_factor": 2}], ids=str)
def test_a_healthy_run_is_the_same_to_the_bit(options: dict[str, Any]) -> None:
    batches = make_batches(7)
    brain = make(**options)
    with attach(brain) as guard:
        fit(brain, batches, batches)
    assert (
        guard.counts["applied"]
        == brain.optimizer_step
        == 14 // options.get("grad_accumulation_factor", 1) - ("grad_accumulation_factor" in options)
    )
    assert differences(facts(brain), facts(fit(make(**options), batches, batches))) == []


@pytest.mark.parametrize("fault", ["nan batch", "inf gradient", "nan loss"])
@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_bad_step_never_happened(fault: str, factor: int, precision: str) -> None:
    options = {"grad_accumulation_factor": factor, "precision": precision}
    batches = make_batches()
    bad = spoiled(spoiled(batches, 5, fault), 7, fault)  # a later micro-batch of its step, if there are several
    without = batches[:4] if factor == 2 else [*batches[:5], batches[6]]
    brain = make(nonfinite_patience=0, **options)
    with attach(brain) as guard:
        fit(brain, bad, batches)
    assert (len(guard.incidents), guard.counts["skipped"]) == (2, 2)
    assert differences(facts(brain), facts(fit(make(**options), without, batches))) == []
    assert all(loss == loss and loss > 0 for _, loss, _ in brain.told)
    diagnosis = guard.incidents[0].diagnosis
    assert diagnosis is not None
    assert diagnosis.capture == "step"
    if fault == "nan batch":
        assert (diagnosis.cause, diagnosis.samples) == ("input_nonfinite", (2,))
        assert diagnosis.source is not None
        assert diagnosis.source.file == __file__


def test_without_a_diagnosis_a_bad_loss_of_one_microbatch_is_enough() -> None:
    batches = make_batches()
    brain = make(grad_accumulation_factor=2)
    with attach(brain, diagnose="off"):
        fit(brain, spoiled(batches, 5, "nan loss"))
    expected = fit(make(grad_accumulation_factor=2), batches[:4] + batches[6:])
    assert differences(facts(brain), facts(expected)) == []


def test_what_happens_without_it() -> None:
    brain = fit(make(), spoiled(make_batches(), 5, "nan batch"))
    assert brain.modules.net[0].weight.isnan().all()
    assert brain.modules.normalize.glob_mean.isnan().any()


@pytest.mark.parametrize("fault", ["nan batch", "nan loss"])
def test_batches_that_are_too_few_for_a_step_at_the_end_of_an_epoch(fault: str) -> None:
    batches = make_batches(5)
    brain = make(grad_accumulation_factor=2)
    with attach(brain) as guard:
        fit(brain, spoiled(batches, 4, fault), batches)
    expected = fit(make(grad_accumulation_factor=2), batches[:4], batches)
    assert guard.counts["applied"] == expected.optimizer_step == 4
    assert len(guard.incidents) == 1
    assert differences(facts(brain), facts(expected)) == []


def test_an_overflow_of_a_real_scaler_is_routine_and_holds_the_schedule() -> None:
    batches, runs = make_batches(), []
    for is_guarded in (True, False):
        brain = make(nonfinite_patience=100)
        brain.scaler = GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
        scaler = brain.scaler
        if is_guarded:
            with attach(brain) as guard:
                fit(brain, batches)
        else:
            fit(brain, batches)
        assert brain.scaler is scaler
        runs.append((everything(brain.modules, [brain.optimizer]), scaler.get_scale()))
        if is_guarded:
            assert guard.incidents == ()
            num_overflows = guard.counts["backed_off"]
            assert 0 < num_overflows < 8
            assert brain.optimizer_step == brain.hparams.schedule.n_steps == 8 - num_overflows
    assert runs[0][1] == runs[1][1] == 2.0 ** (127 - num_overflows)
    assert runs[0][0]["model.net.0.weight"].isfinite().all()


class OwnFitBatch(Recipe):
    """Steps without ``optimizers_step``, and calls ``check_loss_isfinite`` nowhere."""

    def fit_batch(self, batch: Batch) -> Tensor:
        with self.training_ctx:
            outputs = self.compute_forward(batch, sb.Stage.TRAIN)
            loss = self.compute_objectives(outputs, batch, sb.Stage.TRAIN)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.optimizer_step += 1
        self.on_fit_batch_end(batch, outputs, loss, should_step=True)
        return loss.detach()


def test_a_recipe_with_a_fit_batch_of_its_own() -> None:
    batches = make_batches()
    brain = make(OwnFitBatch)
    with attach(brain) as guard:
        fit(brain, spoiled(batches, 3, "nan batch"))
    expected = fit(make(OwnFitBatch), batches[:3] + batches[4:])
    assert guard.counts["skipped"] == 1
    assert differences({**facts(brain), "optimizer_step": 0}, {**facts(expected), "optimizer_step": 0}) == []


class WithoutScaler(Recipe):
    """Calls ``backward()`` on the loss itself."""

    def fit_batch(self, batch: Batch) -> Tensor:
        outputs = self.compute_forward(batch, sb.Stage.TRAIN)
        loss = self.compute_objectives(outputs, batch, sb.Stage.TRAIN)
        self.check_loss_isfinite(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizers_step()
        self.on_fit_batch_end(batch, outputs, loss, should_step=True)
        return loss.detach()


def test_a_recipe_that_does_not_scale_its_loss() -> None:
    batches = make_batches()
    brain = make(WithoutScaler)
    with attach(brain) as guard:
        fit(brain, spoiled(batches, 3, "nan loss"))
    expected = fit(make(WithoutScaler), batches[:3] + batches[4:])
    assert guard.incidents[0].reading.found == ("loss",)
    assert differences(facts(brain), facts(expected)) == []


class TwoOptimizers(Recipe):
    def init_optimizers(self) -> None:
        first, last = self.modules.net[:2].parameters(), self.modules.net[2:].parameters()
        self.optimizer = torch.optim.AdamW(first, lr=0.05)
        self.optimizer_last = torch.optim.SGD(last, lr=0.05)
        self.optimizers_dict = {"first": self.optimizer, "last": self.optimizer_last}

    def freeze_optimizers(self, optimizers: dict[str, Any]) -> dict[str, Any]:
        return optimizers if self.optimizer_step % 2 else {"last": self.optimizer_last}


@pytest.mark.parametrize("place", [2, 3], ids=["while one is frozen", "while none is"])
def test_several_optimizers_of_which_some_are_frozen_at_times(place: int) -> None:
    batches = make_batches()
    brain = make(TwoOptimizers)
    with attach(brain) as guard:
        fit(brain, spoiled(batches, place, "nan batch"))
    expected = fit(make(TwoOptimizers), batches[:place] + batches[place + 1 :])
    assert brain.optimizer_step == expected.optimizer_step == 7
    assert len(guard.incidents) <= 2
    assert differences(facts(brain), facts(expected)) == []


def test_a_halt_leaves_a_checkpoint_from_which_a_run_without_a_guard_goes_on(tmp_path: Path) -> None:
    batches = make_batches()
    brain = make(folder=tmp_path / "save")
    policy = nanguard.Policy(ladder=(nanguard.Halt(),))
    guard = attach(brain, policy=policy, run_dir=tmp_path / "run")
    with pytest.raises(nanguard.NonFiniteError, match="Halted, since"):
        fit(brain, spoiled(batches, 4, "nan batch"))
    guard.detach()
    assert [record.step for record in nanguard.read_run(tmp_path / "run").steps] == [0, 1, 2, 3, 4]
    resumed, expected = make(folder=tmp_path / "save"), fit(make(), batches[:4])
    resumed.on_fit_start()
    assert (resumed.step, resumed.optimizer_step) == (5, 4)
    assert resumed.avg_train_loss == expected.told[0][1]
    assert (
        differences(
            everything(resumed.modules, [resumed.optimizer]), everything(expected.modules, [expected.optimizer])
        )
        == []
    )
    with attach(resumed) as again:
        fit(resumed, batches)
    assert again.incidents == ()


def test_detach_restores_everything() -> None:
    brain, other = make(), make()
    before = dict(vars(brain))
    guard = attach(brain)
    with pytest.raises(RuntimeError, match="training has not begun"):
        _ = guard.loop
    assert guard.incidents == ()
    guard.detach()
    assert vars(brain) == before
    batches = make_batches()
    assert differences(facts(fit(brain, batches)), facts(fit(other, batches))) == []


case = Cases("speaking")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return case.launcher(request)


@pytest.mark.campaign
@needs_gloo
@cases(*(case("guarded", fault=fault) for fault in ("nan batch", "nan loss", "inf gradient")))
def test_ranks_skip_together_and_name_the_line(ranks: Ranks, one: Case) -> None:
    """Modules are wrapped in DDP one by one, and InputNormalization sums over ranks in its forward pass."""
    first, second = ranks(one)
    assert first == second
    assert (first["differences"], first["applied"]) == ([], 15)
    cause, line = {
        "nan batch": ("input_nonfinite", "self.modules.normalize("),
        "nan loss": ("nonfinite_constant", "loss + NAN"),
        "inf gradient": ("nonfinite_constant", "gradient * INF"),
    }[one.options["fault"]]
    assert first["cause"] == cause
    assert line in first["line"]


def test_nanguard_run_uses_the_adapter() -> None:
    batches = make_batches()
    never, plain = make(), make()
    fit(never, [*batches[:3], *batches[4:]])
    fit(plain, batches)
    with nanguard.install() as autopilot:
        run, healthy = make(), make()
        fit(run, spoiled(batches, 3, "nan batch"))
        fit(healthy, batches)
        assert (autopilot.counts["applied"], autopilot.counts["skipped"]) == (2 * len(batches) - 1, 1)
        assert autopilot.incidents[0].outcome.diagnosis is not None
        assert "fit_batch" not in vars(run)
    assert differences(everything(never.modules, [never.optimizer]), everything(run.modules, [run.optimizer])) == []
    assert (
        differences(everything(plain.modules, [plain.optimizer]), everything(healthy.modules, [healthy.optimizer]))
        == []
    )
