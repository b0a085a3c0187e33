"""The generated reference pages are those of the current code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from scripts import cli_docs, metrics_docs
from tests.operator.test_chart import all_metrics

ROOT = Path(__file__).parents[2]


def test_the_reference_of_the_command_line_is_that_of_the_code() -> None:
    assert cli_docs.document() == cli_docs.TARGET.read_text(), "run: python scripts/cli_docs.py"


def test_the_reference_of_the_command_line_names_every_command_that_is_installed() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    page = cli_docs.document()
    # The chart runs rollout-redis-users, which people do not call.
    assert [] == [name for name in scripts if f"`{name}`" not in page and name != "rollout-redis-users"]


def test_the_reference_of_the_metrics_is_that_of_the_collectors() -> None:
    assert metrics_docs.document() == metrics_docs.TARGET.read_text(), "run: python scripts/metrics_docs.py"


def test_the_reference_of_the_metrics_lists_every_metric() -> None:
    rows = set(re.findall(r"^\| `(rollout_\w+)` \|", metrics_docs.document(), re.MULTILINE))
    assert all_metrics() == rows


def test_metrics_that_the_documentation_names_exist() -> None:
    suffixes = ("_bucket", "_sum", "_count")
    unknown = {}
    for page in sorted((ROOT / "docs").glob("**/*.md")):
        named = {name for name in re.findall(r"`(rollout_[a-z_]+)`", page.read_text()) if not hasattr_module(name)}
        names = {next((name.removesuffix(end) for end in suffixes if name.endswith(end)), name) for name in named}
        if missing := {name for name in names if not name.endswith("_")} - all_metrics():
            unknown[page.name] = missing
    assert {} == unknown


def hasattr_module(name: str) -> bool:
    """Return whether this is the name of a package, such as ``rollout_api``."""
    return (ROOT / name).is_dir() or (ROOT / "operator" / name).is_dir()
