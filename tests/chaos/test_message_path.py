"""Whatever strikes a job, and whatever Redis keeps: no rollout is received twice, and none that Redis has kept is lost.

The matrix has a cell for each fault and setting of Redis. ``make test-chaos`` runs some of them, every night all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.message_path import CELLS, Fault, Result, Setting, as_table, run_cell

BY_DAY = {
    ("two coordinators", Setting.NONE),
    ("relay killed", Setting.EVERYSEC),
    ("Redis killed", Setting.END_LOST),
    ("Redis killed", Setting.REPLICA),
    ("Redis killed", Setting.NONE),
    ("disk full", Setting.EVERYSEC),
    ("clock of Redis jumps", Setting.ALWAYS),
}
"""Cells that run by day."""


@pytest.fixture(scope="module")
def results() -> Iterator[list[Result]]:
    """Results of all cells, which are printed in the end."""
    found: list[Result] = []
    yield found
    print(f"\n{as_table(found)}")


@pytest.mark.parametrize(
    ("fault", "setting"),
    [
        pytest.param(
            fault,
            setting,
            id=f"{fault.name}-{setting.name.lower()}".replace(" ", "-"),
            marks=[] if (fault.name, setting) in BY_DAY else pytest.mark.nightly,
        )
        for fault, setting in CELLS
    ],
)
def test_no_rollout_is_received_twice_or_lost(
    fault: Fault,
    setting: Setting,
    tmp_path: Path,
    results: list[Result],
    record_property: Callable[[str, object], None],
) -> None:
    result = run_cell(fault, setting, tmp_path, times=1)
    results.append(result)
    for name, value in vars(result).items():
        record_property(name, value)
    assert (0, 0, 0) == (result.twice, result.lost, result.wrong)
