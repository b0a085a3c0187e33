"""DAS's optimal budgets, compared with a search on a grid, and the acceptance curve."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_worker.policy.das.acceptance_curve import AcceptanceCurve
from rollout_worker.policy.das.optimal import draft_tokens_for, optimal_budgets
from rollout_worker.policy.step_cost import StepCost

RolloutParameters = tuple[float, float, float]
"""Length l, capacity k and efficiency α."""
ROLLOUTS = st.tuples(st.floats(10, 5000), st.floats(0.05, 0.95), st.floats(0.05, 1.0))
COSTS = st.builds(StepCost, st.floats(1e-4, 1e-1), st.floats(1e-6, 1e-3), st.just(0.0), st.just(0.0))


def accepted_tokens(draft_tokens: float, length: float, capacity: float, efficiency: float) -> float:
    """DAS, Eq. 5."""
    return capacity * length * float(1 - np.exp(-efficiency * draft_tokens / length))


def batch_cost(cost: StepCost, drafts: tuple[float, ...], rollouts: list[RolloutParameters]) -> float:
    """DAS's objective with the tokens that need no draft, evaluated directly."""
    steps = [one[0] - accepted_tokens(p, *one) for p, one in zip(drafts, rollouts, strict=True)]
    return cost.base_s * max(steps) + cost.per_token_s * (sum(drafts) + sum(steps))


@settings(max_examples=60, deadline=None)
@given(st.lists(ROLLOUTS, min_size=1, max_size=3), COSTS)
def test_no_budgets_on_a_grid_cost_less_than_the_optimum(rollouts: list[RolloutParameters], cost: StepCost) -> None:
    lengths, capacities, efficiencies = (np.array(column) for column in zip(*rollouts, strict=True))
    optimum = optimal_budgets(lengths, capacities, efficiencies, cost)
    lowest = batch_cost(cost, tuple(optimum.draft_tokens), rollouts)
    grids = [
        sorted({0.0, *(length / efficiency * step for step in np.geomspace(1e-3, 12, 25))})
        for length, _, efficiency in rollouts
    ]
    for drafts in itertools.product(*grids):
        assert lowest <= batch_cost(cost, drafts, rollouts) * (1 + 1e-6)
    for scale in (0.9, 0.99, 1.01, 1.1):
        assert lowest <= batch_cost(cost, tuple(optimum.draft_tokens * scale), rollouts) * (1 + 1e-6)


def test_the_solution_for_a_capacity_of_1_violates_the_constraint_for_a_smaller_one() -> None:
    """The example of docs/budgets.md."""
    length, capacity, efficiency, steps = 1000.0, 0.6, 0.5, 700.0
    for_one = -length / efficiency * np.log(steps / length)
    assert 820 == pytest.approx(length - accepted_tokens(for_one, length, capacity, efficiency))
    corrected = draft_tokens_for(steps, np.array([length]), np.array([capacity]), np.array([efficiency]))[0]
    assert (713, 1386) == (round(for_one), round(corrected))
    assert steps == pytest.approx(length - accepted_tokens(corrected, length, capacity, efficiency))


def test_the_acceptance_curve_learns_the_acceptance_rates() -> None:
    curve = AcceptanceCurve(8)
    rng = np.random.default_rng(0)
    rates = [0.8, 0.8, 0.7, 0.7, 0.6, 0.6, 0.5, 0.5]
    for _ in range(4000):
        accepted = 0
        while accepted < 8 and rng.random() < rates[accepted]:
            accepted += 1
        curve.observe(8, accepted)
    expected = np.concatenate([[0], np.cumsum(np.cumprod(rates))])
    assert expected == pytest.approx(curve.expected_accepted(), rel=0.15, abs=0.05)
    fit = curve.fit_das()
    # Two parameters cannot match all eight positions exactly.
    for drafted in (2, 4, 8):
        generated = 1 + expected[drafted]
        predicted = fit.capacity * (1 - np.exp(-fit.efficiency * drafted / generated))
        assert expected[drafted] / generated == pytest.approx(predicted, abs=0.06)


def test_a_problem_without_observations_has_the_overall_acceptance_rates() -> None:
    overall = AcceptanceCurve(4)
    for _ in range(500):
        overall.observe(4, 1)
    of_problem = AcceptanceCurve(4, prior=overall)
    assert overall.rates() == pytest.approx(of_problem.rates())
    for _ in range(500):
        of_problem.observe(4, 4)
    assert of_problem.rates()[0] > 0.9
