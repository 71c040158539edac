"""The documentation as a site: it builds without a warning, its links lead somewhere, and each cause has its page."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import nanguard
import nanguard.records
from nanguard.diagnosis.causes import TABLE, row_of

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CAUSE_PAGES = sorted(path for path in (DOCS / "causes").glob("*.md") if path.name != "index.md")
GROWTH = {"gradient_explosion", "attention_logit_growth"}
"""Which op ends first, and at which step, is an accident of the machine."""
SECTIONS = ["How it looks", "Why it happens", "The fix", "How to prevent it", "See also"]


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


panels = load(DOCS / "causes" / "panels.py")


# ---- causes ----------------------------------------------------------------------------------------------------------


def test_every_cause_has_its_page_and_every_page_its_cause() -> None:
    assert {path.relative_to(DOCS).as_posix() for path in CAUSE_PAGES} == {row.page for row in TABLE}


def test_the_overview_of_causes_lists_each_once_in_its_tables() -> None:
    listed = re.findall(r"^\| \[`(\w+)`\]\((\w+)\.md\) \|", (DOCS / "causes" / "index.md").read_text(), re.MULTILINE)
    assert sorted(name for name, _ in listed) == sorted(row.name for row in TABLE)
    assert all(name == page for name, page in listed)


@pytest.mark.parametrize("path", CAUSE_PAGES, ids=lambda path: path.stem)
def test_a_page_of_a_cause_is_built_like_the_others(path: Path) -> None:
    text, words = path.read_text(), row_of(path.stem).title
    assert text.startswith(f"# {words[0].upper()}{words[1:]}\n\n`{path.stem}`\n")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS


@pytest.mark.parametrize("path", sorted((DOCS / "causes").glob("*.md")), ids=lambda path: path.stem)
def test_links_of_a_page_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []
    assert len(targets) >= 2


@pytest.mark.parametrize("path", CAUSE_PAGES, ids=lambda path: path.stem)
def test_the_program_of_a_page_has_its_cause_and_the_panel_is_what_nanguard_says(path: Path) -> None:
    page = path.read_text()
    said = panels.run(panels.program_of(page)).panel_of(path.stem)
    assert said is not None, "the cause is not found"
    if path.stem in GROWTH:
        return
    assert gist(panels.panel_in(page)) == gist(said), "run docs/causes/panels.py"


@pytest.mark.parametrize("path", CAUSE_PAGES, ids=lambda path: path.stem)
def test_the_fix_of_a_page_mends_its_program(path: Path) -> None:
    page = path.read_text()
    told = panels.run(panels.fixed(page))
    assert told.incidents == ()
    assert told.names["guard"].counts["applied"] > 0
    for number, code in enumerate(panels.PROGRAM.findall(page)[1:], start=2):
        exec(compile(code, f"{path.name}, snippet {number}", "exec"), told.names)


def gist(panel: str) -> list[str]:
    """What a panel says happened, where and why. Numbers may be others on another machine."""
    rows = re.sub(r"\n {13}", " ", panel).splitlines()
    wanted = [row for row in rows if row.startswith((" nanguard", "   where", "   why"))]
    return [re.sub(r"-?\d[\d.,]*(e[+-]?\d+)?", "#", " ".join(row.split())) for row in wanted]


# ---- what is said elsewhere ------------------------------------------------------------------------------------------


def test_getting_started_shows_what_nanguard_run_prints() -> None:
    page = (DOCS / "getting-started.md").read_text()
    shown, said = panels.panel_in(page), panels.transcript(panels.program_of(page))
    assert said.count("train.py:") >= 2
    assert without_loss(shown) == without_loss(said), "run docs/causes/panels.py"


def without_loss(text: str) -> str:
    """The program's own number is another on another machine."""
    return re.sub(r"^loss \d\.\d+$", "loss #", text, flags=re.MULTILINE)


def test_the_api_page_has_every_public_name() -> None:
    text = (DOCS / "api.md").read_text()
    named = set(re.findall(r"^<!-- api: nanguard\.(\w+) -->$", text, re.MULTILINE))
    assert named == set(nanguard.__all__) - {"__version__"}
    assert "`nanguard.__version__`" in text


def test_the_api_page_has_every_record() -> None:
    named = re.findall(r"^<!-- api: nanguard\.records\.(\w+) -->$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(set(nanguard.records.__all__) - {"Diagnosis"}), "Diagnosis is nanguard.Diagnosis"


# ---- the site --------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a page links to, what it loads, and the places in it that can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.ids: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.update(given[name] for name in ("id", "name") if name in given)
        if "src" in given:
            self.loads.add(given["src"])
        if "href" in given:
            is_loaded = tag == "link" and given.get("rel") not in ("canonical", "next", "prev")
            (self.loads if is_loaded else self.links).add(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def built(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def internal(page: Page) -> Iterator[tuple[str, str]]:
    """Path and anchor of each link and each thing that is loaded, but for other sites."""
    for target in page.links | page.loads:
        parts = urlsplit(target)
        if not parts.scheme and not parts.netloc:
            yield unquote(parts.path), unquote(parts.fragment)


def test_every_link_leads_to_a_page_and_a_place_in_it(site: Path, built: dict[Path, Page]) -> None:
    wrong = []
    for path, page in built.items():
        if path.name == "404.html":  # its links count from the root of a server
            continue
        for target, anchor in internal(page):
            found = (path.parent / target).resolve() if target else path
            found = found / "index.html" if found.is_dir() else found
            is_missing = anchor and found in built and anchor not in built[found].ids and anchor != "__skip"
            if not found.exists() or is_missing:
                wrong.append(f"{path.relative_to(site)}: {target}#{anchor}")
    assert wrong == []


def test_nothing_is_loaded_from_elsewhere(site: Path, built: dict[Path, Page]) -> None:
    outside = {load for page in built.values() for load in page.loads if urlsplit(load).netloc}
    assert outside == set()
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?https?:", style.read_text()), style


def test_every_page_is_in_the_navigation(site: Path, built: dict[Path, Page]) -> None:
    yaml = pytest.importorskip("yaml")

    def pages(tree: Any) -> Iterator[str]:
        for child in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
            yield from pages(child)
        if isinstance(tree, str):
            yield tree

    listed = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert len(listed) == len(set(listed))
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert there <= set(listed)
    home = {target.partition("#")[0] for target in built[site / "index.html"].links}
    assert {name.replace("README", "index").replace(".md", ".html") for name in listed} <= home


def test_the_api_is_on_its_page(site: Path, built: dict[Path, Page]) -> None:
    names = {f"nanguard.{name}" for name in nanguard.__all__ if name != "__version__"}
    assert names <= built[site / "api.html"].ids


def test_causes_can_be_searched_for(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text()
    assert [row.name for row in TABLE if row.page.replace(".md", ".html") not in index] == []


@pytest.mark.parametrize("word", ["wandb", "jupyter", "huggingface", "tensorboard", "lightning", "fsdp"])
def test_what_people_use_besides_can_be_searched_for(site: Path, word: str) -> None:
    pages = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert [page["location"] for page in pages if word in f"{page['title']} {page['text']}".lower()]


FRAMEWORKS = {
    "tensorboard": "loggers",
    "wandb": "loggers",
    "mlflow": "loggers",
    "notify": "notify",
    "speechbrain": "speechbrain",
    "timm": "timm",
    "lightning": "lightning",
    "fabric": "fabric",
    "trainer": "transformers",
    "accelerate": "accelerate",
}


@pytest.mark.parametrize(("word", "page"), FRAMEWORKS.items(), ids=FRAMEWORKS)
def test_searching_for_a_framework_finds_its_page(site: Path, word: str, page: str) -> None:
    pages = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    found = [each["location"] for each in pages if word in f"{each['title']} {each['text']}".lower()]
    assert f"integrations/{page}.html" in found


def test_scripts_of_the_docs_are_not_published(site: Path) -> None:
    assert list(site.rglob("*.py")) == []
