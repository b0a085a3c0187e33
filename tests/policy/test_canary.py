from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from rollout_worker.policy.canary import ALARM, DriftTest, canary_of, uniform_rank

SIBLINGS = 7


def canaries_until_alarm(draw: Callable[[random.Random, bool], float], seed: int, most: int) -> int | None:
    """Groups whose canary (and siblings) have these values, until the test says that they drift."""
    chance, test = random.Random(seed), DriftTest(1)
    for number in range(1, most + 1):
        siblings = [draw(chance, False) for _ in range(SIBLINGS)]
        test.observe([uniform_rank(draw(chance, True), siblings, chance)])
        if test.drifted:
            return number
    return None


@pytest.mark.parametrize("of_few_values", [False, True])
def test_what_is_alike_is_not_said_to_drift(of_few_values: bool) -> None:
    def draw(chance: random.Random, canary: bool) -> float:
        return chance.randint(0, 3) if of_few_values else chance.gauss(0, 1)

    alarms = sum(canaries_until_alarm(draw, seed, 400) is not None for seed in range(600))
    # at most one in ALARM, by Ville's inequality; of 600 runs 5 and more have a chance of 1 in 2,500
    assert alarms < 5
    assert ALARM == 1000


@pytest.mark.parametrize(
    ("draw", "soon"),
    [
        (lambda chance, canary: chance.gauss(1.0 if canary else 0.0, 1), 120),  # drafts make what is likelier
        (lambda chance, canary: chance.gauss(-0.5 if canary else 0.0, 1), 500),
        (lambda chance, canary: chance.gauss(0, 4.0 if canary else 1.0), 150),  # or all the same
        (lambda chance, canary: chance.gauss(0, 0.2 if canary else 1.0), 150),
    ],
)
def test_what_differs_is_soon_said_to_drift(draw: Callable[[random.Random, bool], float], soon: int) -> None:
    found = [canaries_until_alarm(draw, seed, 5 * soon) for seed in range(30)]
    assert all(one is not None for one in found)
    assert sorted(one for one in found if one is not None)[15] < soon


def test_a_drift_in_one_of_two_quantities_is_found_and_stays_found_after_a_restart() -> None:
    chance, test = random.Random(1), DriftTest(2)
    while not test.drifted:
        siblings = [chance.gauss(0, 1) for _ in range(SIBLINGS)]
        test.observe([chance.random(), uniform_rank(chance.gauss(1.5, 1), siblings, chance)])
        assert test.canaries < 500
    again = DriftTest(2, test.wealth, test.canaries)
    assert (True, test.canaries) == (again.drifted, again.canaries)
    for _ in range(2000):
        again.observe([None, chance.random()])
    assert again.drifted


def test_some_groups_have_one_canary_any_of_their_samples() -> None:
    found = [canary_of(f"request {number}", 8) for number in range(16_000)]
    chosen = Counter(one for one in found if one is not None)
    assert 800 < chosen.total() < 1200
    assert set(range(8)) == set(chosen)
    assert max(chosen.values()) < 1.5 * min(chosen.values())
    assert found == [canary_of(f"request {number}", 8) for number in range(16_000)]
    assert {None} == {canary_of(f"request {number}", 1) for number in range(200)}
