"""Draft policies that predict lengths: limits and preferred rollouts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_worker.policy.das.policies import DasClasses, DasOptimal
from rollout_worker.policy.draft_policy import DraftLimits
from rollout_worker.policy.marginal_with_lengths import MarginalWithLengths
from rollout_worker.policy.predicted_lengths import (
    LengthPredictingPolicy,
    LengthSource,
)
from rollout_worker.policy.step_cost import H100_7B, StepCost
from tests.support.draft_policies import COSTS, FixedLengths, assert_limits_are_respected, draft_length


class Trusting(MarginalWithLengths):
    """Lets all shares follow from predictions, so that they differ."""

    trust = 1.0


PolicyFactory = Callable[[DraftLimits, LengthSource], LengthPredictingPolicy]
POLICIES: dict[str, PolicyFactory] = {
    "das-classes": DasClasses,
    "das-optimal": DasOptimal,
    "marginal-with-lengths": Trusting,
}


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES.keys())
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_budgets_respect_all_limits(make: PolicyFactory, data: st.DataObject) -> None:
    known = data.draw(st.lists(st.lists(st.integers(1, 500), max_size=5), min_size=1, max_size=4))
    lengths = FixedLengths({str(number): of_problem for number, of_problem in enumerate(known)})
    assert_limits_are_respected(lambda limits: make(limits, lengths), len(known), data)


@pytest.mark.parametrize("name", ["das-classes", "das-optimal"])
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(20, 3000), min_size=2, max_size=6, unique=True),
    probability=st.floats(0.3, 0.99),
    cost=COSTS,
)
def test_rollouts_that_are_expected_to_be_longer_get_no_fewer_draft_tokens(
    name: str, lengths: list[int], probability: float, cost: StepCost
) -> None:
    problems = {str(number): (length, length + 10) for number, length in enumerate(sorted(lengths))}
    policy = POLICIES[name](DraftLimits(16, 10_000), FixedLengths(problems))
    rows = np.array([policy.open(problem, prompt_tokens=100, generated=0, max_tokens=10_000) for problem in problems])
    total_drafted = np.zeros(len(problems))
    steps = 12
    for _ in range(steps):
        budgets = policy.compute_budgets(rows, cost)
        pairs = zip(budgets.tokens.tolist(), budgets.min_survivals.tolist(), strict=True)
        drafted = np.array([draft_length(budget, survival, probability) for budget, survival in pairs])
        total_drafted += drafted
        # All rollouts generate equally many tokens, so that only their expected lengths differ.
        policy.advance(rows, np.ones(len(problems), np.int64), drafted)
    means = (total_drafted / steps).tolist()
    assert all(longer >= shorter - 1 for shorter, longer in pairwise(means))


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
