"""Predicted remaining lengths, compared with an enumeration of all outcomes."""

from __future__ import annotations

import itertools
import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_api.length_stats import LengthStats
from rollout_store.history.remaining_length import (
    SimilarRollouts,
    estimate_remaining_work,
    remaining_quantiles,
)


def test_remaining_lengths_follow_from_the_lengths_of_the_problem() -> None:
    stats = LengthStats.from_lengths([(0, length, False) for length in (100, 200, 300, 400)])
    assert [100, 200, 300, 400] == remaining_quantiles(stats, generated=0, max_tokens=1000, count=4).tolist()
    assert [50, 50, 150, 150] == remaining_quantiles(stats, generated=250, max_tokens=1000, count=4).tolist()
    # A rollout that is longer than all earlier ones may have any length up to its limit.
    assert [75, 225, 375, 525] == remaining_quantiles(stats, generated=400, max_tokens=1000, count=4).tolist()
    assert [1, 1] == remaining_quantiles(stats, generated=350, max_tokens=351, count=2).tolist()


def test_a_rollout_that_was_cut_off_may_have_any_greater_length() -> None:
    stats = LengthStats.from_lengths([(0, 100, False), (0, 200, True)])
    assert [100, 600] == remaining_quantiles(stats, generated=0, max_tokens=1000, count=2).tolist()


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 500), st.booleans()), max_size=20),
    st.integers(0, 600),
    st.integers(1, 600),
)
def test_remaining_lengths_are_between_one_token_and_the_limit(
    lengths: list[tuple[int, int, bool]], generated: int, more: int
) -> None:
    stats = LengthStats.from_lengths(lengths)
    quantiles = remaining_quantiles(stats, generated=generated, max_tokens=generated + more, count=8)
    assert (np.diff(quantiles) >= 0).all()
    assert 1 <= quantiles[0] <= quantiles[-1] <= more


def test_remaining_work_is_the_sum_and_the_maximum_of_the_remaining_lengths() -> None:
    short, long = (LengthStats.from_lengths([(0, length, False)]) for length in (100, 3000))
    rollouts = [
        SimilarRollouts(short, 0, 4000, 30),
        SimilarRollouts(long, 2000, 4000, 2),
        SimilarRollouts(short, 40, 4000, 1),
    ]
    assert (30 * 100 + 2 * 1000 + 60, 1000) == estimate_remaining_work(rollouts)


def test_similar_rollouts_are_counted_together() -> None:
    stats = LengthStats.from_lengths([(0, length, False) for length in range(100, 900, 100)])
    expected = estimate_remaining_work([SimilarRollouts(stats, 64, 4000, 20_000)])
    started = time.process_time()
    separately = estimate_remaining_work(SimilarRollouts(stats, 64, 4000, 1) for _ in range(20_000))
    assert expected == separately
    assert time.process_time() - started < 0.2  # each computation of quantiles takes 10 us


def test_nothing_remains_without_rollouts() -> None:
    stats = LengthStats.from_lengths([(0, 3000, False)])
    assert (0, 0) == estimate_remaining_work([])
    assert (0, 0) == estimate_remaining_work([SimilarRollouts(stats, 0, 4000, 0)])


def test_the_longest_of_more_rollouts_is_longer() -> None:
    stats = LengthStats.from_lengths([(0, length, False) for length in range(100, 900, 100)])
    longest = [
        estimate_remaining_work([SimilarRollouts(stats, 0, 4000, count)]).longest_tokens for count in (1, 2, 4, 8, 16)
    ]
    assert longest == sorted(longest)
    assert (400, 800) == (longest[0], longest[-1])
    # By enumeration: the smallest length that both of two rollouts do not exceed with probability 1/2.
    pairs = sorted(max(pair) for pair in itertools.product(range(100, 900, 100), repeat=2))
    assert longest[1] == pairs[len(pairs) // 2 - 1]
