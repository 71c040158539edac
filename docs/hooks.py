"""What the site needs beyond Markdown: pages from outside of docs/, and the links to them.

In the repository pages link to each other and to files by relative paths. On the site, links to pages are the same
links; what the site does not have (a folder, a script) is named without a link.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "benchmarks/zoo/README.md")
LINK = re.compile(r"\[([^\][]+)\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
API = re.compile(r"^<!-- api: ([\w.]+) -->$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that live next to what they describe."""
    results = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks" / "results").glob("*.md"))
    for name in (*OUTSIDE, *results):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Links as the site has them, and the API where a comment asks for it."""
    here = page.file.src_uri
    if here == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
    in_repository = here if (ROOT / here).exists() else f"docs/{here}"
    markdown = API.sub(r"::: \1", markdown)
    markdown = re.sub(r"^```python notest$", "```python", markdown, flags=re.MULTILINE)
    return LINK.sub(lambda match: _link(match, here, in_repository, files), markdown)


def on_post_build(*, config: Any) -> None:
    """The search index as a script, for pages that are opened from the disk."""
    folder = Path(config.site_dir) / "search"
    (folder / "search_index.js").write_text(f"var __index = {(folder / 'search_index.json').read_text()}")


def _link(match: re.Match[str], here: str, in_repository: str, files: Files) -> str:
    text, target, anchor = match[1], match[2], match[3] or ""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository), target))
    page = path.removeprefix("docs/")
    if files.get_file_from_path(page) is not None:
        return f"[{text}]({posixpath.relpath(page, posixpath.dirname(here) or '.')}{anchor})"
    return text if (ROOT / path).exists() else match[0]
