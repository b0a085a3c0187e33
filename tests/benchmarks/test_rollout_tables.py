"""Tests of the tables of the results of the benchmark of real engines."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.figures import to_columns
from benchmarks.rollout_runs import Measurement
from benchmarks.rollout_tables import rows

ROOT = Path(__file__).parents[2]


def write_result(file: Path, seconds: dict[str, list[float]], rounds_per_epoch: int) -> None:
    """Write a result with one measurement for each mode and number of seconds."""
    measurements = [
        Measurement(mode, 4, number // rounds_per_epoch, number, 8, 1000, makespan, 100, 50, 25, 0.1, 0.01)
        for mode, makespans in seconds.items()
        for number, makespan in enumerate(makespans)
    ]
    settings = {"modes": list(seconds), "batches": [4], "model": "267m"}
    columns = to_columns([asdict(measurement) for measurement in measurements])
    file.write_text(json.dumps({"figures": [], "settings": settings, "measurements": columns}))


@pytest.mark.parametrize("name", ["rollout-tiny", "rollout-267m", "rollout-tiny-v2"])
def test_the_readme_has_the_tables_of_the_results(name: str) -> None:
    readme = (ROOT / "benchmarks/README.md").read_text()
    assert [] == [row for row in rows(ROOT / f"benchmarks/results/{name}.json") if row not in readme]


def test_a_row_has_the_speeds_the_ratio_and_the_first_epoch(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    write_result(file, {"das": [2.0] * 3 + [1.0] * 5, "none": [4.0] * 8, "suffix": [2.0] * 8}, rounds_per_epoch=3)
    assert "| 267M, 4 | 8 | 2.00 | **4.00** (2.00) | 7.3 % | 2.00 | 1.00–2.00 | 1.00 |" == list(rows(file))[-1]


def test_few_pairs_have_no_bound_and_no_interval(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    write_result(file, {"das": [1.0] * 4, "none": [2.0] * 4, "suffix": [2.0] * 4}, rounds_per_epoch=4)
    assert "| 267M, 4 | 4 | 1.00 | **2.00** (–) | 10.0 % | 2.00 | – |  |" == list(rows(file))[-1]
