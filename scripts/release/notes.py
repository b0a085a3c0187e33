"""The release notes: a section of CHANGELOG.md, or a draft of it from the fragments in changelog.d."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.release.steps import CheckError, run


def fragments(root: Path) -> list[Path]:
    """Return the fragments that no released version contains yet."""
    return sorted(path for path in (root / "changelog.d").glob("*.md") if path.name != "README.md")


def section(changelog: str, version: str) -> str:
    """Return what the changelog says about a version, without the heading.

    Raises:
        CheckError: if it says nothing.
    """
    found = re.search(rf"^## {re.escape(version)} \([^)\n]*\)\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None or not found[1].strip():
        raise CheckError(f"CHANGELOG.md has no section for {version}; run: towncrier build --version {version}")
    return found[1].strip() + "\n"


def draft(root: Path, towncrier: Path, version: str) -> str:
    """Return the section that ``towncrier build`` would write.

    Raises:
        CheckError: if it lacks a fragment, for example because of the fragment's name.
    """
    text = run(towncrier, "build", "--draft", "--version", version, cwd=root)
    words = " ".join(text.split())
    missing = [path.name for path in fragments(root) if " ".join(path.read_text().split()) not in words]
    if missing:
        raise CheckError(f"towncrier leaves out {', '.join(missing)}; see changelog.d/README.md for their form")
    return text


def release_notes(root: Path, towncrier: Path, version: str, *, tagged: bool) -> str:
    """Return the notes of a version: a draft as long as there are fragments, which a tagged commit may not have."""
    waiting = fragments(root)
    if not waiting:
        return section((root / "CHANGELOG.md").read_text(), version)
    if tagged:
        raise CheckError(f"changelog.d still has {len(waiting)} fragments; run: towncrier build --version {version}")
    return draft(root, towncrier, version)
