"""``nanguard watch``, in real terminals and in a pipe, on runs that train, have ended, halted, died or were damaged."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from typer.testing import CliRunner

import nanguard
from helpers import TINY_NET_LINE, build, loss_fn, make_batches, poisoned
from nanguard.cli import app
from nanguard.errors import NonFiniteError, RunLogError
from nanguard.report import glance
from nanguard.report.sparkline import BLOCKS, LETTERS, columns, sparkline
from nanguard.report.watch import status_line, view
from nanguard.runlog.follow import Follower
from nanguard.runlog.reader import read_run
from optimizers import ALL
from reported import header, incident_line, long_run, outcome, refused_run, step_line, write_log

SOURCE = str(Path(nanguard.__file__).parents[1])
FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))

TRAINS = """
import sys, time
import torch
from torch import nn
import nanguard

run_dir, steps, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

def loss_fn(model, batch):
    return model(batch).square().exp().mean()  # overflows where the input is large

with nanguard.Guard(model, optimizer, precision="fp32", run_dir=run_dir) as guard:
    for step in range(steps):
        batch = torch.randn(8, 4)
        guard.step(loss_fn, batch * 1e4 if step % 100 == 20 else batch)
        time.sleep(pause)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAINS)
    return path


def environment(**more: str) -> dict[str, str]:
    ours = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "COLUMNS")}
    return {**ours, "PYTHONPATH": SOURCE, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **more}


@contextmanager
def training(program: Path, run_dir: Path, *, steps: int = 400, pause: float = 0.01) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(program), str(run_dir), str(steps), str(pause)]
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, env=environment(), stdout=null, stderr=null, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=300)


def train(run_dir: Path, *, steps: int = 12, bad: tuple[int, ...] = (4,), **options: Any) -> None:
    model, opt = build(ALL["fused AdamW"])
    with nanguard.Guard(model, opt, precision="fp32", run_dir=run_dir, **options) as guard:
        for batch in guard.epoch(poisoned(make_batches(steps), *bad)):
            guard.step(loss_fn, batch)


def run_cli(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["watch", *map(str, arguments)], env={"COLUMNS": "80"})


def is_plain(text: str) -> bool:
    return not [c for c in text if c != "\n" and not c.isprintable()]


# ---- a curve of characters -----------------------------------------------------------------------------------------

numbers = st.floats(width=64) | st.none()


@given(values=st.lists(numbers, max_size=50), ascii_only=st.booleans(), may_be_log=st.booleans())
def test_a_curve_has_a_character_for_each_value_and_higher_ones_for_higher_values(
    values: list[float | None], ascii_only: bool, may_be_log: bool
) -> None:
    levels = LETTERS if ascii_only else BLOCKS
    curve = sparkline(values, ascii_only=ascii_only, may_be_log=may_be_log)
    assert len(curve) == len(values)
    drawn = [(v, levels.index(c)) for v, c in zip(values, curve, strict=True) if v is not None and math.isfinite(v)]
    assert [level for _, level in sorted(drawn)] == sorted(level for _, level in drawn)
    if drawn and min(drawn)[0] < max(drawn)[0]:
        assert min(drawn)[1] == 0
    assert all(c == " " for v, c in zip(values, curve, strict=True) if v is None or not math.isfinite(v))


def test_what_a_curve_looks_like() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == BLOCKS
    assert sparkline([1, None, 2, math.nan, math.inf], ascii_only=True) == "_ @  "
    assert sparkline([1e-6, 1e-3, 1.0]) == "▁▅█"  # by the logarithm
    assert sparkline([1e-6, 1e-3, 1.0], may_be_log=False) == "▁▁█"
    assert sparkline([-1e308, 0.0, 1e308]) == "▁▅█"
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert sparkline([]) == ""
    assert sparkline([1e-3, 1e-3 * (1 + 2e-16), 1e-3 * (1 - 2e-16)]) == "▁▁▁"  # roundings are no zigzag
    assert sparkline([-1e-3, -1.0000001e-3]) == "▁▁"
    assert sparkline([1.0, 1.00001]) == "▁█"


@given(
    steps=st.lists(st.integers(0, 10**6), unique=True, max_size=60).map(sorted),
    width=st.integers(0, 40),
)
def test_columns_hold_every_value_once_and_in_order(steps: list[int], width: int) -> None:
    found = columns([(step, float(step)) for step in steps], width)
    assert len(found) <= min(width, len(steps))
    assert [v for column in found for v in column] == ([float(step) for step in steps] if width else [])


# ---- following a log -----------------------------------------------------------------------------------------------


class TestFollowing:
    def test_only_what_is_new_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        train(tmp_path / "whole")
        whole = (tmp_path / "whole" / "run.jsonl").read_bytes()
        path, follower, fed = tmp_path / "run.jsonl", Follower(tmp_path), []
        tape_feed = type(follower.tape).feed
        monkeypatch.setattr(type(follower.tape), "feed", lambda tape, data: (fed.append(data), tape_feed(tape, data)))
        assert not follower.poll()
        assert not follower.is_there
        for start in range(0, len(whole), 97):
            with path.open("ab") as file:
                file.write(whole[start : start + 97])
            assert follower.poll()
            assert not follower.poll()
        assert b"".join(fed) == whole
        expected = read_run(tmp_path / "whole")
        assert repr(follower.tape.run().steps) == repr(expected.steps)
        assert follower.tape.run().troubles == ()

    def test_a_log_that_is_cut_or_replaced_is_read_anew(self, tmp_path: Path) -> None:
        train(tmp_path, steps=12)
        follower = Follower(tmp_path)
        follower.poll()
        assert len(follower.tape.steps) == 12
        path = tmp_path / "run.jsonl"
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:4]))
        assert follower.poll()
        assert [record.step for record in follower.tape.steps] == [0, 1, 2]
        path.rename(tmp_path / "run.jsonl.1")
        assert not follower.poll()
        assert len(follower.tape.steps) == 3  # what was known stays
        train(tmp_path, steps=20)
        assert follower.poll()
        assert len(follower.tape.steps) == 20

    def test_what_is_no_log_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "run.jsonl").write_text("hello\n")
        with pytest.raises(
            RunLogError, match="is not a run log that nanguard wrote: line 1: it is incomplete or not JSON"
        ):
            Follower(tmp_path).poll()


# ---- one view ------------------------------------------------------------------------------------------------------


class TestOnce:
    def test_of_a_run_that_has_ended(self, tmp_path: Path) -> None:
        train(tmp_path / "runs" / "a", steps=30, bad=(4, 17))
        told = run_cli(tmp_path / "runs" / "a", "--once")
        assert told.exit_code == 0, told.output
        lines = told.stdout.splitlines()
        assert lines[0].startswith(" nanguard  ")
        assert lines[0].endswith("runs/a" + " " * (80 - len(lines[0].rstrip()[: -len("ended")].rstrip()) - 5) + "ended")
        assert re.search(r"^ step +29  epoch 1, batch 29   [\d.,]+ steps/s   in \d+ s$", told.stdout, re.MULTILINE)
        assert re.search(rf"^ loss +[\d.e-]+  [{BLOCKS} ]+  [\d.e-]+ \.\. [\d.e-]+$", told.stdout, re.MULTILINE)
        assert re.search(r"^ skipped .*× +× *$", told.stdout, re.MULTILINE)
        assert re.search(rf"^ norm +[\d.e-]+  [{BLOCKS} ]+", told.stdout, re.MULTILINE)
        assert " steps       28 applied   2 skipped" in lines
        assert lines[-3:] == [
            " 2 incidents",
            f"  step 17  skipped  non-finite data, helpers.py:{TINY_NET_LINE}, addmm in inp",
            f"  step  4  skipped  non-finite data, helpers.py:{TINY_NET_LINE}, addmm in inp",
        ]
        assert max(map(len, lines)) <= 80
        assert run_cli(tmp_path / "runs" / "a" / "run.jsonl", "--once").stdout.splitlines()[1:] == lines[1:]

    def test_incidents_of_one_fault_are_one_row(self, tmp_path: Path) -> None:
        told = run_cli(refused_run(tmp_path), "--once").stdout.splitlines()
        place = told.index(" 398 incidents")
        assert told[place - 2] == " the last 398 steps in a row were refused: nothing was learned since step 2"
        assert [line[:43].rstrip() for line in told[place + 1 :]] == [
            "  step 399  skipped 395 times since step 2",
            "  step   8  precision raised  layers.1, lay",
            "  step   6  learning rate lowered  layers.1",
            "  step   4  precision raised  layers.1, lay",
        ]
        run = read_run(tmp_path)
        assert status_line(run, 2000.0).endswith("; " + told[place - 2].strip())
        narrow = str(view(run, 2000.0, width=60, height=40)).splitlines()
        assert " nothing was learned since step 2" in "".join(narrow), "it is not cut off"
        assert view(run, 2000.0, width=80, height=16).plain.splitlines()[-1] == "  and 2 before them"
        data = json.loads(run_cli(tmp_path, "--json").stdout)
        assert (len(data["incidents"]), data["refused"]) == (398, told[place - 2].strip())

    def test_other_faults_and_other_answers_stay_apart(self, tmp_path: Path) -> None:
        steps = [step_line(step, skipped=step % 2 == 1) for step in range(12)]
        odd = [outcome(step, response="skip" if step < 9 else "lower_lr") for step in range(1, 12, 2)]
        write_log(tmp_path, header(), *steps, *(incident_line(n, each) for n, each in enumerate(odd, start=1)))
        told = run_cli(tmp_path, "--once").stdout
        assert told.splitlines()[-3:] == [
            "  step 11  learning rate lowered  non-finite loss and gradients",
            "  step  9  learning rate lowered  non-finite loss and gradients",
            "  step  7  skipped 4 times since step 1  non-finite loss and gradients",
        ]
        assert "refused" not in told

    def test_a_constant_learning_rate_is_a_flat_line(self, tmp_path: Path) -> None:
        told = run_cli(long_run(tmp_path, steps=1000, every=97), "--once").stdout
        assert re.search(r"^ lr +0\.001  ▁+ *$", told, re.MULTILINE)

    def test_as_json(self, tmp_path: Path) -> None:
        train(tmp_path)
        told = run_cli(tmp_path, "--json")
        assert told.exit_code == 0
        data = json.loads(told.stdout, parse_constant=pytest.fail)
        assert (data["schema"], data["status"], data["state"], data["steps"]) == (1, 0, "ended", 12)
        assert data["counts"] == {"applied": 11, "skipped": 1, "backed_off": 0, "lost": 0, "rolled_back": 0}
        assert data["optimizers"][""]["step"] == 11
        assert [(each["step"], each["did"]) for each in data["incidents"]] == [(4, "skipped")]
        assert Path(data["incidents"][0]["bundle"]).is_dir()
        assert data["troubles"] == []

    def test_of_a_run_that_halted_the_status_is_1(self, tmp_path: Path) -> None:
        with pytest.raises(NonFiniteError):
            train(tmp_path, policy=nanguard.Policy([nanguard.Halt()]))
        assert run_cli(tmp_path, "--once").exit_code == 1
        assert run_cli(tmp_path, "--json").exit_code == 1
        assert json.loads(run_cli(tmp_path, "--json").stdout)["state"] == "halted"
        assert run_cli(tmp_path, "--interval", "0.05").exit_code == 1

    @pytest.mark.parametrize(("state", "status"), [("gone", 1), ("silent", 0)])
    def test_silence_is_told_and_whether_the_process_is_gone(self, state: str, status: int, tmp_path: Path) -> None:
        pid = os.getpid()
        if state == "gone":
            done = subprocess.Popen([sys.executable, "-c", ""])
            done.wait(timeout=300)
            pid = done.pid
        train(tmp_path)
        path = tmp_path / "run.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line["time"] -= 3600.0
        lines[0]["pid"] = pid
        path.write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
        told = json.loads(run_cli(tmp_path, "--json").stdout)
        assert (told["state"], told["status"]) == (state, status)
        assert "silent for 1 h 00 min" in run_cli(tmp_path, "--once").stdout.splitlines()[0]

    def test_of_several_optimizers_each_is_shown(self, tmp_path: Path) -> None:
        step = {"event": "step", "epoch": 0, "batch": None, "norms": [1.0], "lrs": [0.1], "scale": 2.0**15}
        lines = [{"event": "run", "time": 1.0, "schema": 2}]
        lines += [
            {**step, "time": 1.0 + n / 9, "step": n, "loss": n + k, "optimizer": name}
            for n in range(20)
            for k, name in enumerate(["generator", "critic"])
        ]
        (tmp_path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        told = run_cli(tmp_path, "--once").stdout
        assert re.search(r"step +19 .* generator$", told, re.MULTILINE)
        assert re.search(r"step +19 .* critic$", told, re.MULTILINE)
        assert told.count(" scale ") == 2
        assert "40 applied" in told

    def test_nothing_in_a_file_steers_the_terminal(self, tmp_path: Path) -> None:
        train(tmp_path)
        path = tmp_path / "run.jsonl"
        nasty = "\\u001b[31m[bold red]<script>\\ud800\\u0007"
        text = path.read_text().replace('"module": "inp"', f'"module": "{nasty}"').replace('"fp32"', f'"{nasty}"')
        text += f'{{"event": "alert", "time": 9e9, "step": 3, "message": "{nasty}", "module": "{nasty}"}}\n'
        path.write_text(text)
        for told in (run_cli(tmp_path, "--once"), run_cli(tmp_path), run_cli(tmp_path, "--json")):
            assert told.exit_code == 0, told.output
            assert is_plain(told.stdout)
            assert "<script>" in told.stdout
        assert "\\x1b[31m[bold red]<script>\\ud800\\x07" in run_cli(tmp_path, "--once").stdout

    @pytest.mark.parametrize("command", [["--once"], ["--json"], ["--interval", "0.05"]])
    @pytest.mark.parametrize(
        "content", [b"hello\n", b"\x00\xff\n" * 9, b'{"event": 1}\n', b"[[[[\n", b'{"event": "run"}\n']
    )
    def test_what_is_no_log_ends_with_status_2_and_a_sentence(
        self, command: list[str], content: bytes, tmp_path: Path
    ) -> None:
        (tmp_path / "run.jsonl").write_bytes(content)
        told = run_cli(tmp_path, *command)
        assert told.exit_code == 2
        assert isinstance(told.exception, SystemExit)
        words = json.loads(told.stdout)["error"] if "--json" in command else told.stderr
        assert "is not a run log that nanguard wrote: line 1" in words
        assert "Traceback" not in told.output
        assert run_cli(tmp_path / "none", "--once").exit_code == 2

    @FUZZ
    @given(data=st.data())
    def test_a_damaged_log_is_shown_or_refused(self, data: st.DataObject, tmp_path: Path, whole: bytes) -> None:
        raw = bytearray(whole)
        for _ in range(data.draw(st.sampled_from([1, 5, 40]))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        (tmp_path / "run.jsonl").write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
        shutil.rmtree(tmp_path / "incidents", ignore_errors=True)
        for arguments in (
            ["watch", str(tmp_path), "--once"],
            ["watch", str(tmp_path), "--json"],
            ["explain", str(tmp_path)],
        ):
            told = CliRunner().invoke(app, arguments)
            assert told.exit_code in (0, 1, 2)
            assert told.exception is None or isinstance(told.exception, SystemExit), told.exception
            assert is_plain(told.stdout)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole")
    train(folder, steps=20, bad=(3, 9))
    return (folder / "run.jsonl").read_bytes()


@FUZZ
@given(width=st.integers(1, 200), height=st.integers(1, 60), ascii_only=st.booleans())
def test_the_view_fits_any_terminal(width: int, height: int, ascii_only: bool, tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(whole.replace(b'"inp"', '"модуль.層"'.encode()))
    run = read_run(path)
    lines = view(run, time.time(), width=width, height=height, ascii_only=ascii_only).plain.split("\n")
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width
    assert not ascii_only or "".join(lines).isascii()
    if height >= 6 and width >= 80:
        assert "nanguard" in lines[0]
        assert any("loss" in line for line in lines)


def test_a_log_without_steps_or_with_odd_numbers_has_a_view(tmp_path: Path) -> None:
    odd: dict[str, Any] = {"event": "step", "epoch": 0, "batch": None, "norms": [], "lrs": [], "scale": None}
    steps = [{**odd, "time": 0.0, "step": n, "loss": loss} for n, loss in enumerate(["nan", 1e308, -1e308, 1e-320])]
    for lines in ([], steps, [{**step, "step": 10**18 * step["step"]} for step in steps]):
        header = {"event": "run", "time": 1e300, "parameters": 10**50, "optimizers": [{}, 1], "device": 7, "pid": 2**70}
        (tmp_path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [header, *lines]))
        run = read_run(tmp_path)
        assert view(run, time.time(), width=80, height=24).plain
        assert status_line(run, time.time())
        assert json.dumps(glance.as_dict(run, time.time()))


# ---- live ----------------------------------------------------------------------------------------------------------


def test_in_a_pipe_there_is_a_line_for_each_incident_and_no_control_codes(program: Path, tmp_path: Path) -> None:
    """Begun before the run, it waits for it, follows it, and ends with it; forcing colour changes nothing."""
    command = [sys.executable, "-m", "nanguard", "watch", str(tmp_path / "run"), "--interval", "0.2"]
    env = environment(FORCE_COLOR="1")
    watch = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
    try:
        assert watch.stdout is not None
        first = watch.stdout.readline()
        with training(program, tmp_path / "run", steps=250) as process:
            process.wait(timeout=300)
            out, err = watch.communicate(timeout=300)
    finally:
        watch.kill()
    assert watch.returncode == 0, err
    assert first == f"waiting for {tmp_path / 'run'}: no run has been logged there yet (Ctrl-C ends)\n"
    assert err == ""
    assert is_plain(out)
    lines = out.splitlines()
    incidents = [line for line in lines if line.startswith("step ")]
    assert [line.partition(":")[0] for line in incidents] == ["step 20", "step 120", "step 220"]
    assert "overflow of an exponential, train.py:14, exp" in incidents[0]
    assert sum(line.startswith("run: running; step ") for line in lines) >= 2
    assert lines[-1].startswith("run: ended; step 249, loss ")
    assert lines[-1].endswith("247 applied, 3 skipped")


class TestInATerminal:
    @pytest.fixture
    def spawn(self, tmp_path: Path) -> Iterator[Any]:
        pexpect = pytest.importorskip("pexpect")
        children = []

        def spawned(*arguments: str, columns: int = 80, rows: int = 24, **env: str) -> Any:
            command = ["-m", "nanguard", "watch", *arguments]
            # A shell that runs us in the background has us ignore SIGINT, and children inherit that.
            obeys: Any = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
            size = {"dimensions": (rows, columns), "encoding": "utf-8", "timeout": 300, "preexec_fn": obeys}
            children.append(pexpect.spawn(sys.executable, command, env=environment(**env), **size))
            return children[-1]

        yield spawned
        for child in children:
            child.close(force=True)

    def test_it_follows_a_run_and_ends_with_it(self, spawn: Any, program: Path, tmp_path: Path) -> None:
        import pexpect

        child = spawn(str(tmp_path / "run"), "--interval", "0.2")
        child.expect("waiting for")
        with training(program, tmp_path / "run", steps=150):
            child.expect("running")
            child.expect("1 incident")
            child.expect(r"step  ?20  .*skipped")
            child.expect("2 incidents")
            child.expect("ended")
            child.expect_exact(["\x1b[?25h"])  # the cursor is back
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 0

    def test_ctrl_c_ends_it_quietly(self, spawn: Any, program: Path, tmp_path: Path) -> None:
        import pexpect

        with training(program, tmp_path / "run", steps=10**6):
            child = spawn(str(tmp_path / "run"))
            child.expect("steps/s")
            child.sendintr()
            child.expect(pexpect.EOF)
            child.wait()
        assert child.exitstatus == 130
        assert "Traceback" not in child.before
        assert "Aborted" not in child.before

    @pytest.mark.parametrize("variable", ["NO_COLOR", "none"])
    def test_without_colour_there_is_none(self, variable: str, spawn: Any, tmp_path: Path) -> None:
        import pexpect

        train(tmp_path / "run")
        child = spawn(str(tmp_path / "run"), **{variable: "1"})
        child.expect(pexpect.EOF)
        colours = re.findall(r"\x1b\[[0-9;]*3[0-7][0-9;]*m", child.before)
        assert bool(colours) == (variable == "none")
        assert "1 incident" in child.before

    def test_a_dumb_terminal_gets_plain_lines(self, spawn: Any, tmp_path: Path) -> None:
        import pexpect

        train(tmp_path / "run")
        child = spawn(str(tmp_path / "run"), TERM="dumb")
        child.expect(pexpect.EOF)
        assert "\x1b" not in child.before
        assert child.before.splitlines()[0].startswith("step 4: skipped: ")

    def test_a_terminal_without_blocks_gets_letters(self, spawn: Any, tmp_path: Path) -> None:
        import pexpect

        train(tmp_path / "run")
        child = spawn(str(tmp_path / "run"), PYTHONIOENCODING="ascii")
        child.expect(pexpect.EOF)
        assert child.before.isascii()
        assert "loss" in child.before


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_on_a_screen_of_80_columns_and_24_rows(program: Path, tmp_path: Path) -> None:
    """What a person sees in tmux: one view that is drawn over, not a scroll of them."""

    def tmux(*arguments: str) -> str:
        command = ["tmux", "-S", str(tmp_path / "tmux"), "-f", os.devnull, *arguments]
        return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300, check=False).stdout

    def screen_with(words: str) -> list[str]:
        for _ in range(3000):
            lines = tmux("capture-pane", "-p", "-t", "watch").splitlines()
            if any(words in line for line in lines):
                return lines
            time.sleep(0.1)
        pytest.fail("\n".join(lines))

    with training(program, tmp_path / "run", steps=300):
        watch = f"{sys.executable} -m nanguard watch {tmp_path / 'run'} --interval 0.2; echo status $?; sleep 300"
        env = [f"PYTHONPATH={SOURCE}", "PYTHONIOENCODING=utf-8"]
        flags = [part for each in env for part in ("-e", each)]
        tmux("-u", "new-session", "-d", "-s", "watch", "-x", "80", "-y", "24", *flags, watch)
        try:
            live = screen_with("2 incidents")
            over = screen_with("status 0")
        finally:
            tmux("kill-server")
    for lines in (live, over):
        assert max(map(len, lines)) <= 80
        assert sum("nanguard" in line for line in lines) == 1
        assert sum(line.startswith(" loss ") for line in lines) == 1
    assert live[0].endswith("running")
    assert over[0].endswith("ended")
    assert any(
        line.startswith("  step 220  skipped 3 times since step 20  overflow of an exponential") for line in over
    )
