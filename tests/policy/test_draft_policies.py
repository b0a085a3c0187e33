"""Draft policies: limits, preferred rollouts, what a token is worth, and the table of running rollouts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_worker.policy.draft_policy import DraftLimits, DraftPolicy, Fixed, Marginal, RolloutTable
from rollout_worker.policy.step_cost import H100_7B
from tests.support.draft_policies import assert_limits_are_respected


@pytest.mark.parametrize("make", [Fixed, Marginal])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_budgets_respect_all_limits(make: Callable[[DraftLimits], DraftPolicy], data: st.DataObject) -> None:
    assert_limits_are_respected(make, 1, data)


def open_rollouts(policy: DraftPolicy, *prompt_tokens: int) -> np.ndarray:
    return np.array([policy.open("p", prompt_tokens=tokens, generated=0, max_tokens=4000) for tokens in prompt_tokens])


def test_an_accepted_token_is_worth_a_share_of_the_step_and_reading_the_context() -> None:
    policy = Marginal(DraftLimits(16, 1000))
    budgets = policy.compute_budgets(open_rollouts(policy, 100, 16_000), H100_7B)
    base_s, token_s, context_token_s = H100_7B[:3]
    expected = [base_s / 2 + token_s + tokens * context_token_s for tokens in (100, 16_000)]
    assert expected == pytest.approx(budgets.token_values_s.tolist())
    # A token that is accepted with the smallest permitted survival saves what it costs.
    assert [token_s] * 2 == pytest.approx((budgets.min_survivals * budgets.token_values_s).tolist())


def test_the_last_rollouts_of_a_batch_get_the_longest_drafts() -> None:
    policy = Marginal(DraftLimits(16, 1000))
    rows = open_rollouts(policy, *[100] * 64)
    few, many = (policy.compute_budgets(rows[:count], H100_7B).min_survivals[0] for count in (2, 64))
    assert few < many / 20


def test_a_token_is_worth_less_to_a_rollout_that_advances_by_several_tokens_per_step() -> None:
    policy = Marginal(DraftLimits(16, 1000))
    slow, fast = open_rollouts(policy, 100, 100).tolist()
    for _ in range(200):
        policy.advance(np.array([slow, fast]), np.array([1, 4]), np.array([0, 6]))
    values = policy.compute_budgets(np.array([slow, fast]), H100_7B).token_values_s
    context_s = 300 * H100_7B.per_context_token_s
    step_s = H100_7B.base_s / 2 + H100_7B.per_token_s + context_s
    assert [step_s, (step_s + 6 * H100_7B.per_token_s) / 4] == pytest.approx(values.tolist(), rel=0.02)


def test_the_rollouts_that_gain_most_are_served_first_when_the_step_limit_is_reached() -> None:
    policy = Marginal(DraftLimits(16, 20))
    assert [4, 16] == policy.compute_budgets(open_rollouts(policy, 10, 10_000), H100_7B).tokens.tolist()


def test_a_new_rollout_is_assumed_to_be_as_fast_as_the_running_ones() -> None:
    table = RolloutTable()

    def start(generated: int = 0) -> int:
        return table.open(prompt_tokens=1, generated=generated, max_tokens=1000)

    def step(row: int) -> None:
        table.advance(np.array([row]), np.array([3]), np.array([5]))

    a = start()
    for _ in range(200):
        step(a)
    b = start()
    assert [3.0, 3.0] == pytest.approx(table.tokens_per_step[[a, b]].tolist(), rel=0.01)
    assert [5.0, 5.0] == pytest.approx(table.drafted_per_step[[a, b]].tolist(), rel=0.01)
    # A rollout that reuses a row inherits nothing from the rollout that had it.
    table.close(a)
    step(b)
    c = start(generated=5)
    assert a == c
    assert 3.0 == pytest.approx(table.tokens_per_step[c], rel=0.01)
    table.close(b)
    table.close(c)
    d = start()
    assert (1.0, 0.0) == (table.tokens_per_step[d], table.drafted_per_step[d])


def test_each_of_many_rollouts_has_its_own_row() -> None:
    table = RolloutTable()
    rows = np.array([table.open(prompt_tokens=number, generated=0, max_tokens=1000) for number in range(100)])
    assert 100 == len(set(rows.tolist()))
    table.advance(rows, np.arange(100), np.zeros(100, np.int64))
    table.generated[rows[3]] += 500
    assert [503, 4] == table.generated[rows[[3, 4]]].tolist()
    assert [3, 99] == table.prompt_tokens[rows[[3, 99]]].tolist()
