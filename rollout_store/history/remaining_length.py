"""Predicts how many tokens running rollouts still generate, in total and in the longest of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from rollout_api.length_stats import LengthStats
from rollout_store.arrays import Floats

_QUANTILES = 8
"""Number of quantiles that describe a remaining length in :func:`estimate_remaining_work`."""


class SimilarRollouts(NamedTuple):
    """Queued or running rollouts of one problem that have generated equally many tokens."""

    length_stats: LengthStats
    """Lengths of the problem's earlier rollouts."""
    generated: int
    """Number of tokens that each has generated."""
    max_tokens: int
    """Number of tokens at which each is cut off."""
    num_rollouts: int


class RemainingWork(NamedTuple):
    """The tokens that a set of rollouts still generates."""

    total_tokens: float
    """Expected number of tokens of all rollouts together."""
    longest_tokens: float
    """Median of the number of tokens of the rollout with the most remaining tokens."""


def estimate_remaining_work(rollouts: Iterable[SimilarRollouts]) -> RemainingWork:
    """Estimate the remaining tokens of rollouts whose lengths are independent of each other."""
    # Thousands of rollouts have few kinds, if those of a problem share its statistics.
    kinds: list[SimilarRollouts] = []
    numbers: list[int] = []
    indices: dict[tuple[int, int, int], int] = {}
    for rollout in rollouts:
        stats, generated, max_tokens, number = rollout
        if not number:
            continue
        index = indices.setdefault((id(stats), generated, max_tokens), len(kinds))
        if index == len(kinds):
            kinds.append(rollout)
            numbers.append(0)
        numbers[index] += number
    if not kinds:
        return RemainingWork(0.0, 0.0)
    quantiles = np.stack(
        [
            remaining_quantiles(
                rollout.length_stats, generated=rollout.generated, max_tokens=rollout.max_tokens, count=_QUANTILES
            )
            for rollout in kinds
        ]
    )
    counts = np.array(numbers)
    lengths = np.unique(quantiles)
    first, last = 0, len(lengths) - 1
    while first < last:
        middle = (first + last) // 2
        ended = (quantiles <= lengths[middle]).mean(axis=1)
        # The probability that all rollouts have ended by this length is the product of their probabilities.
        if ended.min() > 0 and float(counts @ np.log(ended)) >= np.log(0.5):
            last = middle
        else:
            first = middle + 1
    return RemainingWork(float(counts @ quantiles.mean(axis=1)), float(lengths[first]))


def remaining_quantiles(stats: LengthStats, *, generated: int, max_tokens: int, count: int) -> Floats:
    """Return quantiles of the tokens that a rollout still generates, given that it has not ended yet.

    The quantiles are those in the middle of *count* equal parts. Quantiles beyond the longest observed length are
    spread evenly up to *max_tokens*.

    Args:
        stats: lengths of the problem's earlier rollouts.
        generated: number of tokens that the rollout has generated.
        max_tokens: number of tokens at which it is cut off.
        count: number of quantiles.

    Returns:
        Tokens, at least 1, in ascending order; shape (count,).
    """
    ends = [stats.quantile((i + 0.5) / count, so_far=generated) for i in range(count)]
    known = [end for end in ends if end is not None]
    num_unknown = count - len(known)
    known_until = min(max(generated, known[-1] if known else 0, stats.longest), max_tokens)
    unknown = known_until + (max_tokens - known_until) * (np.arange(num_unknown) + 0.5) / max(num_unknown, 1)
    return np.asarray(np.maximum(np.minimum(np.concatenate([known, unknown]), max_tokens) - generated, 1.0))
