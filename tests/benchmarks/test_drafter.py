"""Tests of the batch of recorded rollouts in which the drafter's time is measured."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.drafter import Batch, filled_index, first_turn, measure
from benchmarks.problems import Problem
from benchmarks.traces import Segment, Trajectory


def trajectory(sample: int, *tokens: int) -> Trajectory:
    prompt = np.array([1, 2, 3], np.uint32)
    return Trajectory("p", sample, "1", prompt, (Segment(True, np.array(tokens, np.uint32)),))


@pytest.fixture
def problem() -> Problem:
    return Problem("p", [trajectory(9, *range(10, 60))], [trajectory(0, *range(10, 60)), trajectory(1, *range(70, 74))])


def test_batch_samples_the_recorded_tokens_and_one_more_than_the_accepted_drafts(problem: Problem) -> None:
    batch = Batch([problem], 2, filled_index([problem]))
    assert [[10], [70]] == batch.verify([[], []])
    assert [[11, 12, 13], [71]] == batch.verify([[11, 12, 20], [90]])
    assert [[11, 12, 20], [90]] == batch.runner.input_batch.spec_token_ids
    assert [1, 2, 3, 10, 11, 12, 13] == batch.token_ids[0, : batch.num_tokens[0]].tolist()


def test_rollout_that_has_ended_becomes_history_and_the_next_one_starts(problem: Problem) -> None:
    index = filled_index([problem])
    batch = Batch([problem], 2, index)
    whole = first_turn(problem.evaluated[1]).tolist()
    batch.verify([[], []])
    assert [[11], whole[1:]] == batch.verify([[], whole[1:]])
    # The ended rollout is "2", because ids count the rollouts that have started.
    assert [[12], [10]] == batch.verify([[], [99]])
    index.wait_idle()
    assert ["p/0", "2"] == index.rollouts("p")
    assert [1, 2, 3, 10] == batch.token_ids[1, : batch.num_tokens[1]].tolist()


def test_measured_drafts_are_accepted(problem: Problem) -> None:
    measured = measure([problem], 2, steps=20)
    assert measured["drafted_per_step"] > 0.5
    assert measured["tokens_per_step"] > 1.5
