"""Programs with several threads, and programs under a debugger or a profiler."""

from __future__ import annotations

import json
import pstats
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import nanguard
from nanguard.autopilot.registry import Registry
from test_run import NANGUARD, PYTHON, done, script

THREADS = """
    import json, sys, threading
    import torch
    from torch import nn

    BAD = {BAD}
    sums = {}

    def train(number):
        generator = torch.Generator().manual_seed(number)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for step in range(60):
            x = torch.randn(16, 8, generator=generator)
            y = x.sum(1, keepdim=True)
            if [number, step] in BAD:
                y[3] = float("nan")
            error = model(x) - y
            loss = (error * error).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        everything = [*model.parameters(), *model.buffers()]
        sums[number] = [tensor.double().sum().item() for tensor in everything]

    threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps([sums[number] for number in range(4)]))
"""


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param([], marks=pytest.mark.campaign, id="healthy"),
        pytest.param([[1, 20], [2, 20], [2, 21], [3, 0]], id="faulty"),  # one thread of it stays healthy
    ],
)
def test_each_thread_is_guarded_as_if_it_were_alone(tmp_path: Path, bad: list[list[int]]) -> None:
    healthy = script(tmp_path, THREADS.replace("{BAD}", "[]"), "healthy.py")
    program = script(tmp_path, THREADS.replace("{BAD}", json.dumps(bad)))
    plain = json.loads(done(*PYTHON, healthy, cwd=tmp_path).stdout)
    ran = done(*NANGUARD, "--run-dir", "run", program, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    sums = json.loads(ran.stdout)
    touched = {number for number, _ in bad}
    for number in range(4):
        assert all(value == value for value in sums[number]), f"thread {number} ends with NaN"
        assert (sums[number] == plain[number]) == (number not in touched)
    run = nanguard.read_run(tmp_path / "run")
    assert "nanguard: 240 steps" in ran.stderr
    assert len(run.incidents) == len(bad)
    causes = {incident.diagnosis.cause for incident in run.incidents if incident.diagnosis is not None}
    assert causes <= {"input_nonfinite", "unknown"}, "one thread at a time writes a tape"


def test_a_thread_waits_until_its_optimizer_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may be at it, since it guards all optimizers that are new."""
    begun, done, guard = threading.Event(), threading.Event(), Registry.guard

    def slowly(registry: Registry, optimizer: Optimizer, *rest: Any) -> Any:
        if optimizer is optimizers[1]:  # the last one
            begun.set()
            done.wait(1)  # time for a thread that does not wait
        return guard(registry, optimizer, *rest)

    monkeypatch.setattr(Registry, "guard", slowly)
    with nanguard.install() as autopilot:
        models = [nn.Linear(4, 1), nn.Linear(4, 1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

        def train(which: int, value: float) -> None:
            models[which](torch.full((2, 4), value)).sum().backward()
            optimizers[which].step()

        def train_late() -> None:
            begun.wait()
            train(1, float("nan"))
            done.set()

        thread = threading.Thread(target=train_late)
        thread.start()
        train(0, 1.0)
        thread.join()
    assert all(parameter.isfinite().all() for parameter in models[1].parameters())
    assert len(autopilot.incidents) == 1


WATCHED = """
    import torch
    from torch import nn
    from torch.profiler import ProfilerActivity, profile, schedule

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    turns = schedule(wait=1, warmup=1, active=3)
    with profile(activities=[ProfilerActivity.CPU], schedule=turns, record_shapes=True, with_stack=True) as profiler:
        for step in range(12):
            x = torch.randn(16, 8)
            if step == 6:
                breakpoint()
            loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            profiler.step()
    print("seen", any("addmm" in event.key for event in profiler.key_averages()))
    print([parameter.double().sum().item() for parameter in model.parameters()])
"""


def test_a_debugger_and_two_profilers_see_the_program_as_without_nanguard(tmp_path: Path) -> None:
    program = script(tmp_path, WATCHED)

    def ran(*command: str) -> list[str]:
        result = done(*command, program, cwd=tmp_path, typed="next\nprint('at', step)\ncontinue\n")
        assert result.returncode == 0, result.stderr
        lines = [line.removeprefix("(Pdb) ") for line in result.stdout.splitlines()]
        return [line for line in lines if line.startswith(("at", "seen", "["))]

    plain = ran(*PYTHON)
    profiled = ran(sys.executable, "-m", "cProfile", "-o", "profile.out", *NANGUARD[1:], "--run-dir", "run")
    assert plain == profiled
    assert len(plain) == 3
    functions = {name for _, _, name in pstats.Stats(str(tmp_path / "profile.out")).stats}  # type: ignore[attr-defined]
    assert "_single_tensor_adam" in functions
