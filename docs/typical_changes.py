"""Makes the table "files to touch, before and now" in docs/architecture.md: `python docs/typical_changes.py`.

For each typical change there is a representative: something of that kind that exists already. A new one touches the
files that mention the representative, so these are counted, with `git grep -lE PATTERN REVISION -- PATHS`. "Before" is
the last commit before the rebuild; "now" is the working tree. Tests and pages are not counted, since every change has
them.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEFORE = "48605f0"
BEGIN, END = "<!-- changes:begin -->", "<!-- changes:end -->"

_SOURCES = ("src/*.py", "src/*.js", "src/*.css")
_OF_RUNS = (
    *_SOURCES,
    # They read files or source text, or inject faults: not live training runs.
    *(f":!src/nanguard/{name}" for name in ("checkpoint", "checkup", "demo", "testing.py")),
)


@dataclass(frozen=True)
class Change:
    """``pattern`` in ``paths`` finds the files; ``now`` in ``paths_now`` those of today, if they differ."""

    name: str
    representative: str
    pattern: str
    paths: tuple[str, ...] = _SOURCES
    now: str | None = None
    paths_now: tuple[str, ...] | None = None


CHANGES = (
    # Before: a rung under its class name or its name in the run log. `diagnosis/` has "lower_lr" as a word for advice.
    # Now: a rung that is defined outside of the package. One of our own is also exported by `__init__.py`.
    Change(
        "a new rung of the ladder",
        "`LowerLR`; now a rung in tests/test_own_rung.py",
        r"LowerLR|lower_lr",
        paths=(*_SOURCES, ":!src/nanguard/diagnosis"),
        now=r"def refuses\(",
        paths_now=("tests/test_own_rung.py",),
    ),
    # A cause with a rule of its own, and no special case anywhere.
    Change("a new cause", "`acos_asin_domain`", r"acos_asin_domain"),
    # Optimizers and options that are named only where something about them differs. Adam, AdamW and SGD would also
    # find examples in docstrings.
    Change("a quirk of one optimizer", "Adagrad, RMSprop, LBFGS, amsgrad", r"Adagrad|RMSprop|LBFGS|amsgrad"),
    # Before, there was no place for a watcher: the run log was part of the journal, which had to learn of any other
    # one, the guard had to take it as an argument, and `assembly` and the pilot had to pass it on: files that make a
    # journal or hand over what it is made of. Now it is a class outside of the package.
    Change(
        "something that watches training",
        "the run log; now examples/observer.py",
        r"RunLog\(|Journal\(",
        now=r"\(nanguard\.Observer\)",
        paths_now=("examples/*.py",),
    ),
    # Before, there was no seam: files that list the parameters, buffers or optimizer state of a live run on their own,
    # or ask whether they are sharded. Now: the seam (`state/sharding.py` turns local sums and maxima into global ones)
    # and the files that refuse sharded models until it is filled in.
    Change(
        "sharded parameters",
        "own lists of the run's tensors; now files that ask about shards",
        r"\.state\.(get|items|values)\(|optimizer\.state\b|named_(buffers|parameters)\(|\._buffers\b|\.state\[|is_sharded",
        paths=_OF_RUNS,
        now=r"def global_sum_|is_sharded\(",
        paths_now=_OF_RUNS,
    ),
    # Before: everything that knew a pilot or the tower, the only way to guard a loop from outside. Now: a trainer class
    # that drives the hosted engine from its own loop, without any patch.
    Change(
        "guarding a loop that a framework owns",
        "`Tower` and `Pilot`; now the trainer in tests/test_hosted.py",
        r"\b(Tower|Pilot)\b",
        now=r"from nanguard\.hosted",
        paths_now=("tests/test_hosted.py",),
    ),
)


def has_before() -> bool:
    """Whether the commit before the rebuild is there: not in a shallow clone."""
    return _git("cat-file", "-e", f"{BEFORE}^{{commit}}").returncode == 0


def files(pattern: str, paths: tuple[str, ...], revision: str | None) -> list[str]:
    """Names of the files that mention ``pattern``; of the working tree if ``revision`` is None."""
    where = ["--untracked"] if revision is None else []
    done = _git("grep", "-lE", *where, pattern, *([] if revision is None else [revision]), "--", *paths)
    if done.returncode > 1:  # 1: nothing was found
        raise RuntimeError(done.stderr)
    return done.stdout.splitlines()


def table() -> str:
    rows = ["| a typical change | counted by | before | now |", "| --- | --- | ---: | ---: |"]
    for change in CHANGES:
        before = files(change.pattern, change.paths, BEFORE)
        now = files(change.now or change.pattern, change.paths_now or change.paths, None)
        rows.append(f"| {change.name} | {change.representative} | {len(before)} | {len(now) or 'none yet'} |")
    return "\n".join(rows)


def filled(text: str) -> str:
    """The page with the table of today."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


def _git(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
    print(table())
    for each in CHANGES:
        print(f"\n{each.name}, now:")
        print(*files(each.now or each.pattern, each.paths_now or each.paths, None), sep="\n")
