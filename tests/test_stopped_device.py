"""A GPU that stops in the middle of a step, by an assertion in a kernel: what the host still knows is told."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

import nanguard
from nanguard import _compat
from nanguard.diagnosis.host_data import bad_data
from nanguard.runlog.reader import read_run
from nanguard.state.readback import AsyncReadback
from nanguard.step.tape import CallTape
from nanguard.step.tape_recorder import TapeRecorder

PROGRAM = """
import sys
import weakref
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device, what = sys.argv[1:3]
torch.manual_seed(0)
x = torch.rand(64, 8)
y = (x.sum(1, keepdim=True) > 4).float()
if what == "nan":
    x[37, 3] = float("nan")
if what == "target":
    y[37] = 1.5
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1), nn.Sigmoid()).to(device)
optimizer = torch.optim.Adam(net.parameters(), fused=sys.argv[3] == "fused")
for features, labels in DataLoader(TensorDataset(x, y), batch_size=8):
    features, labels = features.to(device), labels.to(device)
    optimizer.zero_grad()
    out = net(features)
    if device == "cpu" and not (out.isfinite().all() and labels.max() <= 1):  # what a GPU would say
        raise RuntimeError("CUDA error: device-side assert triggered\\nSearch for `cudaErrorAssert'")
    loss = nn.BCELoss()(out, labels)
    loss.backward()
    optimizer.step()
"""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU, and torch sees none here")
    return str(request.param)


def run(folder: Path, *args: str, guarded: bool = True) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM)
    guard = ["-m", "nanguard", "run", "--run-dir", "run"] if guarded else []
    command = [sys.executable, *guard, "program.py", *args]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("kind", ["fused", "plain"])
def test_bad_data_that_stopped_the_gpu_are_named_with_their_index(tmp_path: Path, device: str, kind: str) -> None:
    done = run(tmp_path, device, "nan", kind)
    (incident,) = read_run(tmp_path / "run").incidents
    diagnosis = incident.diagnosis
    assert diagnosis is not None
    assert diagnosis.cause == "input_nonfinite"
    assert diagnosis.because == "features holds NaN at [5, 3]"
    assert diagnosis.samples == (5,)
    assert diagnosis.dataset_indices == (37,)
    assert diagnosis.step == incident.reading.step == 4
    assert "features.to(device)" in str(diagnosis.source.text if diagnosis.source else "")
    panel, _, closing = done.stderr.partition("nanguard: ")
    assert "the GPU has stopped, and the program ends" in panel
    assert "untouched" not in panel, "that cannot be known any more"
    assert "could not be looked at" in closing
    assert "weights and optimizer state finite" not in closing


@pytest.mark.parametrize("kind", ["fused", "plain"])
def test_nothing_is_claimed_if_the_data_are_finite(tmp_path: Path, device: str, kind: str) -> None:
    done = run(tmp_path, device, "target", kind)
    assert read_run(tmp_path / "run").incidents == ()
    assert "CUDA_LAUNCH_BLOCKING=1" in done.stderr
    assert "device-side assert" in done.stderr


def test_the_error_of_the_program_has_nothing_of_ours(tmp_path: Path, device: str) -> None:
    done = run(tmp_path, device, "nan", "fused")
    assert done.returncode == run(tmp_path, device, "nan", "fused", guarded=False).returncode
    assert "nanguard failed" not in done.stderr
    assert "another exception occurred" not in done.stderr
    assert "src/nanguard" not in done.stderr.partition("Traceback")[2]


@pytest.mark.parametrize(
    ("error", "is_stopped"),
    [
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("the text device-side assert in an error of the program"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (ValueError("CUDA error: device-side assert triggered"), False),
        (None, False),
    ],
)
def test_which_errors_stop_a_gpu(error: BaseException | None, is_stopped: bool) -> None:
    assert _compat.stops_device(error) is is_stopped


@pytest.mark.parametrize(("corner", "because"), [(-torch.inf, None), (torch.nan, "mask holds NaN at [0, 0]")])
def test_a_mask_of_infinities_is_no_bad_data(corner: float, because: str | None) -> None:
    tape, recorder = CallTape(), TapeRecorder(lambda: None, "cpu")
    scores, mask = torch.rand(4, 4), torch.full((4, 4), -torch.inf).triu(1)
    mask[0, 0] = corner
    recorder.begin(tape)
    try:
        masked = scores + mask
    finally:
        recorder.close()
    found = bad_data(tape, ())
    assert tape.rows
    assert masked.shape == (4, 4)
    assert (because is None) is (found is None)
    assert found is None or found.because.startswith(str(because))


def test_a_guarded_loop_does_not_run_a_step_again_after_it(caplog: pytest.LogCaptureFixture) -> None:
    net = torch.nn.Linear(4, 1)
    guard = nanguard.Guard(net, torch.optim.SGD(net.parameters(), lr=0.1))
    num_calls = 0

    def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if batch.isnan().any():
            raise RuntimeError("CUDA error: device-side assert triggered")
        return model(batch).sum()

    guard.step(loss_fn, torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="device-side assert"):
        guard.step(loss_fn, torch.full((2, 4), torch.nan))
    assert num_calls == 2
    assert not caplog.records


def test_memory_of_a_copy_to_the_host_is_freed_without_the_garbage_collector() -> None:
    readbacks = AsyncReadback(torch.device("cpu"))
    first = readbacks.post(torch.ones(3, dtype=torch.float64))
    memory = weakref.ref(first.copy)
    assert first.read() == [1.0, 1.0, 1.0]
    again = readbacks.post(torch.zeros(3, dtype=torch.float64))
    assert again.copy is memory(), "it is used again"
    assert again.read() == [0.0, 0.0, 0.0]
    gc.disable()
    try:
        del first, again, readbacks
        assert memory() is None
    finally:
        gc.enable()


def test_data_of_a_step_of_another_optimizer_that_this_one_uses_are_looked_at() -> None:
    before, tape, recorder = CallTape(), CallTape(), TapeRecorder(lambda: None, "cpu")
    pictures = torch.tensor([1.0, torch.nan])
    recorder.begin(before)
    try:
        real = pictures.type(torch.DoubleTensor)
        recorder.begin(tape, keeps_older=True)
        loss = real.sum()
    finally:
        recorder.close()
    found = bad_data(tape, ())
    assert loss.isnan()
    assert found is not None
    assert found.because == "pictures holds NaN at [1]"
