"""``marginal-with-lengths``: whose drafts are longer, and that useless predictions change nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_worker.policy.draft_policy import DraftLimits, Marginal, Position
from rollout_worker.policy.marginal_with_lengths import NUM_QUANTILES, MarginalWithLengths, expected_shares
from rollout_worker.policy.predicted_lengths import LengthSource
from rollout_worker.policy.step_cost import H100_7B
from tests.support.draft_policies import FixedLengths

_REPLAN_STEPS = 64
NOWHERE = Position(None, 0, 0)
LENGTHS = {"short": [100, 110, 120, 130], "long": [1500, 1600, 1700, 1800]}

KNOWN = FixedLengths(LENGTHS)


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
        examine_all(policy, rows)
        policy.compute_budgets(rows, H100_7B)
        tokens = min(10, min(ends.values()) - generated)
        advance(policy, rows, tokens)
        generated += tokens
        for row in [row for row, length in ends.items() if length == generated]:
            policy.close(row)
            del ends[row]


def examine_all(policy: MarginalWithLengths, rows: np.ndarray) -> None:
    while policy.examine(rows, lambda row: NOWHERE) or policy.is_learning:
        pass


def values_of_step(policy: MarginalWithLengths, problems: list[str]) -> list[float]:
    rows = open_rollouts(policy, problems)
    examine_all(policy, rows)
    for _ in range(2 * _REPLAN_STEPS):
        budgets = policy.compute_budgets(rows, H100_7B)
    for row in rows.tolist():
        policy.close(row, ended=False)
    return budgets.token_values_s.tolist()


def trained(lengths: LengthSource = KNOWN, *, places: int = 1000) -> MarginalWithLengths:
    """Return a policy that has learned from five training steps."""
    policy = MarginalWithLengths(DraftLimits(16, 1000, places=places), lengths)
    for _ in range(5):
        run_training_step(policy, LENGTHS)
    return policy


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
    short, long = values_of_step(trained(), ["short", "long"])
    assert long > 2 * short


def test_slow_rollouts_are_worth_more_than_fast_ones_of_the_same_length() -> None:
    policy = trained()
    rows = open_rollouts(policy, ["long", "long"])
    examine_all(policy, rows)
    policy._rollouts.tokens_per_step[rows] = [1.0, 2.0]
    for _ in range(2 * _REPLAN_STEPS):
        values = policy.compute_budgets(rows, H100_7B).step_values_s
    assert values is not None
    assert values[0] > values[1]


def test_shares_do_not_amplify_themselves() -> None:
    """The speed of a rollout depends on its share, and its share on its speed."""
    policy = trained()
    rows = open_rollouts(policy, ["long"] * 3 + ["short"])
    examine_all(policy, rows)
    ratios = []
    for step in range(20 * _REPLAN_STEPS):
        values = policy.compute_budgets(rows, H100_7B).step_values_s
        if values is None:
            continue
        policy._rollouts.tokens_per_step[rows] = np.maximum(1.0, 2.0 * (values / values.mean()) ** 0.15)
        if step % _REPLAN_STEPS == 0:
            ratios.append(float(values[0] / values[3]))
    assert ratios[-1] == pytest.approx(ratios[1], rel=0.3)


def test_the_shares_of_an_earlier_plan_do_not_survive_a_full_batch() -> None:
    policy = trained(places=5)
    rows = open_rollouts(policy, ["long", "short"])
    examine_all(policy, rows)
    for _ in range(2 * _REPLAN_STEPS):
        policy.compute_budgets(rows, H100_7B)
    planned = policy._factors[rows].tolist()
    assert planned[0] > 1.5
    others = open_rollouts(policy, ["long", "short", "long"])
    policy.compute_budgets(np.concatenate([rows, others]), H100_7B)
    assert [1.0, 1.0] == policy._factors[rows].tolist()


def test_what_happens_counts_more_than_what_the_known_lengths_say() -> None:
    """They say the opposite, which is learned."""
    short, long = values_of_step(
        trained(FixedLengths({"short": LENGTHS["long"], "long": LENGTHS["short"]})), ["short", "long"]
    )
    assert short <= long


@pytest.mark.parametrize("factor", [0.3, 0.7, 1.5, 3.0])
def test_lengths_that_are_wrong_for_all_rollouts_alike_explain_nothing(factor: float) -> None:
    """All problems are alike, so that no source can tell rollouts apart."""
    generator = np.random.default_rng(2)
    problems = [str(number) for number in range(8)]
    known = FixedLengths({problem: [int(600 * factor)] * 4 for problem in problems})
    policy = MarginalWithLengths(DraftLimits(16, 1000), known)
    for _ in range(8):
        run_training_step(
            policy, {problem: [int(one) for one in generator.normal(600, 100, 4).clip(100)] for problem in problems}
        )
    examine_all(policy, open_rollouts(policy, problems))
    assert policy.trust < 0.35


def test_all_rollouts_are_worth_the_same_while_others_may_wait_for_a_place() -> None:
    policy = trained(places=8)
    assert policy.trust > 0.5
    assert len(set(values_of_step(policy, ["short", "long"] * 4))) == 1
    rows = open_rollouts(policy, ["short", "long"] * 4)
    examine_all(policy, rows)
    policy.compute_budgets(rows, H100_7B)
    values = [policy.compute_budgets(rows[:7], H100_7B).step_values_s for _ in range(2 * _REPLAN_STEPS)]
    # Between the end of a rollout and the start of the next one, a place is free for a few steps.
    assert values[:8] == [None] * 8
    assert values[-1] is not None


def test_nothing_is_learned_from_rollouts_that_have_not_ended() -> None:
    learned, aborted = trained(), trained()
    for policy, ended in ((learned, True), (aborted, False)):
        for _ in range(8):
            rows = open_rollouts(policy, ["long"] * 8)
            examine_all(policy, rows)
            advance(policy, rows, 300)
            for row in rows.tolist():
                policy.close(row, ended=ended)
        examine_all(policy, open_rollouts(policy, ["short"]))
    unchanged = trained()
    examine_all(unchanged, open_rollouts(unchanged, ["short"]))
    assert unchanged.explained_lengths == aborted.explained_lengths != learned.explained_lengths


def test_the_first_rollouts_that_end_are_learned_from_together_with_the_others() -> None:
    policy = MarginalWithLengths(DraftLimits(16, 1000), FixedLengths(LENGTHS))
    rows = open_rollouts(policy, ["short", "long"] * 8)
    examine_all(policy, rows)
    advance(policy, rows, 100)
    for row in rows[:10].tolist():
        policy.close(row)
    policy.close(int(rows[10]), ended=False)
    assert not policy.is_learning
    for row in rows[11:].tolist():
        policy.close(row)
    assert policy.is_learning
    # One in each step, because each takes a fraction of a millisecond.
    for _ in range(14):
        policy.examine(rows[:0], lambda row: NOWHERE)
        assert policy.is_learning
    policy.examine(rows[:0], lambda row: NOWHERE)
    assert not policy.is_learning


def test_rollouts_without_a_prediction_are_worth_the_mean() -> None:
    policy = trained()
    rows = open_rollouts(policy, ["short", "long"])
    examine_all(policy, rows)
    new = open_rollouts(policy, ["short"] * 2)
    everything = np.concatenate([rows, new])
    for _ in range(2 * _REPLAN_STEPS):
        policy.compute_budgets(everything, H100_7B)
    short, long, *others = policy._factors[everything].tolist()
    assert others == [1.0, 1.0]
    assert short < 1.0 < long


def test_few_lengths_are_predicted_in_one_step() -> None:
    """A prediction takes a fraction of a millisecond."""
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
