"""Makes the pictures of README and docs: a terminal with a panel, the live view and the report, as they really are.

    python docs/screenshots.py

Runs `nanguard run examples/unguarded.py` and `nanguard demo` behind a real terminal, writes their reports, and takes
the pictures in Debian's chromium (packages chromium and chromium-driver). They go to docs/assets.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pexpect
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from browsing import browser, look_at, shoot  # noqa: E402  (the tests' own browser)

ASSETS = ROOT / "docs" / "assets"
COLUMNS, ROWS = 100, 50
PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; background: #16181d; }}
pre {{ margin: 0; padding: 18px 22px; width: max-content; }}
pre {{ color: #d8dade; font: 14px/1.45 "DejaVu Sans Mono", monospace; }}
</style><pre>{}</pre>"""


def terminal(command: list[str], folder: Path, *, columns: int = COLUMNS) -> str:
    """What a command prints to a terminal, colours and all."""
    env = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "OMP_NUM_THREADS": "1"}
    child: Any = pexpect.spawn(
        command[0], command[1:], cwd=str(folder), env=env, dimensions=(ROWS, columns), encoding="utf-8", timeout=600
    )
    child.expect(pexpect.EOF)
    shown: str = child.before
    return shown.replace("\r\n", "\n")


def as_page(shown: str, *, columns: int = COLUMNS) -> str:
    """The same as HTML."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(shown), soft_wrap=True)
    inside = console.export_html(inline_styles=True, code_format="{code}")
    return PAGE.format(inside)


def picture(driver: Any, page: str, to: Path, folder: Path) -> None:
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    look_at(driver, path, width=1280, height=400)
    measure = "const r = document.querySelector('pre').getBoundingClientRect(); return [r.width, r.height]"
    box = driver.execute_script(measure)
    look_at(driver, path, width=int(box[0]) + 1, height=int(box[1]) + 1)
    shoot(driver, to, whole=False)


def main() -> None:
    ASSETS.mkdir(exist_ok=True)
    nanguard = str(Path(sys.executable).with_name("nanguard"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text((ROOT / "examples" / "unguarded.py").read_text())
        shown = terminal([nanguard, "run", "train.py"], folder)
        lines = shown.splitlines()
        ends = [place for place, line in enumerate(lines) if " nanguard  step" in line]
        first = "\n".join(lines[: ends[1]]) if len(ends) > 1 else shown
        rest = "\n".join(lines[ends[-1] :]) if len(ends) > 1 else ""
        prompt = "\x1b[1;32m$\x1b[0m nanguard run train.py\n"
        with browser(folder / "profile") as driver:
            picture(driver, as_page(prompt + first + "\n\x1b[2m   ...\x1b[0m\n" + rest), ASSETS / "panel.png", folder)
            watched = terminal([nanguard, "watch", "--once", "nanguard-runs/train"], folder, columns=96)
            prompt = "\x1b[1;32m$\x1b[0m nanguard watch nanguard-runs/train\n"
            picture(driver, as_page(prompt + watched, columns=96), ASSETS / "watch.png", folder)
            demo = [nanguard, "demo", "--quiet", "--run-dir", "nanguard-runs/demo"]
            subprocess.run(demo, cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=900)
            for theme in ("light", "dark"):
                look_at(driver, folder / "nanguard-runs" / "demo" / "report.html", width=1180, height=1500, theme=theme)
                shoot(driver, ASSETS / f"report-{theme}.png", whole=False)
    for path in sorted(ASSETS.glob("*.png")):
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
