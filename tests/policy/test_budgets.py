from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

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

COST = st.builds(StepCost, st.floats(1e-4, 0.1), st.floats(1e-6, 1e-2), st.floats(0, 1e-6))
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
    running: dict[str, list[int]] = {}
    for number in range(data.draw(st.integers(1, 12))):
        problem = data.draw(st.integers(0, len(known) - 1))
        said, more = data.draw(st.integers(0, 400)), data.draw(st.integers(1, 60))
        policy.open(str(number), str(problem), prompt=10, said=said, most=said + more)
        running[str(number)] = [said, said + more]
    while running:
        keys = list(running)
        allowed = policy.allow(keys, cost, Waiting(data.draw(st.integers(0, 3)), 100.0))
        assert len(keys) == len(allowed.budgets) == len(allowed.min_survivals)
        assert sum(allowed.budgets) <= pool.step
        assert all(0 <= one <= 1 for one in allowed.min_survivals)
        for key, budget in zip(keys, allowed.budgets, strict=True):
            said, most = running[key]
            assert 0 <= budget <= min(pool.draft, most - said - 1)
            accepted = data.draw(st.integers(0, budget))
            policy.advance(key, accepted + 1, drafted=budget)
            running[key][0] = said + accepted + 1
            if running[key][0] == most or data.draw(st.booleans()):
                policy.close(key)
                del running[key]


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
    for key in of:
        policy.open(key, key, prompt=100, said=0, most=10_000)
    given_ = dict.fromkeys(of, 0)
    steps = 12
    for _ in range(steps):
        allowed = policy.allow(list(of), cost, Waiting(waiting, 500.0 * waiting))
        for key, budget, survival in zip(of, allowed.budgets, allowed.min_survivals, strict=True):
            drafted = draft_length(budget, survival, probability)
            given_[key] += drafted
            # whatever passes, all have said the same
            policy.advance(key, 1, drafted=drafted)
    ordered = [given_[key] / steps for key in of]
    assert all(longer >= shorter - 1 for shorter, longer in pairwise(ordered))


def test_marginal_drafts_for_the_long_and_for_who_has_much_to_read() -> None:
    of = {"short": stats(100, 120), "long": stats(3000, 3100)}
    policy = Marginal(Pool(16, 1000), of.__getitem__)
    policy.open("a", "short", prompt=100, said=0, most=4000)
    policy.open("b", "long", prompt=100, said=0, most=4000)
    policy.open("c", "short", prompt=16_000, said=0, most=4000)
    survivals = policy.allow(["a", "b", "c"], H100_7B).min_survivals
    # who ends last is worth a whole step; who reads much saves reading it; who is neither saves next to nothing
    assert survivals[1] == pytest.approx(H100_7B.per_token / (H100_7B.per_token + H100_7B.base), rel=0.1)
    assert survivals[1] < survivals[2] < 0.1
    assert survivals[0] > 0.9


def test_where_others_wait_all_are_worth_about_the_same() -> None:
    of = {"short": stats(100, 120), "long": stats(300, 310)}
    policy = Marginal(Pool(16, 1000), of.__getitem__)
    policy.open("a", "short", prompt=10, said=0, most=4000)
    policy.open("b", "long", prompt=10, said=0, most=4000)
    survivals = policy.allow(["a", "b"], H100_7B, Waiting(100, 20_000.0)).min_survivals
    even = 2 / (2 + H100_7B.base_tokens)
    assert [even, even] == pytest.approx(survivals, rel=0.1)


def test_the_pool_goes_first_to_whom_it_is_worth_most() -> None:
    of = {"short": stats(100), "long": stats(3000)}
    policy = Marginal(Pool(16, 20), of.__getitem__)
    policy.open("a", "short", prompt=10, said=0, most=4000)
    policy.open("b", "long", prompt=10, said=0, most=4000)
    assert [4, 16] == policy.allow(["a", "b"], H100_7B).budgets


def test_das_optimal_drafts_for_the_long_and_not_for_who_ends_before_them_anyway() -> None:
    policy = DasOptimal(Pool(16, 1000), lambda problem: stats(3000 if problem == "long" else 210))
    policy.open("a", "long", prompt=10, said=0, most=4000)
    policy.open("b", "short", prompt=10, said=0, most=4000)
    drafted = {"a": 0, "b": 0}
    for _ in range(100):
        allowed = policy.allow(["a", "b"], H100_7B)
        for key, budget in zip(("a", "b"), allowed.budgets, strict=True):
            drafted[key] += budget
            policy.advance(key, 1 + budget // 2, drafted=budget)
    assert drafted["a"] > 100
    assert 0 == drafted["b"]
