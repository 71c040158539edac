"""Snippets in README and docs run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nanguard

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
    names = world()
    for number, code in enumerate(SNIPPET.findall(page.read_text()), start=1):
        exec(compile(code, f"{page.name}, snippet {number}", "exec"), names)


def test_there_are_snippets() -> None:
    assert sum(len(SNIPPET.findall(page.read_text())) for page in PAGES) >= 8


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md"], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_overhead_in_the_readme_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import readme

    results = readme.newest()
    assert results, "a dated result is committed"
    text = (ROOT / "README.md").read_text()
    assert text == readme.filled(text, results), "run benchmarks/readme.py"
