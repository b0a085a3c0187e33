"""Draft policies: limits, preferred rollouts and queues."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_api.length_stats import LengthStats
from rollout_worker.policy.das_policies import DasClasses, DasOptimal
from rollout_worker.policy.draft_policy import DraftLimits, DraftPolicy, QueueState
from rollout_worker.policy.marginal import Marginal
from rollout_worker.policy.rollout_table import LengthsByProblem
from rollout_worker.policy.simple_policies import Fixed
from rollout_worker.policy.step_cost import H100_7B, StepCost

COSTS = st.builds(StepCost, st.floats(1e-4, 0.1), st.floats(1e-6, 1e-2), st.floats(0, 1e-6), st.floats(0, 1e-2))
PolicyFactory = Callable[[DraftLimits, LengthsByProblem, LengthStats], DraftPolicy]
POLICIES: dict[str, PolicyFactory] = {
    "fixed": lambda limits, lengths, overall: Fixed(limits, lengths),
    "das-classes": lambda limits, lengths, overall: DasClasses(limits, lengths, lambda: overall),
    "das-optimal": lambda limits, lengths, overall: DasOptimal(limits, lengths),
    "marginal": lambda limits, lengths, overall: Marginal(limits, lengths),
}


def stats_of(*lengths: int) -> LengthStats:
    return LengthStats.from_lengths([(0, length, False) for length in lengths])


def draft_length(budget: int, min_survival: float, probability: float) -> int:
    """Return the length of a draft whose tokens all have the same acceptance probability."""
    length = 0
    while length < budget and probability ** (length + 1) >= min_survival:
        length += 1
    return length


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES.keys())
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_budgets_respect_all_limits(make: PolicyFactory, data: st.DataObject) -> None:
    """The limit of a rollout, the limit of a step, and the number of tokens that the rollout may still generate."""
    limits = DraftLimits(data.draw(st.integers(1, 64)), data.draw(st.integers(0, 200)))
    known = data.draw(st.lists(st.lists(st.integers(1, 500), max_size=5), min_size=1, max_size=4))
    lengths = [stats_of(*of_problem) for of_problem in known]
    overall = stats_of(*(length for of_problem in known for length in of_problem))
    policy = make(limits, lambda problem: lengths[int(problem)], overall)
    cost = data.draw(COSTS)
    progress: dict[int, list[int]] = {}
    """Row → generated tokens, maximum number of tokens."""
    for _ in range(data.draw(st.integers(1, 12))):
        problem = data.draw(st.integers(0, len(known) - 1))
        generated, more = data.draw(st.integers(0, 400)), data.draw(st.integers(1, 60))
        row = policy.open(str(problem), prompt_tokens=10, generated=generated, max_tokens=generated + more)
        progress[row] = [generated, generated + more]
    while progress:
        rows = list(progress)
        budgets = policy.compute_budgets(np.array(rows), cost, QueueState(data.draw(st.integers(0, 3)), 100.0))
        assert len(rows) == len(budgets.tokens) == len(budgets.min_survivals)
        assert budgets.tokens.sum() <= limits.per_step
        assert all(0 <= survival <= 1 for survival in budgets.min_survivals)
        new_tokens = []
        for row, budget in zip(rows, budgets.tokens.tolist(), strict=True):
            generated, max_tokens = progress[row]
            assert 0 <= budget <= min(limits.per_rollout, max_tokens - generated - 1)
            new_tokens.append(data.draw(st.integers(0, budget)) + 1)
            progress[row][0] = generated + new_tokens[-1]
        policy.advance(np.array(rows), np.array(new_tokens), budgets.tokens)
        for row in rows:
            if progress[row][0] == progress[row][1] or data.draw(st.booleans()):
                policy.close(row)
                del progress[row]


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
    problems = {str(number): stats_of(length, length + 10) for number, length in enumerate(sorted(lengths))}
    policy = POLICIES[name](DraftLimits(16, 10_000), problems.__getitem__, stats_of(*lengths))
    rows = np.array([policy.open(problem, prompt_tokens=100, generated=0, max_tokens=10_000) for problem in problems])
    total_drafted = np.zeros(len(problems))
    steps = 12
    for _ in range(steps):
        budgets = policy.compute_budgets(rows, cost, QueueState(queued, 500.0 * queued))
        pairs = zip(budgets.tokens.tolist(), budgets.min_survivals.tolist(), strict=True)
        drafted = np.array([draft_length(budget, survival, probability) for budget, survival in pairs])
        total_drafted += drafted
        # All rollouts generate equally many tokens, so that only their expected lengths differ.
        policy.advance(rows, np.ones(len(problems), np.int64), drafted)
    means = (total_drafted / steps).tolist()
    assert all(longer >= shorter - 1 for shorter, longer in pairwise(means))


def test_marginal_prefers_the_rollout_that_ends_last_and_rollouts_with_long_contexts() -> None:
    problems = {"short": stats_of(100, 120), "long": stats_of(3000, 3100)}
    policy = Marginal(DraftLimits(16, 1000), problems.__getitem__)
    rows = [
        policy.open(problem, prompt_tokens=prompt_tokens, generated=0, max_tokens=4000)
        for problem, prompt_tokens in (("short", 100), ("long", 100), ("short", 16_000))
    ]
    survivals = policy.compute_budgets(np.array(rows), H100_7B).min_survivals
    # Each of three rollouts has half of the probability 1/3 that it ends last, whatever is predicted; the last one has
    # the other half as well.
    cost = H100_7B.per_token_s
    assert survivals[1] == pytest.approx(cost / (cost + (1 / 2 + 1 / 6) * H100_7B.base_s), rel=0.1)
    assert survivals[0] == pytest.approx(cost / (cost + 1 / 6 * H100_7B.base_s), rel=0.1)
    # A saved step of a rollout with a long context saves reading it.
    assert survivals[1] < survivals[2] < 0.9 * survivals[0] < 0.1


def test_marginal_treats_rollouts_alike_while_many_are_queued() -> None:
    problems = {"short": stats_of(100, 120), "long": stats_of(300, 310)}
    policy = Marginal(DraftLimits(16, 1000), problems.__getitem__)
    rows = np.array(
        [policy.open(problem, prompt_tokens=10, generated=0, max_tokens=4000) for problem in ("short", "long")]
    )
    survivals = policy.compute_budgets(rows, H100_7B, QueueState(100, 20_000.0)).min_survivals
    even = 2 / (2 + H100_7B.base_s / H100_7B.per_token_s)
    assert [even, even] == pytest.approx(survivals.tolist(), rel=0.1)


def test_marginal_serves_the_most_valuable_rollouts_first_when_the_step_limit_is_reached() -> None:
    problems = {"short": stats_of(100), "long": stats_of(3000)}
    policy = Marginal(DraftLimits(16, 20), problems.__getitem__)
    rows = np.array(
        [policy.open(problem, prompt_tokens=10, generated=0, max_tokens=4000) for problem in ("short", "long")]
    )
    assert [4, 16] == policy.compute_budgets(rows, H100_7B).tokens.tolist()


def test_das_optimal_drafts_nothing_for_rollouts_that_end_before_the_batch() -> None:
    policy = DasOptimal(DraftLimits(16, 1000), lambda problem: stats_of(3000 if problem == "long" else 210))
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
