"""Turns of trajectories are recognized by their prompts."""

from __future__ import annotations

from rollout_api import problem_id_of
from rollout_api.integrations.recognized_turns import RecognizedTurns


def test_a_prompt_that_continues_a_turn_is_the_next_turn_of_its_trajectory() -> None:
    turns = RecognizedTurns()
    first, sibling = turns.recognize([1, 2]), turns.recognize([1, 2])
    assert (0, problem_id_of([1, 2])) == (first.turn, first.problem_id)
    assert first.trajectory_id != sibling.trajectory_id
    turns.remember(first, [1, 2], [3])
    turns.remember(sibling, [1, 2], [4])
    second = turns.recognize([1, 2, 3, 50])
    assert first._replace(turn=1) == second
    turns.remember(second, [1, 2, 3, 50], [5, 6])
    assert first._replace(turn=2) == turns.recognize([1, 2, 3, 50, 5, 6, 51])
    assert sibling._replace(turn=1) == turns.recognize([1, 2, 4])
    assert 0 == turns.recognize([1, 2]).turn == turns.recognize([1, 2, 9, 3]).turn


def test_only_the_latest_turns_are_remembered() -> None:
    turns = RecognizedTurns(max_turns=2)
    for token in (1, 2, 3):
        turns.remember(turns.recognize([token]), [token], [10])
    assert [0, 1, 1] == [turns.recognize([token, 10, 11]).turn for token in (1, 2, 3)]
