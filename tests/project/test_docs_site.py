"""The documentation site can be built without warnings, needs no other server, and has the anchors of GitHub."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from scripts import docs_hooks
from scripts.repository import ROOT, tracked_files
from tests.project.test_repository import anchors

LOADED = {
    "script": "src",
    "link": "href",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "object": "data",
}
"""Element → the attribute with the address of what a browser loads for it."""


class PageParser(HTMLParser):
    """Collects the addresses that a page loads, and its anchors."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.classes: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if tag in LOADED and (address := values.get(LOADED[tag])):
            self.loaded.append(address)
        if identifier := values.get("id"):
            self.anchors.add(identifier)
        self.classes.update((values.get("class") or "").split())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert 0 == process.returncode, process.stderr
    return directory


def html(site: Path, page: str) -> Path:
    """Return the file of a page of docs/."""
    path = Path(page)
    folder = path.parent if path.name in ("README.md", "index.md") else path.with_suffix("")
    return site / folder / "index.html"


def test_no_page_loads_anything_from_another_server(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    external = {
        (str(page.relative_to(site)), address)
        for page in pages
        for address in PageParser(page).loaded
        if re.match(r"(?:[a-z]+:)?//", address)
    }
    assert set() == external
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert [] == re.findall(r"url\(['\"]?(?:https?:)?//[^)]*", styles)


def test_no_page_makes_the_theme_load_a_library_for_diagrams(site: Path) -> None:
    # The theme would load it from another server.
    assert [] == [page for page in site.rglob("*.html") if "mermaid" in PageParser(page).classes]


def test_every_file_that_a_page_loads_exists(site: Path) -> None:
    missing = []
    for page in site.rglob("*.html"):
        for address in PageParser(page).loaded:
            path = re.sub(r"[?#].*", "", address)
            target = site / path.lstrip("/") if path.startswith("/") else page.parent / path
            if path and not path.startswith("data:") and not target.exists():
                missing.append((str(page.relative_to(site)), address))
    assert [] == missing


@pytest.mark.parametrize("page", tracked_files("docs/*.md", "docs/**/*.md"))
def test_headings_have_the_anchors_that_github_gives_them(site: Path, page: str) -> None:
    assert set() == anchors(ROOT / page) - PageParser(html(site, page.removeprefix("docs/"))).anchors


def test_every_page_is_in_the_navigation_once() -> None:
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text())

    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        children = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else []
        return [page for child in children for page in pages(child)]

    named = Counter(pages(yaml.safe_load(text)["nav"]))
    existing = {page.removeprefix("docs/") for page in tracked_files("docs/*.md", "docs/**/*.md")}
    assert existing | set(docs_hooks.PAGES.values()) == set(named)
    assert {1} == set(named.values())


def test_pictures_have_a_light_and_a_dark_variant(site: Path) -> None:
    light, dark = (site / "images" / f"drafting.{name}.svg" for name in ("light", "dark"))
    assert "prefers-color-scheme" not in light.read_text() + dark.read_text()
    assert light.read_text() != dark.read_text()
    page = html(site, "drafting.md").read_text()
    assert "drafting.light.svg#only-light" in page
    assert "drafting.dark.svg#only-dark" in page


def test_links_lead_from_pages_of_other_folders_to_the_site() -> None:
    text = (
        "See [the history](../docs/history.md#choosing-a-redis), [traces](traces.py) and [a site](https://example.org)."
    )
    expected = (
        "See [the history](../history.md#choosing-a-redis), [traces](../source/benchmarks/traces.py.md) and "
        "[a site](https://example.org)."
    )
    assert expected == docs_hooks.rewrite_links(text, "benchmarks/README.md", "project/benchmarks.md")


def test_links_within_code_are_left_alone() -> None:
    text = "```python\nvalues[0](../x.md)\n```\n"
    assert text == docs_hooks.rewrite_links(text, "README.md", "project/readme.md")


def test_links_are_named_after_the_titles_of_pages(site: Path) -> None:
    page = html(site, "drafting.md").read_text()
    assert '<a href="../lossless/">Lossless drafting and how it is tested</a>' in page
    assert "lossless.md" not in page
