"""The report: all that is known of runs on one page, and nothing from a file that could be more than text."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import linecache
import math
import os
import re
import shutil
import struct
import sys
import webbrowser
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner

import nanguard
from nanguard.cli import app
from nanguard.errors import ReportError, RunLogError
from nanguard.records.markup import Markup, embedded, tag
from nanguard.records.steps import Outcome
from nanguard.replay.runs import in_one_line
from nanguard.report import page
from nanguard.report.html import story as storied
from nanguard.report.html.kinds import KINDS, marks_of
from nanguard.report.html.prose import as_dict, figures, percent, plain_summary
from nanguard.report.html.series import packed
from nanguard.report.page import make_report, write_report
from nanguard.source.excerpt import excerpt
from reported import (
    header,
    hostile_diagnosis,
    hostile_run,
    incident_line,
    outcome,
    real_run,
    refused_run,
    step_line,
    write_log,
)

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    '"onmouseover="alert(1)',
    "' onfocus='alert(1)' autofocus='",
    "<!--<script>",
    "]]>--><img src=x onerror=alert(1)>",
    "javascript:alert(1)",
    "&lt;b&gt;&#0;",
    "a\u2028b\u202ec\x00\x1b[31m\r\n",
    "%{x}<br><b>$x$</b>{{7*7}}",
    "\ud800",
)


class Outline(HTMLParser):
    """Elements with the names of their attributes, in order; and the text, links, ids and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.words, self.ids, self.links, self.scripts = [], [], [], []
        self._in_script = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(name for name, _ in attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag == "script":
            self._in_script = True
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = self._in_script and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


@pytest.fixture
def no_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without the 5 MB that are the same on all of them."""
    monkeypatch.setattr(page, "_plotly", lambda: "var Plotly;")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nanguard.Guard]:
    folder = tmp_path_factory.mktemp("runs") / "first"
    return folder, real_run(folder)


def unpacked(told: dict[str, Any]) -> list[float]:
    """What page.js does."""
    if "start" in told:
        return [told["start"] + place * told["by"] for place in range(told["n"])]
    kind, key = ("f", "f32") if "f32" in told else ("d", "f64")
    return list(struct.unpack(f"<{told['n']}{kind}", base64.b64decode(told[key])))


# ---- a run that comes to nothing


@pytest.mark.usefixtures("no_plotly")
def test_a_run_that_refused_almost_all_of_its_steps_says_so_first(tmp_path: Path) -> None:
    report = make_report([refused_run(tmp_path)])
    (story,) = report.stories
    sentence = "The last 398 steps in a row were refused: nothing was learned since step 2."
    assert plain_summary(story).startswith(f"400 steps: 398 skipped; all others applied. {sentence} Problem: ")
    assert sentence in Outline(report.html).text
    told = {name: (value, remark) for name, value, remark in figures(story.figures)}
    assert told["skipped"] == ("398", "99.5% of all")
    assert told["last finite loss"] == ("600", "at step 1, from 1,200")
    assert "last loss" not in told
    assert as_dict(story)["figures"]["refused_at_end"]["count"] == 398


@pytest.mark.parametrize(
    ("steps", "good", "words"),
    [
        (4, 0, "All 4 steps were refused: nothing was learned."),
        (5, 2, "The last 3 steps in a row were refused: nothing was learned since step 2."),
        (40, 30, "The last 10 steps in a row were refused: nothing was learned since step 30."),
        (40, 31, ""),
        (3, 1, ""),
    ],
)
@pytest.mark.usefixtures("no_plotly")
def test_a_row_of_refused_steps_is_told_where_it_is_long_or_most_of_the_run(
    steps: int, good: int, words: str, tmp_path: Path
) -> None:
    (story,) = make_report([refused_run(tmp_path, steps=steps, good=good)]).stories
    assert words in plain_summary(story)
    assert ("refused" in plain_summary(story)) == bool(words)


@pytest.mark.usefixtures("no_plotly")
def test_a_gap_in_the_log_is_steps_that_were_applied(tmp_path: Path) -> None:
    lines = [step_line(step, skipped=True) for step in (*range(50), *range(80, 92))]
    (story,) = make_report([write_log(tmp_path, header(), *lines)]).stories
    assert "The last 12 steps in a row were refused: nothing was learned since step 80." in plain_summary(story)


@pytest.mark.usefixtures("no_plotly")
def test_the_last_loss_is_called_so_where_it_is_finite(tmp_path: Path) -> None:
    (story,) = make_report([write_log(tmp_path, header(), *(step_line(step) for step in range(9)))]).stories
    assert "last loss" in [name for name, _, _ in figures(story.figures)]


@pytest.mark.parametrize(
    ("part", "whole", "words"),
    [
        (398, 400, "99.5%"),
        (400, 400, "100%"),
        (399_999, 400_000, "over 99.9%"),
        (1, 2, "50%"),
        (1, 400, "0.25%"),
        (1, 1_000_000, "under 0.01%"),
        (12, 97, "12.4%"),
    ],
)
def test_shares_are_told_in_plain_figures(part: int, whole: int, words: str) -> None:
    assert percent(part, whole) == words


@pytest.mark.usefixtures("no_plotly")
def test_every_step_that_the_key_figure_counts_as_skipped_has_its_cross(tmp_path: Path) -> None:
    (story,) = make_report([refused_run(tmp_path)]).stories
    marks = marks_of(story)
    assert {mark["x"] for mark in marks if mark["kind"] == "skip"} == set(range(2, 400))
    assert [mark["x"] for mark in marks if mark["kind"] == "raise_precision"] == [4, 8]
    assert [mark["x"] for mark in marks if mark["kind"] == "lower_lr"] == [6]


# ---- what is on it


@pytest.mark.usefixtures("no_plotly")
def test_a_real_run_is_told_from_the_first_sentence_to_the_last_table(run: tuple[Path, nanguard.Guard]) -> None:
    folder, guard = run
    report = make_report([folder])
    (story,) = report.stories
    outline = Outline(report.html)
    assert report.troubles == ()
    assert (story.figures.steps, story.figures.skipped) == (90, guard.counts["skipped"])
    assert (story.figures.incidents, len(story.faults)) == (len(guard.incidents), 2)
    assert "90 steps: 5 skipped; all others applied." in outline.text
    assert "First problem: overflow of fp16 in attention at step 40 and 3 more times" in outline.text
    assert "Response: attention in fp32 from now on." in outline.text
    for incident in guard.incidents:
        assert f"step {incident.reading.step}" in outline.text
        assert incident.diagnosis is not None
        assert incident.diagnosis.because in outline.text
    first = guard.incidents[0].diagnosis
    assert first is not None
    assert first.fix.code in outline.text
    assert first.chain[-1].source is not None
    assert first.chain[-1].source.text in outline.text
    assert all(trial.what in outline.text for trial in first.tried)
    assert "def forward(self, x: Tensor) -> Tensor:" in outline.text, "the lines around the one to blame"
    assert "Sample 2 of the batch" in outline.text
    assert "batch['sound'] fp32 6 x 4 x 8" in outline.text
    assert f"nanguard explain {folder}/incidents/0001" in outline.text
    assert "taken 4 times" in outline.text
    assert "used 3 of 3 within 100 steps" in outline.text
    assert "attention.query" in json.loads(outline.scripts[1])["trails"]["run0-incident1"][0]["module"]


@pytest.mark.usefixtures("no_plotly")
def test_headings_ids_and_links_are_sound(run: tuple[Path, nanguard.Guard], tmp_path: Path) -> None:
    second = tmp_path / "second"
    real_run(second, seed=1, until=42)
    outline = Outline(make_report([run[0], second]).html)
    assert len(outline.ids) == len(set(outline.ids))
    assert [link for link in outline.links if link.startswith("#") and link[1:] not in outline.ids] == []
    assert [link for link in outline.links if not link.startswith("#")] == ["data:,"], "nothing is fetched"
    levels = [int(name[1]) for name, _ in outline.elements if re.fullmatch("h[1-6]", name)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    marks = [mark for told in json.loads(outline.scripts[1])["runs"] for mark in told["marks"]]
    assert {mark["to"] for mark in marks} <= set(outline.ids), "every mark opens something"
    assert {mark["kind"] for mark in marks} == {"skip", "raise_precision"}


def test_scripts_run_only_by_their_hash(run: tuple[Path, nanguard.Guard]) -> None:
    text = make_report([run[0]]).html
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    told = html.unescape(policy)
    assert "default-src 'none'" in told
    assert "unsafe-eval" not in told
    (allowed,) = re.findall(r"script-src ([^;]*)", told)
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts]
    assert allowed.split() == hashes
    assert len(scripts) == 3


@given(st.lists(st.floats() | st.floats(width=32) | st.integers(0, 9).map(float)))
@example([0.0, 1.0, 2.0, 3.0])
@example([math.inf])
@example([math.nan, 1.0])
@example([-0.0, 0.0])
@example([3.4028235677973366e38, 1.0])
def test_values_reach_the_browser_to_the_bit(values: list[float]) -> None:
    back = unpacked(json.loads(json.dumps(packed(values), allow_nan=False)))
    assert [v if v == v else "nan" for v in back] == [v if v == v else "nan" for v in values]


@pytest.mark.usefixtures("no_plotly")
def test_a_thousand_repeats_are_folded(tmp_path: Path) -> None:
    lines = [header()]
    for step in range(3000):
        is_bad = step % 3 == 0
        lines.append(step_line(step, skipped=True) if is_bad else step_line(step))
        if is_bad:
            lines.append(incident_line(1 + step // 3, outcome(step)))
    report = make_report([write_log(tmp_path, *lines)])
    outline = Outline(report.html)
    cards = [place for place in outline.ids if place.startswith("run0-incident")]
    assert len(report.stories[0].incidents) == 1000
    assert len(report.stories[0].faults) == 1
    assert len(cards) == 1 + storied.MOST_REPEATS
    assert f"and {999 - storied.MOST_REPEATS} more, up to step 2,997" in outline.text
    marks = json.loads(outline.scripts[1])["runs"][0]["marks"]
    assert len(marks) == 1000
    assert {mark["to"] for mark in marks} == set(cards)


@pytest.mark.usefixtures("no_plotly")
def test_many_different_faults_stay_on_one_page(tmp_path: Path) -> None:
    told = [outcome(step, diagnosis=hostile_diagnosis(f"layer{step}", step)) for step in range(150)]
    lines = [incident_line(step + 1, each) for step, each in enumerate(told)]
    report = make_report([write_log(tmp_path, header(), *lines)])
    assert len(report.stories[0].faults) == 150
    assert len(json.loads(Outline(report.html).scripts[1])["trails"]) == storied.MOST_IN_FULL
    assert all(f"layer{step}" in report.html for step in range(150))


@pytest.mark.usefixtures("no_plotly")
def test_runs_without_much_to_say(tmp_path: Path) -> None:
    healthy = write_log(
        tmp_path / "healthy",
        header(),
        *(step_line(step) for step in range(5)),
        {"event": "end", "time": 1001.0, "steps": 5, "counts": {"applied": 5, "skipped": 0}},
    )
    text = Outline(make_report([healthy]).html).text
    assert "5 steps, all applied." in text
    assert "No incidents: every step was finite." in text
    empty = write_log(tmp_path / "empty", header())
    text = Outline(make_report([empty]).html).text
    assert "No steps are in the log." in text
    halted = [header(), step_line(0, skipped=True), incident_line(1, outcome(0, response="halt", rung=1))]
    text = Outline(make_report([write_log(tmp_path / "halted", *halted)]).html).text
    assert "Training halted at step 0." in text
    going = write_log(tmp_path / "going", header(), step_line(0))
    assert "The log has no end: the run is still going or was stopped." in Outline(make_report([going]).html).text


@pytest.mark.usefixtures("no_plotly")
def test_optimizers_that_are_guarded_on_their_own_have_curves_of_their_own(tmp_path: Path) -> None:
    lines = [
        header(optimizer="D", groups=["critic"]),
        {**header(optimizer="G", groups=["maker"]), "event": "optimizer"},
    ]
    for step in range(6):
        lines += [step_line(step, optimizer="D", skipped=step == 2), step_line(step, optimizer="G", norms=[2.0])]
    lines.append({**incident_line(1, outcome(2)), "optimizer": "D"})
    ends = [{"event": "end", "time": 1009.0, "steps": 6, "counts": {"applied": 6}, "optimizer": name} for name in "DG"]
    report = make_report([write_log(tmp_path, *lines, *ends)])
    figures = report.stories[0].figures
    assert (figures.steps, figures.applied, figures.skipped) == (12, 11, 1)
    panels = json.loads(Outline(report.html).scripts[1])["runs"][0]["panels"]
    assert [curve["label"] for curve in panels["norm"]] == ["D · critic", "G · maker"]
    assert [unpacked(curve["y"])[3] for curve in panels["norm"]] == [pytest.approx(1 + 0.5 * math.cos(3)), 2.0]
    assert "D (AdamW), G (AdamW)" in Outline(report.html).text
    assert "<dt>optimizer</dt>" in report.html
    assert "12 steps, 1 incident" in in_one_line(tmp_path)


@pytest.mark.usefixtures("no_plotly")
def test_the_only_optimizer_of_a_run_is_not_named(tmp_path: Path) -> None:
    lines = [header(optimizer="optimizer"), step_line(0, optimizer="optimizer", skipped=True)]
    log = write_log(tmp_path, *lines, {**incident_line(1, outcome(0)), "optimizer": "optimizer"})
    assert "<dt>optimizer</dt>" not in make_report([log]).html


@pytest.mark.usefixtures("no_plotly")
def test_all_kinds_of_events_are_marked(tmp_path: Path) -> None:
    responses = ("skip", "lower_lr", "raise_precision", "roll_back", "act", "warn", "halt", "back_off")
    incidents = [incident_line(place + 1, outcome(place, response=r)) for place, r in enumerate(responses)]
    incidents.append(incident_line(20, outcome(20, response="skip", did="the program raised ValueError")))
    others = [
        {
            "event": name,
            "time": 1001.0,
            "step": 9,
            "scale": 2.0,
            "what": "w",
            "did": "d",
            "message": "m",
            "module": None,
        }
        for name in ("overflow", "eased", "roll_back", "alert", "of a later version")
    ]
    drop = incident_line(9, outcome(10, response="drop_gradients"), "drop")
    report = make_report([write_log(tmp_path, header(), *incidents, *others, drop)])
    marks = json.loads(Outline(report.html).scripts[1])["runs"][0]["marks"]
    assert {mark["kind"] for mark in marks} == set(KINDS)
    assert report.troubles == ()


# ---- the program's own lines


def test_lines_are_shown_as_they_were_or_not_at_all(tmp_path: Path) -> None:
    from nanguard.records.diagnosis import Source

    file = tmp_path / "model.py"
    file.write_text("a = 1\nb = 2\nc = a / b\nd = 4\n")
    shown = excerpt(Source(file=str(file), line=3, text="c = a / b"))
    assert shown.lines == ((1, "a = 1"), (2, "b = 2"), (3, "c = a / b"), (4, "d = 4"))
    file.write_text("# new\na = 1\nb = 2\nc = a / b\n")
    shown = excerpt(Source(file=str(file), line=3, text="c = a / b"))
    assert (shown.lines, "changed" in shown.note) == (((3, "c = a / b"),), True)
    secret = tmp_path / "secret.txt"
    secret.write_text("one\ntwo\nthree\n")
    shown = excerpt(Source(file=str(secret), line=2, text="two"))
    assert shown.lines == ((2, "two"),), "a log may name any file, and a page may be passed on"
    pipe = tmp_path / "pipe.py"
    os.mkfifo(pipe)
    assert excerpt(Source(file=str(pipe), line=1, text="x")).lines == ((1, "x"),)
    assert excerpt(Source(file="a\0b.py", line=1, text="x")).lines == ((1, "x"),)


# ---- nothing in a file is more than text


def _outline(folder: Path, text: str) -> tuple[Outline, str]:
    shutil.rmtree(folder, ignore_errors=True)
    report = make_report([hostile_run(folder, text)])
    assert report.troubles == ()
    return Outline(report.html), report.html


@pytest.mark.usefixtures("no_plotly")
@given(text=st.text(min_size=1) | st.lists(st.sampled_from(HOSTILE), min_size=1, max_size=3).map("".join))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_names_never_change_the_page(tmp_path: Path, text: str) -> None:
    """The elements and attributes are those of a run with harmless names, one by one; only the text differs."""
    assume(text not in ("rung", "words", "times", "per"))  # fields of a rung that have a place of their own
    assume(text != "Halt")  # the last rung of a ladder that does not name it
    plain, _ = _outline(tmp_path / "plain" / "run", "harmless")
    outline, source = _outline(tmp_path / "hostile" / "run", text)
    assert outline.elements == plain.elements
    assert outline.ids == plain.ids
    assert len(outline.scripts) == len(plain.scripts) == 4
    data = json.loads(outline.scripts[1])
    assert data["trails"]["run0-incident1"][0]["module"] == text
    assert outline.scripts[2:] == plain.scripts[2:]
    assert source.encode("utf-8")


@pytest.mark.parametrize("text", HOSTILE)
def test_markup_takes_strings_for_what_they_are(text: str) -> None:
    outline = Outline(tag("p", text, tag("i", text), [text], title=text, data_x=text))
    assert outline.elements == [("p", ("title", "data-x")), ("i", ())]
    assert Outline(tag("script", embedded({text: text}), type="application/json")).elements == [("script", ("type",))]
    assert json.loads(embedded({"a": text})) == {"a": text}
    assert tag("b", Markup("<i></i>")) == "<b><i></i></b>"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**40) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = ("policy", "groups", "optimizers", "script", "argv", "device", "parameters", "ranks", "torch", "sync")
POLICIES = st.fixed_dictionaries({"ladder": JSON | st.lists(st.fixed_dictionaries({"rung": st.sampled_from(
    ("Skip", "Halt", "Rollback", "LowerLR", "RaisePrecision", "DropBadGradients", "New")), "times": JSON, "per": JSON,
    "lr": JSON}), max_size=4), "max_norm": JSON, "divergence": JSON})  # fmt: skip


@pytest.mark.usefixtures("no_plotly")
@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys(KEYS, JSON) | {"policy": POLICIES | JSON}),
    st.fixed_dictionaries({}, optional={"steps": JSON, "counts": JSON}),
    st.lists(st.fixed_dictionaries({"event": st.sampled_from(("overflow", "eased", "alert", "x")), "scale": JSON,
                                    "message": JSON, "module": JSON, "what": JSON}), max_size=3),
)  # fmt: skip
@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_log_says_there_is_a_page(
    tmp_path: Path, about: dict[str, Any], end: dict[str, Any], events: list[dict[str, Any]]
) -> None:
    lines = [{"event": "run", "time": 1.0, "schema": 2, **about}, step_line(0), incident_line(1, outcome(2))]
    lines += [{"time": 2.0, "step": 1, **event} for event in events]
    report = make_report([write_log(tmp_path, *lines, {"event": "end", "time": 3.0, **end})])
    assert json.loads(Outline(report.html).scripts[1])


# ---- what cannot be read or written


@pytest.mark.usefixtures("no_plotly")
def test_what_cannot_be_read_is_told_and_the_rest_is_shown(run: tuple[Path, nanguard.Guard], tmp_path: Path) -> None:
    torn = tmp_path / "torn"
    shutil.copytree(run[0], torn)
    with (torn / "run.jsonl").open("a") as file:
        file.write("no json\n" + json.dumps(header())[:50])
    (torn / "incidents" / "0001" / "incident.json").write_text("{")
    report = make_report([torn, tmp_path / "nowhere"])
    assert len(report.stories) == 1
    assert [any(word in trouble for trouble in report.troubles) for word in ("nowhere", "run.jsonl: line", "0001")] == [
        True, True, True
    ]  # fmt: skip
    text = Outline(report.html).text
    assert all(trouble in text for trouble in report.troubles)
    assert "overflow of fp16" in text, "the log itself says what the folder no longer can"
    with pytest.raises(RunLogError, match=r"nowhere: there is no run log here"):
        make_report([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="one run or more"):
        make_report([])


@pytest.mark.usefixtures("no_plotly")
def test_a_run_that_was_moved_still_has_its_incidents(run: tuple[Path, nanguard.Guard], tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(run[0], moved)
    (story,) = make_report([moved]).stories
    bundle = story.faults[0].bundle
    assert bundle is not None
    assert bundle.path == moved / "incidents" / "0001"
    shutil.rmtree(moved / "incidents")
    lines = (moved / "run.jsonl").read_text().replace(str(run[0]), "/gone")
    (moved / "run.jsonl").write_text(lines)
    assert "/gone/incidents/0001 no longer exists." in Outline(make_report([moved]).html).text


@pytest.mark.usefixtures("no_plotly")
def test_a_page_is_written_whole_or_not_at_all(
    run: tuple[Path, nanguard.Guard], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "new" / "report.html"
    assert write_report([run[0]], out) == out
    before = out.read_bytes()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ReportError, match="No space left on device"):
        write_report([run[0]], out)
    monkeypatch.undo()
    assert out.read_bytes() == before
    assert list(out.parent.iterdir()) == [out]
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(page, "_plotly", lambda: "")
    with pytest.raises(ReportError, match="cannot be written"):
        write_report([run[0]], tmp_path / "folder")


@pytest.mark.usefixtures("no_plotly")
def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write_log(tmp_path / name / "run", header(), step_line(0)) for name in ("a", "b")]
    labels = [story.label for story in make_report([*folders, folders[0]]).stories]
    assert labels == [str(folders[0]), str(folders[1]), f"{folders[0]} (2)"]


# ---- the command


def test_the_command_writes_beside_the_log(
    run: tuple[Path, nanguard.Guard], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run[0], folder)
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    done = CliRunner().invoke(app, ["report", str(folder), "--open"])
    assert done.exit_code == 0, done.output
    out = folder / "report.html"
    assert done.stdout.splitlines()[-1] == str(out)
    assert "90 steps: 5 skipped" in done.stdout
    assert opened == [out.as_uri()]
    narrow = CliRunner().invoke(app, ["report", str(folder)], env={"FORCE_COLOR": "1", "COLUMNS": "60"})
    *sentence, path = narrow.stdout.splitlines()
    assert max(map(len, sentence)) <= 60 < len(" ".join(sentence)), "as wide as the terminal"
    assert (" ".join(sentence), path) == tuple(done.stdout.splitlines()), "words and paths are not broken"
    assert "Plotly" in out.read_text()
    again = CliRunner().invoke(app, ["report", str(folder / "run.jsonl"), "--json", "--out", str(tmp_path / "x.html")])
    told = json.loads(again.stdout)
    assert (told["status"], told["report"], told["troubles"]) == (0, str(tmp_path / "x.html"), [])
    assert told["runs"][0]["figures"]["skipped"] == 5
    assert told["runs"][0]["summary"].startswith("90 steps")


@pytest.mark.usefixtures("no_plotly")
def test_the_command_ends_with_2_where_something_could_not_be_read(tmp_path: Path) -> None:
    good = write_log(tmp_path / "good", header(), step_line(0))
    some = CliRunner().invoke(app, ["report", str(good), str(tmp_path / "none")])
    assert (some.exit_code, (good / "report.html").exists()) == (2, True)
    assert "there is no run log here" in some.stderr
    none = CliRunner().invoke(app, ["report", str(tmp_path / "none"), "--json"])
    assert (none.exit_code, json.loads(none.stdout)["status"]) == (2, 2)
    assert not (tmp_path / "none").exists()
    noise = tmp_path / "noise"
    noise.mkdir()
    (noise / "run.jsonl").write_bytes(os.urandom(500))
    done = CliRunner().invoke(app, ["report", str(noise)])
    assert (done.exit_code, "Traceback" in done.output) == (2, False)


def test_without_plotly_the_command_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    done = CliRunner().invoke(app, ["report", str(write_log(tmp_path, header(), step_line(0)))])
    assert done.exit_code == 2
    assert "pip install plotly" in done.stderr


# ---- notebooks


def test_a_diagnosis_shows_the_rows_of_its_panel_in_a_notebook(run: tuple[Path, nanguard.Guard]) -> None:
    diagnosis = run[1].incidents[0].diagnosis
    assert diagnosis is not None
    outline = Outline(diagnosis._repr_html_())
    for line in str(diagnosis).splitlines()[1:]:
        name, _, text = line.strip().partition("  ")
        assert name in outline.text
        assert re.sub(r"\s+", " ", text.strip()) in outline.text
    assert not {name for name, _ in outline.elements} & {"script", "style", "link"}


def test_a_guard_shows_counts_and_its_last_incidents_in_a_notebook(run: tuple[Path, nanguard.Guard]) -> None:
    guard = run[1]
    text = Outline(guard._repr_html_()).text
    assert f"{guard.counts['applied']} applied, {guard.counts['skipped']} skipped" in text
    assert "fp16" in text
    assert "60 the loss is NaN non-finite data" in re.sub(r"\s+", " ", text)


def test_incidents_outcomes_and_runs_are_tables_in_a_notebook(run: tuple[Path, nanguard.Guard]) -> None:
    folder, guard = run
    shown = [guard.incidents, guard.incidents[0], guard.incidents[0].outcome, guard.last_outcome]
    log = nanguard.read_run(folder)
    texts = [re.sub(r"\s+", " ", Outline(each._repr_html_()).text) for each in (*shown, log, log.incidents)]  # type: ignore[union-attr]
    assert f"{len(guard.incidents)} incidents" in texts[0]
    assert texts[0].count("overflow of fp16 in attention, reported.py:") == 4
    assert "step 40: the loss is NaN: step skipped" in texts[1]
    assert texts[1] == texts[2]
    assert "applied" in texts[3]
    assert "90, 5 not applied" in texts[4]
    assert "attention in fp32 from now on" in texts[4]
    assert texts[5] == texts[0]
    assert all("Outcome(" not in text for text in texts)
    empty = type(guard.incidents)()
    assert "no incidents" in empty._repr_html_()
    assert empty == ()


CELL = """
def forward(x):
    return x.log().sum()
"""


@pytest.mark.parametrize("name", ["<ipython-input-3-0123abcd>", "ipykernel"])
def test_a_line_of_a_notebook_is_named_by_its_cell(name: str) -> None:
    if name == "ipykernel":
        shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell.instance()
        shell.execution_count = 3
        name = shell.compile.cache(CELL, 3)
    names: dict[str, Any] = {}
    exec(compile(CELL, name, "exec"), names)
    linecache.cache[name] = (len(CELL), None, CELL.splitlines(keepends=True), name)
    model = nn.Linear(2, 1)
    found = nanguard.diagnose(
        model, lambda model, x: names["forward"](model(x) * 0), torch.ones(2, 2), precision="fp32"
    )
    assert str(found.source) == "cell 3, line 3"
    assert "where     cell 3, line 3 (log, forward, fp32)\n               return x.log().sum()" in str(found)


@pytest.mark.parametrize("text", HOSTILE)
def test_names_stay_text_in_a_notebook(text: str) -> None:
    plain, hostile = (Outline(hostile_diagnosis(name)._repr_html_()) for name in ("harmless", text))
    assert hostile.elements == plain.elements


def test_a_drop_is_an_incident_too(tmp_path: Path) -> None:
    told = Outcome.from_dict(outcome(3, response="drop_gradients", did="two gradients").as_dict())
    (story,) = storied.stories_of([nanguard.read_run(write_log(tmp_path, header(), incident_line(1, told, "drop")))])
    assert [record.outcome.did for record in story.incidents] == ["two gradients"]


class Masked(nn.Module):
    """A causal mask, which is no fault."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((x.shape[-1], x.shape[-1]), -math.inf).triu(1)
        return (x.unsqueeze(-1) @ x.unsqueeze(-2) + mask).softmax(-1).sum(-1)


class Dividing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x * 0)


@pytest.fixture(scope="module")
def never_finite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("never")
    model = nn.Sequential(nn.Linear(4, 4), Masked(), Masked(), Masked(), Masked(), Dividing(), nn.Linear(4, 1))
    policy = nanguard.Policy([nanguard.LowerLR(times=1), nanguard.Skip(times=None)])
    guard = nanguard.Guard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp32", policy=policy, run_dir=folder
    )
    for _ in range(4):
        guard.step(lambda model, batch: model(batch).mean(), torch.ones(2, 4))
    guard.close()
    return folder


def test_infinities_of_masks_before_the_fault_are_not_painted(never_finite: Path) -> None:
    (trail,) = json.loads(Outline(make_report([never_finite]).html).scripts[1])["trails"].values()
    finite = {row["module"]: row["finite"] for row in trail}
    assert finite == {**dict.fromkeys("01234", True), "5": False, "6": False, "(top level)": False}


def test_a_run_without_a_finite_loss_says_so(never_finite: Path) -> None:
    text = " ".join(Outline(make_report([never_finite]).html).words)
    assert "The loss is NaN or Inf in all 4 steps, so there is nothing to draw." in text
    assert "The gradient norm of all parameters is NaN or Inf in all 4 steps" in text
    assert "all others applied" not in text


def test_a_number_alone_is_no_place(never_finite: Path) -> None:
    report = make_report([never_finite])
    assert "in module 5, test_report.py:" in plain_summary(report.stories[0])
    assert " in <code>5</code>" not in report.html


def test_what_a_rung_did_among_skips_is_told_on_the_card(never_finite: Path) -> None:
    text = re.sub(r"\s+", " ", " ".join(Outline(make_report([never_finite]).html).words))
    assert "steps 0 to 3" in text
    assert "the loss is NaN: 1x step skipped, learning rate lowered; 3x step skipped, nothing changed" in text


@pytest.mark.usefixtures("no_plotly")
def test_the_steps_of_several_optimizers_are_told_in_order(tmp_path: Path) -> None:
    """Neighbours are one stretch, whichever optimizer made them, and a loss is compared with its own first one."""
    lines, incidents = [header(optimizer="D")], []
    for step in range(9):
        for name in ("D", "G"):
            bad = step > 2
            loss = (1.0 if name == "D" else -4.0) - step / 10
            lines.append(step_line(step, optimizer=name, skipped=bad, loss=math.nan if bad else loss))
            incidents += [incident_line(2 * step, outcome(step)) | {"optimizer": name}] * bad
    log = write_log(tmp_path, *lines, *incidents)
    text = Outline(make_report([log]).html).text
    assert "at steps 3 to 8" in " ".join(text.split())
    assert "last finite loss -4.2 at step 2, from -4" in " ".join(text.split())


@pytest.mark.usefixtures("no_plotly")
def test_a_run_that_was_halted_is_not_one_that_ended(tmp_path: Path) -> None:
    """The program ends after that, or catches the error and goes on."""
    halted = [header(), step_line(0), incident_line(1, outcome(1, response="halt"))]
    over = {"event": "end", "time": 1001.0, "counts": {"applied": 1, "halted": 1}}
    assert "Training halted at step 1." in plain_summary(
        make_report([write_log(tmp_path / "a", *halted, over)]).stories[0]
    )
    assert "halted" not in plain_summary(
        make_report([write_log(tmp_path / "b", *halted, step_line(2), over)]).stories[0]
    )


@pytest.mark.usefixtures("no_plotly")
def test_what_a_program_did_itself_is_not_called_a_response(tmp_path: Path) -> None:
    told = outcome(1, did="the program raised RuntimeError: no")
    log = write_log(tmp_path, header(), step_line(0), incident_line(1, told))
    summary = plain_summary(make_report([log]).stories[0])
    assert summary.endswith("at step 1: the program raised RuntimeError: no.")
    marks = json.loads(Outline(make_report([log]).html).scripts[1])["runs"][0]["marks"]
    assert [mark["kind"] for mark in marks] == ["left_out"]
