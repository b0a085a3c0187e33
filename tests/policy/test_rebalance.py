"""Migrations at the end of a training step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_worker.policy.rebalance import PlacedRollout, plan_rebalancing, remaining_seconds
from rollout_worker.policy.step_cost import H100_7B, StepCost
from tests.support.draft_policies import COSTS

EngineLoads = list[list[tuple[int, float]]]
"""For each engine, context tokens and remaining steps of its rollouts."""
ENGINE_LOADS = st.lists(
    st.lists(st.tuples(st.integers(10, 16_000), st.floats(1, 16_000)), max_size=6), min_size=1, max_size=4
)


def engines_with(loads: EngineLoads) -> dict[str, list[PlacedRollout]]:
    return {
        str(engine): [
            PlacedRollout((str(engine), sample), context_tokens, steps)
            for sample, (context_tokens, steps) in enumerate(rollouts)
        ]
        for engine, rollouts in enumerate(loads)
    }


def test_steps_get_shorter_as_rollouts_end() -> None:
    cost = StepCost(1.0, 0.1, 0.001)
    rollouts = [PlacedRollout(("a", 0), 100, 10.0), PlacedRollout(("a", 1), 200, 30.0)]
    assert 10 * (1 + 0.2 + 0.3) + 20 * (1 + 0.1 + 0.2) == pytest.approx(remaining_seconds(rollouts, cost))
    assert 0 == remaining_seconds([], cost)


def test_long_rollouts_of_a_busy_engine_migrate_to_an_idle_one() -> None:
    many = [PlacedRollout(("a", sample), 12_000, 4000.0) for sample in range(16)]
    migrations = plan_rebalancing({"busy": many, "idle": []}, H100_7B)
    assert 4 <= len(migrations) <= 8  # it would be half of them if reading their contexts cost nothing
    assert {("busy", "idle")} == {(migration.source, migration.target) for migration in migrations}


def test_rollouts_that_end_soon_stay() -> None:
    ending = [PlacedRollout(("a", sample), 12_000, 40.0) for sample in range(16)]
    assert [] == plan_rebalancing({"busy": ending, "idle": []}, H100_7B)


def test_a_single_rollout_and_a_single_engine_stay_as_they_are() -> None:
    assert [] == plan_rebalancing({"busy": [PlacedRollout(("a", 0), 12_000, 4000.0)], "idle": []}, H100_7B)
    many = [PlacedRollout(("a", sample), 12_000, 4000.0) for sample in range(16)]
    assert [] == plan_rebalancing({"only": many}, H100_7B)


@settings(deadline=None)
@given(ENGINE_LOADS, COSTS)
def test_migrations_save_a_minimum_share_of_time_and_move_no_rollout_twice(loads: EngineLoads, cost: StepCost) -> None:
    engines = engines_with(loads)
    migrations = plan_rebalancing(engines, cost)
    assert len({migration.key for migration in migrations}) == len(migrations)
    before = max(remaining_seconds(rollouts, cost) for rollouts in engines.values())
    for migration in migrations:
        (rollout,) = [rollout for rollout in engines[migration.source] if rollout.key == migration.key]
        engines[migration.source].remove(rollout)
        engines[migration.target].append(rollout)
    after = max(remaining_seconds(rollouts, cost) for rollouts in engines.values())
    assert after <= (0.95 * before if migrations else before)


def test_a_rollout_that_ends_at_once_does_not_migrate() -> None:
    """Regression: after other migrations to its engine, moving it appeared to save one step."""
    cost = StepCost(0.001, 0.0078125, 0.0, 0.0)
    loads = [
        [(10, 1.0)],
        [(10, 483.0)],
        [(2241, 1057.0), (10, 9188.0)],
        [(227, 5172.0), (38, 6094.0), (642, 9503.0), (10, 4329.0)],
    ]
    assert ("0", 0) not in {migration.key for migration in plan_rebalancing(engines_with(loads), cost)}


@settings(deadline=None)
@given(ENGINE_LOADS, COSTS)
def test_only_movable_rollouts_migrate(loads: EngineLoads, cost: StepCost) -> None:
    engines = engines_with(loads)
    movable = {rollout.key for rollouts in engines.values() for rollout in rollouts if rollout.key[1] % 2}
    assert {migration.key for migration in plan_rebalancing(engines, cost, movable=movable)} <= movable
    assert [] == plan_rebalancing(engines, cost, movable=())
