from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_worker.policy.acceptance_curve import AcceptanceCurve
from rollout_worker.policy.das_optimal import drafts_for, optimal_budgets
from rollout_worker.policy.step_cost import StepCost

ROLLOUT = st.tuples(st.floats(10, 5000), st.floats(0.05, 0.95), st.floats(0.05, 1.0))
COST = st.builds(StepCost, st.floats(1e-4, 1e-1), st.floats(1e-6, 1e-3), st.just(0.0), st.just(0.0))


def accepted(p: float, length: float, share: float, efficiency: float) -> float:
    return share * length * float(1 - np.exp(-efficiency * p / length))


def total(cost: StepCost, drafts: tuple[float, ...], rollouts: list[tuple[float, float, float]]) -> float:
    """DAS's objective, written down without solving anything."""
    steps = [one[0] - accepted(p, *one) for p, one in zip(drafts, rollouts, strict=True)]
    return cost.base * max(steps) + cost.per_token * (sum(drafts) + sum(steps))


@settings(max_examples=60, deadline=None)
@given(st.lists(ROLLOUT, min_size=1, max_size=3), COST)
def test_no_budgets_on_a_grid_are_cheaper(rollouts: list[tuple[float, float, float]], cost: StepCost) -> None:
    lengths, shares, efficiencies = (np.array(column) for column in zip(*rollouts, strict=True))
    found = optimal_budgets(lengths, shares, efficiencies, cost)
    best = total(cost, tuple(found.drafts), rollouts)
    grids = [
        sorted({0.0, *(length / efficiency * step for step in np.geomspace(1e-3, 12, 25))})
        for length, _, efficiency in rollouts
    ]
    for drafts in itertools.product(*grids):
        assert best <= total(cost, drafts, rollouts) * (1 + 1e-6)
    for scale in (0.9, 0.99, 1.01, 1.1):
        assert best <= total(cost, tuple(found.drafts * scale), rollouts) * (1 + 1e-6)


@settings(deadline=None)
@given(st.lists(ROLLOUT, min_size=1, max_size=20), COST)
def test_all_that_are_drafted_for_end_together_and_none_later(
    rollouts: list[tuple[float, float, float]], cost: StepCost
) -> None:
    lengths, shares, efficiencies = (np.array(column) for column in zip(*rollouts, strict=True))
    found = optimal_budgets(lengths, shares, efficiencies, cost)
    assert (found.drafts >= 0).all()
    for drafted, one in zip(found.drafts, rollouts, strict=True):
        steps = one[0] - accepted(drafted, *one)
        assert steps <= found.steps * (1 + 1e-6)
        if drafted > 0:
            assert found.steps == pytest.approx(steps, rel=1e-6)


def test_the_form_for_drafts_that_may_all_be_accepted_misses_the_constraint_where_they_may_not() -> None:
    """DAS's Eq. 7 holds its own constraint only where k = 1, where it is this."""
    length, share, efficiency, steps = 1000.0, 0.6, 0.5, 700.0
    as_if_all = -length / efficiency * np.log(steps / length)
    assert length - accepted(as_if_all, length, share, efficiency) - steps > 100
    ours = drafts_for(steps, np.array([length]), np.array([share]), np.array([efficiency]))[0]
    assert steps == pytest.approx(length - accepted(ours, length, share, efficiency))


def test_free_tokens_are_drafted_as_far_as_it_goes_and_nobody_is_no_problem() -> None:
    found = optimal_budgets(np.array([100.0]), np.array([0.5]), np.array([0.5]), StepCost(1.0, 0.0))
    assert 50 == pytest.approx(found.steps, rel=1e-3)
    assert 0 == optimal_budgets(np.zeros(0), np.zeros(0), np.zeros(0), StepCost(1.0, 1.0)).steps


def test_the_curve_of_acceptance_finds_what_drafts_have_accepted() -> None:
    curve = AcceptanceCurve(8)
    random = np.random.default_rng(0)
    rates = [0.8, 0.8, 0.7, 0.7, 0.6, 0.6, 0.5, 0.5]
    for _ in range(4000):
        accepted = 0
        while accepted < 8 and random.random() < rates[accepted]:
            accepted += 1
        curve.observe(8, accepted)
    expected = np.concatenate([[0], np.cumsum(np.cumprod(rates))])
    assert expected == pytest.approx(curve.accepted(), rel=0.15, abs=0.05)
    das = curve.das()
    # the formula has two parameters for eight places: near, not equal
    for drafted in (2, 4, 8):
        said = 1 + expected[drafted]
        assert expected[drafted] / said == pytest.approx(
            das.share * (1 - np.exp(-das.efficiency * drafted / said)), abs=0.06
        )


def test_a_problem_of_which_little_is_known_is_as_all_are() -> None:
    everything = AcceptanceCurve(4)
    for _ in range(500):
        everything.observe(4, 1)
    own = AcceptanceCurve(4, prior=everything)
    assert everything.rates() == pytest.approx(own.rates())
    for _ in range(500):
        own.observe(4, 4)
    assert own.rates()[0] > 0.9
