"""The table of running rollouts: progress per step and rows."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_worker.policy.draft_policy import RolloutTable


def test_a_new_rollout_is_assumed_to_be_as_fast_as_the_running_ones() -> None:
    table = RolloutTable()

    def start(generated: int = 0) -> int:
        return table.open(prompt_tokens=1, generated=generated, max_tokens=1000)

    def step(row: int) -> None:
        table.advance(np.array([row]), np.array([3]), np.array([5]))

    a = start()
    for _ in range(200):
        step(a)
    b = start()
    assert [3.0, 3.0] == pytest.approx(table.tokens_per_step[[a, b]].tolist(), rel=0.01)
    assert [5.0, 5.0] == pytest.approx(table.drafted_per_step[[a, b]].tolist(), rel=0.01)
    # A rollout that reuses a row inherits nothing from the rollout that had it.
    table.close(a)
    step(b)
    c = start(generated=5)
    assert a == c
    assert 3.0 == pytest.approx(table.tokens_per_step[c], rel=0.01)
    table.close(b)
    table.close(c)
    d = start()
    assert (1.0, 0.0) == (table.tokens_per_step[d], table.drafted_per_step[d])


def test_each_of_many_rollouts_has_its_own_row() -> None:
    table = RolloutTable()
    rows = np.array([table.open(prompt_tokens=number, generated=0, max_tokens=1000) for number in range(100)])
    assert 100 == len(set(rows.tolist()))
    table.advance(rows, np.arange(100), np.zeros(100, np.int64))
    table.add_unobserved(int(rows[3]), 500)
    assert [503, 4] == table.generated[rows[[3, 4]]].tolist()
    assert [3, 99] == table.prompt_tokens[rows[[3, 99]]].tolist()
