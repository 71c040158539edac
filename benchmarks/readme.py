"""Puts the newest measured overhead and recovery into tables of the README and the docs: python benchmarks/readme.py

Their numbers come from nowhere else; tests hold them to the result files.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "comparison.md")
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


def table(results: list[dict[str, Any]]) -> str:
    measured: dict[tuple[str, str], dict[str, Any]] = {}
    for section in (section for result in results for section in result["sections"]):
        measured.setdefault((section["model"], section["mode"]), {}).update(section["variants"])
    result = results[-1]
    lines = [f"| | {' | '.join(COLUMNS.values())} |", f"| --- |{' ---: |' * len(COLUMNS)}"]
    for variant, title in ROWS.items():
        ratios = [measured.get(column, {}).get(variant, {}).get("ratio", {}).get("median") for column in COLUMNS]
        if any(ratio is not None for ratio in ratios):
            lines.append(f"| {title} | " + " | ".join("" if r is None else f"{r:.3f}" for r in ratios) + " |")
    return "\n".join([*lines, "", f"{result['machine']}, torch {result['torch']}, {result['date']}."]) + "\n"


def recovery() -> str:
    """The summary of the newest recovery benchmark, as its own report has it."""
    newest = max(RESULTS.glob("recovery-*.md"), key=lambda path: path.stem[-10:])
    text = newest.read_text()
    summary = re.search(r"## In short\n\n(.*?)\n\n## ", text, re.DOTALL)
    facts = dict(re.findall(r"^- (machine|torch|seeds|date): (.*)$", text, re.MULTILINE))
    assert summary is not None, f"{newest} has no summary"
    where = f"{facts['machine']}, torch {facts['torch']}, {facts['seeds']} seeds, {facts['date']}."
    return f"{summary[1]}\n\n{where}\n"


def filled(readme: str, results: list[dict[str, Any]]) -> str:
    readme = MARKED.sub(lambda match: match[1] + table(results) + match[2], readme)
    return RECOVERY.sub(lambda match: match[1] + recovery() + match[2], readme)


if __name__ == "__main__":
    results = newest()
    if not results:
        raise SystemExit(f"no results in {RESULTS}")
    for page in PAGES:
        page.write_text(filled(page.read_text(), results))
        print(f"{page.relative_to(ROOT)} now shows {len(results)} results of {results[-1]['date']}")
