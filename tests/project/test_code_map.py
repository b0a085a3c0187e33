"""The contributor's map names every folder and module, and the documentation names only files that exist."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from scripts import code_map
from scripts.code_map import PAGE, ROOT, tracked_files
from tests.project.test_repository import FENCE

ROWS = re.compile(r"^\| (.+?) \|", re.MULTILINE)
CODE = re.compile(r"`([^`\s]+)`")
FOLDERS = {
    "rollout_api",
    "rollout_server",
    "rollout_worker",
    "operator",
    "charts",
    "crds",
    "benchmarks",
    "changelog.d",
    "client",
    "requirements",
    "scripts",
    "tests",
}
"""Folders whose files the documentation names; `docs` and `examples` may also be those of another project."""


def section(heading: str) -> str:
    """Return the text of the page between this heading and the next one of its level."""
    return PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def named(text: str) -> set[str]:
    """Return the names in the first cells of a text's tables."""
    return {name for row in ROWS.findall(text) for name in CODE.findall(row)}


def block(folder: str) -> str:
    found = re.search(rf"<!-- {folder}: .*?-->(.*?)<!-- /{folder} -->", PAGE.read_text(), re.DOTALL)
    assert found is not None, f"{PAGE.name} has no generated block for {folder}"
    return found[1]


def named_modules(folder: str) -> set[str]:
    """Return the paths of the files that the page's block for *folder* names."""
    parts = re.split(r"^### `(.+)`$", block(folder), flags=re.MULTILINE)
    sections = [(folder, parts[0]), *zip(parts[1::2], parts[2::2], strict=True)]
    return {f"{parent}/{name}" for parent, text in sections for name in named(text)}


@pytest.mark.parametrize("folder", code_map.BLOCKS)
def test_the_map_names_exactly_the_modules_that_exist(folder: str) -> None:
    existing = {name for name in code_map.modules(folder) if Path(name).name != "__init__.py"}
    missing, unknown = sorted(existing - named_modules(folder)), sorted(named_modules(folder) - existing)
    assert ([], []) == (missing, unknown), "run: python -m scripts.code_map"


def test_the_descriptions_are_those_of_the_files() -> None:
    page = PAGE.read_text()
    differences = difflib.unified_diff(page.splitlines(), code_map.document(page).splitlines(), lineterm="", n=0)
    changed = [line for line in differences if line.startswith(("+", "-")) and not line.startswith(("+++", "---"))]
    assert [] == changed, "run: python -m scripts.code_map"


def test_the_map_names_every_top_level_folder() -> None:
    folders = {name.split("/")[0] for name in tracked_files() if "/" in name}
    assert folders == named(section("Top-level folders"))


def test_the_map_names_every_test_folder() -> None:
    folders = {"/".join(name.split("/")[:2]) for name in tracked_files("tests/*/*")}
    assert folders == {name for name in named(section("`tests`")) if "/" in name}


def test_the_map_names_every_file_of_the_chart_and_the_crds() -> None:
    files = set(tracked_files("charts/*", "crds/*")) - {"charts/das-rollout/README.md"}
    assert files == named(section("`charts` and `crds`"))


def test_the_map_names_every_requirements_file() -> None:
    files = {Path(name).name for name in tracked_files("requirements/*")}
    assert files == named(section("`requirements`"))


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *tracked_files("docs/*.md", "charts/*.md", "examples/*.md")]
)
def test_the_documentation_names_only_files_that_exist(page: str) -> None:
    files = tracked_files()
    folders = {str(parent) for name in files for parent in Path(name).parents}
    unknown = []
    for name in CODE.findall(FENCE.sub("", (ROOT / page).read_text())):
        path = name.rstrip("/")
        is_path = "/" in path and path.split("/")[0] in FOLDERS and "*" not in path
        if is_path and path not in folders and path not in files:
            unknown.append(path)
    assert [] == unknown
