"""Drift detection by canaries: false alarms are rare, and drift is detected early."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from rollout_store.job.canary import ALARM_E_VALUE, DriftTest, canary_sample, uniform_rank

SIBLINGS = 7


def canaries_until_alarm(draw: Callable[[random.Random, bool], float], seed: int, max_canaries: int) -> int | None:
    """Return the number of canaries until drift is detected; *draw* samples the value of a canary or of a sibling."""
    rng, test = random.Random(seed), DriftTest(1)
    for number in range(1, max_canaries + 1):
        siblings = [draw(rng, False) for _ in range(SIBLINGS)]
        test.observe([uniform_rank(draw(rng, True), siblings, rng)])
        if test.drifted:
            return number
    return None


@pytest.mark.parametrize("has_ties", [False, True])
def test_no_drift_is_detected_between_equal_distributions(has_ties: bool) -> None:
    def draw(rng: random.Random, is_canary: bool) -> float:
        return rng.randint(0, 3) if has_ties else rng.gauss(0, 1)

    alarms = sum(canaries_until_alarm(draw, seed, 400) is not None for seed in range(600))
    # The false alarm rate is at most 1 / 1000 by Ville's inequality; 5 or more of 600 runs have a chance of 1 in 2500.
    assert alarms < 5
    assert ALARM_E_VALUE == 1000


@pytest.mark.parametrize(
    ("draw", "median_canaries"),
    [
        (lambda rng, is_canary: rng.gauss(1.0 if is_canary else 0.0, 1), 120),
        (lambda rng, is_canary: rng.gauss(-0.5 if is_canary else 0.0, 1), 500),
        (lambda rng, is_canary: rng.gauss(0, 4.0 if is_canary else 1.0), 150),
        (lambda rng, is_canary: rng.gauss(0, 0.2 if is_canary else 1.0), 150),
    ],
    ids=["higher", "lower", "wider", "narrower"],
)
def test_drift_is_detected_after_few_canaries(
    draw: Callable[[random.Random, bool], float], median_canaries: int
) -> None:
    counts = [canaries_until_alarm(draw, seed, 5 * median_canaries) for seed in range(30)]
    assert all(count is not None for count in counts)
    assert sorted(count for count in counts if count is not None)[15] < median_canaries


def test_drift_in_one_of_two_quantities_is_detected_and_survives_a_restart() -> None:
    rng, test = random.Random(1), DriftTest(2)
    while not test.drifted:
        siblings = [rng.gauss(0, 1) for _ in range(SIBLINGS)]
        test.observe([rng.random(), uniform_rank(rng.gauss(1.5, 1), siblings, rng)])
        assert test.canaries < 500
    restarted = DriftTest(2, test.log_e_values, test.canaries)
    assert (True, test.canaries) == (restarted.drifted, restarted.canaries)
    for _ in range(2000):
        restarted.observe([None, rng.random()])
    assert restarted.drifted


def test_one_group_in_16_has_a_canary_and_each_sample_is_equally_likely() -> None:
    canaries = [canary_sample(f"request {number}", 8) for number in range(16_000)]
    counts = Counter(sample for sample in canaries if sample is not None)
    assert 800 < counts.total() < 1200
    assert set(range(8)) == set(counts)
    assert max(counts.values()) < 1.5 * min(counts.values())
    assert canaries == [canary_sample(f"request {number}", 8) for number in range(16_000)]
    assert {None} == {canary_sample(f"request {number}", 1) for number in range(200)}
