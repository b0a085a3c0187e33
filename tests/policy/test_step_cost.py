"""The cost model of a step, with and without experts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_worker.policy.step_cost import H100_7B
from tests.support.draft_policies import COSTS

ROLLOUTS = st.integers(1, 300)


@given(cost=COSTS, rollouts=ROLLOUTS, drafted=st.integers(1, 600))
def test_the_linear_model_agrees_with_and_without_drafts(cost: tuple[float, ...], rollouts: int, drafted: int) -> None:
    exact = H100_7B._make(cost)
    linear = exact.linear_between(rollouts, drafted)
    assert 0 == linear.experts_s * linear.expert_share
    for tokens in (rollouts, rollouts + drafted):
        assert exact.step_time(tokens, 100) == pytest.approx(linear.step_time(tokens, 100))


@given(cost=COSTS, rollouts=ROLLOUTS)
def test_the_costs_of_drafts_are_differences_of_step_times(cost: tuple[float, ...], rollouts: int) -> None:
    exact = H100_7B._make(cost)
    costs = exact.draft_costs(rollouts, 20)
    without = exact.step_time(rollouts, 100)
    assert (21,) == costs.shape
    assert 0 == costs[0]
    for tokens in range(1, 21):
        assert exact.step_time(rollouts + tokens, 100, has_drafts=True) - without == pytest.approx(
            costs[tokens], abs=1e-12
        )
    assert (np.diff(costs[1:]) >= 0).all()


def test_the_first_draft_tokens_cost_most_in_a_mixture_of_experts() -> None:
    costs = np.diff(H100_7B.with_experts(8 / 128).draft_costs(2, 100))
    assert costs[0] > 10 * costs[-1] > 10 * H100_7B.per_token_s * 0.999
    assert H100_7B == H100_7B.with_experts(0.0)
