from __future__ import annotations

import pytest

from rollout_api.length_stats import LengthStats
from rollout_worker.policy.rollouts import RunningRollouts


def test_a_new_rollout_is_taken_to_be_as_fast_as_those_that_run() -> None:
    rollouts = RunningRollouts(lambda problem: LengthStats.of(()))
    rollouts.open("a", "p", prompt=1, said=0, most=1000)
    for _ in range(200):
        rollouts.advance("a", 3)
    rollouts.open("b", "p", prompt=1, said=0, most=1000)
    assert [3.0, 3.0] == pytest.approx(rollouts.rate[rollouts.rows(["a", "b"])].tolist(), rel=0.01)
    # in the row of one that ended, of which nothing is left
    rollouts.close("a")
    rollouts.advance("b", 3)
    rollouts.open("c", "p", prompt=1, said=5, most=1000)
    assert 3.0 == pytest.approx(rollouts.rate[rollouts.rows(["c"])].tolist()[0], rel=0.01)
    rollouts.close("b")
    rollouts.close("c")
    rollouts.open("d", "p", prompt=1, said=0, most=1000)
    assert [1.0] == rollouts.rate[rollouts.rows(["d"])].tolist()
