from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_api.length_stats import LengthStats
from rollout_worker.policy.budgets import (
    BudgetPolicy,
    DasClasses,
    DasOptimal,
    Fixed,
    Marginal,
    Off,
    Pool,
    Waiting,
)
from rollout_worker.policy.rollouts import Lengths
from rollout_worker.policy.step_cost import H100_7B, StepCost

COST = st.builds(StepCost, st.floats(1e-4, 0.1), st.floats(1e-6, 1e-2), st.floats(0, 1e-6), st.floats(0, 1e-2))
Make = Callable[[Pool, Lengths, LengthStats], BudgetPolicy]
POLICIES: dict[str, Make] = {
    "off": lambda pool, lengths, of_all: Off(pool, lengths),
    "fixed": lambda pool, lengths, of_all: Fixed(pool, lengths),
    "das-classes": lambda pool, lengths, of_all: DasClasses(pool, lengths, lambda: of_all),
    "das-optimal": lambda pool, lengths, of_all: DasOptimal(pool, lengths),
    "marginal": lambda pool, lengths, of_all: Marginal(pool, lengths),
}
EVERY = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES.keys())


def stats(*lengths: int) -> LengthStats:
    return LengthStats.of([(0, length, False) for length in lengths])


def draft_length(budget: int, min_survival: float, probability: float) -> int:
    length = 0
    while length < budget and probability ** (length + 1) >= min_survival:
        length += 1
    return length


@EVERY
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_budget_exceeds_draft_pool_cap_or_what_remains(make: Make, data: st.DataObject) -> None:
    pool = Pool(data.draw(st.integers(1, 64)), data.draw(st.integers(0, 200)))
    known = data.draw(st.lists(st.lists(st.integers(1, 500), max_size=5), min_size=1, max_size=4))
    lengths = [stats(*one) for one in known]
    of_all = stats(*(length for one in known for length in one))
    policy = make(pool, lambda problem: lengths[int(problem)], of_all)
    cost = data.draw(COST)
    running: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        problem = data.draw(st.integers(0, len(known) - 1))
        said, more = data.draw(st.integers(0, 400)), data.draw(st.integers(1, 60))
        running[policy.open(str(problem), prompt=10, said=said, most=said + more)] = [said, said + more]
    while running:
        rows = list(running)
        allowed = policy.allow(np.array(rows), cost, Waiting(data.draw(st.integers(0, 3)), 100.0))
        assert len(rows) == len(allowed.budgets) == len(allowed.min_survivals)
        assert allowed.budgets.sum() <= pool.step
        assert all(0 <= one <= 1 for one in allowed.min_survivals)
        said_now = []
        for row, budget in zip(rows, allowed.budgets.tolist(), strict=True):
            said, most = running[row]
            assert 0 <= budget <= min(pool.draft, most - said - 1)
            said_now.append(data.draw(st.integers(0, budget)) + 1)
            running[row][0] = said + said_now[-1]
        policy.advance(np.array(rows), np.array(said_now), allowed.budgets)
        for row in rows:
            if running[row][0] == running[row][1] or data.draw(st.booleans()):
                policy.close(row)
                del running[row]


@pytest.mark.parametrize("name", ["das-classes", "das-optimal", "marginal"])
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(20, 3000), min_size=2, max_size=6, unique=True),
    probability=st.floats(0.3, 0.99),
    cost=COST,
    waiting=st.integers(0, 5),
)
def test_who_is_expected_to_be_longer_gets_no_less(
    name: str, lengths: list[int], probability: float, cost: StepCost, waiting: int
) -> None:
    of = {str(number): stats(length, length + 10) for number, length in enumerate(sorted(lengths))}
    of_all = stats(*lengths)
    policy = POLICIES[name](Pool(16, 10_000), of.__getitem__, of_all)
    rows = np.array([policy.open(problem, prompt=100, said=0, most=10_000) for problem in of])
    given_ = np.zeros(len(of))
    steps = 12
    for _ in range(steps):
        allowed = policy.allow(rows, cost, Waiting(waiting, 500.0 * waiting))
        pairs = zip(allowed.budgets.tolist(), allowed.min_survivals.tolist(), strict=True)
        drafted = np.array([draft_length(budget, survival, probability) for budget, survival in pairs])
        given_ += drafted
        # whatever passes, all have said the same
        policy.advance(rows, np.ones(len(of), np.int64), drafted)
    ordered = (given_ / steps).tolist()
    assert all(longer >= shorter - 1 for shorter, longer in pairwise(ordered))


def test_marginal_drafts_for_the_long_and_for_who_has_much_to_read() -> None:
    of = {"short": stats(100, 120), "long": stats(3000, 3100)}
    policy = Marginal(Pool(16, 1000), of.__getitem__)
    rows = [
        policy.open(problem, prompt=prompt, said=0, most=4000)
        for problem, prompt in (("short", 100), ("long", 100), ("short", 16_000))
    ]
    survivals = policy.allow(np.array(rows), H100_7B).min_survivals
    # who ends last is worth a whole step; who reads much saves reading it; who is neither saves next to nothing
    assert survivals[1] == pytest.approx(H100_7B.per_token / (H100_7B.per_token + H100_7B.base), rel=0.1)
    assert survivals[1] < survivals[2] < 0.1
    assert survivals[0] > 0.9


def test_where_others_wait_all_are_worth_about_the_same() -> None:
    of = {"short": stats(100, 120), "long": stats(300, 310)}
    policy = Marginal(Pool(16, 1000), of.__getitem__)
    rows = np.array([policy.open(problem, prompt=10, said=0, most=4000) for problem in ("short", "long")])
    survivals = policy.allow(rows, H100_7B, Waiting(100, 20_000.0)).min_survivals
    even = 2 / (2 + H100_7B.base_tokens)
    assert [even, even] == pytest.approx(survivals.tolist(), rel=0.1)


def test_the_pool_goes_first_to_whom_it_is_worth_most() -> None:
    of = {"short": stats(100), "long": stats(3000)}
    policy = Marginal(Pool(16, 20), of.__getitem__)
    rows = np.array([policy.open(problem, prompt=10, said=0, most=4000) for problem in ("short", "long")])
    assert [4, 16] == policy.allow(rows, H100_7B).budgets.tolist()


def test_das_optimal_drafts_for_the_long_and_not_for_who_ends_before_them_anyway() -> None:
    policy = DasOptimal(Pool(16, 1000), lambda problem: stats(3000 if problem == "long" else 210))
    rows = np.array([policy.open(problem, prompt=10, said=0, most=4000) for problem in ("long", "short")])
    drafted = np.zeros(2, np.int64)
    for _ in range(100):
        budgets = policy.allow(rows, H100_7B).budgets
        drafted += budgets
        policy.advance(rows, 1 + budgets // 2, budgets)
    assert drafted[0] > 100
    assert 0 == drafted[1]
