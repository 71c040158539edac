"""``read_run`` says what a log holds, and never stumbles over one that is damaged."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nanguard
from helpers import build, loss_fn, make_batches, poisoned
from nanguard.errors import NanguardError, RunLogError
from nanguard.records.run import Run
from nanguard.runlog.reader import Tape, read_run
from nanguard.testing import Fault, inject
from optimizers import ALL

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def train(run_dir: Path, *, steps: int = 12, first: Any = None) -> nanguard.Guard:
    """With an overflow at step 1 and an incident at step 4."""
    model, opt = build(ALL["fused AdamW"])
    with nanguard.Guard(model, opt, precision="fp16", run_dir=run_dir) as guard:
        if first is not None:
            guard.load_state_dict(first)
        with inject(guard, Fault(into="gradient", name="out.bias", steps=(1,))):
            for batch in guard.epoch(poisoned(make_batches(steps), 4)):
                guard.step(loss_fn, batch)
    return guard


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("run")
    train(folder)
    return (folder / "run.jsonl").read_bytes()


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "run.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def step_line(step: int, **more: Any) -> dict[str, Any]:
    plain = {"event": "step", "time": 1.0, "step": step, "epoch": 0, "batch": None, "loss": 0.5}
    return {**plain, "norms": [1.0], "lrs": [0.1], "scale": None, **more}


RUN = {"event": "run", "time": 1.0, "schema": 2}


class TestReading:
    def test_a_run_says_what_happened(self, tmp_path: Path) -> None:
        guard = train(tmp_path / "a")
        run = read_run(tmp_path / "a")
        assert run.header["precision"] == "fp16"
        assert run.header["schema"] == 2
        assert [record.step for record in run.steps] == list(range(12))
        assert [record.step for record in run.steps if record.skipped] == [1, 4]
        assert math.isnan(run.steps[4].loss)
        assert run.steps[2].scale == run.steps[0].scale / 2  # type: ignore[operator]
        assert [incident.outcome for incident in run.incidents] != []
        assert repr(run.incidents[0].outcome) == repr(guard.incidents[0].outcome)
        assert run.incidents[0].number == 1
        assert run.incidents[0].reading.step == 4
        assert run.incidents[0].diagnosis == guard.incidents[0].diagnosis
        assert [(event.event, event.step) for event in run.events] == [("overflow", 1)]
        assert run.end is not None
        assert run.end["counts"] == guard.counts
        assert run.is_over
        assert run.troubles == ()
        assert run.name == "a"
        assert repr(read_run(str(tmp_path / "a" / "run.jsonl"))) == repr(run)

    def test_a_frame_has_a_row_for_each_step(self, tmp_path: Path) -> None:
        pytest.importorskip("pandas")
        written(tmp_path, RUN, step_line(0, norms=[1.0, "inf"], lrs=[None, 0.2], batch=3), step_line(1, skipped=True))
        frame = read_run(tmp_path).frame()
        columns = ["step", "time", "epoch", "batch", "loss", "norm_0", "norm_1", "lr_0", "lr_1", "scale", "skipped"]
        assert list(frame.columns) == [*columns, "optimizer"]
        assert frame["norm_1"].iloc[0] == math.inf
        assert math.isnan(frame["norm_1"].iloc[1])
        assert math.isnan(frame["lr_0"].iloc[0])
        assert frame["skipped"].tolist() == [False, True]
        assert frame["batch"].iloc[0] == 3
        assert frame["batch"].isna().tolist() == [False, True]
        written(tmp_path, RUN)
        assert len(read_run(tmp_path).frame()) == 0

    def test_without_pandas_a_frame_is_refused_in_words(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pandas", None)
        written(tmp_path, RUN, step_line(0))
        with pytest.raises(ImportError, match="needs pandas, which is not installed: pip install pandas"):
            read_run(tmp_path).frame()

    def test_steps_that_a_resumed_run_makes_again_take_the_place_of_the_first(self, tmp_path: Path) -> None:
        first = [step_line(step, loss=1.0) for step in range(8)]
        again = [step_line(step, loss=2.0) for step in range(5, 7)]
        written(tmp_path, RUN, *first, {"event": "end", "time": 9.0}, {**RUN, "device": "cuda"}, *again)
        run = read_run(tmp_path)
        assert [(record.step, record.loss) for record in run.steps] == [
            *((s, 1.0) for s in range(5)),
            (5, 2.0),
            (6, 2.0),
        ]
        assert len(run.headers) == 2
        assert run.header["device"] == "cuda"
        assert not run.is_over

    def test_a_run_that_begins_anew_in_the_same_folder_is_another(self, tmp_path: Path) -> None:
        train(tmp_path, steps=12)
        train(tmp_path, steps=6)
        run = read_run(tmp_path)
        assert [record.step for record in run.steps] == list(range(6))
        assert len(run.incidents) == len(run.headers) == len(run.events) == 1

    def test_a_guard_that_goes_on_has_the_incidents_of_both(self, tmp_path: Path) -> None:
        guard = train(tmp_path, steps=6)
        train(tmp_path, steps=6, first=guard.state_dict())
        run = read_run(tmp_path)
        assert [record.step for record in run.steps] == list(range(12))
        assert [incident.number for incident in run.incidents] == [1, 2]
        assert len(run.headers) == 2
        assert run.is_over

    def test_two_guards_may_write_to_one_log(self, tmp_path: Path) -> None:
        lines = [step_line(step, optimizer=name) for step in range(3) for name in ("generator", "critic")]
        written(tmp_path, RUN, lines[0], RUN, *lines[1:])
        steps = read_run(tmp_path).steps
        assert [record.step for record in steps if record.optimizer == "generator"] == [0, 1, 2]
        assert [record.step for record in steps if record.optimizer == "critic"] == [0, 1, 2]

    def test_lines_written_late_are_put_in_order(self, tmp_path: Path) -> None:
        written(tmp_path, RUN, *(step_line(step) for step in (0, 8, 16, 9, 10, 17, 18)))
        assert [record.step for record in read_run(tmp_path).steps] == [0, 8, 9, 10, 16, 17, 18]

    def test_an_alert_is_understood(self, tmp_path: Path) -> None:
        written(tmp_path, RUN, {"event": "alert", "time": 2.0, "step": 7, "message": "soon", "module": None})
        (alert,) = read_run(tmp_path).events
        assert (alert.event, alert.step, dict(alert.fields)) == ("alert", 7, {"message": "soon", "module": None})

    def test_a_log_of_the_first_schema_is_read(self, tmp_path: Path, real: bytes) -> None:
        lines = [json.loads(line) for line in real.splitlines() if b'"event":"step"' not in line]
        lines[0]["schema"] = 1
        for line in lines:
            if line["event"] == "incident":
                del line["verdict"]["reading"]["lrs"]
        written(tmp_path, *lines)
        run = read_run(tmp_path)
        assert len(run.incidents) == 1
        assert run.troubles == ()

    def test_a_log_of_a_newer_nanguard_is_read_as_far_as_it_is_understood(self, tmp_path: Path) -> None:
        written(tmp_path, {**RUN, "schema": 99}, step_line(0, mood="fine"), {"event": "new", "time": 2.0})
        run = read_run(tmp_path)
        assert len(run.steps) == len(run.events) == 1
        assert "newer nanguard" in run.troubles[0]

    def test_reading_needs_no_torch(self, tmp_path: Path) -> None:
        written(tmp_path, RUN)
        code = f"import sys, nanguard; nanguard.read_run({str(tmp_path)!r}); print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
        assert done.stdout.strip() == "False", done.stderr


class TestNotARunLog:
    def test_nothing_there(self, tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "none", tmp_path / "none" / "run.jsonl"):
            with pytest.raises(RunLogError, match=r"there is no run log here\. Give the folder of a run"):
                read_run(path)

    def test_impossible_names(self) -> None:
        for name in ("a\0b", "x" * 5000):
            with pytest.raises(RunLogError, match="cannot be"):
                read_run(name)

    def test_a_folder_in_its_place(self, tmp_path: Path) -> None:
        (tmp_path / "run.jsonl").mkdir()
        with pytest.raises(RunLogError, match="cannot be read: Is a directory"):
            read_run(tmp_path)

    @pytest.mark.parametrize(
        "content", [b"", b"\n\n", b"hello\n", b'{"a": 1}\n', b"[]\n", b"\xff\xfe", b"{" * 10**6, b'{"event": "run"}\n']
    )
    def test_anything_else(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "run.jsonl").write_bytes(content)
        with pytest.raises(RunLogError, match=r"run.jsonl is not a run log that nanguard wrote: "):
            read_run(tmp_path)

    def test_the_error_is_of_the_family(self) -> None:
        assert issubclass(RunLogError, NanguardError)


def survives(path: Path, content: bytes) -> Run | None:
    """Read, or refused."""
    path.write_bytes(content)
    try:
        run = read_run(path)
    except RunLogError:
        return None
    assert all(isinstance(trouble, str) and len(trouble) < 1000 for trouble in run.troubles)
    return run


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["nan", "inf", "-inf", 10**400, -(10**30), 2**63, "\ud800", "<script>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
EVENTS = st.sampled_from(["run", "step", "incident", "drop", "overflow", "eased", "roll_back", "alert", "end", "x"])


class TestDamage:
    def test_cut_off_at_every_byte_it_reads_as_far_as_it_goes(self, tmp_path: Path, real: bytes) -> None:
        path = tmp_path / "run.jsonl"
        first = real.index(b"\n")
        whole = read_run_bytes(tmp_path, real)
        for end in range(len(real)):
            run = survives(path, real[:end])
            assert (run is None) == (end < first), end
            if run is not None:
                assert run.troubles == ()
                assert repr(run.steps) == repr(whole.steps[: len(run.steps)])
                lines = real[:end].count(b"\n") + real[end : end + 1].count(b"\n")  # whole but for its newline
                told = len(run.steps) + len(run.incidents) + len(run.events) + len(run.headers) + run.is_over
                assert told == lines

    @FUZZ
    @given(content=st.binary(max_size=400))
    def test_random_bytes(self, content: bytes, tmp_path: Path) -> None:
        survives(tmp_path / "run.jsonl", content)

    @FUZZ
    @given(data=st.data())
    def test_random_bytes_inside_a_real_log(self, data: st.DataObject, tmp_path: Path, real: bytes) -> None:
        at = data.draw(st.integers(0, len(real)))
        until = data.draw(st.integers(at, min(len(real), at + 200)))
        run = survives(tmp_path / "run.jsonl", real[:at] + data.draw(st.binary(max_size=40)) + real[until:])
        if real.count(b"\n", at, until) == 0:
            assert run is not None
            assert len(run.steps) >= 11  # one line is lost at most

    @FUZZ
    @given(data=st.data())
    def test_a_value_of_any_other_type_anywhere_in_a_real_log(
        self, data: st.DataObject, tmp_path: Path, real: bytes
    ) -> None:
        lines = [json.loads(line) for line in real.splitlines()]
        number = data.draw(st.integers(0, len(lines) - 1))
        place = lines[number]
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = data.draw(st.sampled_from(keys))
            inner = place[key]
            if not isinstance(inner, (dict, list)) or not inner or data.draw(st.booleans()):
                break
            place = inner
        if isinstance(place, dict) and data.draw(st.booleans()):
            del place[key]
        else:
            place[key] = data.draw(JSON)
        run = survives(tmp_path / "run.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
        assert run is not None
        assert len(run.steps) >= 11
        usable(run)

    @FUZZ
    @given(lines=st.lists(st.tuples(EVENTS, st.dictionaries(st.text(max_size=6), JSON, max_size=4)), max_size=6))
    def test_made_up_lines(self, lines: list[tuple[str, dict[str, Any]]], tmp_path: Path) -> None:
        told = [json.dumps({"time": 1.0, **fields, "event": event}) + "\n" for event, fields in lines]
        run = survives(tmp_path / "run.jsonl", "".join(told).encode())
        if run is not None:
            usable(run)

    def test_what_hurts_other_readers(self, tmp_path: Path) -> None:
        lines = [
            json.dumps({**RUN, "x": 0}).replace("0}", "[" * 100_000 + "]" * 100_000 + "}") + "\n",
            json.dumps(step_line(0)).replace("0.5", "9" * 10_000) + "\n",
            json.dumps(step_line(0)).replace("0.5", "NaN") + "\n",
            step_line(0, loss=10**400),
            step_line(10**400),
            step_line(2**63),
            step_line(-1),
            step_line(True),
            step_line(0, time="nan"),
            step_line(0, norms=1.0),
            step_line(0, norms=[None]),
            step_line(0, skipped="yes"),
            {"event": ["run"], "time": 1.0},
            {"event": "incident", "time": 1.0, "number": 1, "verdict": {}},
            {"event": "overflow", "time": 1.0, "step": 1.5},
            step_line(7),
        ]
        written(tmp_path, *lines)
        run = read_run(tmp_path)
        assert [record.step for record in run.steps] == [7]
        assert len(run.troubles) == len(lines) - 1
        assert [trouble.partition(":")[0] for trouble in run.troubles] == [f"line {n}" for n in range(1, len(lines))]

    def test_many_troubles_are_summed_up(self, tmp_path: Path) -> None:
        written(tmp_path, RUN, "x\n" * 5000)
        troubles = read_run(tmp_path).troubles
        assert len(troubles) == 1001
        assert troubles[-1] == "4,000 more lines could not be read"

    def test_an_endless_line_is_passed_over(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("nanguard.runlog.reader._LONGEST_LINE", 1000)
        monkeypatch.setattr("nanguard.runlog.reader._CHUNK", 100)
        written(tmp_path, RUN, "x" * 5000 + "\n", step_line(0))
        run = read_run(tmp_path)
        assert len(run.steps) == 1
        assert run.troubles == ("line 2: it is longer than 1,000 bytes",)

    @FUZZ
    @given(cuts=st.lists(st.integers(0, 20_000), max_size=8))
    def test_in_pieces_it_reads_as_in_one(self, cuts: list[int], tmp_path: Path, real: bytes) -> None:
        places = [0, *sorted(min(cut, len(real)) for cut in cuts), len(real)]
        tape = Tape(tmp_path / "run.jsonl")
        for start, end in pairwise(places):
            tape.feed(real[start:end])
        assert repr(tape.run()) == repr(read_run_bytes(tmp_path, real))


def read_run_bytes(folder: Path, content: bytes) -> Run:
    (folder / "run.jsonl").write_bytes(content)
    return read_run(folder / "run.jsonl")


def usable(run: Run) -> None:
    """What readers do with it."""
    pytest.importorskip("pandas")
    assert len(run.frame()) == len(run.steps)
    assert [record.step for record in run.steps] == sorted(record.step for record in run.steps)
    for incident in run.incidents:
        assert isinstance(incident.reading.loss, float)
    assert isinstance(run.name, str)
