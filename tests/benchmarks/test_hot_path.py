"""Tests of the batch of recorded rollouts that the time on the critical path is measured with."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.batch_drafters import LoopDrafter, RecordedBatch, first_turn
from benchmarks.hot_path import measure
from benchmarks.traces import Problem, Segment, Trajectory

MAX_DRAFT = 16


def trajectory(sample: int, *tokens: int) -> Trajectory:
    prompt = np.array([1, 2, 3], np.uint32)
    return Trajectory("p", sample, "1", prompt, (Segment(True, np.array(tokens, np.uint32)),))


@pytest.fixture
def problem() -> Problem:
    return Problem("p", [trajectory(9, *range(10, 60))], [trajectory(0, *range(10, 60)), trajectory(1, *range(70, 74))])


def make(problems: list[Problem], size: int, longest: int) -> LoopDrafter:
    return LoopDrafter(problems, size, longest, threads=1, draft_ahead=False)


def test_a_batch_samples_the_recorded_tokens_and_one_more_than_the_accepted_drafts(problem: Problem) -> None:
    drafter = make([problem], 2, 100)
    batch = RecordedBatch([problem], 2, MAX_DRAFT)
    batch.start(drafter)
    drafts, lengths = np.full((2, MAX_DRAFT), -1), np.zeros(2, np.int32)
    batch.verify(drafts, lengths)
    assert [1, 1] == batch.num_sampled.tolist()
    assert [10, 70] == batch.sampled[:, 0].tolist()
    drafts[0, :3], lengths[0] = [11, 12, 20], 3
    batch.verify(drafts, lengths)
    assert [3, 1] == batch.num_sampled.tolist()
    assert [11, 12, 13] == batch.sampled[0, :3].tolist()


def test_a_rollout_that_has_ended_becomes_history_and_the_next_one_starts(problem: Problem) -> None:
    drafter = make([problem], 2, 100)
    batch = RecordedBatch([problem], 2, MAX_DRAFT)
    batch.start(drafter)
    drafts, lengths = np.full((2, MAX_DRAFT), -1), np.zeros(2, np.int32)
    whole = first_turn(problem.evaluated[1])
    drafts[1, : len(whole)], lengths[1] = whole, len(whole)
    batch.verify(drafts, lengths)
    assert [1] == batch.replace_ended(drafter).tolist()
    drafter.index.wait_idle()
    assert ["p/0", "started/2"] == drafter.index.rollouts("p")
    assert [4, 3] == batch.context_tokens.tolist()


def test_measured_drafts_are_accepted(problem: Problem) -> None:
    measured = measure(make, [problem], 2, steps=20, rounds=1)
    assert measured["drafted_per_step"] > 0.5
    assert measured["accepted_per_step"] > 0.5
    assert 0 < measured["request_bytes"] < measured["total_bytes"]
