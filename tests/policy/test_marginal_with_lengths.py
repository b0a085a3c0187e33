"""``marginal-with-lengths``: whose drafts are longer, and that useless predictions change nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_worker.policy.draft_policy import DraftLimits, Marginal, Position
from rollout_worker.policy.marginal_with_lengths import NUM_QUANTILES, MarginalWithLengths, expected_shares
from rollout_worker.policy.step_cost import H100_7B
from tests.support.draft_policies import FixedLengths

_REPLAN_STEPS = 64
NOWHERE = Position(None, 0, 0)
LENGTHS = {"short": [100, 110, 120, 130], "long": [1500, 1600, 1700, 1800]}


def open_rollouts(policy: Marginal, problems: list[str]) -> np.ndarray:
    return np.array([policy.open(one, prompt_tokens=50, generated=0, max_tokens=4096) for one in problems])


def advance(policy: Marginal, rows: np.ndarray, tokens: int) -> None:
    policy.advance(rows, np.full(len(rows), tokens), np.zeros(len(rows), np.int64))


def run_training_step(policy: MarginalWithLengths, lengths: dict[str, list[int]]) -> None:
    """Run rollouts of these lengths to their ends, all at the same speed."""
    ends = {}
    for problem, of_problem in lengths.items():
        for row, length in zip(open_rollouts(policy, [problem] * len(of_problem)), of_problem, strict=True):
            ends[int(row)] = length
    generated = 0
    while ends:
        rows = np.array([*ends])
        while policy.examine(rows, lambda row: NOWHERE):
            pass
        policy.compute_budgets(rows, H100_7B)
        tokens = min(10, min(ends.values()) - generated)
        advance(policy, rows, tokens)
        generated += tokens
        for row in [row for row, length in ends.items() if length == generated]:
            policy.close(row)
            del ends[row]


def values_of_step(policy: MarginalWithLengths, problems: list[str]) -> list[float]:
    rows = open_rollouts(policy, problems)
    while policy.examine(rows, lambda row: NOWHERE):
        pass
    for _ in range(_REPLAN_STEPS):
        budgets = policy.compute_budgets(rows, H100_7B)
    return budgets.token_values_s.tolist()


@settings(deadline=None)
@given(st.lists(st.floats(0, 9), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_shares_add_up_to_one_and_grow_with_the_remaining_steps(log_steps: list[float], random: object) -> None:
    quantiles = np.array(log_steps)[:, None].repeat(NUM_QUANTILES, axis=1)
    samples = np.zeros((8, len(log_steps)), np.int64)
    shares = expected_shares(quantiles, samples)
    assert float(shares.sum()) == pytest.approx(1.0)
    assert (np.diff(shares[np.argsort(log_steps)]) >= -1e-12).all()


def test_the_share_of_a_rollout_that_may_be_longest_is_the_probability_that_it_is() -> None:
    """With remaining steps far apart, only the longest rollout of a sample matters."""
    quantiles = np.array([[0.0] * 15 + [9.0], [5.0] * 16])
    samples = np.stack([np.arange(16), np.arange(16)], axis=1)
    assert expected_shares(quantiles, samples).tolist() == pytest.approx([1 / 16, 15 / 16], abs=1e-3)


def test_rollouts_that_are_expected_to_end_last_are_worth_more_once_predictions_were_right() -> None:
    policy = MarginalWithLengths(DraftLimits(16, 1000), FixedLengths(LENGTHS))
    before = values_of_step(policy, ["short", "long"])
    assert before[0] == pytest.approx(before[1])
    policy = MarginalWithLengths(DraftLimits(16, 1000), FixedLengths(LENGTHS))
    for _ in range(5):
        run_training_step(policy, LENGTHS)
    short, long = values_of_step(policy, ["short", "long"])
    assert long > 2 * short


def test_wrong_predictions_change_nothing() -> None:
    """The lengths say the opposite of what happens."""
    wrong = FixedLengths({"short": LENGTHS["long"], "long": LENGTHS["short"]})
    policy = MarginalWithLengths(DraftLimits(16, 1000), wrong)
    run_training_step(policy, LENGTHS)
    assert 0 == policy.trust
    assert len(set(values_of_step(policy, ["short", "long"]))) == 1


def test_all_rollouts_are_worth_the_same_while_others_may_wait_for_a_place() -> None:
    policy = MarginalWithLengths(DraftLimits(16, 1000, places=8), FixedLengths(LENGTHS))
    for _ in range(5):
        run_training_step(policy, {problem: lengths[:2] for problem, lengths in LENGTHS.items()})
    assert policy.trust > 0.5
    assert len(set(values_of_step(policy, ["short", "long"] * 4))) == 1


def test_nothing_is_learned_from_rollouts_that_are_followed_again() -> None:
    policy = MarginalWithLengths(DraftLimits(16, 1000), FixedLengths(LENGTHS))
    rows = open_rollouts(policy, ["short", "long"] * 4)
    for _ in range(4):
        policy.examine(rows, lambda row: NOWHERE)
    advance(policy, rows, 5)
    for row in rows.tolist():
        policy.close(row, ended=False)
    assert 0 == policy.trust
    assert values_of_step(policy, ["short", "long"]) == values_of_step(
        MarginalWithLengths(DraftLimits(16, 1000), FixedLengths(LENGTHS)), ["short", "long"]
    )


def test_few_lengths_are_predicted_in_one_step() -> None:
    """A prediction takes 0.2 to 0.3 ms."""
    policy = MarginalWithLengths(DraftLimits(16, 1000), FixedLengths(LENGTHS))
    rows = open_rollouts(policy, ["short"] * 64)
    asked: list[int] = []

    def position_of(row: int) -> Position:
        asked.append(row)
        return NOWHERE

    numbers = [policy.examine(rows, position_of) for _ in range(80)]
    assert 1 == max(numbers)
    assert sorted(asked) == sorted(rows.tolist())
    advance(policy, rows, 60)
    assert 0 == policy.examine(rows, position_of)
    advance(policy, rows, 60)
    assert policy.examine(rows, position_of) > 0
