"""The batch of recorded rollouts in which the time on the critical path is measured, and the measurement itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks import hot_path
from benchmarks.batch_drafters import IndexDrafter, SuffixGpuDrafter, SuffixProposerDrafter
from benchmarks.problems import Problem
from benchmarks.recorded_batch import BatchDrafter, RecordedBatch, first_turn
from benchmarks.traces import Segment, Tokens, Trajectory


def trajectory(sample: int, *tokens: int) -> Trajectory:
    prompt = np.array([1, 2, 3], np.uint32)
    return Trajectory("p", sample, "1", prompt, (Segment(True, np.array(tokens, np.uint32)),))


@pytest.fixture
def problem() -> Problem:
    return Problem("p", [trajectory(9, *range(10, 60))], [trajectory(0, *range(10, 60)), trajectory(1, *range(70, 74))])


class Recorder:
    """A drafter that records which rollouts begin and end."""

    name = "recorder"

    def __init__(self) -> None:
        self.drafts, self.lengths = np.full((2, 3), -1, np.int64), np.zeros(2, np.int32)
        self.calls: list[tuple[str, int, int]] = []

    def open(self, place: int, trajectory: Trajectory, tokens: Tokens) -> None:
        self.calls.append(("open", place, trajectory.sample))

    def close(self, place: int, trajectory: Trajectory, tokens: Tokens) -> None:
        self.calls.append(("close", place, trajectory.sample))

    def before_step(self, sampled: Any, num_sampled: Any) -> None:
        raise AssertionError

    def step(self, sampled: Any, num_sampled: Any) -> None:
        raise AssertionError

    def after_step(self, num_sampled: Any, verified: Any) -> None:
        raise AssertionError

    def verify(self, batch: RecordedBatch, *drafts: list[int]) -> list[list[int]]:
        self.drafts[:] = -1
        for place, draft in enumerate(drafts):
            self.drafts[place, : len(draft)] = draft
            self.lengths[place] = len(draft)
        batch.verify(self.drafts, self.lengths)
        return [row[:count].tolist() for row, count in zip(batch.sampled, batch.num_sampled, strict=True)]


def test_batch_samples_the_recorded_tokens_and_one_more_than_the_accepted_drafts(problem: Problem) -> None:
    recorder, batch = Recorder(), RecordedBatch([problem], 2, 3)
    batch.start(recorder)
    assert [[10], [70]] == recorder.verify(batch, [], [])
    assert [[11, 12, 13], [71]] == recorder.verify(batch, [11, 12, 20], [90])
    assert [[14], [72]] == recorder.verify(batch, [20, 15, 16], [])
    assert [3 + 5, 3 + 3] == batch.context_tokens.tolist()


def test_a_rollout_that_has_ended_is_replaced_by_the_next_one(problem: Problem) -> None:
    recorder, batch = Recorder(), RecordedBatch([problem], 2, 3)
    batch.start(recorder)
    whole = first_turn(problem.evaluated[1]).tolist()
    recorder.verify(batch, [], [])
    assert [] == batch.replace_ended(recorder).tolist()
    assert [[11], whole[1:]] == recorder.verify(batch, [], whole[1:4])
    assert [1] == batch.replace_ended(recorder).tolist()
    assert [("open", 0, 0), ("open", 1, 1), ("close", 1, 1), ("open", 1, 0)] == recorder.calls
    assert [[12], [10]] == recorder.verify(batch, [], [])


@pytest.mark.parametrize("drafter", [IndexDrafter, SuffixProposerDrafter, SuffixGpuDrafter])
def test_measured_drafts_are_accepted(problem: Problem, drafter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_path, "WARM_UP_STEPS", 5)

    def make(problems: list[Problem], size: int, longest: int) -> BatchDrafter:
        options = {"threads": 1} if drafter is IndexDrafter else {}
        try:
            made: BatchDrafter = drafter(problems, size, longest, **options)
        except ImportError as error:
            pytest.skip(str(error))
        return made

    measured = hot_path.measure(make, [problem], 2, steps=15, rounds=2)
    assert measured["drafted_per_step"] > 0.5
    assert measured["accepted_per_step"] > 0.5
    assert 0 < measured["p50_us"]["min"] <= measured["p99_us"]["max"]
    if drafter is IndexDrafter:
        assert measured["found_share"] > 0.2
        figures = hot_path.figures_of([{**measured, "threads": 1}, {**measured, "drafter": "peer"}])
        assert ["", "", "", "", "", "peer"] == [figure.peer for figure in figures]
