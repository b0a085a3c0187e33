from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_worker.policy.rebalance import Running, rebalance, time_until_end
from rollout_worker.policy.step_cost import H100_7B, StepCost

COST = st.builds(StepCost, st.floats(1e-3, 0.1), st.floats(1e-6, 1e-2), st.floats(0, 1e-6), st.floats(0, 1e-2))
RUNNING = st.lists(
    st.lists(st.tuples(st.integers(10, 16_000), st.floats(1, 16_000)), max_size=6), min_size=1, max_size=4
)


def engines_of(shape: list[list[tuple[int, float]]]) -> dict[str, list[Running]]:
    return {
        str(engine): [Running((str(engine), place), context, steps) for place, (context, steps) in enumerate(running)]
        for engine, running in enumerate(shape)
    }


def test_steps_get_shorter_as_others_end() -> None:
    cost = StepCost(1.0, 0.1, 0.001)
    running = [Running(("a", 0), 100, 10.0), Running(("a", 1), 200, 30.0)]
    assert 10 * (1 + 0.2 + 0.3) + 20 * (1 + 0.1 + 0.2) == pytest.approx(time_until_end(running, cost))
    assert 0 == time_until_end([], cost)


def test_an_idle_engine_takes_from_one_whose_steps_are_long() -> None:
    many = [Running(("a", place), 12_000, 4000.0) for place in range(16)]
    moves = rebalance({"busy": many, "idle": []}, H100_7B)
    assert 4 <= len(moves) <= 8  # half of them, if reading them cost nothing
    assert {("busy", "idle")} == {(move.source, move.target) for move in moves}


def test_what_ends_soon_stays() -> None:
    soon = [Running(("a", place), 12_000, 40.0) for place in range(16)]
    assert [] == rebalance({"busy": soon, "idle": []}, H100_7B)


def test_who_is_alone_stays() -> None:
    assert [] == rebalance({"busy": [Running(("a", 0), 12_000, 4000.0)], "idle": []}, H100_7B)
    assert [] == rebalance({"only": [Running(("a", place), 12_000, 4000.0) for place in range(16)]}, H100_7B)


@settings(deadline=None)
@given(RUNNING, COST)
def test_moves_let_the_last_end_sooner_and_move_nothing_twice(
    shape: list[list[tuple[int, float]]], cost: StepCost
) -> None:
    engines = engines_of(shape)
    moves = rebalance(engines, cost)
    assert len({move.rollout for move in moves}) == len(moves)
    before = max(time_until_end(running, cost) for running in engines.values())
    for move in moves:
        (one,) = [one for one in engines[move.source] if one.rollout == move.rollout]
        engines[move.source].remove(one)
        engines[move.target].append(one)
    after = max(time_until_end(running, cost) for running in engines.values())
    # with each plan by a share, and so nothing goes to and fro
    assert after <= (0.95 * before if moves else before)


def test_a_rollout_that_ends_at_once_makes_no_room_for_others() -> None:
    """Moves of much work to an engine let those of its own look worth something that save it one step."""
    cost = StepCost(0.001, 0.0078125, 0.0, 0.0)
    shape = [
        [(10, 1.0)],
        [(10, 483.0)],
        [(2241, 1057.0), (10, 9188.0)],
        [(227, 5172.0), (38, 6094.0), (642, 9503.0), (10, 4329.0)],
    ]
    assert ("0", 0) not in {move.rollout for move in rebalance(engines_of(shape), cost)}


@settings(deadline=None)
@given(RUNNING, COST)
def test_what_cannot_go_on_elsewhere_stays(shape: list[list[tuple[int, float]]], cost: StepCost) -> None:
    engines = engines_of(shape)
    movable = {one.rollout for running in engines.values() for one in running if one.rollout[1] % 2}
    assert {move.rollout for move in rebalance(engines, cost, movable=movable)} <= movable
    assert [] == rebalance(engines, cost, movable=())
