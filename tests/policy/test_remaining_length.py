from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_api.length_stats import LengthStats
from rollout_worker.policy.remaining_length import Ahead, last_probabilities, remaining, work_ahead

ENDS = st.integers(1, 5).flatmap(
    lambda points: st.lists(
        st.lists(st.integers(1, 12), min_size=points, max_size=points).map(sorted), min_size=1, max_size=4
    )
)


@settings(deadline=None)
@given(ENDS)
def test_the_last_is_who_is_last_in_all_that_may_happen(ends: list[list[int]]) -> None:
    count = [0.0] * len(ends)
    for outcome in itertools.product(*ends):
        last = max(range(len(ends)), key=lambda row: (outcome[row], row))
        count[last] += 1
    expected = np.array(count) / sum(count)
    assert expected == pytest.approx(last_probabilities(np.array(ends, dtype=np.float64)))


def test_many_rollouts_add_up_to_one() -> None:
    ends = np.sort(np.random.default_rng(1).exponential(1000, (256, 16)), axis=1)
    found = last_probabilities(ends)
    assert 1.0 == pytest.approx(found.sum())
    assert (found >= 0).all()
    assert found[ends.mean(axis=1).argmax()] > 1 / 256


def test_what_is_ahead_follows_the_lengths_of_the_problem() -> None:
    stats = LengthStats.of([(0, length, False) for length in (100, 200, 300, 400)])
    assert [100, 200, 300, 400] == remaining(stats, so_far=0, most=1000, points=4).tolist()
    assert [50, 50, 150, 150] == remaining(stats, so_far=250, most=1000, points=4).tolist()
    # longer than any before: nothing is known but the cap
    assert [75, 225, 375, 525] == remaining(stats, so_far=400, most=1000, points=4).tolist()
    assert [1, 1] == remaining(stats, so_far=350, most=351, points=2).tolist()


def test_what_was_cut_off_may_be_longer_up_to_the_cap() -> None:
    stats = LengthStats.of([(0, 100, False), (0, 200, True)])
    assert [100, 600] == remaining(stats, so_far=0, most=1000, points=2).tolist()


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 500), st.booleans()), max_size=20),
    st.integers(0, 600),
    st.integers(1, 600),
)
def test_what_is_ahead_is_between_one_token_and_the_cap(
    lengths: list[tuple[int, int, bool]], so_far: int, more: int
) -> None:
    ahead = remaining(LengthStats.of(lengths), so_far=so_far, most=so_far + more, points=8)
    assert (np.diff(ahead) >= 0).all()
    assert 1 <= ahead[0] <= ahead[-1] <= more


def test_work_ahead_is_the_sum_and_the_longest_of_what_rollouts_have_ahead() -> None:
    short, long = (LengthStats.of([(0, length, False)]) for length in (100, 3000))
    rollouts = [Ahead(short, 0, 4000, 30), Ahead(long, 2000, 4000, 2), Ahead(short, 40, 4000, 1)]
    assert (30 * 100 + 2 * 1000 + 60, 1000) == work_ahead(rollouts)
    assert (0, 0) == work_ahead([])
    assert (0, 0) == work_ahead([Ahead(long, 0, 4000, 0)])


def test_of_many_the_longest_is_longer_than_of_few() -> None:
    stats = LengthStats.of([(0, length, False) for length in range(100, 900, 100)])
    longest = [work_ahead([Ahead(stats, 0, 4000, count)]).longest for count in (1, 2, 4, 8, 16)]
    assert longest == sorted(longest)
    assert (400, 800) == (longest[0], longest[-1])
    # by enumeration: the least length that both of two do not exceed with probability 1/2
    pairs = sorted(max(pair) for pair in itertools.product(range(100, 900, 100), repeat=2))
    assert longest[1] == pairs[len(pairs) // 2 - 1]
