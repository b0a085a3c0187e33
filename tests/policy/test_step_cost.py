"""The cost model of a step, and fitting it to measured steps that are partly delayed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_worker.policy import cost_fit
from rollout_worker.policy.cost_fit import CostFit, TimedStep
from rollout_worker.policy.step_cost import CPU, H100_7B, CudaGraphs, StepCost
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


def test_draft_tokens_are_free_up_to_the_size_of_a_graph_and_open_a_larger_one_as_a_whole() -> None:
    graphs = CudaGraphs([16, 8, 32])
    token_s = H100_7B.per_token_s
    costs = H100_7B.draft_costs(13, 25, graphs)
    assert [0.0] * 4 + [16 * token_s] * 16 + [pytest.approx(number * token_s) for number in range(17, 23)] == [
        pytest.approx(cost) for cost in costs
    ]
    for drafted in range(26):
        with_drafts = H100_7B.step_time(13 + drafted, 100, graphs=graphs)
        assert costs[drafted] == pytest.approx(with_drafts - H100_7B.step_time(13, 100, graphs=graphs), abs=1e-12)


def test_a_step_with_a_prompt_is_padded_as_a_whole() -> None:
    cost, graphs = H100_7B._replace(per_prompt_token_s=1e-6), CudaGraphs([8, 64])
    padded = cost.step_time(64 - 40, 0) + 40e-6
    assert padded == pytest.approx(cost.step_time(3, 0, prompt_tokens=40, graphs=graphs))
    # There is no graph for larger steps.
    assert cost.step_time(3, 0) + 80e-6 == pytest.approx(cost.step_time(3, 0, prompt_tokens=80, graphs=graphs))


def random_steps(cost: StepCost, count: int, seed: int = 0, noise: float = 0.02) -> list[TimedStep]:
    """Return steps of random batches. Some were delayed by something else."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(count):
        rollouts = int(rng.integers(1, 128))
        tokens = rollouts * int(rng.integers(1, 9))
        context_tokens = rollouts * int(rng.integers(100, 16_000))
        seconds = cost.step_time(tokens, context_tokens) * (1 + noise * rng.standard_normal())
        if rng.random() < 0.05:
            seconds *= rng.uniform(2, 20)
        steps.append(TimedStep(tokens, context_tokens, False, seconds))
    return steps


@pytest.mark.parametrize("truth", [H100_7B, StepCost(45e-3, 3.2e-3, 1e-7), StepCost(2e-3, 5e-6, 30e-9)])
def test_the_fit_finds_the_true_cost_whatever_the_prior_and_despite_delays(truth: StepCost) -> None:
    fit = CostFit(CPU)
    for step in random_steps(truth, 2000):
        fit.observe(step)
    assert truth.base_s == pytest.approx(fit.cost.base_s, rel=0.1)
    assert truth.step_time(200, 500_000) == pytest.approx(fit.cost.step_time(200, 500_000), rel=0.03)
    assert truth.step_time(8, 1000) == pytest.approx(fit.cost.step_time(8, 1000), rel=0.05)
    assert fit.median_relative_error < 0.05


def test_coefficients_that_steps_do_not_determine_keep_their_proportion() -> None:
    fit = CostFit(H100_7B)
    for _ in range(256):
        fit.observe(TimedStep(1, 1000, True, 2 * H100_7B.step_time(1, 1000)))
    assert H100_7B.base_s / H100_7B.per_token_s == pytest.approx(fit.cost.base_s / fit.cost.per_token_s, rel=0.01)
    assert 2 * H100_7B.step_time(1, 1000) == pytest.approx(fit.cost.step_time(1, 1000), rel=0.01)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.8])
def test_the_fixed_cost_of_drafts_is_told_apart_from_the_cost_of_their_tokens(share: float) -> None:
    truth = StepCost(3e-3, 50e-6, 1e-7, share * 3e-3)
    fit, rng = CostFit(CPU), np.random.default_rng(1)
    for number in range(800):
        rollouts, context_tokens = int(rng.integers(1, 64)), int(rng.integers(1000, 50_000))
        has_drafts = number % 20 > 0
        tokens = rollouts + has_drafts * int(rng.integers(1, 3 * rollouts + 2))
        seconds = truth.step_time(tokens, context_tokens, has_drafts=has_drafts)
        seconds *= 1 + 0.05 * rng.standard_normal()
        fit.observe(TimedStep(tokens, context_tokens, not has_drafts, seconds, has_drafts))
    assert truth.drafting_s == pytest.approx(fit.cost.drafting_s, abs=0.04 * truth.base_s)
    assert truth.base_s == pytest.approx(fit.cost.base_s, rel=0.08)
    assert truth.per_token_s == pytest.approx(fit.cost.per_token_s, rel=0.08)


def test_few_steps_of_a_busy_machine_do_not_mislead_the_fit() -> None:
    """The machine's speed changes every 20 steps, and one step in eight is delayed by 15 ms on average."""
    truth = StepCost(2.9e-3, 95e-6, 0.1e-9, 0.2e-3)
    draft_cost = truth.draft_costs(32, 40)[40]
    for seed in range(200):
        rng, fit, slowness = np.random.default_rng(seed), CostFit(CPU), 1.0
        for _ in range(200):
            if rng.random() < 0.05:
                slowness = np.exp(rng.normal(0, 0.25))
            drafted = int(rng.integers(1, 70)) if rng.random() < 0.65 else 0
            seconds = truth.step_time(32 + drafted, 3200, has_drafts=drafted > 0)
            seconds *= slowness * np.exp(abs(rng.normal(0, 0.15)))
            if rng.random() < 0.12:
                seconds += rng.exponential(15e-3)
            fit.observe(TimedStep(32 + drafted, 3200, not drafted, seconds, drafted > 0))
            if fit.num_steps >= 16:
                assert fit.cost.draft_costs(32, 40)[40] / fit.cost.step_time(32, 3200) < (
                    1.6 * draft_cost / truth.step_time(32, 3200)
                )


def test_no_coefficient_becomes_zero() -> None:
    """If tokens appeared to be free, any number of them would be drafted."""
    fit, rng = CostFit(CPU), np.random.default_rng(2)
    for _ in range(256):
        tokens = int(rng.integers(1, 17))
        seconds = (4.5 if tokens == 1 else 6.0 - 0.05 * tokens) * 1e-3
        fit.observe(TimedStep(tokens, 200, tokens == 1, seconds, tokens > 1))
    assert min(fit.cost[:4]) > 0
    assert fit.cost.per_token_s < CPU.per_token_s / 20


def test_the_fit_follows_a_change_of_the_cost() -> None:
    fit = CostFit(H100_7B)
    for step in random_steps(H100_7B, 500):
        fit.observe(step)
    slower = H100_7B._replace(base_s=2 * H100_7B.base_s)
    for step in random_steps(slower, 1500, seed=1):
        fit.observe(step)
    assert slower.base_s == pytest.approx(fit.cost.base_s, rel=0.15)


def test_no_coefficient_is_below_its_limit_even_if_all_would_be() -> None:
    prior = np.ones(3)
    solution = cost_fit._solve(np.ones((1, 3)), np.array([-10.0]), np.ones(1), prior, prior_weight=0.1)
    assert (0.01 * prior == solution).all()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.builds(
            TimedStep,
            st.integers(1, 4096),
            st.integers(0, 2_000_000),
            st.booleans(),
            st.floats(1e-6, 1e3) | st.just(0.0),
            st.booleans(),
            st.integers(0, 8192),
        ),
        min_size=1,
        max_size=80,
    )
)
def test_coefficients_and_predictions_are_always_finite_and_not_negative(observed: list[TimedStep]) -> None:
    fit = CostFit(H100_7B)
    for step in observed:
        fit.observe(step)
        assert min(fit.cost) >= 0
        assert sum(fit.cost) > 0
        assert np.isfinite(fit.cost.step_time(10, 1000))


def test_a_prior_with_a_free_coefficient_is_rejected() -> None:
    with pytest.raises(ValueError, match="every coefficient of the prior must be positive"):
        CostFit(StepCost(1.0, 1.0))


def test_the_fit_learns_from_padded_sizes_and_from_steps_with_prompts() -> None:
    truth, graphs = H100_7B._replace(per_prompt_token_s=60e-6), CudaGraphs([1, 2, 4, *range(8, 257, 8)])
    fit, rng = CostFit(StepCost(12e-3, 80e-6, 30e-9), graphs), np.random.default_rng(0)
    for _ in range(800):
        tokens, context_tokens = int(rng.integers(1, 300)), int(rng.integers(100, 400_000))
        prompt_tokens = int(rng.integers(1, 2000)) if rng.random() < 0.4 else 0
        seconds = truth.step_time(tokens, context_tokens, prompt_tokens=prompt_tokens, graphs=graphs)
        seconds *= 1 + 0.02 * rng.standard_normal()
        fit.observe(TimedStep(tokens, context_tokens, False, seconds, False, prompt_tokens))
    for name in ("base_s", "per_token_s", "per_context_token_s", "per_prompt_token_s"):
        assert getattr(truth, name) == pytest.approx(getattr(fit.cost, name), rel=0.08)


def test_only_the_first_step_of_each_graph_is_ignored() -> None:
    fit = CostFit(H100_7B, CudaGraphs([8, 16, 24]))
    sizes = [3, 8, 1, 9, 16, 12, 17, 18, 100, 120, 65, 300]
    representative = [fit.observe(TimedStep(tokens, 0, True, 0.01)) for tokens in sizes]
    # Larger steps run without a graph; the first one between two powers of two is ignored.
    assert [False, True, True, False, True, True, False, True, False, True, True, False] == representative


def test_first_steps_count_if_most_steps_are_first_ones() -> None:
    fit = CostFit(CPU)
    representative = [fit.observe(TimedStep(tokens, 0, True, 0.01)) for tokens in range(1, 201)]
    assert not any(representative[:16])
    assert sum(representative) > 80
