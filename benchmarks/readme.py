"""Puts the newest measured overhead and recovery into tables of the README and the docs: python benchmarks/readme.py

Their numbers come from nowhere else; tests hold them to the result files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
PAGES = (README, ROOT / "docs" / "comparison.md")
MARKED = re.compile(r"(<!-- overhead:begin -->\n).*?(<!-- overhead:end -->)", re.DOTALL)
RECOVERY = re.compile(r"(<!-- recovery:begin -->\n).*?(<!-- recovery:end -->)", re.DOTALL)

ROWS = {
    "guard": "**nanguard**, `guard.step`",
    "guard_own_loop": "**nanguard**, your own loop",
    "guard_global": '**nanguard**, `clip="global"` (bit-identical to `clip_grad_norm_`)',
    "guard_eager": '**nanguard**, `sync="eager"`',
    "plain_again": "the plain loop again (noise)",
    "grad_scaler": "GradScaler",
    "isfinite_norm": "`if isfinite(norm)`",
    "isfinite_loss": "`if isfinite(loss)`",
    "per_param_isfinite": "`isfinite` of every gradient",
    "forward_hooks": "hooks with `isfinite` on every module",
    "hf_debug": "DebugUnderflowOverflow",
    "detect_anomaly": "`detect_anomaly`",
}
IN_SHORT = ("guard", "guard_own_loop", "isfinite_norm", "detect_anomaly")
"""The rows of the README; the docs have them all."""
RECOVERY_IN_SHORT = ("**nanguard**", "plain loop", "`if isfinite(norm)`")
COLUMNS = {
    ("large", "eager"): "124M GPT",
    ("large", "compile"): "124M GPT, compiled",
    ("tiny", "eager"): "launch-bound",
    ("tiny", "compile"): "launch-bound, compiled",
}


def newest() -> list[dict[str, Any]]:
    """The results of the newest date, in the order of their file names: what was measured again counts last."""
    found = {
        path: re.search(r"\d{4}-\d\d-\d\d", path.stem)
        for path in sorted(RESULTS.glob("overhead-*.json"), key=lambda p: p.stem)
    }
    dates = {path: match[0] for path, match in found.items() if match}
    return [json.loads(path.read_text()) for path in dates if dates[path] == max(dates.values())]


def table(results: list[dict[str, Any]], rows: Collection[str] = tuple(ROWS)) -> str:
    measured: dict[tuple[str, str], dict[str, Any]] = {}
    for section in (section for result in results for section in result["sections"]):
        measured.setdefault((section["model"], section["mode"]), {}).update(section["variants"])
    result = results[-1]
    lines = [f"| | {' | '.join(COLUMNS.values())} |", f"| --- |{' ---: |' * len(COLUMNS)}"]
    for variant, title in ((variant, title) for variant, title in ROWS.items() if variant in rows):
        ratios = [measured.get(column, {}).get(variant, {}).get("ratio", {}).get("median") for column in COLUMNS]
        if any(ratio is not None for ratio in ratios):
            lines.append(f"| {title} | " + " | ".join("" if r is None else f"{r:.3f}" for r in ratios) + " |")
    return "\n".join([*lines, "", f"{result['machine']}, torch {result['torch']}, {result['date']}."]) + "\n"


def recovery(rows: Collection[str] | None = None) -> str:
    """The summary of the newest recovery benchmark, as its own report has it, or these rows of it."""
    newest = max(RESULTS.glob("recovery-*.md"), key=lambda path: path.stem[-10:])
    text = newest.read_text()
    summary = re.search(r"## In short\n\n(.*?)\n\n## ", text, re.DOTALL)
    facts = dict(re.findall(r"^- (machine|torch|seeds|date): (.*)$", text, re.MULTILINE))
    assert summary is not None, f"{newest} has no summary"
    where = f"{facts['machine']}, torch {facts['torch']}, {facts['seeds']} seeds, {facts['date']}."
    head, ruler, *lines = summary[1].splitlines()
    kept = [line for line in lines if rows is None or line.split("|")[1].strip() in rows]
    return "\n".join([head, ruler, *kept, "", where]) + "\n"


def filled(page: Path, results: list[dict[str, Any]]) -> str:
    """The page with its tables as measured: the README has a few rows of them."""
    is_short = page == README
    told = table(results, IN_SHORT if is_short else tuple(ROWS))
    text = MARKED.sub(lambda match: match[1] + told + match[2], page.read_text())
    recovered = recovery(RECOVERY_IN_SHORT if is_short else None)
    return RECOVERY.sub(lambda match: match[1] + recovered + match[2], text)


if __name__ == "__main__":
    results = newest()
    if not results:
        raise SystemExit(f"no results in {RESULTS}")
    for page in PAGES:
        page.write_text(filled(page, results))
        print(f"{page.relative_to(ROOT)} now shows {len(results)} results of {results[-1]['date']}")
