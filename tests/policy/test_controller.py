"""Draft policies and the controller of an engine: what a token is worth, and which drafts are verified."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_store.arrays import Integers
from rollout_worker.policy.controller import DraftController, IdleBackoff
from rollout_worker.policy.draft_policy import DraftBudgets, DraftLimits, DraftPolicy, Fixed, Marginal, RolloutTable
from rollout_worker.policy.governor import StepOutcome, Trial
from rollout_worker.policy.step_cost import CPU, H100_7B, StepCost
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


ROLLOUTS, MAX_DRAFT_TOKENS = 4, 32


def make_controller(policy: DraftPolicy | None = None, *, governed: bool = True) -> DraftController:
    policy = policy or Fixed(DraftLimits(MAX_DRAFT_TOKENS, 1000))
    controller = DraftController(policy, CPU, governed=governed)
    for _ in range(ROLLOUTS):
        controller.open("p", prompt_tokens=10, generated=0, max_tokens=10**9)
    return controller


def run_steps(
    controller: DraftController,
    true_cost: StepCost,
    steps: int,
    *,
    accepted_tokens: float,
    draft_tokens: int = 6,
    preparation_s: float = 0.0,
) -> list[bool]:
    """Simulate steps and return whether each verified any drafts.

    Args:
        controller: makes the decisions.
        true_cost: determines the durations of the steps.
        steps: number of steps.
        accepted_tokens: number of tokens of each draft that are expected to be accepted, and are.
        draft_tokens: length of the drafts; their maximum length if *preparation_s* is given.
        preparation_s: seconds that the first step with each number of tokens takes in addition.
    """
    rows, lengths = np.arange(ROLLOUTS), np.full(ROLLOUTS, draft_tokens)
    rng, prepared = np.random.default_rng(0), set[int]()
    verified = np.zeros(ROLLOUTS, np.int64)
    had_drafts = []
    for _ in range(steps):
        accepted = np.where(verified > 0, round(accepted_tokens), 0)
        expected = np.where(verified > 0, accepted_tokens, 0.0)
        context_tokens = np.full(ROLLOUTS, 100)
        tokens = ROLLOUTS + int(verified.sum())
        seconds = true_cost.step_time(tokens, int(context_tokens.sum()), has_drafts=bool(verified.any()))
        if preparation_s:
            seconds += preparation_s * (tokens not in prepared)
            prepared.add(tokens)
            lengths = rng.integers(1, draft_tokens + 1, ROLLOUTS)
        outcome = StepOutcome(rows, accepted + 1, verified, expected, context_tokens, controller.governor.trial)
        controller.observe_step(outcome, seconds)
        if controller.skip_step():
            verified = np.zeros(ROLLOUTS, np.int64)
        else:
            budgets = controller.compute_budgets(rows)
            proposed = np.minimum(lengths, budgets.tokens)
            saved_s = np.where(proposed > 0, accepted_tokens, 0.0) * budgets.token_values_s
            gain_s = float(saved_s.sum() - controller.draft_costs_s[proposed.sum()])
            verified = np.zeros(ROLLOUTS, np.int64)
            if gain_s > controller.min_gain_s:
                verified = proposed
            elif proposed.any():
                selected = controller.select_trial(rows, proposed, gain_s)
                if selected is not None:
                    verified[selected] = proposed[selected]
            controller.record_drafts(int(np.count_nonzero(proposed)))
        had_drafts.append(bool(verified.any()))
    return had_drafts


def test_drafts_that_pay_are_verified_except_in_few_steps() -> None:
    had_drafts = run_steps(make_controller(), CPU, 2048, accepted_tokens=4.0)
    assert had_drafts[0]
    assert 2048 - 4 - 2048 // 256 - 10 <= sum(had_drafts) + 4 < 2048


def test_drafts_are_never_longer_than_the_largest_cuda_graph() -> None:
    def finite_costs(policy: DraftPolicy, rollouts: int) -> list[bool]:
        controller = DraftController(policy, CPU, graph_sizes=[10])
        rows = np.array([controller.open("p", prompt_tokens=1, generated=0, max_tokens=100) for _ in range(rollouts)])
        controller.compute_budgets(rows)
        finite: list[bool] = np.isfinite(controller.draft_costs_s).tolist()
        return finite

    limits = DraftLimits(8, 1000)
    assert [True] * 7 + [False] * 26 == finite_costs(Marginal(limits), 4)
    # There is no graph for so many rollouts anyway.
    assert [True] * (12 * 8 + 1) == finite_costs(Marginal(limits), 12)
    # This policy does not take the cost into account.
    assert [True] * (4 * 8 + 1) == finite_costs(Fixed(limits), 4)


def test_drafts_fill_a_cuda_graph_but_do_not_open_a_larger_one_for_a_token() -> None:
    controller = DraftController(Marginal(DraftLimits(8, 1000)), H100_7B, graph_sizes=[8, 16, 32])
    rows = np.array([controller.open("p", prompt_tokens=1, generated=0, max_tokens=100) for _ in range(5)])
    budgets = controller.compute_budgets(rows)
    # Tokens that pay only half of their cost are drafted, because they may be free.
    assert (H100_7B.per_token_s / budgets.token_values_s / 2).tolist() == pytest.approx(budgets.min_survivals.tolist())
    free, costly = controller.draft_costs_s[1:4], controller.draft_costs_s[4:12]
    assert [controller.fit.cost.drafting_s] * 3 == free.tolist()
    assert [8 * H100_7B.per_token_s] * 8 == pytest.approx((costly - free[0]).tolist())


def test_steps_with_prompts_and_of_micro_batches_are_learned_from() -> None:
    controller = DraftController(Fixed(DraftLimits(8, 1000)), H100_7B, graph_sizes=[4, 20])
    rows = np.array([controller.open("p", prompt_tokens=1, generated=0, max_tokens=10**9) for _ in range(8)])
    rng, true_cost = np.random.default_rng(0), StepCost(8e-3, 100e-6, 20e-9, 4e-3, per_prompt_token_s=50e-6)
    decoding_s = 0.0
    for step in range(300):
        batch = rows[:4] if step % 2 else rows[4:]
        is_reference = controller.governor.is_reference_step
        drafted = np.full(4, 0 if is_reference else 4)
        prompt_tokens = int(rng.integers(500, 1000)) if rng.random() < 0.5 else 0
        outcome = StepOutcome(
            batch, np.where(drafted, 2, 1), drafted, drafted / 4, np.full(4, 100), None, prompt_tokens=prompt_tokens
        )
        tokens = 4 + int(drafted.sum())
        seconds = true_cost.step_time(tokens, 400, has_drafts=not is_reference, prompt_tokens=prompt_tokens)
        decoding_s += true_cost.step_time(tokens, 400, has_drafts=not is_reference)
        controller.compute_budgets(rows, 4)
        controller.record_drafts(4)
        controller.observe_step(outcome, seconds)
    assert 280 < controller.fit.num_steps
    assert true_cost.per_prompt_token_s == pytest.approx(controller.fit.cost.per_prompt_token_s, rel=0.05)
    gain = controller.governor.gain
    assert np.log(2 / (13.6 / 8.4)) == pytest.approx(gain.value, abs=0.05)
    assert gain.value > gain.error
    # The time for prompts is not part of what drafts can save.
    assert decoding_s == pytest.approx(controller.timed_s, rel=0.05)


def test_the_time_to_read_experts_is_learned() -> None:
    rng, true_cost = np.random.default_rng(0), StepCost(2e-3, 10e-6, 1e-9, 0.0, 15e-3, 8 / 128)
    controller = DraftController(Fixed(DraftLimits(8, 1000)), H100_7B.with_experts(8 / 128))
    for _ in range(20):
        controller.open("p", prompt_tokens=10, generated=0, max_tokens=10**9)
    for _ in range(500):
        rows = np.arange(rng.integers(2, 20))
        drafted = rng.integers(0, 6, len(rows))
        context = np.full(len(rows), 100)
        seconds = true_cost.step_time(len(rows) + int(drafted.sum()), int(context.sum()))
        outcome = StepOutcome(rows, np.ones(len(rows), np.int64), drafted, np.zeros(len(rows)), context)
        controller.observe_step(outcome, seconds)
        controller.observe_step(outcome, seconds)  # the first step of a size is not representative
    assert true_cost.draft_costs(4, 16) == pytest.approx(controller.fit.cost.draft_costs(4, 16), rel=0.05)


def test_drafting_stops_when_the_fixed_cost_of_verifying_drafts_exceeds_their_benefit() -> None:
    expensive = CPU._replace(drafting_s=3 * CPU.base_s)
    assert sum(run_steps(make_controller(), CPU, 1000, accepted_tokens=1.0)[500:]) > 480
    assert sum(run_steps(make_controller(), expensive, 1000, accepted_tokens=1.0)[500:]) < 25


class OneRolloutMatters(Fixed):
    """Drafts for the first rollout only, because the batch waits for no other."""

    def compute_budgets(self, rows: Integers, cost: StepCost) -> DraftBudgets:
        is_first = rows == rows[0]
        budgets = super().compute_budgets(rows, cost)
        return budgets._replace(tokens=budgets.tokens * is_first, step_values_s=is_first.astype(float))


@pytest.mark.parametrize(("accepted", "pays"), [(4.0, True), (0.2, False)])
def test_drafts_for_the_only_rollout_that_the_batch_waits_for_need_not_help_the_others(
    accepted: float, *, pays: bool
) -> None:
    """Its drafts make steps 43 % longer, and save the batch up to 80 % of them, but the average rollout only 20 %."""
    cost = StepCost(base_s=10e-3, per_token_s=1e-3, per_context_token_s=0.0)
    controller = make_controller(OneRolloutMatters(DraftLimits(MAX_DRAFT_TOKENS, 1000)))
    had_drafts = run_steps(controller, cost, 2048, accepted_tokens=accepted)
    assert pays == (sum(had_drafts[-512:]) > 400)


def test_one_time_preparation_of_a_token_count_does_not_stop_drafting() -> None:
    """vLLM on CPUs behaves like this: oneDNN creates its kernels when a shape occurs for the first time."""
    for factor in (2.0, 8.0):
        controller = make_controller()
        had_drafts = run_steps(
            controller,
            CPU._replace(per_token_s=20e-6),
            200,
            accepted_tokens=1.0,
            draft_tokens=12,
            preparation_s=factor * CPU.base_s,
        )
        assert sum(had_drafts) > 180
        assert 0 == controller.governor.num_stops


@pytest.mark.parametrize("generations", [1, 100])
def test_new_generations_of_the_history_make_the_governor_try_drafts_again_after_a_pause(generations: int) -> None:
    controller = make_controller()
    controller.set_generation(1)
    newer = itertools.count(2)

    def count_disabled_steps() -> int:
        while not controller.governor.drafting_disabled:
            controller.governor.observe_time(2.0, 0.1)
            controller.governor.observe_time(1.0)
        steps = 0
        while controller.governor.drafting_disabled:
            controller.skip_step()
            steps += 1
            if steps <= generations:
                controller.set_generation(next(newer))
        return steps

    assert [256, 257, 257] == [count_disabled_steps() for _ in range(3)]
    assert sum(run_steps(controller, CPU, 200, accepted_tokens=1.0)) > 160


def test_a_trial_is_judged_by_its_own_tokens_if_those_of_the_other_rollouts_only_pad_the_step() -> None:
    controller = DraftController(Fixed(DraftLimits(8, 1000)), H100_7B, uniform_lengths=[0, 1, 2, 4, 8])
    rows = np.array([controller.open("p", prompt_tokens=10, generated=0, max_tokens=10**9) for _ in range(ROLLOUTS)])
    controller.compute_budgets(rows)
    while not controller.governor.drafting_disabled:
        controller.governor.observe_time(2.0, 0.1)
        controller.governor.observe_time(1.0)
    first = rows == rows[0]
    accepted, expected, padded = np.where(first, 3, 0), np.where(first, 3.0, 0.0), np.full(ROLLOUTS, 4)
    for _ in range(8):
        assert controller.governor.drafting_disabled
        trial = Trial(int(rows[0]), ROLLOUTS)
        outcome = StepOutcome(rows, accepted + 1, padded, expected, np.full(ROLLOUTS, 100), trial)
        controller.observe_step(outcome, H100_7B.step_time(5 * ROLLOUTS, 400))
    assert not controller.governor.drafting_disabled


@pytest.mark.parametrize(("uniform_lengths", "tokens"), [((), 4 * 2), ((0, 1, 2), 4 * 2), ((0, 1, 2, 8), 4 * 8)])
def test_the_cost_of_all_tokens_that_a_step_may_verify_is_known(uniform_lengths: Sequence[int], tokens: int) -> None:
    controller = DraftController(Fixed(DraftLimits(2, 1000)), H100_7B, uniform_lengths=uniform_lengths)
    rows = np.array([controller.open("p", prompt_tokens=10, generated=0, max_tokens=10**9) for _ in range(ROLLOUTS)])
    controller.compute_budgets(rows)
    assert 1 + tokens == len(controller.draft_costs_s)


def test_all_drafts_are_verified_without_a_governor() -> None:
    assert all(run_steps(make_controller(governed=False), CPU._replace(drafting_s=1.0), 600, accepted_tokens=1.0))


def count_skipped(backoff: IdleBackoff, steps: int, *, drafted: bool) -> int:
    skipped = 0
    for _ in range(steps):
        if backoff.skip_step():
            skipped += 1
        else:
            backoff.record_step(drafted)
    return skipped


def test_no_step_is_skipped_while_something_is_drafted() -> None:
    assert 0 == count_skipped(IdleBackoff(), 1000, drafted=True)


def test_series_of_skipped_steps_double_up_to_16_with_two_steps_between_them() -> None:
    backoff, steps = IdleBackoff(), []
    for _ in range(200):
        steps.append(backoff.skip_step())
        if not steps[-1]:
            backoff.record_step(False)
    series = [(skipped, len(list(group))) for skipped, group in groupby(steps)][:-1]
    active = [length for skipped, length in series if not skipped]
    assert [4] + [2] * (len(active) - 1) == active
    assert [2, 4, 8, 16, 16] == [length for skipped, length in series if skipped][:5]


def test_drafts_are_noticed_within_16_steps_and_end_the_skipping() -> None:
    backoff = IdleBackoff()
    count_skipped(backoff, 1000, drafted=False)
    assert count_skipped(backoff, 20, drafted=True) <= 16
    assert 0 == count_skipped(backoff, 1000, drafted=True)
