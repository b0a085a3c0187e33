"""Statistics of the rewards of one problem's rollouts, for curricula."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from typing_extensions import Self

from rollout_api.protocol.length_entries import LengthEntry

DEFAULT_THRESHOLD = 0.5
"""Reward from which a rollout passes, by default: it separates rewards of 0 and 1, and of −1 and 1."""


@dataclass(frozen=True)
class RewardStats:
    """Rewards of one problem's rollouts."""

    num_rollouts: int
    """Number of rollouts, with and without a reward."""
    count: int
    """Number of rollouts with a reward."""
    mean: float | None
    """Mean reward; None without rewards."""
    pass_rate: float | None
    """Share of the rewards that are at least the threshold; None without rewards."""
    newest_generation: int | None
    """Newest generation of a rollout with a reward; None without rewards."""

    @classmethod
    def from_entries(
        cls,
        entries: Iterable[LengthEntry],
        *,
        threshold: float = DEFAULT_THRESHOLD,
        oldest_generation: int = 0,
    ) -> Self:
        """Compute the statistics of a problem's entries.

        Args:
            entries: the entries of the problem's rollouts.
            threshold: reward from which a rollout passes. It is rounded to binary32, as the rewards are, so that a
                reward that was reported as 0.9 reaches a threshold of 0.9.
            oldest_generation: oldest generation whose rollouts count.
        """
        counted = [entry for entry in entries if entry.generation >= oldest_generation]
        rewarded = [
            (entry.generation, entry.reward)
            for entry in counted
            if entry.reward is not None and math.isfinite(entry.reward)
        ]
        rewards = [reward for _, reward in rewarded]
        rounded = _binary32(threshold)
        return cls(
            num_rollouts=len(counted),
            count=len(rewards),
            mean=math.fsum(rewards) / len(rewards) if rewards else None,
            pass_rate=sum(reward >= rounded for reward in rewards) / len(rewards) if rewards else None,
            newest_generation=max((generation for generation, _ in rewarded), default=None),
        )


def _binary32(value: float) -> float:
    """Return *value* rounded to binary32, which is infinite beyond its range."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded
