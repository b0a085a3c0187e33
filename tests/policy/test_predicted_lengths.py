"""Draft policies that predict lengths: limits, preferred rollouts and queues."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_api.length_stats import LengthStats
from rollout_worker.policy.das.policies import DasClasses, DasOptimal
from rollout_worker.policy.draft_policy import DraftLimits
from rollout_worker.policy.predicted_lengths import (
    LengthPredictingPolicy,
    LengthSource,
    MarginalWithLengths,
    QueueState,
    last_probabilities,
)
from rollout_worker.policy.step_cost import H100_7B, StepCost
from tests.support.draft_policies import COSTS, assert_limits_are_respected, draft_length

PolicyFactory = Callable[[DraftLimits, LengthSource], LengthPredictingPolicy]
POLICIES: dict[str, PolicyFactory] = {
    "das-classes": DasClasses,
    "das-optimal": DasOptimal,
    "marginal": MarginalWithLengths,
}
POSSIBLE_ENDS = st.integers(1, 5).flatmap(
    lambda points: st.lists(
        st.lists(st.integers(1, 12), min_size=points, max_size=points).map(sorted), min_size=1, max_size=4
    )
)


@settings(deadline=None)
@given(POSSIBLE_ENDS)
def test_last_probabilities_agree_with_an_enumeration_of_all_outcomes(ends: list[list[int]]) -> None:
    counts = [0.0] * len(ends)
    for outcome in itertools.product(*ends):
        last = max(range(len(ends)), key=lambda row: (outcome[row], row))
        counts[last] += 1
    expected = np.array(counts) / sum(counts)
    assert expected == pytest.approx(last_probabilities(np.array(ends, dtype=np.float64)))


def stats_of(*lengths: int) -> LengthStats:
    return LengthStats.from_lengths([(0, length, False) for length in lengths])


class FixedLengths:
    """Lengths of earlier rollouts, by problem."""

    def __init__(self, lengths: Mapping[str, Sequence[int]]) -> None:
        self._problems = {problem: stats_of(*of_problem) for problem, of_problem in lengths.items()}
        self._overall = stats_of(*itertools.chain.from_iterable(lengths.values()))

    def of_problem(self, problem: str) -> LengthStats:
        return self._problems[problem]

    def overall(self) -> LengthStats:
        return self._overall


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES.keys())
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_budgets_respect_all_limits(make: PolicyFactory, data: st.DataObject) -> None:
    known = data.draw(st.lists(st.lists(st.integers(1, 500), max_size=5), min_size=1, max_size=4))
    lengths = FixedLengths({str(number): of_problem for number, of_problem in enumerate(known)})
    assert_limits_are_respected(lambda limits: make(limits, lengths), len(known), data)


@pytest.mark.parametrize("name", ["das-classes", "das-optimal", "marginal"])
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(20, 3000), min_size=2, max_size=6, unique=True),
    probability=st.floats(0.3, 0.99),
    cost=COSTS,
    queued=st.integers(0, 5),
)
def test_rollouts_that_are_expected_to_be_longer_get_no_fewer_draft_tokens(
    name: str, lengths: list[int], probability: float, cost: StepCost, queued: int
) -> None:
    problems = {str(number): (length, length + 10) for number, length in enumerate(sorted(lengths))}
    policy = POLICIES[name](DraftLimits(16, 10_000), FixedLengths(problems))
    rows = np.array([policy.open(problem, prompt_tokens=100, generated=0, max_tokens=10_000) for problem in problems])
    total_drafted = np.zeros(len(problems))
    steps = 12
    for _ in range(steps):
        if isinstance(policy, MarginalWithLengths):
            policy.queue = QueueState(queued, 500.0 * queued)
        budgets = policy.compute_budgets(rows, cost)
        pairs = zip(budgets.tokens.tolist(), budgets.min_survivals.tolist(), strict=True)
        drafted = np.array([draft_length(budget, survival, probability) for budget, survival in pairs])
        total_drafted += drafted
        # All rollouts generate equally many tokens, so that only their expected lengths differ.
        policy.advance(rows, np.ones(len(problems), np.int64), drafted)
    means = (total_drafted / steps).tolist()
    assert all(longer >= shorter - 1 for shorter, longer in pairwise(means))


def test_marginal_prefers_the_rollout_that_ends_last() -> None:
    problems = {"short": (100, 120), "long": (3000, 3100)}
    policy = MarginalWithLengths(DraftLimits(16, 1000), FixedLengths(problems))
    rows = [
        policy.open(problem, prompt_tokens=100, generated=0, max_tokens=4000) for problem in ("short", "long", "short")
    ]
    values = policy.compute_budgets(np.array(rows), H100_7B).token_values_s
    # Each of three rollouts has half of the probability 1/3 that it ends last, whatever is predicted; the last one has
    # the other half as well.
    expected = [1 / 6 * H100_7B.base_s, (1 / 2 + 1 / 6) * H100_7B.base_s, 1 / 6 * H100_7B.base_s]
    assert expected == pytest.approx(values.tolist(), rel=0.1)


def test_marginal_treats_rollouts_alike_while_many_are_queued() -> None:
    problems = {"short": (100, 120), "long": (300, 310)}
    policy = MarginalWithLengths(DraftLimits(16, 1000), FixedLengths(problems))
    rows = np.array(
        [policy.open(problem, prompt_tokens=10, generated=0, max_tokens=4000) for problem in ("short", "long")]
    )
    policy.queue = QueueState(100, 20_000.0)
    values = policy.compute_budgets(rows, H100_7B).token_values_s
    assert [H100_7B.base_s / 2] * 2 == pytest.approx(values.tolist(), rel=0.1)


def test_das_optimal_drafts_nothing_for_rollouts_that_end_before_the_batch() -> None:
    policy = DasOptimal(DraftLimits(16, 1000), FixedLengths({"long": (3000,), "short": (210,)}))
    rows = np.array(
        [policy.open(problem, prompt_tokens=10, generated=0, max_tokens=4000) for problem in ("long", "short")]
    )
    drafted = np.zeros(2, np.int64)
    for _ in range(100):
        tokens = policy.compute_budgets(rows, H100_7B).tokens
        drafted += tokens
        policy.advance(rows, 1 + tokens // 2, tokens)
    assert drafted[0] > 100
    assert 0 == drafted[1]
