"""Tests of the figures that benchmarks report and the files that they write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.figures import Figure, from_columns, quantile, report, to_columns

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks/results").glob("*.json"))


def test_report_writes_figures_and_details(tmp_path: Path) -> None:
    figure = Figure("speed", 2.0, "x", "none", ">=", 1.0)
    report(tmp_path / "r.json", [figure], rows=[{"a": 1 / 3}])
    assert {
        "figures": [{"name": "speed", "value": 2.0, "unit": "x", "peer": "none", "op": ">=", "target": 1.0}],
        "rows": [{"a": 0.333333}],
    } == json.loads((tmp_path / "r.json").read_text())


def test_rows_survive_the_conversion_to_columns() -> None:
    rows = [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    assert rows == from_columns(to_columns(rows))
    assert [] == from_columns(to_columns([]))


def test_quantile_is_a_value_that_the_share_does_not_exceed() -> None:
    assert [1, 2, 4] == [quantile([4, 3, 2, 1], share) for share in (0.0, 0.5, 1.0)]


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_committed_results_have_complete_figures(file: Path) -> None:
    figures = json.loads(file.read_text())["figures"]
    assert figures
    assert all({"name", "value", "unit", "peer", "op", "target"} == figure.keys() for figure in figures)
