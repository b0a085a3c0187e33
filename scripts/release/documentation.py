"""The documentation of a version, which mike adds to those of the other versions on the branch ``gh-pages``."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.release.steps import CheckError, run

BRANCH = "gh-pages"
ALIAS = "latest"
"""Another name of the newest version on the site."""


def documented_version(version: str) -> str:
    """Return the version without PATCH, for example 0.2, because PATCH changes nothing that users have to know."""
    return version.rpartition(".")[0]


def check_documentation(root: Path, mike: Path, version: str, directory: Path) -> None:
    """Add the documentation of the commit that is checked out in *root* to the branch of a clone in *directory*.

    Raises:
        CheckError: if it cannot be built, or the branch lacks it.
    """
    run("git", "clone", "-q", "--no-tags", root, directory)
    for name, value in (("user.name", "release-check"), ("user.email", "release-check@localhost")):
        run("git", "config", name, value, cwd=directory)
    documented = documented_version(version)
    run(mike, "deploy", "--update-aliases", documented, ALIAS, cwd=directory, programs=mike.parent)
    run(mike, "set-default", ALIAS, cwd=directory)
    listed = json.loads(run("git", "show", f"{BRANCH}:versions.json", cwd=directory))
    if [{"version": documented, "title": documented, "aliases": [ALIAS]}] != listed:
        raise CheckError(f"versions.json of the branch {BRANCH} is {listed}")
    published = run("git", "ls-tree", "-r", "--name-only", BRANCH, cwd=directory).split()
    if missing := {"index.html", f"{documented}/index.html", f"{documented}/upgrading/index.html"} - set(published):
        raise CheckError(f"the branch {BRANCH} lacks {', '.join(sorted(missing))}")
