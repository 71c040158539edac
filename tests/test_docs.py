"""Snippets in README and docs run as they stand."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nanguard
from nanguard import Divergence, DropBadGradients, LossScale, LowerLR, Policy, RaisePrecision, Rollback, Skip, Snapshots
from nanguard.cli.run import PARENT
from nanguard.incidents import bundle
from nanguard.runlog import writer as runlog
from nanguard.state import rng, undo
from nanguard.step import update_checks

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def world() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = [(torch.randn(6, 4), torch.randint(0, 2, (6,))) for _ in range(5)]
    return {
        "nanguard": nanguard,
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10),
        "loader": loader,
        "batch": loader[0],
        "bad_batch": (loader[0][0].log(), loader[0][1]),
        "loss_fn": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        "epochs": 1,
        "guard": nanguard.Guard(model, optimizer),
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_snippets(page)


def run_snippets(page: Path) -> None:
    """One after the other, in one world."""
    names = world()
    for number, code in enumerate(SNIPPET.findall(page.read_text()), start=1):
        exec(compile(code, f"{page.name}, snippet {number}", "exec"), names)


def _text(page: str) -> str:
    """A page without its line breaks."""
    return " ".join((ROOT / page).read_text().split())


@pytest.mark.parametrize(
    ("page", "claim"),
    [
        ("docs/guide.md", f"Buffers of {undo._LARGE:,} elements and more"),
        ("docs/guide.md", f"for {update_checks._MANY_STEPS:,} steps, every update is checked"),
        ("docs/guide.md", f"the first {rng._FIRST} steps and every {rng._EVERY}th are looked at"),
        (
            "docs/guide.md",
            f"nanguard.Guard(model, optimizer) # {'none' if Policy().max_norm is None else '?'} (the default)",
        ),
        ("docs/runlog.md", f"`schema` ({runlog.SCHEMA})"),
        ("docs/runlog.md", f"All of the first {runlog.EVERY_STEP_UNTIL:,} steps are written"),
        ("docs/runlog.md", f"the {runlog.AROUND} steps before and after each of the first {runlog._MOST_SURROUNDED} "),
        ("docs/incidents.md", f"A run keeps {bundle.MOST} bundles"),
        ("docs/run.md", f"are in `{PARENT}/SCRIPT`"),
        ("docs/getting-started.md", f"otherwise `{PARENT}/`"),
        ("README.md", f"nanguard explain {PARENT}/train"),
    ],
)
def test_numbers_in_the_docs_are_those_of_the_code(page: str, claim: str) -> None:
    assert claim in _text(page)


@pytest.mark.parametrize(
    ("page", "kind"),
    [
        ("docs/guide.md", LossScale),
        ("docs/recovery.md", Divergence),
        ("docs/recovery.md", Snapshots),
        ("docs/recovery.md", Skip),
        ("docs/recovery.md", DropBadGradients),
        ("docs/recovery.md", LowerLR),
        ("docs/recovery.md", RaisePrecision),
        ("docs/recovery.md", Rollback),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_defaults_in_the_docs_are_those_of_the_code(page: str, kind: Any) -> None:
    """The first mention with every argument: in the table of rungs, or the line that explains it."""
    name = kind.__name__
    calls = re.findall(
        rf"(?:\| `|`(?:nanguard\.)?|^```python\n)({name}\([^`\n]*\))", (ROOT / page).read_text(), re.MULTILINE
    )
    assert eval(calls[0], {name: kind}) == kind()


def test_the_default_ladder_is_the_one_that_is_explained() -> None:
    page = (ROOT / "docs" / "recovery.md").read_text()
    code = next(code for code in SNIPPET.findall(page) if code.startswith("Policy().ladder == ("))
    assert eval(code, {name: getattr(nanguard, name) for name in dir(nanguard)}) is True


def test_there_are_snippets() -> None:
    assert sum(len(SNIPPET.findall(page.read_text())) for page in PAGES) >= 8


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md"], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_table_of_typical_changes_is_what_its_script_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import typical_changes

    if not typical_changes.has_before():
        pytest.skip(f"no git history here with commit {typical_changes.BEFORE}")
    text = typical_changes.PAGE.read_text()
    assert text == typical_changes.filled(text), "run docs/typical_changes.py"


def test_the_tables_of_the_readme_and_the_docs_are_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import readme

    results = readme.newest()
    assert results, "a dated result is committed"
    for page in readme.PAGES:
        assert page.read_text() == readme.filled(page, results), "run benchmarks/readme.py"
        assert page.read_text().count("| **nanguard**") >= (3 if page == readme.README else 5)


def test_the_table_of_frameworks_is_what_was_measured() -> None:
    frameworks = runpy.run_path(str(ROOT / "benchmarks" / "frameworks.py"), run_name="frameworks")
    page, results = frameworks["PAGE"].read_text(), frameworks["newest"]()
    assert page == frameworks["filled"](page, results), "run benchmarks/frameworks.py"
    assert results["frameworks"].keys() == frameworks["FRAMEWORKS"].keys()
    for rows in results["frameworks"].values():
        assert {rows["attached"][column] for column in frameworks["COLUMNS"]} <= {"same", ""}
        assert "NaN" in rows["alone"].values()
        assert rows["attached"]["ended"] == ""
