from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_worker.policy.cost_fit import CostFit, Step
from rollout_worker.policy.step_cost import CPU, H100_7B, StepCost


def steps(cost: StepCost, count: int, seed: int = 0, noise: float = 0.02) -> list[Step]:
    """As a batch with drafts has them, some of which wait for something else."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        rollouts = int(random.integers(1, 128))
        tokens = rollouts * int(random.integers(1, 9))
        context = rollouts * int(random.integers(100, 16_000))
        seconds = cost.time(tokens, context) * (1 + noise * random.standard_normal())
        if random.random() < 0.05:
            seconds *= random.uniform(2, 20)
        found.append(Step(tokens, context, False, seconds))
    return found


@pytest.mark.parametrize("truth", [H100_7B, StepCost(45e-3, 3.2e-3, 1e-7), StepCost(2e-3, 5e-6, 30e-9)])
def test_what_steps_cost_is_found_whatever_was_assumed_and_though_some_wait(truth: StepCost) -> None:
    fit = CostFit(CPU)
    for step in steps(truth, 2000):
        fit.observe(step)
    assert truth.base == pytest.approx(fit.cost.base, rel=0.1)
    assert truth.time(200, 500_000) == pytest.approx(fit.cost.time(200, 500_000), rel=0.03)
    assert truth.time(8, 1000) == pytest.approx(fit.predict(8, 1000, uniform=False), rel=0.05)
    assert fit.error < 0.05


def test_what_steps_do_not_tell_keeps_its_proportion() -> None:
    fit = CostFit(H100_7B)
    for _ in range(256):
        fit.observe(Step(1, 1000, True, 2 * H100_7B.time(1, 1000)))
    assert H100_7B.base_tokens == pytest.approx(fit.cost.base_tokens, rel=0.01)
    assert 2 * H100_7B.time(1, 1000) == pytest.approx(fit.cost.time(1, 1000), rel=0.01)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.8])
def test_what_drafts_cost_at_all_is_told_from_what_each_token_costs(share: float) -> None:
    truth = StepCost(3e-3, 50e-6, 1e-7, share * 3e-3)
    fit, random = CostFit(CPU), np.random.default_rng(1)
    for number in range(800):
        rollouts, context = int(random.integers(1, 64)), int(random.integers(1000, 50_000))
        drafts = number % 20 > 0
        tokens = rollouts + drafts * int(random.integers(1, 3 * rollouts + 2))
        seconds = truth.time(tokens, context, drafts=drafts) * (1 + 0.05 * random.standard_normal())
        fit.observe(Step(tokens, context, not drafts, seconds, drafts))
    assert truth.drafting == pytest.approx(fit.cost.drafting, abs=0.04 * truth.base)
    assert truth.base == pytest.approx(fit.cost.base, rel=0.08)
    assert truth.per_token == pytest.approx(fit.cost.per_token, rel=0.08)


def test_nothing_is_free_even_where_steps_take_as_long_whatever_they_verify() -> None:
    """Else drafts would be worth any number of tokens."""
    fit, random = CostFit(CPU), np.random.default_rng(2)
    for _ in range(256):
        tokens = int(random.integers(1, 17))
        fit.observe(Step(tokens, 200, tokens == 1, (4.5 if tokens == 1 else 6.0 - 0.05 * tokens) * 1e-3, tokens > 1))
    assert min(fit.cost) > 0
    assert fit.cost.per_token < CPU.per_token / 20


def test_the_fit_follows_what_changes() -> None:
    fit = CostFit(H100_7B)
    for step in steps(H100_7B, 500):
        fit.observe(step)
    slower = StepCost(2 * H100_7B.base, H100_7B.per_token, H100_7B.per_context)
    for step in steps(slower, 1500, seed=1):
        fit.observe(step)
    assert slower.base == pytest.approx(fit.cost.base, rel=0.15)


def test_what_is_peculiar_to_a_kind_of_step_is_learned() -> None:
    """Uneven drafts run in pieces on GPUs, and cost more."""
    fit = CostFit(H100_7B)
    random = np.random.default_rng(0)
    for _ in range(1000):
        rollouts = int(random.integers(16, 33))
        uniform = bool(random.integers(2))
        seconds = H100_7B.time(rollouts * 4, rollouts * 1000) * (1.0 if uniform else 1.3)
        fit.observe(Step(rollouts * 4, rollouts * 1000, uniform, seconds))
    ratio = fit.predict(96, 24_000, uniform=False) / fit.predict(96, 24_000, uniform=True)
    assert 1.3 == pytest.approx(ratio, rel=0.1)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.builds(
            Step,
            st.integers(1, 4096),
            st.integers(0, 2_000_000),
            st.booleans(),
            st.floats(1e-6, 1e3) | st.just(0.0),
        ),
        min_size=1,
        max_size=80,
    )
)
def test_no_cost_is_ever_negative_or_undefined(observed: list[Step]) -> None:
    fit = CostFit(H100_7B)
    for step in observed:
        fit.observe(step)
        assert min(fit.cost) >= 0
        assert sum(fit.cost) > 0
        assert np.isfinite(fit.predict(10, 1000, uniform=True))


def test_a_prior_without_a_price_is_refused() -> None:
    with pytest.raises(ValueError, match="no part of a prior may be free"):
        CostFit(StepCost(1.0, 1.0))
