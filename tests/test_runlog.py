"""What is written to the run log: every step that matters, little of the rest, and never at training's expense."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nanguard
from helpers import build, loss_fn, make_batches, own_step, poisoned
from nanguard.autopilot import entry
from nanguard.hosted.settings import Settings
from nanguard.records.steps import Reading
from nanguard.run_folder import RunFolder
from nanguard.runlog import writer as runlog
from nanguard.runlog.writer import AROUND, EVERY_STEP_UNTIL, RunLog, stride
from nanguard.state.schedule import Schedule
from optimizers import ALL


def facts_of(step: int, *, skipped: bool = False) -> dict[str, Any]:
    """A step whose values are a function of its number, of as many digits as real ones have."""
    return {
        "step": step,
        "epoch": step // 1000,
        "batch": step % 1000,
        "loss": float("nan") if skipped else 1 / (step + 3),
        "norms": (7 / (step + 1),),
        "lrs": (0.1 / (step + 1),),
        "scale": None,
        "skipped": skipped,
    }


def write_step(log: RunLog, *, skipped: bool, **facts: Any) -> None:
    log.write_step(Reading(**facts), skipped=skipped)


def write_steps(log: RunLog, *steps: int) -> None:
    for step in steps:
        write_step(log, **facts_of(step))


def steps_in(path: Path) -> list[int]:
    """As they stand in the file."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["step"] for line in lines if line["event"] == "step"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still; its one element is the time."""
    now = [1000.0]
    monkeypatch.setattr("nanguard.runlog.writer.time.time", lambda: now[0])
    return now


class TestThinning:
    @settings(max_examples=40, deadline=None)
    @given(
        first=st.integers(0, 40 * EVERY_STEP_UNTIL),
        number=st.integers(1, 3000),
        bad=st.lists(st.integers(0, 2999), max_size=4),
        skipped=st.lists(st.integers(0, 2999), max_size=8),
        closed=st.booleans(),
    )
    def test_what_matters_is_there_exactly_and_once(
        self, first: int, number: int, bad: list[int], skipped: list[int], closed: bool
    ) -> None:
        with tempfile.TemporaryDirectory() as folder:
            log = RunLog(folder)
            log.write("run", schema=runlog.SCHEMA)
            for place in range(number):
                write_step(log, **facts_of(first + place, skipped=place in skipped))
                if place in bad:
                    log.write_incident("roll_back", step=first + place)
            if closed:
                log.close()
            else:
                del log
            run = nanguard.read_run(folder)
        written = [record.step for record in run.steps]
        assert written == sorted(set(written))
        made = range(first, first + number)
        due = {step for step in made if step % stride(step) == 0} | {made[-1]} | set(made[:AROUND])
        due |= {first + place for place in skipped if place < number}
        for place in [place for place in bad if place < number]:
            due |= set(range(first + place - AROUND, first + place + AROUND + 1)) & set(made)
        assert due <= set(written)
        for record in run.steps:
            expected = facts_of(record.step, skipped=record.step - first in skipped)
            assert (record.norms, record.lrs) == (expected["norms"], expected["lrs"])
            assert repr(record.loss) == repr(expected["loss"])
            assert record.skipped == expected["skipped"]

    def test_every_step_of_a_short_run_is_there(self, tmp_path: Path) -> None:
        log = RunLog(tmp_path)
        write_steps(log, *range(EVERY_STEP_UNTIL))
        log.close()
        assert steps_in(log.path) == list(range(EVERY_STEP_UNTIL))

    def test_a_million_steps_stay_under_ten_megabytes(self, tmp_path: Path, clock: list[float]) -> None:
        log = RunLog(tmp_path)
        facts = facts_of(12345)
        for step in range(1_000_000):
            clock[0] += 0.01
            facts["step"] = step
            write_step(log, **facts)
        log.close()
        assert log.path.stat().st_size < 10e6
        assert 20_000 < len(nanguard.read_run(tmp_path).steps) < 50_000

    def test_a_bad_day_does_not_write_every_step_for_ever(self, tmp_path: Path) -> None:
        """After hundreds of incidents only they themselves are written."""
        log, first = RunLog(tmp_path), 64 * EVERY_STEP_UNTIL
        for step in range(first, first + 60_000):
            write_step(log, **facts_of(step))
            if step % 100 == 50:
                log.write_incident("roll_back", step=step)
        log.close()
        written = steps_in(log.path)
        assert len([step for step in written if step < first + 40_000]) == 40_000
        assert len([step for step in written if step > first + 55_000]) < 100

    def test_a_slow_run_is_seen_to_be_alive(self, tmp_path: Path, clock: list[float]) -> None:
        log, first = RunLog(tmp_path), 1_000_001
        for step in range(first, first + 200):
            clock[0] += 25.0
            write_step(log, **facts_of(step))
        times = [json.loads(line)["time"] for line in log.path.read_text().splitlines()]
        assert max(b - a for a, b in pairwise(times)) <= 75.0


class TestWriting:
    def test_steps_are_gathered_and_events_are_written_at_once(self, tmp_path: Path, clock: list[float]) -> None:
        log = RunLog(tmp_path)
        write_steps(log, 0, 1, 2)
        assert not log.path.exists()
        log.write("eased", step=2, what="x")
        assert steps_in(log.path) == [0, 1, 2]
        write_steps(log, 3)
        assert steps_in(log.path) == [0, 1, 2]
        clock[0] += 1.0
        write_steps(log, 4)
        assert steps_in(log.path) == [0, 1, 2, 3, 4]
        clock[0] -= 3600.0  # put back, as at the end of summer time
        write_steps(log, 5)
        assert steps_in(log.path) == [0, 1, 2, 3, 4, 5]

    def test_many_steps_within_a_second_do_not_pile_up(self, tmp_path: Path, clock: list[float]) -> None:
        log = RunLog(tmp_path)
        write_steps(log, *range(5000))
        assert len(steps_in(log.path)) > 4000

    def test_a_line_is_json_with_nan_and_inf_as_strings(self, tmp_path: Path) -> None:
        log = RunLog(tmp_path, optimizer='the "first"')
        inf = float("inf")
        facts = {**facts_of(7), "loss": float("nan"), "norms": (inf, -inf, 0.1), "lrs": (None, 1), "batch": None}
        write_step(log, **{**facts, "scale": 65536.0, "skipped": True})
        log.close()
        line = json.loads(log.path.read_text(), parse_constant=pytest.fail)
        del line["time"]
        expected = {"event": "step", "step": 7, "epoch": 0, "batch": None, "loss": "nan", "norms": ["inf", "-inf", 0.1]}
        assert line == expected | {"lrs": [None, 1.0], "scale": 65536.0, "skipped": True, "optimizer": 'the "first"'}

    def test_half_a_line_of_a_killed_process_does_not_spoil_the_next(self, tmp_path: Path) -> None:
        log = RunLog(tmp_path)
        write_steps(log, 0)
        log.close()
        log.path.write_bytes(log.path.read_bytes() + b'{"event":"step","ti')
        again = RunLog(tmp_path)
        write_steps(again, 1)
        again.close()
        run = nanguard.read_run(tmp_path)
        assert [record.step for record in run.steps] == [0, 1]
        assert len(run.troubles) == 1

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    def test_a_full_disk_stops_the_log_with_one_warning_and_not_the_run(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "run.jsonl").symlink_to("/dev/full")
        model, opt = build(ALL["fused AdamW"])
        with nanguard.Guard(model, opt, precision="fp32", run_dir=tmp_path, capture="none") as guard:
            for batch in poisoned(make_batches(6), 2):
                guard.step(loss_fn, batch)
        assert caplog.text.count("the run goes on without its log") == 1
        assert "No space left on device" in caplog.text
        assert guard.counts["applied"] == 5

    def test_a_disk_that_fills_up_leaves_a_log_that_reads(self, tmp_path: Path) -> None:
        """A limit on the size of files cuts a line in two, as a full disk does."""
        code = (
            "import resource, signal, sys; from nanguard.runlog.writer import RunLog\n"
            "from nanguard.records.steps import Reading\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
            "log = RunLog(sys.argv[1]); log.write('run', schema=2)\n"
            "for step in range(5000):\n"
            "    log.write_step(Reading(step=step, epoch=0, batch=0, loss=0.5, norms=(1.0,)), skipped=False)\n"
            "log.close(); print('went on')\n"
        )
        done = run_python(code, str(tmp_path))
        assert done.stdout == "went on\n"
        assert done.stderr.count("the run goes on without its log") == 1
        run = nanguard.read_run(tmp_path)
        assert 50 < len(run.steps) < 150
        assert run.troubles == ()

    def test_what_cannot_be_written_never_stops_the_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(*_: Any, **__: Any) -> None:
            raise IndexError("a bug of ours")

        monkeypatch.setattr(RunLog, "write_step", broken)
        model, opt = build(ALL["fused AdamW"])
        with nanguard.Guard(model, opt, precision="fp32", run_dir=tmp_path) as guard:
            for batch in make_batches(4):
                guard.step(loss_fn, batch)
        assert guard.counts["applied"] == 4
        assert caplog.text.count("the run log failed in on_heard and is dropped") == 1


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(nanguard.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": source}
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)


WRITES = """
import os, sys
from nanguard.records.steps import Reading
from nanguard.runlog.writer import RunLog
log = RunLog(sys.argv[1])
def write(*steps):
    for step in steps:
        log.write_step(Reading(step=step, epoch=0, batch=None, loss=0.5, norms=(1.0,)), skipped=False)
"""


@pytest.mark.parametrize(
    "ending",
    ["", "sys.exit(3)", "raise ValueError", "raise KeyboardInterrupt", "del log", "globals().clear()"],
)
def test_what_is_unwritten_when_the_interpreter_ends_is_written(ending: str, tmp_path: Path) -> None:
    run_python(f"{WRITES}\nwrite(0, 1, 2)\n{ending}", str(tmp_path))
    assert steps_in(tmp_path / "run.jsonl") == [0, 1, 2]


def test_the_last_step_is_written_though_others_around_it_are_not(tmp_path: Path) -> None:
    run_python(f"{WRITES}\nwrite(*range(1_000_000, 1_000_600))", str(tmp_path))
    written = steps_in(tmp_path / "run.jsonl")
    assert written[-1] == 1_000_599
    assert len(written) < 100


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    "then", ["sys.exit()", "os._exit(0)", "write(7, 8); sys.exit()", "log.write('eased'); os._exit(0)"]
)
def test_a_forked_process_does_not_write_what_its_parent_gathered(then: str, tmp_path: Path) -> None:
    code = f"write(0, 1, 2)\nif os.fork() == 0:\n    {then}\nos.wait(); write(3)"
    run_python(f"{WRITES}\n{code}", str(tmp_path))
    assert sorted(set(steps_in(tmp_path / "run.jsonl")) - {7, 8}) == [0, 1, 2, 3]
    assert len(steps_in(tmp_path / "run.jsonl")) == 4 + 2 * ("7, 8" in then)


class TestUnderTheGuard:
    @pytest.mark.parametrize("sync", ["eager", "late"])
    @pytest.mark.parametrize("style", ["step", "own"])
    def test_each_step_has_the_learning_rate_it_was_made_with(self, sync: Any, style: str, tmp_path: Path) -> None:
        model, opt = build(ALL["fused AdamW"])
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (step + 1))
        base = opt.param_groups[0]["lr"]
        with nanguard.Guard(model, opt, scheduler=schedule, precision="fp32", sync=sync, run_dir=tmp_path) as guard:
            for batch in guard.epoch(make_batches(12)):
                own_step(guard, batch) if style == "own" else guard.step(loss_fn, batch)
        records = nanguard.read_run(tmp_path).steps
        assert [record.step for record in records] == list(range(12))
        assert [record.lrs for record in records] == [(pytest.approx(base / (step + 1)),) for step in range(12)]
        assert [(record.epoch, record.batch) for record in records] == [(1, place) for place in range(12)]

    def test_late_and_eager_write_the_same_steps(self, tmp_path: Path) -> None:
        told, norms = [], []
        for sync in ("eager", "late"):
            model, opt = build(ALL["fused AdamW"])
            schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (step + 1))
            with nanguard.Guard(
                model, opt, scheduler=schedule, precision="fp32", sync=sync, run_dir=tmp_path / sync
            ) as guard:
                for batch in guard.epoch(poisoned(make_batches(20), 5, 6, 13)):
                    guard.step(loss_fn, batch)
            records = nanguard.read_run(tmp_path / sync).steps
            told.append([(r.step, repr(r.loss), r.lrs, r.skipped) for r in records])
            norms.append([norm for r in records for norm in r.norms])
        assert told[0] == told[1]
        # On a CPU, a step that is waited for is measured by one sum in fp32 for all gradients of a group.
        assert norms[0] == pytest.approx(norms[1], rel=1e-6, nan_ok=True)
        assert [step for step, *_, skipped in told[0] if skipped] == [5, 6, 13]

    def test_a_learning_rate_on_the_device_is_not_asked_for(self) -> None:
        _, opt = build(ALL["fused AdamW"])
        schedule = Schedule([opt], [])
        opt.param_groups[0]["lr"] = torch.tensor(0.25)
        assert schedule.known_rates == (0.25,)
        opt.param_groups[0]["lr"] = torch.tensor(0.25, device="meta")  # reading it would raise
        assert schedule.known_rates == (None,)
        opt.param_groups[0]["lr"] = 1
        assert schedule.known_rates == (1.0,)

    def test_norms_have_names(self, tmp_path: Path) -> None:
        def header(name: str, optimizers: Any, **options: Any) -> Any:
            guard = nanguard.Guard(model, optimizers, precision="fp32", run_dir=tmp_path / name, **options)
            guard.close()
            return nanguard.read_run(tmp_path / name).header

        model, opt = build(ALL["fused AdamW"])
        assert header("one", opt)["groups"] == ["all parameters"]
        halves = [list(model.inp.parameters()), [*model.norm.parameters(), *model.out.parameters()]]  # type: ignore[union-attr, operator]
        groups = torch.optim.SGD([{"params": halves[0], "name": "inner"}, {"params": halves[1]}], lr=0.1)
        assert header("groups", groups)["groups"] == ["inner", "SGD group 1"]
        assert header("together", groups, clip="global")["groups"] == ["all parameters"]
        two = [torch.optim.SGD(half, lr=0.1) for half in halves]
        assert header("two", two)["groups"] == ["SGD 0 group 0", "SGD 1 group 0"]
        assert header("version", opt)["nanguard"] == nanguard.__version__


KILLED = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from torch import nn
import nanguard
folder, kills, dice = Path(sys.argv[1]), int(sys.argv[2]), random.Random(sys.argv[3])
torch.set_num_threads(1)

def train(run_dir, pipe):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    policy = nanguard.Policy(divergence=None)  # after some 10,000 steps the loss is nothing but rounding errors
    options = {"run_dir": run_dir, "capture": "none", "snapshots": None, "policy": policy}
    guard = nanguard.Guard(model, optimizer, precision="fp32", **options)
    for step in range(10**9):
        batch = torch.full((2, 4), float("nan") if step % 700 == 300 else 1.0)
        guard.step(lambda m, b: m(b).square().mean(), batch)
        os.write(pipe, f"{step} {time.time()}\\n".encode())

model = nn.Linear(1, 1)
nanguard.Guard(model, torch.optim.AdamW(model.parameters()))  # what is imported here is not imported by each child
found = []
for number in range(kills):
    run_dir = folder / str(number % 3)  # later processes find what was left by others that were killed
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        train(run_dir, write)
    os.close(write)
    told = os.read(read, 1 << 16)
    until = time.monotonic() + dice.uniform(0.0, 3.0)
    os.set_blocking(read, False)
    while time.monotonic() < until:
        try:
            told += os.read(read, 1 << 16)
        except BlockingIOError:
            time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.set_blocking(read, True)
    while more := os.read(read, 1 << 16):
        told += more
    os.close(read)
    steps = [line.split() for line in told.decode().splitlines()[:-2]]  # the last may be half a line
    run = nanguard.read_run(run_dir)
    before = [int(step) for step, when in steps if float(when) <= float(steps[-1][1]) - 1.0] if steps else []
    there = [record.step for record in run.steps]
    found.append({
        "told": len(steps), "read": len(there), "in order": there == list(range(len(there))),
        "missing": len(set(before) - set(there)), "troubles": list(run.troubles),
        "incidents": [incident.reading.step for incident in run.incidents], "over": run.is_over,
    })
print(json.dumps(found))
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL") or not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_a_run_that_is_killed_at_any_moment_leaves_all_but_the_last_second(tmp_path: Path) -> None:
    done = run_python(KILLED, str(tmp_path), "5", "0")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 5
    for each in found:
        assert each["in order"]
        assert each["missing"] == 0
        assert not each["over"]
        assert all(step % 700 == 300 for step in each["incidents"])
        assert len(each["troubles"]) <= 2  # a line that a kill cut in two, before the next process came
    assert sum(each["read"] for each in found) > 100
    assert any(each["incidents"] for each in found)


def test_the_numbers_in_the_docs_are_those_that_were_measured() -> None:
    root = Path(__file__).parent.parent
    newest = max((root / "benchmarks" / "results").glob("runlog-cpu-*.md"), key=lambda path: path.stem[-10:])
    rows = [line for line in newest.read_text().splitlines() if line.startswith("|")]
    page = (root / "docs" / "runlog.md").read_text()
    assert len(rows) > 6
    assert [row for row in rows if row not in page] == []


class TestFolder:
    """One that is made with the first record that is worth keeping."""

    def test_a_header_and_an_end_are_not_worth_one(self, tmp_path: Path) -> None:
        log = RunLog(RunFolder(tmp_path / "a" / "b"))
        log.write("run", schema=2)
        log.close()
        log.write("end", steps=0)
        del log
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("first", ["step", "incident", "alert"])
    def test_the_first_record_makes_it_with_all_that_was_before(self, first: str, tmp_path: Path) -> None:
        """Optimizers share a folder, and whichever has the first record, the header of the run comes first."""
        folder = RunFolder(tmp_path / "a" / "b")
        one, other = RunLog(folder, optimizer="one"), RunLog(folder, optimizer="other")
        one.write("run", schema=2)
        other.write("optimizer", schema=2)
        assert not folder.is_made
        if first == "step":
            write_steps(other, 0)
        else:
            other.write(first, step=0)
        lines = [json.loads(line) for line in (tmp_path / "a" / "b" / "run.jsonl").read_text().splitlines()]
        assert [(line["event"], line["optimizer"]) for line in lines] == [
            *(("run", "one"), ("optimizer", "other"), (first, "other"))
        ]
        one.write("end", steps=0)
        assert json.loads(one.path.read_text().splitlines()[-1])["event"] == "end"

    def test_its_name_is_chosen_when_it_is_made(self, tmp_path: Path) -> None:
        folders = [RunFolder(tmp_path / "runs" / "train", is_new=True) for _ in range(3)]
        logs = [RunLog(folder) for folder in folders]
        (tmp_path / "runs").mkdir()
        (tmp_path / "runs" / "train").touch()  # the program has made something of this name since
        for place in (2, 0, 1):
            write_steps(logs[place], place)
        assert [log.path.parent.name for log in logs] == ["train-3", "train-4", "train-2"]
        assert [steps_in(log.path) for log in logs] == [[0], [1], [2]]

    def test_threads_that_begin_at_the_same_time_share_it(self, tmp_path: Path) -> None:
        for number in range(50):
            folder, start = RunFolder(tmp_path / str(number) / "train", is_new=True), threading.Barrier(4)

            def make(folder: RunFolder = folder, start: threading.Barrier = start) -> Path:
                start.wait()
                return folder.make()

            with ThreadPoolExecutor(4) as pool:
                made = [each.result() for each in [pool.submit(make) for _ in range(4)]]
            assert set(made) == {folder.path} == set((tmp_path / str(number)).iterdir())

    def test_where_it_cannot_be_made_the_run_goes_on(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "file").touch()
        for is_new in (True, False):
            caplog.clear()
            log = RunLog(RunFolder(tmp_path / "file" / "a", is_new=is_new))
            log.write("run", schema=2)
            write_steps(log, 0, 1, 2)
            log.close()
            assert caplog.text.count("the run goes on without its log") == 1

    def test_incidents_go_where_the_log_goes(self, tmp_path: Path) -> None:
        (tmp_path / "train" / "incidents" / "0001").mkdir(parents=True)  # of an earlier run
        with entry.begin(Settings(run_dir=RunFolder(tmp_path / "train", is_new=True))):
            w = torch.ones(3, requires_grad=True)
            optimizer = torch.optim.SGD([w], lr=0.1)
            torch.log(w - 1.0).sum().backward()
            optimizer.step()
        assert sorted(path.name for path in (tmp_path / "train-2").iterdir()) == ["incidents", "run.jsonl"]
        assert [path.name for path in (tmp_path / "train-2" / "incidents").iterdir()] == ["0001"]
