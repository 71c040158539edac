"""The Hugging Face Trainer, guarded: after a skipped step all its numbers are those of a run without that batch."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import SequentialSampler

import nanguard
from helpers import INF, NAN, TinyNet, differences, everything
from launching import needs_gloo
from nanguard.policy.rungs import Halt, Skip

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from nanguard.integrations import transformers as integration  # noqa: E402

BATCH, WINDOWS = 4, 8
BAD = 3
"""The window of data that is bad, counted from 0."""

Sample = dict[str, Tensor]
TIMES = ("runtime", "per_second", "flos", "epoch", "step")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


class Classifier(nn.Module):
    """A model as the Trainer wants it: it returns its loss. BatchNorm has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TinyNet()
        self.net.drop = nn.Identity()  # type: ignore[assignment]
        self.spoil: Callable[[Tensor, Tensor], Tensor] = lambda loss, x: loss

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, labels)
        return {"loss": self.spoil(loss, x) if self.training else loss, "logits": logits}


class InOrder(transformers.Trainer):  # type: ignore[misc]
    """Without shuffling, so that a window of data can be left out by hand."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return SequentialSampler(self.train_dataset)


def samples(number: int = WINDOWS * BATCH, *, accumulate: int = 1) -> list[Sample]:
    g = torch.Generator().manual_seed(0)
    count = number * accumulate
    x, y = torch.randn(count, 6, generator=g), torch.randint(0, 3, (count,), generator=g)
    return [{"x": x[place], "labels": y[place]} for place in range(count)]


def without_window(data: list[Sample], *, accumulate: int = 1, window: int = BAD) -> list[Sample]:
    size = BATCH * accumulate
    return data[: window * size] + data[(window + 1) * size :]


def make(
    data: list[Sample],
    folder: Path,
    *,
    accumulate: int = 1,
    kind: type[Any] = InOrder,
    callbacks: Any = (),
    **args: Any,
) -> Any:
    torch.manual_seed(0)
    model = args.pop("model", None) or Classifier()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=args.pop("fused", None))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    given = {
        "num_train_epochs": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_grad_norm": 0.5,
        **args,
    }
    options = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulate,
        report_to=[],
        use_cpu=True,
        **given,
    )
    return kind(
        model,
        options,
        train_dataset=data,
        eval_dataset=samples(8),
        optimizers=(optimizer, schedule),
        callbacks=list(callbacks),
    )


def state_of(trainer: Any) -> dict[str, Any]:
    plain = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return everything(trainer.model, [plain], trainer.lr_scheduler)


def history_of(trainer: Any) -> list[dict[str, float]]:
    """What was logged, without times, positions, and our own entries."""
    entries = []
    for entry in trainer.state.log_history:
        kept = {k: v for k, v in entry.items() if not any(word in k for word in TIMES) and k != integration.SKIPPED}
        if kept:
            entries.append(kept)
    return entries


# ---- healthy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accumulate", "args"),
    [(1, {}), (2, {"bf16": True}), (2, {"max_grad_norm": 0.0, "logging_steps": 3})],
    ids=["plain", "bf16 accumulated", "not clipped"],
)
def test_a_healthy_run_is_the_same_to_the_bit(tmp_path: Path, accumulate: int, args: dict[str, Any]) -> None:
    runs = []
    for is_guarded in (False, True):
        trainer = make(samples(accumulate=accumulate), tmp_path, accumulate=accumulate, **args)
        guard = integration.attach(trainer) if is_guarded else None
        output = trainer.train()
        runs.append((state_of(trainer), history_of(trainer), output.training_loss, torch.get_rng_state()))
        if guard is not None:
            assert guard.counts["applied"] == WINDOWS
            assert guard.incidents == ()
            assert integration.SKIPPED not in str(trainer.state.log_history)
    assert differences(runs[0][0], runs[1][0]) == []
    assert runs[0][1:3] == runs[1][1:3]
    assert torch.equal(runs[0][3], runs[1][3])


# ---- faults ----------------------------------------------------------------------------------------------------------


class _Silent(torch.autograd.Function):
    """NaN, with a gradient of 0."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss * NAN

    @staticmethod
    def backward(ctx: Any, *above: Any) -> Any:
        return above[0] * 0


class _Loud(torch.autograd.Function):
    """Unchanged, with a gradient of Inf."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *above: Any) -> Any:
        return above[0] * INF


def nan_in_data(sample: Sample, model: Classifier) -> None:
    sample["x"][0] = NAN


def inf_gradient(sample: Sample, model: Classifier) -> None:
    bad = sample["x"]
    model.spoil = lambda loss, x: _Loud.apply(loss) if (x == bad).all(1).any() else loss  # type: ignore[no-untyped-call]


def nan_loss(sample: Sample, model: Classifier) -> None:
    bad = sample["x"]
    model.spoil = lambda loss, x: _Silent.apply(loss) if (x == bad).all(1).any() else loss  # type: ignore[no-untyped-call]


FAULTS = [(nan_in_data, 1), (nan_in_data, 2), (inf_gradient, 1), (nan_loss, 2)]


@pytest.mark.parametrize(("fault", "accumulate"), FAULTS)
def test_a_bad_step_never_happened(tmp_path: Path, fault: Any, accumulate: int) -> None:
    good = without_window(samples(accumulate=accumulate), accumulate=accumulate)
    never = make(good, tmp_path / "a", accumulate=accumulate)
    expected = never.train()

    data = samples(accumulate=accumulate)
    torch.manual_seed(0)
    model = Classifier()
    fault(data[(BAD + 1) * BATCH * accumulate - 1], model)  # in the last micro-batch
    trainer = make(data, tmp_path / "b", accumulate=accumulate, model=model)
    guard = integration.attach(trainer)
    output = trainer.train()

    assert differences(state_of(never), state_of(trainer)) == []
    assert history_of(never) == history_of(trainer)
    assert output.training_loss == expected.training_loss
    assert trainer.state.global_step == WINDOWS, "it counts windows of data"
    assert trainer.lr_scheduler.last_epoch == WINDOWS - 1, "the schedule counts applied steps"
    shown = [entry.get(integration.SKIPPED) for entry in trainer.state.log_history]
    assert shown == [None] * BAD + [1] * (WINDOWS - BAD + 1)
    (incident,) = guard.incidents
    assert incident.outcome.verdict.reading.step == BAD
    diagnosis = incident.outcome.diagnosis
    assert diagnosis is not None
    assert diagnosis.capture == "step"
    assert diagnosis.microbatch == (1 if accumulate == 2 else None)
    assert diagnosis.source is not None
    assert diagnosis.source.file == __file__
    assert guard.unsound() == ()


def test_the_mean_of_a_log_leaves_out_sum_and_count(tmp_path: Path) -> None:
    data = samples()
    nan_in_data(data[BAD * BATCH], Classifier())
    single = make(data, tmp_path / "a")
    with integration.attach(single):
        single.train()
    losses = [entry["loss"] for entry in single.state.log_history if "loss" in entry]
    losses.insert(BAD, NAN)
    trainer = make(data, tmp_path / "b", logging_steps=2, logging_nan_inf_filter=False)
    with integration.attach(trainer):
        trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    pairs = [[loss for loss in losses[place : place + 2] if loss == loss] for place in range(0, WINDOWS, 2)]
    assert logged == pytest.approx([sum(pair) / len(pair) for pair in pairs], rel=1e-4)


def test_the_run_log_has_the_loss_and_the_norm_that_the_trainer_logs(tmp_path: Path) -> None:
    heard: list[Any] = []

    class Watch(nanguard.Observer):
        def on_heard(self, outcome: Any) -> None:
            heard.append(outcome.verdict.reading)

    trainer = make(samples(accumulate=2), tmp_path, accumulate=2)
    integration.attach(trainer, observers=[Watch()])
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [reading.loss for reading in heard] == pytest.approx([entry["loss"] for entry in logged], rel=1e-4)
    assert [reading.norms[0] for reading in heard] == pytest.approx([entry["grad_norm"] for entry in logged])


# ---- fp16 ------------------------------------------------------------------------------------------------------------


def in_fp16(trainer: Any, scale: float = 2.0**10) -> Any:
    """As on a GPU: Accelerate makes no scaler on a CPU."""
    accelerator = trainer.accelerator
    accelerator.scaler = GradScaler("cpu", init_scale=scale, growth_interval=100)
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    return trainer


@pytest.fixture
def _alone() -> Iterator[None]:
    """Accelerators of a process share their precision."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("scale", [2.0**10, 2.0**127], ids=["healthy", "overflow"])
def test_fp16_with_a_scaler_is_the_same_and_an_overflow_is_routine(tmp_path: Path, scale: float) -> None:
    plain, trainer = (in_fp16(make(samples(), tmp_path / name), scale) for name in "ab")
    plain.train()
    guard = integration.attach(trainer)
    trainer.train()
    assert differences(state_of(plain), state_of(trainer)) == []
    assert str(history_of(plain)) == str(history_of(trainer)), "NaN norms of overflows too"
    assert plain.accelerator.scaler.get_scale() == trainer.accelerator.scaler.get_scale()
    assert guard.incidents == ()
    assert guard.counts["backed_off"] == (WINDOWS if scale > 2.0**20 else 0)


@pytest.mark.usefixtures("_alone")
def test_a_module_that_overflows_in_fp16_is_kept_in_fp32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Classifier()
    with torch.no_grad():
        model.net.inp.weight.mul_(1e6)  # normalised afterwards
    trainer = in_fp16(make(samples(), tmp_path, model=model))
    guard = integration.attach(trainer)
    trainer.train()
    assert guard.num_skipped == 4
    assert guard.counts["applied"] == WINDOWS - 4
    diagnosis = guard.incidents[0].outcome.diagnosis
    assert diagnosis is not None
    assert diagnosis.cause == "overflow_fp16"
    assert diagnosis.modules_to_keep == ("net.inp",)
    assert guard.unsound() == ()


# ---- labels ----------------------------------------------------------------------------------------------------------


def language_model() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def test_labels_that_all_are_ignored_are_named(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 32, (WINDOWS * BATCH, 8), generator=g)
    labels = tokens.clone()
    ignored = -100
    labels[BAD * BATCH : (BAD + 1) * BATCH] = ignored
    data = [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]
    trainer = make(data, tmp_path, model=language_model())
    guard = integration.attach(trainer)
    trainer.train()
    (incident,) = guard.incidents
    diagnosis = incident.outcome.diagnosis
    assert diagnosis is not None
    assert diagnosis.cause == "all_labels_ignored"
    assert diagnosis.samples == (0, 1, 2, 3)
    assert "transformers" not in str(diagnosis.source)


# ---- stopping, saving, resuming --------------------------------------------------------------------------------------


def test_a_policy_that_halts_stops_cleanly_with_a_checkpoint(tmp_path: Path) -> None:
    data = samples()
    for sample in data[BAD * BATCH :]:
        nan_in_data(sample, Classifier())
    trainer = make(data, tmp_path, save_strategy="steps", save_steps=100)
    guard = integration.attach(trainer, policy=nanguard.Policy([Skip(times=2), Halt()]))
    output = trainer.train()
    assert guard.halted is not None
    assert trainer.state.global_step == BAD + 3
    assert trainer.lr_scheduler.last_epoch == BAD
    assert output.training_loss == output.training_loss, "finite"
    never = make(samples()[: BAD * BATCH], tmp_path / "never")
    never.train()
    assert differences(state_of(never), state_of(trainer)) == []

    again = make(samples(), tmp_path, save_strategy="steps", save_steps=100)
    guard = integration.attach(again)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == WINDOWS
    assert guard.halted is None
    assert guard.num_skipped == 3, "counted on from the log of the checkpoint"
    assert guard.unsound() == ()


@pytest.mark.parametrize("is_guarded", [False, True], ids=["unguarded", "guarded"])
def test_a_checkpoint_is_resumed(tmp_path: Path, is_guarded: bool) -> None:
    data = samples()
    nan_in_data(data[5 * BATCH], Classifier())
    whole = make(data, tmp_path / "whole")
    integration.attach(whole)
    whole.train()
    first = make(data, tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    if is_guarded:
        integration.attach(first)
    first.train()
    second = make(data, tmp_path, save_strategy="steps", save_steps=100)
    guard = integration.attach(second)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert differences(state_of(whole), state_of(second)) == []
    assert guard.incidents[0].outcome.verdict.reading.step == 5, "as the Trainer counts"


def test_early_stopping_and_the_best_model_see_finite_numbers(tmp_path: Path) -> None:
    data = samples()
    nan_in_data(data[BAD * BATCH], Classifier())
    trainer = make(
        data,
        tmp_path,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=WINDOWS)],
    )
    integration.attach(trainer)
    trainer.train()
    scores = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(scores) == WINDOWS
    assert all(score == score for score in scores)
    assert scores[BAD] == scores[BAD - 1], "nothing changed"
    assert trainer.state.best_metric == min(scores)


def test_the_progress_bar_shows_skips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = samples()
    nan_in_data(data[BAD * BATCH], Classifier())
    trainer = make(data, tmp_path, disable_tqdm=False)
    integration.attach(trainer)
    trainer.train()
    assert "skipped=1" in capsys.readouterr().err


# ---- the program's own code ------------------------------------------------------------------------------------------


class OwnLoss(InOrder):
    """A Trainer as people write it: its own loss, and metrics that it collects as the trainers of TRL do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics: dict[str, list[float]] = {}
        self.num_seen = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        chances = outputs["logits"].softmax(1).gather(1, inputs.pop("labels")[:, None])
        loss = -(chances - inputs["x"][:, :1].clamp(9) + 9).log().mean()  # guilty
        self.log({"own": loss.item()})
        self._metrics.setdefault("loss", []).append(loss.item())
        self.num_seen += len(outputs["logits"])
        if not torch.isfinite(loss) and self.args.logging_steps == 7:
            raise RuntimeError("the loss is not finite")
        return (loss, outputs) if return_outputs else loss


def test_the_line_of_a_loss_of_the_programs_own_is_named_and_its_log_is_muted(tmp_path: Path) -> None:
    data = samples()
    data[BAD * BATCH + 2]["x"][0] = 10.0
    trainer = make(data, tmp_path, kind=OwnLoss)
    guard = integration.attach(trainer)
    trainer.train()
    diagnosis = guard.incidents[0].outcome.diagnosis
    assert diagnosis is not None
    assert diagnosis.cause == "log_of_negative"
    assert diagnosis.source is not None
    assert diagnosis.source.text.endswith("# guilty")
    assert diagnosis.samples == (2,)
    assert sum("own" in entry for entry in trainer.state.log_history) == WINDOWS
    assert trainer.num_seen == WINDOWS * BATCH
    assert trainer._metrics["loss"] == [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_an_error_of_the_program_in_a_bad_step_is_examined_and_goes_on(tmp_path: Path) -> None:
    data = samples()
    data[BAD * BATCH + 2]["x"][0] = 10.0
    trainer = make(data, tmp_path, kind=OwnLoss, logging_steps=7)
    guard = integration.attach(trainer)
    with pytest.raises(RuntimeError, match="the loss is not finite"):
        trainer.train()
    assert len(guard.incidents) == 1
    assert guard.unsound() == ()
    assert "backward" not in vars(trainer.accelerator), "restored"


def test_a_frozen_base_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Classifier()
    model.net.inp.requires_grad_(requires_grad=False)
    before = model.net.inp.weight.clone()
    data = samples()
    nan_in_data(data[BAD * BATCH], model)
    trainer = make(data, tmp_path, model=model)
    guard = integration.attach(trainer)
    trainer.train()
    assert guard.counts["applied"] == WINDOWS - 1
    assert torch.equal(before, model.net.inp.weight)
    assert guard.unsound() == ()


# ---- attach and detach -----------------------------------------------------------------------------------------------


def test_detach_restores_everything(tmp_path: Path) -> None:
    trainer = make(samples(), tmp_path)
    of_accelerator = set(vars(trainer.accelerator))
    guard = integration.attach(trainer)
    with pytest.raises(RuntimeError, match="training has not begun"):
        guard.summary()
    with pytest.raises(ValueError, match="guarded already"):
        integration.attach(trainer)
    trainer.train()
    assert guard.summary().startswith("8 steps")
    guard.detach()
    for name in ("training_step", "_inner_training_loop", "_maybe_log_save_evaluate", "log"):
        assert name not in vars(trainer)
    assert set(vars(trainer.accelerator)) == of_accelerator
    trainer.train()
    assert guard.counts["applied"] == WINDOWS, "the second training was not guarded"


def test_sharded_training_is_refused(tmp_path: Path) -> None:
    from accelerate.utils import DistributedType

    trainer = make(samples(), tmp_path)
    before = trainer.accelerator.state.distributed_type
    for kind in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        trainer.accelerator.state.distributed_type = kind
        with pytest.raises(ValueError, match=f"does not support {kind.value}"):
            integration.attach(trainer)
    trainer.accelerator.state.distributed_type = before


# ---- the callback ----------------------------------------------------------------------------------------------------


def test_the_callback_protects_the_weights_and_says_what_it_cannot_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    never = make(without_window(samples()), tmp_path / "a")
    never.train()
    data = samples()
    nan_in_data(data[BAD * BATCH], Classifier())
    callback = integration.GuardCallback()
    trainer = make(data, tmp_path / "b", callbacks=[callback])
    with caplog.at_level(logging.WARNING, logger="nanguard"):
        trainer.train()
    assert "A callback never gets the Trainer" in caplog.text
    assert differences(state_of(never), state_of(trainer)) == []
    assert callback.guard.counts["skipped"] == 1
    assert "step" not in vars(trainer.optimizer)

    for sample in data[BAD * BATCH :]:
        nan_in_data(sample, Classifier())
    callback = integration.GuardCallback(policy=nanguard.Policy([Halt()]))
    stops = make(data, tmp_path / "c", callbacks=[callback], save_strategy="steps", save_steps=100)
    stops.train()
    assert callback.halted is not None
    assert stops.state.global_step == BAD + 1
    assert (tmp_path / "c" / f"checkpoint-{BAD + 1}" / "trainer_state.json").exists()


# ---- launchers and compilers -----------------------------------------------------------------------------------------


@pytest.mark.campaign
@needs_gloo
def test_ranks_skip_together_and_the_one_with_the_bad_batch_examines_it() -> None:
    script = Path(__file__).parent / "ranks" / "hf_trainer_ranks.py"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launch, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    results = sorted((json.loads(line) for line in lines), key=lambda result: result["rank"])
    assert [result["rank"] for result in results] == [0, 1], done.stdout + done.stderr
    for result in results:
        assert result["same"]
        assert result["last_epoch"] == 5
        assert result["global_step"] == 6
        assert result["unsound"] == []
        assert result["cause"] == "input_nonfinite"
        assert result["culprit"] == 1
        assert result["capture"] == "step"
        assert (result["samples"], result["indices"]) == ([3], [31])
        assert result["refused"].startswith("GuardCallback guards one process, and this training has 2")
        assert "attach(trainer)" in result["refused"]
    assert results[0]["logs_same"]


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch.compile
def test_a_compiled_model_is_guarded_and_diagnosed(tmp_path: Path) -> None:
    data = samples()
    data[BAD * BATCH + 2]["x"][0] = 10.0
    never = make(without_window(data), tmp_path / "a", kind=OwnLoss, torch_compile=True)
    never.train()
    trainer = make(data, tmp_path / "b", kind=OwnLoss, torch_compile=True)
    guard = integration.attach(trainer)
    trainer.train()
    assert differences(state_of(never), state_of(trainer)) == []
    diagnosis = guard.incidents[0].outcome.diagnosis
    assert diagnosis is not None
    assert diagnosis.cause == "log_of_negative"
    assert diagnosis.source is not None
    assert diagnosis.source.text.endswith("# guilty")
