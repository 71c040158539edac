"""TensorBoard, Weights & Biases and MLflow receive what happens in a run. What they wrote is read back."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nanguard
from helpers import build, differences, everything, loss_fn, make_batches, poisoned
from nanguard.integrations.loggers import MLflow, TensorBoard, WandB
from nanguard.records.alert import Alert
from nanguard.records.steps import Outcome
from test_docs import ROOT, run_snippets

ALERT = Alert(
    number=1, state="raised", step=6, module="inp", op="addmm", quantity="largest value", now=3e4, limit=65504.0,
    room=1.1, trend=-0.1, crossing=15, earliest=10, latest=20, reason="activations grow", cause="overflow_fp16",
    advice="keep it in fp32", severity="warning",
)  # fmt: skip


class Losses(nanguard.Observer):
    """The numbers that a logger should have: of applied steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_heard(self, outcome: Outcome) -> None:
        if outcome.applied:
            self.losses.append(outcome.verdict.reading.loss)
            self.norms.append(math.hypot(*outcome.verdict.reading.norms))


class Warns(nanguard.Monitor):
    """Raises a warning in step 6, as the early warning does it."""

    def on_open(self, step: int) -> None:
        if step == 6:
            self._note("alert", **ALERT.as_dict(), message=ALERT.message)
            self._note("headroom", step=6, rooms={"inp": 1.1, "": 7.5})


def train(observers: list[Any], *, bad: tuple[int, ...] = (3,), groups: int = 1) -> dict[str, Any]:
    def make(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        split = [params] if groups == 1 else [params[:2], params[2:]]
        return torch.optim.AdamW([{"params": each} for each in split], lr=1e-2, fused=True)

    model, opt = build(make)
    with nanguard.Guard(model, opt, sync="late", observers=observers) as guard:
        for batch in guard.epoch(poisoned(make_batches(10), *bad)):
            guard.step(loss_fn, batch)
    return everything(model, [opt], torch.get_rng_state())


def scalars_and_texts(folder: Path) -> tuple[dict[str, dict[int, float]], dict[str, list[str]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    scalars = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    texts = {
        tag: [e.tensor_proto.string_val[0].decode() for e in events.Tensors(tag)] for tag in events.Tags()["tensors"]
    }
    return scalars, texts


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    expected = Losses()
    torch.manual_seed(0)
    guarded = train([TensorBoard(tmp_path / "tb", every=4), Warns(), expected], groups=2)
    torch.manual_seed(0)
    assert differences(guarded, train([], groups=2)) == []
    scalars, texts = scalars_and_texts(tmp_path / "tb")
    loss = scalars["nanguard/loss"]  # the incident of step 3, the four steps after it, the rest at the end
    assert list(loss) == [3, 7, 9]
    assert loss[3] == pytest.approx(sum(expected.losses[:3]) / 3)
    assert loss[7] == pytest.approx(sum(expected.losses[3:7]) / 4)
    assert loss[9] == pytest.approx(sum(expected.losses[7:]) / 2)
    assert scalars["nanguard/grad_norm"][7] == pytest.approx(max(expected.norms[3:7]))
    assert scalars["nanguard/skipped"] == scalars["nanguard/incidents"] == {3: 1.0, 7: 1.0, 9: 1.0}
    assert scalars["nanguard/lr/AdamW group 1"][9] == pytest.approx(1e-2)
    assert scalars["nanguard/headroom/inp"] == {6: pytest.approx(1.1)}
    assert scalars["nanguard/headroom/model"] == {6: 7.5}
    assert all(math.isfinite(value) for points in scalars.values() for value in points.values())
    (incident,) = texts["nanguard/incidents/text_summary"]
    assert incident.startswith("**step 3: the loss is NaN: step skipped, nothing changed**")
    assert "where    " in incident
    assert "the batch" in incident
    assert "activations grow" in texts["nanguard/alerts/text_summary"][0]


def test_a_writer_of_the_user_stays_open_and_repeats_are_written_now_and_then(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    train([TensorBoard(writer, every=1000)], bad=(1, 2, 3, 4, 5, 7, 8))
    writer.add_scalar("mine", 1.0, 0)
    writer.close()
    scalars, texts = scalars_and_texts(tmp_path)
    assert scalars["mine"] == {0: 1.0}
    assert len(texts["nanguard/incidents/text_summary"]) == 3
    assert "same as step 1" in texts["nanguard/incidents/text_summary"][1]
    assert scalars["nanguard/incidents"][9] == 7


def test_counts_go_on_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    saved: dict[str, Any] = {}
    for number in (1, 2):
        model, opt = build(torch.optim.AdamW)
        guard = nanguard.Guard(model, opt, observers=[TensorBoard(tmp_path / str(number))])
        if saved:
            guard.load_state_dict(saved)
        for batch in guard.epoch(poisoned(make_batches(4), 2)):
            guard.step(loss_fn, batch)
        saved = guard.state_dict()
        guard.close()
        scalars, _ = scalars_and_texts(tmp_path / str(number))
        assert list(scalars["nanguard/skipped"].values())[-1] == number
        assert max(scalars["nanguard/skipped"]) == 4 * number - 1


def test_a_halt_is_written_although_nothing_closes_the_guard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    model, opt = build(torch.optim.AdamW)
    policy = nanguard.Policy(ladder=(nanguard.Halt(),))
    guard = nanguard.Guard(model, opt, policy=policy, observers=[TensorBoard(tmp_path)])
    with pytest.raises(nanguard.NonFiniteError):
        for batch in guard.epoch(poisoned(make_batches(4), 2)):
            guard.step(loss_fn, batch)
    scalars, texts = scalars_and_texts(tmp_path)
    assert list(scalars["nanguard/loss"]) == [2]
    assert "training halted" in texts["nanguard/incidents/text_summary"][0]


def test_the_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    run_snippets(ROOT / "docs" / "integrations" / "loggers.md")
    assert list(scalars_and_texts(tmp_path / "runs" / "a")[0]["nanguard/loss"]) == [4]


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    wandb = pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true", "CONSOLE": "off"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield wandb
    wandb.teardown()


def chunks(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format: blocks of 32 KiB, each part with checksum, length and type."""
    place, parts = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def records(folder: Path) -> tuple[list[dict[str, Any]], list[Any]]:
    """Rows of the history, and alerts, of an offline run."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # waits until everything is on the disk
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows, alerts = [], []
    for data in chunks(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = record.history.item
            rows.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
        elif record.HasField("alert"):
            alerts.append(record.alert)
    return rows, alerts


def test_wandb_beside_a_user_who_logs_with_steps_of_their_own(tmp_path: Path, offline: Any) -> None:
    expected = Losses()
    run = offline.init()

    class Mine(nanguard.Observer):
        def on_heard(self, outcome: Outcome) -> None:
            run.log({"mine": 1.0}, step=outcome.verdict.reading.step)

    train([Mine(), WandB(every=4), Warns(), expected])
    run.finish()
    rows, alerts = records(tmp_path)
    assert [row["_step"] for row in rows if "mine" in row] == list(range(10))  # none of theirs is lost
    ours = {row["nanguard/step"]: row for row in rows if "nanguard/loss" in row}
    assert list(ours) == [3, 7, 9]
    assert ours[7]["nanguard/loss"] == pytest.approx(sum(expected.losses[3:7]) / 4)
    assert ours[9]["nanguard/skipped"] == 1
    (incident,) = [row["nanguard/incident"] for row in rows if "nanguard/incident" in row]
    assert "step skipped, nothing changed" in incident
    assert [alert.title.split(":")[0] for alert in alerts] == ["step 3", "step 6"]


def test_wandb_makes_a_run_if_there_is_none_and_ends_it(tmp_path: Path, offline: Any) -> None:
    train([WandB(every=4)])
    assert offline.run is None
    rows, _ = records(tmp_path)
    assert [row["nanguard/step"] for row in rows if "nanguard/loss" in row] == [3, 7, 9]
    assert all("nan" not in json.dumps(row).replace("nanguard", "") for row in rows if "nanguard/incident" not in row)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
    yield mlflow
    mlflow.set_tracking_uri("")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_mlflow(tmp_path: Path, store: Any) -> None:
    expected = Losses()
    train([MLflow(every=4), Warns(), expected])
    assert store.active_run() is None
    client = store.MlflowClient()
    (run,) = client.search_runs(["0"])
    loss = {each.step: each.value for each in client.get_metric_history(run.info.run_id, "nanguard/loss")}
    assert list(loss) == [3, 7, 9]
    assert loss[7] == pytest.approx(sum(expected.losses[3:7]) / 4)
    assert run.data.metrics["nanguard/incidents"] == 1
    names = sorted(Path(each.path).name for each in client.list_artifacts(run.info.run_id, "nanguard"))
    assert names == ["0001-step-3-incident.txt", "0002-step-6-alert.txt"]
    text = store.artifacts.load_text(f"{run.info.artifact_uri}/nanguard/{names[0]}")
    assert "the loss is NaN" in text
    assert "where    " in text


def test_a_missing_package_gives_the_pip_command_and_importing_needs_none() -> None:
    code = (
        "import sys; sys.modules.update(tensorboard=None, wandb=None, mlflow=None)\n"
        "from nanguard.integrations import loggers\n"
        "for make in (lambda: loggers.TensorBoard('x'), loggers.WandB, loggers.MLflow):\n"
        "    try: make()\n"
        "    except ModuleNotFoundError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert [line.partition(": ")[2] for line in done.stdout.splitlines()] == [
        f"pip install 'nanguard[{extra}]'" for extra in ("tensorboard", "wandb", "mlflow")
    ], done.stderr


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    logger = TensorBoard(tmp_path / "tb", every=1)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        train([logger])
    finally:
        torch.distributed.destroy_process_group()
    assert not (tmp_path / "tb").exists()


@pytest.mark.parametrize("every", [0, -1, 2.5, None])
def test_a_bad_every_is_refused(every: Any) -> None:
    with pytest.raises(ValueError, match="every must be a whole number of steps from 1, got "):
        MLflow(every=every)


def test_what_is_no_writer_is_refused() -> None:
    pytest.importorskip("tensorboard")
    with pytest.raises(ValueError, match="writer_or_dir must be a folder or a SummaryWriter, got None"):
        TensorBoard(None)
