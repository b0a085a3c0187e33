"""How many tokens a running rollout still has ahead, and which rollout will be the last."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_api.length_stats import LengthStats

Floats = npt.NDArray[np.float64]


_POINTS = 8


class Ahead(NamedTuple):
    """Rollouts alike, that wait or run."""

    stats: LengthStats
    """Lengths of their problem's rollouts."""
    so_far: int
    """Tokens that each has."""
    most: int
    """At which each is cut off."""
    rollouts: int


class WorkAhead(NamedTuple):
    """What many rollouts still have to say, in tokens."""

    tokens: float
    """Expected, all together."""
    longest: float
    """Of the one that has most ahead; it has more as probably as less."""


def work_ahead(rollouts: Iterable[Ahead]) -> WorkAhead:
    """What is ahead of all these rollouts, each independent of the others."""
    alike = [one for one in rollouts if one.rollouts]
    if not alike:
        return WorkAhead(0.0, 0.0)
    found = np.stack([remaining(one.stats, so_far=one.so_far, most=one.most, points=_POINTS) for one in alike])
    counts = np.array([one.rollouts for one in alike])
    times = np.unique(found)
    first, last = 0, len(times) - 1
    while first < last:
        middle = (first + last) // 2
        ended = (found <= times[middle]).mean(axis=1)
        # the probability that all have ended by then
        if ended.min() > 0 and float(counts @ np.log(ended)) >= np.log(0.5):
            last = middle
        else:
            first = middle + 1
    return WorkAhead(float(counts @ found.mean(axis=1)), float(times[first]))


def remaining(stats: LengthStats, *, so_far: int, most: int, points: int) -> Floats:
    """Quantiles of what a rollout has ahead, given that it has not ended yet: the middles of *points* equal parts.

    Args:
        stats: lengths of its problem's rollouts.
        so_far: tokens it has.
        most: at which it is cut off; quantiles that lie beyond what was ever seen are spread evenly up to it.
        points: how many.

    Returns:
        Tokens, at least 1, ascending; shape (points,).
    """
    ends = [stats.quantile((point + 0.5) / points, so_far=so_far) for point in range(points)]
    known = [end for end in ends if end is not None]
    beyond = points - len(known)
    since = min(max(so_far, known[-1] if known else 0, stats.longest), most)
    unknown = since + (most - since) * (np.arange(beyond) + 0.5) / max(beyond, 1)
    return np.asarray(np.maximum(np.minimum(np.concatenate([known, unknown]), most) - so_far, 1.0))


def last_probabilities(ends: Floats) -> Floats:
    """The probability of each rollout that it is the last to end.

    Args:
        ends: when rollouts may end, shape (rollouts, points); the points of a row are equally probable, and rollouts
            are independent. Of those that end at the same moment, the one that stands later here is taken for the last.

    Returns:
        Shape (rollouts,); they add up to 1. O(n log n) for n points.
    """
    rollouts, points = ends.shape
    if rollouts == 0:
        return np.zeros(0)
    # in the order of time, ties by row; F_j is the share of j's points that have passed
    order = np.argsort(ends, axis=None, kind="stable")
    rows = order // points
    passed = np.empty(rollouts * points)
    by_row = np.argsort(rows, kind="stable")
    passed[by_row] = np.tile(np.arange(1, points + 1), rollouts)
    # the product of all F_j just behind each point: a factor of 0 for each row of which none has passed
    growth = np.where(passed > 1, np.log(passed) - np.log(np.maximum(passed - 1, 1)), -np.log(points))
    begun = np.cumsum(passed == 1)
    product = np.where(begun == rollouts, np.exp(np.cumsum(growth)), 0.0)
    # P(i ends here, and all others have): 1/points · Π F_j without F_i
    shares = product / passed
    found = np.bincount(rows, weights=shares, minlength=rollouts)
    total = float(found.sum())
    return found / total if total > 0 else np.full(rollouts, 1.0 / rollouts)
