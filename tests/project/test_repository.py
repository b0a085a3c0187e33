"""Facts that are stated in several files of the repository agree, and links between its pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.repository import ROOT, tracked_files

FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\s]+)`")
FOLDERS = {"rollout_api", "rollout_server", "rollout_worker", "operator", "charts", "crds", "benchmarks", "client"}
FOLDERS |= {"requirements", "scripts", "tests"}
"""Folders whose files the documentation names; `docs` and `examples` may also be those of another project."""
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub generates them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    texts = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", tracked_files("*.md"))
def test_links_lead_to_files_and_headings(page: str) -> None:
    file = ROOT / page
    broken = []
    for link in LINK.findall(FENCE.sub("", file.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert [] == broken


def test_every_page_of_the_documentation_is_in_its_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for page in tracked_files("docs/*.md"):
        if page != "docs/README.md":
            name = page.removeprefix("docs/")
            assert f"({name})" in index, f"docs/README.md does not link to {name}"


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


def test_the_code_map_names_every_top_level_folder() -> None:
    folders = {name.split("/")[0] for name in tracked_files() if "/" in name}
    rows = re.findall(r"^\| (`.+?) \|", (ROOT / "docs" / "code-map.md").read_text(), re.MULTILINE)
    assert set() == folders - {name.split("/")[0] for row in rows for name in CODE.findall(row)}


def test_workflows_name_actions_by_commit() -> None:
    """A tag may be moved to other code, which would run with the permissions of a release."""
    actions = [
        line
        for file in tracked_files(".github/workflows/*.yml")
        for line in re.findall(r"\buses: (.*)", (ROOT / file).read_text())
    ]
    assert actions
    assert [] == [action for action in actions if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v\S+", action)]
