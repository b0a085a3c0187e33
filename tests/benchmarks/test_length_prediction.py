"""Jobs with a long tail, and how predictions of their lengths are judged."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.length_prediction import LIVES, SOURCES, Outcome, Replay, coverage, explained
from benchmarks.rollout_bench.workload import half_of, make_long_tail_job
from benchmarks.traces import Segment, Trajectory

PROBLEMS = [name for name in map(str, range(100)) if half_of(name) == "report"][:4]


def trace() -> list[Trajectory]:
    """Recorded rollouts of two checkpoints, in which no token occurs twice."""
    recorded = []
    for number, (problem, checkpoint, sample) in enumerate(
        (problem, checkpoint, sample) for problem in PROBLEMS for checkpoint in "ab" for sample in range(40)
    ):
        tokens = np.arange(number * 500, (number + 1) * 500, dtype=np.uint32)
        prompt = np.array([1, 2], np.uint32)
        recorded.append(Trajectory(problem, sample, checkpoint, prompt, (Segment(True, tokens),)))
    return recorded


def test_a_long_tail_uses_each_recorded_token_once() -> None:
    job = make_long_tail_job(trace(), "report", rollouts=16, seed=0)
    assert [(step.epoch, step.block) for step in job.steps] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    rollouts = [rollout for step in job.steps for group in step.groups for rollout in group.rollouts]
    tokens = np.concatenate([rollout.segments[0].tokens for rollout in rollouts])
    assert len(np.unique(tokens)) == len(tokens)
    assert all(1 <= rollout.generated <= job.max_tokens == 4096 for rollout in rollouts)
    assert len({(rollout.problem, rollout.checkpoint) for rollout in rollouts}) == 8


def test_the_lengths_of_a_long_tail_are_log_normal_and_differ_between_seeds() -> None:
    lengths = [
        [
            rollout.generated
            for step in make_long_tail_job(trace(), "report", rollouts=16, seed=seed).steps
            for group in step.groups
            for rollout in group.rollouts
        ]
        for seed in range(40)
    ]
    assert lengths[0] != lengths[1]
    logs = np.log(np.concatenate(lengths))
    assert float(np.median(logs)) == pytest.approx(math.log(500), abs=0.2)
    assert float(logs.std()) == pytest.approx(1.0, abs=0.15)


def test_predictions_are_judged_by_their_errors_and_their_quantiles() -> None:
    quantiles = np.linspace(0.0, 1.9, 20)
    rests = np.linspace(0.0, 2.0, 101)
    useless = [Outcome(0.5, quantiles, float(rest)) for rest in rests]
    exact = [Outcome(0.5, np.full(20, rest), float(rest)) for rest in rests]
    assert explained(useless, useless) == pytest.approx(0.0)
    assert explained(exact, useless) == pytest.approx(1.0)
    assert coverage(useless, 0.5) == pytest.approx(0.5, abs=0.05)


def test_a_replay_predicts_each_rollout_at_all_shares_of_its_life_with_all_sources() -> None:
    job = make_long_tail_job(trace(), "report", rollouts=16, seed=3)
    replay = Replay(job)
    replay.run()
    long_enough = sum(
        rollout.generated >= 20 for step in job.steps for group in step.groups for rollout in group.rollouts
    )
    for sources in SOURCES:
        outcomes = [one for epoch in (0, 1) for one in replay.outcomes[sources, epoch]]
        for life in LIVES:
            assert sum(one.life == life for one in outcomes) >= long_enough
