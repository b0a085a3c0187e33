"""The generated reference pages are those of the current code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import metrics_docs, performance_docs, sizing_docs
from scripts.sizing_docs import EXAMPLES, Plan
from tests.operator.test_chart import all_metrics

ROOT = Path(__file__).parents[2]


def test_the_reference_of_the_command_line_is_that_of_the_code() -> None:
    parts = [
        ("rollout_tools.cli.main", "--name", "rollout", "--title", "Command line"),
        ("rollout_store.history_service.cli", "--name", "rollout-history"),
    ]
    page = ""
    for module, *options in parts:
        command = [sys.executable, "-m", "typer", module, "utils", "docs", *options]
        page += subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert page == (ROOT / "docs" / "cli.md").read_text(), "run: make generate"


def test_the_reference_of_the_metrics_is_that_of_the_collectors() -> None:
    assert metrics_docs.document() == metrics_docs.TARGET.read_text(), "run: python scripts/metrics_docs.py"


def test_the_reference_of_the_metrics_lists_every_metric() -> None:
    rows = set(re.findall(r"^\| `(rollout_\w+)` \|", metrics_docs.document(), re.MULTILINE))
    assert all_metrics() == rows


def test_metrics_that_the_documentation_names_exist() -> None:
    suffixes = ("_bucket", "_sum", "_count")
    unknown = {}
    # These pages name fields of messages that begin in the same way.
    others = {"http.md", "integrations.md", "own-engines.md"}
    for page in sorted(set((ROOT / "docs").glob("**/*.md")) - {ROOT / "docs" / name for name in others}):
        named = {name for name in re.findall(r"`(rollout_[a-z_]+)`", page.read_text()) if not is_package(name)}
        names = {next((name.removesuffix(end) for end in suffixes if name.endswith(end)), name) for name in named}
        if missing := {name for name in names if not name.endswith("_")} - all_metrics():
            unknown[page.name] = missing
    assert {} == unknown


def is_package(name: str) -> bool:
    """Return whether this is the name of a package, such as ``rollout_api``."""
    return (ROOT / name).is_dir() or (ROOT / "operator" / name).is_dir()


def test_the_tables_of_performance_are_those_of_the_results() -> None:
    page = performance_docs.PAGE.read_text()
    assert performance_docs.document(page) == page, "run: python -m scripts.performance_docs"
    assert performance_docs.chart() == performance_docs.CHART.read_text(), "run: python -m scripts.performance_docs"


def test_the_list_of_further_measurements_repeats_the_results() -> None:
    page = performance_docs.PAGE.read_text()
    recovery, load = performance_docs.figures("recovery"), performance_docs.figures("load")
    death = "rollouts continue elsewhere after an engine's death"
    assert f"{recovery[f'{death}, p50']:.2f} s (p50), {recovery[f'{death}, p99']:.2f} s (p99)" in page
    assert f"{load['CPU time per rollout, all processes, 2500 trajectories']:.1f} ms in all processes" in page
    assert f"at {load['rollouts, 2500 trajectories']:.0f} rollouts per second" in page
    drafter = performance_docs.figures("hot-path-rg")
    times = [drafter[f"critical path, p50, batch {batch}, das-rollout, threads 1"] / 1000 for batch in (64, 256)]
    assert f"{times[0]:.2f} and {times[1]:.2f} ms" in page
    server = performance_docs.figures("front-door")
    ratios = [value for name, value in server.items() if name.startswith("end to end")]
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times" in page
    later = [value for name, value in server.items() if name.startswith("first token later, median")]
    assert f"up to {max(later):.0f} ms later" in page


def test_the_examples_of_the_sizing_guide_are_those_of_its_formulas() -> None:
    page = sizing_docs.PAGE.read_text()
    assert sizing_docs.document(page) == page, "run: python -m scripts.sizing_docs"


@pytest.mark.parametrize("plan", EXAMPLES.values(), ids=EXAMPLES)
def test_the_examples_of_the_sizing_guide_have_room_for_the_default_number_of_rollouts(plan: Plan) -> None:
    assert 128 <= sizing_docs.running_rollouts(plan)


def test_the_sizing_guide_repeats_the_measured_cpu_times() -> None:
    page = " ".join(sizing_docs.PAGE.read_text().split())
    for kind in ("coordinator", "relay", "Redis"):
        assert f"{sizing_docs.cpu_ms_per_rollout(kind):.2f} ms" in page
