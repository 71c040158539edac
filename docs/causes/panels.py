"""Makes the panels in docs/causes and docs/getting-started.md again, by running the program of each page.

    python docs/causes/panels.py            all pages
    python docs/causes/panels.py --check    changes nothing; status 1 where a page does not say what nanguard says

The first ``python`` block of a page is a program with the fault, its first ``text`` block the panel of it, and its
``diff`` block the fix. The name of the page is the cause that must be found; with the fix there must be nothing to say.
Getting started has a program without a guard, and what ``nanguard run`` prints.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import nanguard
from nanguard.records.layout import fitted
from nanguard.records.panel import panel
from nanguard.records.steps import Incident

HERE = Path(__file__).parent
GETTING_STARTED = HERE.parent / "getting-started.md"
COMMAND = "$ nanguard run train.py\n"
WIDTH = 96
"""Panels are wrapped as `nanguard run` wraps them in a terminal of this width."""

PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PANEL = re.compile(r"^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
FIX = re.compile(r"^```diff\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What came of a program: the names it defined, and its incidents."""

    names: dict[str, Any]
    incidents: tuple[Incident, ...]

    def panel_of(self, cause: str) -> str | None:
        """The first panel that names a cause."""
        for incident in self.incidents:
            if incident.diagnosis is not None and incident.diagnosis.cause == cause:
                return wrapped(panel(incident))
        return None


def pages() -> list[Path]:
    """One for each cause."""
    return sorted(path for path in HERE.glob("*.md") if path.name != "index.md")


def program_of(page: str) -> str:
    return _first(PROGRAM, page)


def panel_in(page: str) -> str:
    return _first(PANEL, page)


def fixed(page: str) -> str:
    """The program of a page with its fix. Hunks of the diff are separated by empty lines."""
    program = program_of(page)
    for hunk in re.split(r"\n\s*\n", _first(FIX, page).strip("\n")):
        lines = hunk.splitlines()
        old = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
        new = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
        if program.count(old) != 1:
            raise ValueError(f"these lines are not in the program exactly once:\n{old}")
        program = program.replace(old, new)
    return program


def run(program: str) -> Told:
    """Runs a program as ``train.py``, in this process and in one thread."""
    with tempfile.TemporaryDirectory() as folder, _alone():
        path = Path(folder) / "train.py"
        path.write_text(program)
        spec = importlib.util.spec_from_file_location("train", path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["train"] = importlib.util.module_from_spec(spec)
        with contextlib.suppress(nanguard.NonFiniteError):  # what came before the halt is what the page shows
            spec.loader.exec_module(module)
    return Told(names=vars(module), incidents=vars(module)["guard"].incidents)


def transcript(program: str) -> str:
    """What a terminal shows of ``nanguard run train.py``."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(program)
        done = subprocess.run(
            [sys.executable, "-m", "nanguard", "run", "train.py"],
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
            timeout=300,
        )
    return COMMAND + wrapped(done.stdout)


def wrapped(text: str) -> str:
    """As in a terminal of this width."""
    return f"{fitted(text.rstrip(), WIDTH)}\n"


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Nothing is printed, and what a program changes for the whole process is put back."""
    log, threads, state = logging.getLogger("nanguard"), torch.get_num_threads(), torch.get_rng_state()
    disabled, log.disabled = log.disabled, True
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about the very fault of the page
            yield
    finally:
        sys.modules.pop("train", None)
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
        torch.use_deterministic_algorithms(False)
        log.disabled = disabled


def _first(pattern: re.Pattern[str], page: str) -> str:
    found = pattern.search(page)
    if found is None:
        raise ValueError(f"the page has no block like {pattern.pattern[1:12]!r}")
    return found[1]


def main(check: bool) -> int:
    status = 0
    for path in pages():
        page = path.read_text()
        seen = run(program_of(page)).panel_of(path.stem)
        after = run(fixed(page))
        if seen is None or after.incidents:
            print(f"{path.name}: {'the cause is not found' if seen is None else 'the fix does not help'}")
            status = 1
            continue
        status = max(status, _show(path, seen, check))
    return max(status, _show(GETTING_STARTED, transcript(program_of(GETTING_STARTED.read_text())), check))


def _show(path: Path, panel: str, check: bool) -> int:
    page = path.read_text()
    new = page.replace(f"```text\n{panel_in(page)}```", f"```text\n{panel}```", 1)
    if new == page:
        return 0
    print(f"{path.name}: {'another panel' if check else 'written'}")
    if not check:
        path.write_text(new)
    return int(check)


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
