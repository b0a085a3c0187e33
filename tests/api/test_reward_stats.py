"""Statistics of rewards, compared with their definitions."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api import RewardStats
from rollout_api.protocol.history_encoding import LengthEntry

rewards = st.none() | st.floats(width=32, allow_nan=False, allow_infinity=False)
entries = st.lists(
    st.builds(LengthEntry, st.just(b"rollout_"), st.integers(0, 5), st.integers(1, 99), st.booleans(), rewards)
)


@given(entries, st.floats(-1e30, 1e30), st.integers(-2, 7))
def test_statistics_follow_their_definitions(entries: list[LengthEntry], threshold: float, oldest: int) -> None:
    stats = RewardStats.from_entries(entries, threshold=threshold, oldest_generation=oldest)
    counted = [entry for entry in entries if entry.generation >= oldest]
    known = [entry.reward for entry in counted if entry.reward is not None]
    assert (len(counted), len(known)) == (stats.num_rollouts, stats.count)
    if not known:
        assert (None, None, None) == (stats.mean, stats.pass_rate, stats.newest_generation)
        return
    assert stats.mean is not None
    assert math.isclose(sum(known) / len(known), stats.mean, rel_tol=1e-6, abs_tol=1e-6 * max(map(abs, known)))
    [rounded] = struct.unpack("<f", struct.pack("<f", threshold))
    assert sum(reward >= rounded for reward in known) / len(known) == stats.pass_rate
    assert max(entry.generation for entry in counted if entry.reward is not None) == stats.newest_generation


@given(st.floats(-1e30, 1e30))
def test_reward_reaches_the_threshold_of_the_same_value(reward: float) -> None:
    [stored] = struct.unpack("<f", struct.pack("<f", reward))
    stats = RewardStats.from_entries([LengthEntry(b"rollout_", 1, 1, False, stored)], threshold=reward)
    assert stats.pass_rate == 1.0


@pytest.mark.parametrize(("threshold", "share"), [(1e300, 0.0), (-1e300, 1.0)])
def test_threshold_beyond_binary32(threshold: float, share: float) -> None:
    entry = LengthEntry(b"rollout_", 1, 1, False, 3.0e38)
    assert share == RewardStats.from_entries([entry], threshold=threshold).pass_rate


def test_infinite_rewards_of_other_programs_are_ignored() -> None:
    entries = [LengthEntry(b"rollout_", 1, 1, False, reward) for reward in (math.inf, 1.0)]
    stats = RewardStats.from_entries(entries)
    assert (2, 1, 1.0) == (stats.num_rollouts, stats.count, stats.mean)
