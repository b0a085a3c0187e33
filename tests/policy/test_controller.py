from __future__ import annotations

import numpy as np

from rollout_api.length_stats import LengthStats
from rollout_worker.policy.budgets import Fixed, Pool
from rollout_worker.policy.controller import DraftController, Outcomes
from rollout_worker.policy.step_cost import CPU, StepCost

ROLLOUTS, DRAFT = 4, 32


def controller(*, governed: bool = True) -> DraftController:
    stats = LengthStats.of([(0, 500, False)])
    found = DraftController(Fixed(Pool(DRAFT, 1000), lambda _: stats), CPU, governed=governed)
    for _ in range(ROLLOUTS):
        found.open("p", prompt=10, said=0, most=10**9)
    return found


def drafted_in(
    found: DraftController, truth: StepCost, steps: int, *, passes: float, most: int = 6, preparing: float = 0.0
) -> list[bool]:
    """Whether each of so many steps verified drafts, of which so many tokens are expected to pass, and do.

    Args:
        found: decides.
        truth: what steps take.
        steps: how many.
        passes: tokens.
        most: tokens of a draft; they differ if it takes time to prepare for a number of tokens.
        preparing: seconds, the first time that a step has a number of tokens.
    """
    rows, lengths = np.arange(ROLLOUTS), np.full(ROLLOUTS, most)
    random, prepared = np.random.default_rng(0), set[int]()
    some = np.zeros(ROLLOUTS, np.int64)
    drafts = []
    for _ in range(steps):
        accepted = np.where(some > 0, round(passes), 0)
        expected = np.where(some > 0, passes, 0.0)
        context = np.full(ROLLOUTS, 100)
        tokens = ROLLOUTS + int(some.sum())
        seconds = truth.time(tokens, int(context.sum()), drafts=bool(some.any()))
        if preparing:
            seconds += preparing * (tokens not in prepared)
            prepared.add(tokens)
            lengths = random.integers(1, most + 1, ROLLOUTS)
        found.verified(Outcomes(rows, accepted + 1, some, expected, context), seconds)
        if found.sleeps():
            some = np.zeros(ROLLOUTS, np.int64)
        else:
            allowed = found.allow(rows)
            proposed = np.minimum(lengths, allowed.budgets)
            kept = found.keep(rows, proposed, np.where(proposed > 0, passes, 0.0))
            some = np.zeros(ROLLOUTS, np.int64)
            some[kept] = proposed[kept]
        drafts.append(bool(some.any()))
    return drafts


def test_drafts_that_pay_are_verified_but_for_a_step_in_256() -> None:
    found = drafted_in(controller(), CPU, 2048, passes=4.0)
    assert all(found[:7])
    assert 2048 - 5 - 2048 // 256 <= sum(found) + 4 <= 2048


def test_drafts_that_pay_but_for_what_it_costs_to_verify_any_are_soon_not_verified_any_more() -> None:
    cheap, dear = CPU, CPU._replace(drafting=3 * CPU.base)
    assert sum(drafted_in(controller(), cheap, 1000, passes=1.0)[500:]) > 480
    found = drafted_in(controller(), dear, 1000, passes=1.0)
    assert sum(found[500:]) < 25


def test_what_it_takes_to_prepare_for_a_number_of_tokens_is_not_taken_for_what_they_cost() -> None:
    """Seen with vLLM on CPUs: oneDNN makes its kernels when a shape comes for the first time."""
    for preparing in (2.0, 8.0):
        own = controller()
        found = drafted_in(own, CPU._replace(per_token=20e-6), 200, passes=1.0, most=12, preparing=preparing * CPU.base)
        assert sum(found) > 180, sum(found)
        assert 0 == own.governor.stops


def test_without_a_governor_everything_is_verified() -> None:
    found = drafted_in(controller(governed=False), CPU._replace(drafting=1.0), 600, passes=1.0)
    assert all(found)
