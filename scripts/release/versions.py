"""Find and set the version of a release in all files that state it: ``python -m scripts.release.versions VERSION``.

The notes of a version are its section of the changelog.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from scripts.release.steps import CheckError
from scripts.repository import ROOT, tracked_files

VERSION = re.compile(r"\d+\.\d+\.\d+")
"""Pattern of a version. Pre-releases have none that is valid for both Python and Helm."""
CHART = "charts/das-rollout/Chart.yaml"
PLACES = (
    ("pyproject.toml", re.compile(r'^version = "(.*)"$', re.MULTILINE)),
    ("pyproject.toml", re.compile(r'"das-rollout-api==([^"]*)"')),
    ("rollout_api/pyproject.toml", re.compile(r'^version = "(.*)"$', re.MULTILINE)),
    (CHART, re.compile(r"^version: (.*)$", re.MULTILINE)),
    (CHART, re.compile(r'^appVersion: "(.*)"$', re.MULTILINE)),
)
"""Files and what states the version in them, in the group of the expression."""
IMAGE = re.compile(r"\bdas-rollout(?:-(?:operator|worker|worker-cpu):| --version )(\d+\.\d+\.\d+[^\s`\"')]*)")
"""An image with its tag, or the chart with its version, in any page, manifest or Dockerfile."""


def image_files() -> list[str]:
    """Return the paths of all files that may name an image, relative to the root of the repository."""
    files = tracked_files("*.md", "*.yaml", "*/Dockerfile")
    return [name for name in files if name != "CHANGELOG.md"]


def current_version(root: Path = ROOT) -> str:
    """Return the version of the package; all other places must agree with it."""
    version: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    return version


def disagreements(root: Path, images: list[str]) -> list[str]:
    """Return a sentence for each place whose version is missing or is not that of the package.

    Args:
        root: the root of the repository.
        images: paths of the files that may name images, relative to *root*.
    """
    version = current_version(root)
    found = []
    if not VERSION.fullmatch(version):
        found.append(f"pyproject.toml has the version {version}, which is not of the form MAJOR.MINOR.PATCH.")
    for name, place in PLACES:
        stated = place.findall((root / name).read_text())
        if stated != [version]:
            found.append(f"{name} has {', '.join(stated) or 'nothing'} where {place.pattern} should find {version}.")
    for name in images:
        tags = {tag for tag in IMAGE.findall((root / name).read_text()) if tag != version}
        found += [f"{name} names an image with the tag {tag} instead of {version}." for tag in sorted(tags)]
    return found


def set_version(root: Path, images: list[str], version: str) -> None:
    """Write a version to all places; the arguments are those of :func:`disagreements`.

    Raises:
        ValueError: if it is not of the form MAJOR.MINOR.PATCH.
    """
    if not VERSION.fullmatch(version):
        raise ValueError(f"{version!r} is not a version; it must be of the form MAJOR.MINOR.PATCH, such as 0.2.0")
    for name, place in (*PLACES, *((name, IMAGE) for name in images)):
        text = (root / name).read_text()
        changed = place.sub(lambda match: match[0].replace(match[1], version), text)
        if changed != text:
            (root / name).write_text(changed)


def release_notes(changelog: str, version: str, *, tagged: bool) -> str:
    """Return what the changelog says about a version, without the heading.

    Raises:
        CheckError: if it says nothing, or the version is tagged and its heading has no date.
    """
    heading, text = rf"^## {re.escape(version)}(?: \(([^)\n]*)\))?\n", r"(.*?)(?=^## |\Z)"
    found = re.search(heading + text, changelog, re.MULTILINE | re.DOTALL)
    if found is None or not found[2].strip():
        raise CheckError(f"CHANGELOG.md has no section for {version}; rename the section Unreleased")
    if tagged and not re.fullmatch(r"\d{4}-\d\d-\d\d", found[1] or ""):
        raise CheckError(f"CHANGELOG.md must give the date of {version}: ## {version} (YYYY-MM-DD)")
    return found[2].strip() + "\n"


def main(arguments: list[str]) -> None:
    """Set the version that is the only argument."""
    if len(arguments) != 1:
        sys.exit("usage: python -m scripts.release.versions VERSION")
    try:
        set_version(ROOT, image_files(), arguments[0])
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
