from __future__ import annotations

import numpy as np
import pytest

from rollout_api.length_stats import LengthStats
from rollout_worker.policy.rollouts import RunningRollouts


def test_a_new_rollout_is_taken_to_be_as_fast_as_those_that_run() -> None:
    rollouts = RunningRollouts(lambda problem: LengthStats.of(()))

    def begin(said: int = 0) -> int:
        return rollouts.open("p", prompt=1, said=said, most=1000)

    def say(row: int) -> None:
        rollouts.advance(np.array([row]), np.array([3]))

    a = begin()
    for _ in range(200):
        say(a)
    b = begin()
    assert [3.0, 3.0] == pytest.approx(rollouts.rate[[a, b]].tolist(), rel=0.01)
    # in the row of one that ended, of which nothing is left
    rollouts.close(a)
    say(b)
    c = begin(said=5)
    assert a == c
    assert 3.0 == pytest.approx(rollouts.rate[c], rel=0.01)
    rollouts.close(b)
    rollouts.close(c)
    assert 1.0 == rollouts.rate[begin()]


def test_rows_are_told_apart_however_many_there_are() -> None:
    rollouts = RunningRollouts(lambda problem: LengthStats.of(()))
    rows = np.array([rollouts.open(f"p{number}", prompt=number, said=0, most=1000) for number in range(100)])
    assert 100 == len(set(rows.tolist()))
    rollouts.advance(rows, np.arange(100))
    rollouts.miss(int(rows[3]), 500)
    assert [503, 4] == rollouts.said[rows[[3, 4]]].tolist()
    assert ["p3", "p99"] == [rollouts.problem(int(rows[number])) for number in (3, 99)]
    assert (len(rows), 8) == rollouts.ahead(rows).shape
