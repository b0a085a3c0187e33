"""The metrics of a training step: examples that were computed by hand, and properties."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api import (
    FinishReason,
    Group,
    InvalidRequestError,
    Prompt,
    Rollout,
    RolloutSummary,
    WeightSpan,
    step_metrics,
)
from rollout_api.step_metrics import Timeline

ROOT = Path(__file__).parents[2]
SUMMARIES = st.lists(
    st.builds(
        RolloutSummary,
        problem_id=st.sampled_from("abc"),
        num_tokens=st.integers(0, 50),
        finish_reason=st.sampled_from(FinishReason),
        num_decoding_steps=st.integers(0, 50),
        num_draft_tokens=st.integers(20, 40),
        num_accepted_tokens=st.integers(0, 20),
        accepted_by_source=st.just({}),
        started_at=st.integers(0, 20).map(float),
        finished_at=st.integers(0, 40).map(float),
        weight_version=st.none() | st.integers(0, 5),
        staleness=st.none() | st.integers(0, 5),
        reward=st.none() | st.floats(-10, 10),
    ),
    max_size=20,
)


def rollout(problem: str, sample: int, length: int, **fields: Any) -> Rollout:
    """Return a rollout that weight version 3 sampled, unless *fields* say otherwise."""
    defaults: dict[str, Any] = {
        "rollout_id": f"uid/{problem}/{sample}/0",
        "problem_id": problem,
        "token_ids": [1] * length,
        "weight_spans": [WeightSpan(start=0, weight_version=3)] if length else [],
        "finish_reason": FinishReason.STOP,
    }
    return Rollout(**(defaults | fields))


STEP = [
    rollout(
        "a",
        0,
        10,
        num_decoding_steps=4,
        num_draft_tokens=12,
        num_accepted_tokens=6,
        started_at=100,
        finished_at=104,
        accepted_tokens_by_source={"history": 4, "self": 2},
    ),
    rollout("a", 1, 20, num_decoding_steps=20, started_at=100, finished_at=110),
    rollout(
        "b",
        0,
        40,
        num_decoding_steps=16,
        num_draft_tokens=36,
        num_accepted_tokens=24,
        accepted_tokens_by_source={"history": 10, "siblings": 14},
        finish_reason=FinishReason.LENGTH,
        started_at=100,
        finished_at=120,
        weight_spans=[WeightSpan(start=0, weight_version=2), WeightSpan(start=8, weight_version=3)],
    ),
    rollout("b", 1, 5, finish_reason=FinishReason.CANCELLED, started_at=110, finished_at=111),
    rollout("b", 2, 0, finish_reason=FinishReason.FAILED, detail="out of memory"),
]
REWARDS = {"uid/a/0/0": 1.0, "uid/a/1/0": 1.0, "uid/b/0/0": 0.0, "uid/b/1/0": 2.0}


def documented_metrics() -> list[str]:
    """Return the names in the table of docs/integrations.md."""
    section = (ROOT / "docs" / "integrations.md").read_text().split("\n## Figures of each training step\n")[1]
    return re.findall(r"^\| `(rollout/\w+)` \|", section.split("\n## ")[0], re.MULTILINE)


def test_a_documented_step_computed_by_hand() -> None:
    expected = {
        "rollout/num_rollouts": 5,
        "rollout/num_tokens": 75,
        "rollout/length_mean": 70 / 3,
        "rollout/length_p50": 20,
        "rollout/length_p90": 40,
        "rollout/length_p99": 40,
        "rollout/length_max": 40,
        "rollout/truncated_share": 0.2,
        "rollout/interrupted_share": 0.2,
        "rollout/failed_share": 0.2,
        "rollout/makespan_s": 20,
        # Of at most three rollouts at once, only one runs from second 111 on.
        "rollout/tail_s": 9,
        "rollout/tail_share": 9 / 20,
        "rollout/longest_share": 1,
        "rollout/tokens_per_s": 75 / 20,
        "rollout/accepted_per_step": 30 / 40,
        "rollout/acceptance_rate": 30 / 48,
        "rollout/accepted_share": 30 / 70,
        "rollout/accepted_share_history": 14 / 70,
        "rollout/accepted_share_self": 2 / 70,
        "rollout/accepted_share_siblings": 14 / 70,
        "rollout/accepted_share_cross_problem": 0,
        "rollout/weight_version": 3,
        # The newest version is 4: four rollouts have tokens, the oldest of which are from the versions 3, 3, 2 and 3.
        "rollout/staleness_mean": 5 / 4,
        "rollout/staleness_max": 2,
        "rollout/reward_mean": 1.0,
        "rollout/reward_std": math.sqrt(0.5),
        "rollout/equal_reward_share": 0.5,
    }
    assert expected == step_metrics(STEP, REWARDS, newest_version=4)
    assert list(expected) == documented_metrics()


def test_figures_that_are_unknown_have_no_metric() -> None:
    assert {
        "rollout/num_rollouts": 1,
        "rollout/num_tokens": 7,
        **{f"rollout/length_{name}": 7 for name in ("mean", "p50", "p90", "p99", "max")},
        **{f"rollout/{name}_share": 0 for name in ("truncated", "interrupted", "failed")},
        "rollout/weight_version": 3,
    } == step_metrics([rollout("a", 0, 7)])


def test_a_step_without_rollouts_has_only_counts() -> None:
    assert {"rollout/num_rollouts": 0, "rollout/num_tokens": 0} == step_metrics([])


def test_groups_of_a_queue_have_their_own_newest_version() -> None:
    groups = [
        Group(0, Prompt([1]), [rollout("a", 0, 4), rollout("a", 1, 4)], [0.0, 1.0], newest_version=3),
        Group(1, Prompt([2]), [rollout("b", 0, 4), rollout("b", 1, 4)], [1.0, 1.0], newest_version=5),
    ]
    figures = step_metrics(groups)
    assert (1.0, 2) == (figures["rollout/staleness_mean"], figures["rollout/staleness_max"])
    assert (0.75, 0.5) == (figures["rollout/reward_mean"], figures["rollout/equal_reward_share"])


def test_groups_of_a_queue_without_a_reward_function_have_no_rewards() -> None:
    figures = step_metrics([Group(0, Prompt([1]), [rollout("a", 0, 4)], None, newest_version=3)])
    assert (1, None) == (figures["rollout/num_rollouts"], figures.get("rollout/reward_mean"))


def test_rewards_of_other_rollouts_are_rejected() -> None:
    with pytest.raises(InvalidRequestError, match=r"no rollout of the step has the id 'uid/a/9/0'; 1 of the 2 rewards"):
        step_metrics([rollout("a", 0, 4)], {"uid/a/0/0": 1.0, "uid/a/9/0": 1.0})


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_rewards_that_are_not_finite_are_rejected(reward: float) -> None:
    with pytest.raises(InvalidRequestError, match=f"problem 'a' has the reward {reward}"):
        step_metrics([rollout("a", 0, 4)], {"uid/a/0/0": reward})


@given(SUMMARIES)
def test_shares_are_between_0_and_1_and_lengths_in_order(summaries: list[RolloutSummary]) -> None:
    figures = step_metrics(summaries)
    shares = {name: value for name, value in figures.items() if name.endswith(("_share", "_rate"))}
    assert {} == {name: value for name, value in shares.items() if not 0 <= value <= 1}
    lengths = [figures[name] for name in figures if name.startswith("rollout/length_")]
    assert len(lengths) in (0, 5)
    if lengths:
        mean, *quantiles = lengths
        assert sorted(quantiles) == quantiles
        assert mean <= quantiles[-1]


@given(SUMMARIES, st.integers(1, 20))
def test_quantiles_are_lengths_that_enough_rollouts_do_not_exceed(summaries: list[RolloutSummary], copies: int) -> None:
    figures = step_metrics(summaries * copies)
    lengths = [summary.num_tokens for summary in summaries if summary.finish_reason.complete]
    for percent in (50, 90, 99):
        quantile = figures.get(f"rollout/length_p{percent}")
        assert (quantile is None) == (not lengths)
        if quantile is not None:
            assert quantile in lengths
            assert 100 * sum(length <= quantile for length in lengths) >= percent * len(lengths)
            assert 100 * sum(length < quantile for length in lengths) < percent * len(lengths)


INTERVALS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 8)).map(lambda run: (run[0], run[0] + run[1])), min_size=1, max_size=12
)


def timeline(*intervals: tuple[float, float]) -> Timeline:
    result = Timeline.from_intervals(intervals)
    assert result is not None
    return result


@given(INTERVALS)
def test_the_tail_begins_after_the_last_second_in_which_half_of_the_peak_runs(intervals: list[tuple[int, int]]) -> None:
    first, last = min(start for start, _ in intervals), max(end for _, end in intervals)
    running = [sum(start <= second < end for start, end in intervals) for second in range(first, last)]
    tail = 0
    while 2 * running[-1 - tail] < max(running):
        tail += 1
    assert Timeline(first, last - tail, last, max(end - start for start, end in intervals)) == timeline(*intervals)


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        pytest.param([(0, 10), (5, 4)], Timeline(0, 10, 10, 10), id="clocks that differ"),
        pytest.param([(3, 3)], Timeline(3, 3, 3, 0), id="no duration"),
    ],
)
def test_intervals_without_a_duration_do_not_count(intervals: list[tuple[float, float]], expected: Timeline) -> None:
    assert expected == timeline(*intervals)


def test_a_step_without_rollouts_has_no_timeline() -> None:
    assert Timeline.from_intervals([]) is None
