"""The table of running rollouts: progress per step and rows."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_api.length_stats import LengthStats
from rollout_worker.policy.rollout_table import RolloutTable


def make_table() -> RolloutTable:
    return RolloutTable(lambda problem: LengthStats.from_lengths(()))


def test_a_new_rollout_is_assumed_to_be_as_fast_as_the_running_ones() -> None:
    table = make_table()

    def start(generated: int = 0) -> int:
        return table.open("p", prompt_tokens=1, generated=generated, max_tokens=1000)

    def step(row: int) -> None:
        table.advance(np.array([row]), np.array([3]))

    a = start()
    for _ in range(200):
        step(a)
    b = start()
    assert [3.0, 3.0] == pytest.approx(table.tokens_per_step[[a, b]].tolist(), rel=0.01)
    # A rollout that reuses a row inherits nothing from the rollout that had it.
    table.close(a)
    step(b)
    c = start(generated=5)
    assert a == c
    assert 3.0 == pytest.approx(table.tokens_per_step[c], rel=0.01)
    table.close(b)
    table.close(c)
    assert 1.0 == table.tokens_per_step[start()]


def test_each_of_many_rollouts_has_its_own_row() -> None:
    table = make_table()
    rows = np.array(
        [table.open(f"p{number}", prompt_tokens=number, generated=0, max_tokens=1000) for number in range(100)]
    )
    assert 100 == len(set(rows.tolist()))
    table.advance(rows, np.arange(100))
    table.add_unobserved(int(rows[3]), 500)
    assert [503, 4] == table.generated[rows[[3, 4]]].tolist()
    assert ["p3", "p99"] == [table.problem(int(rows[number])) for number in (3, 99)]
    assert (len(rows), 8) == table.remaining_quantiles(rows).shape
