"""Statistics of rollout lengths, estimated from the lengths of earlier rollouts."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from operator import mul, neg

from typing_extensions import Self

from rollout_api.str_enum import StrEnum

HALF_LIFE = 4
"""Number of newer generations with rollouts after which a rollout has half its weight, because lengths change with the
policy."""
MIN_ROLLOUTS_OF_ALL = 64
"""In statistics of all problems, number of rollouts below which a generation counts only in part. If every small
training step has a weight version, the rollouts of a few generations do not represent all problems."""
_MIN_WEIGHT = 2.0**-64
"""Lower limit of weights. It is negligible next to newer rollouts, but old ones still count where there are no
others."""
_TOLERANCE = 1e-9
"""Shares that differ relatively by no more than this are equal, so that one rollout of three is a third of them."""


class LengthClass(StrEnum):
    """Class of a problem's rollout lengths relative to other problems; see :meth:`LengthStats.length_class`."""

    LONG = "long"
    MEDIUM = "medium"
    SHORT = "short"


@dataclass(frozen=True)
class LengthStats:
    """Distribution of rollout lengths, in tokens, of one problem or of all.

    It is a Kaplan–Meier estimate: a rollout that was cut off is censored, that is, it only shows that its full length
    would have been greater. A rollout has the weight 0.5 ** (age / 4), where its age is the number of newer generations
    that have rollouts in these statistics. A problem that is sampled only in every hundredth generation is
    therefore described by the last generations that sampled it. Where nothing is known, because no rollout was
    as long or there are none, a rollout is expected to continue: taking a short rollout for a long one costs less than
    the reverse.
    """

    count: int
    """Number of rollouts."""
    weight: float
    """Sum of the rollouts' weights: the number of rollouts of the newest generation that would be as informative."""
    censored_share: float
    """Share of *weight* that belongs to rollouts that were cut off; 0 without rollouts."""
    mean: float
    """Mean of min(length, :attr:`longest`); 0 without rollouts."""
    longest: int
    """Greatest observed length, of a rollout that ended or was cut off; 0 without rollouts."""
    mean_log: float
    """Mean of the natural logarithm of min(length, :attr:`longest`); 0 without rollouts."""
    deviation_log: float
    """Standard deviation of that logarithm."""
    _ends: tuple[int, ...] = field(repr=False)
    """Lengths at which rollouts ended by themselves, in ascending order."""
    _survival: tuple[float, ...] = field(repr=False)
    """For each of these lengths, the probability of a greater length."""

    @classmethod
    def from_lengths(cls, lengths: Iterable[tuple[int, int, bool]], *, min_rollouts: int = 1) -> Self:
        """Estimate the statistics in O(n log n).

        Args:
            lengths: for each rollout, its generation, its length in tokens, and whether it was cut off.
            min_rollouts: a rollout's age is at most the number of rollouts of newer generations divided by this.
        """
        rollouts = list(lengths)
        weights: dict[int, float] = {}
        newer = 0
        for rank, (generation, count) in enumerate(
            sorted(Counter(one for one, _, _ in rollouts).items(), reverse=True)
        ):
            weights[generation] = max(_MIN_WEIGHT, 0.5 ** (min(rank, newer / min_rollouts) / HALF_LIFE))
            newer += count
        ended: defaultdict[int, float] = defaultdict(float)
        censored: defaultdict[int, float] = defaultdict(float)
        for generation, length, cut_off in rollouts:
            (censored if cut_off else ended)[length] += weights[generation]
        steps: list[tuple[int, float]] = []
        # From the greatest length down, so that the small weights of few long rollouts are not lost to rounding.
        at_risk = 0.0
        for length in sorted(ended.keys() | censored.keys(), reverse=True):
            at_risk += censored.get(length, 0.0)
            if length in ended:
                steps.append((length, at_risk / (at_risk + ended[length])))
                at_risk += ended[length]
        ends, survival, probability = [], [], 1.0
        for length, factor in reversed(steps):
            probability *= factor
            ends.append(length)
            survival.append(probability)
        longest = max((length for _, length, _ in rollouts), default=0)
        areas = zip(pairwise([0, *ends, longest]), [1.0, *survival], strict=True)
        shares = [before - after for before, after in pairwise([1.0, *survival, 0.0])]
        logs = [math.log(max(length, 1)) for length in [*ends, longest]]
        mean_log = sum(map(mul, shares, logs))
        return cls(
            count=len(rollouts),
            weight=at_risk,
            censored_share=sum(censored.values()) / at_risk if rollouts else 0.0,
            mean=sum((stop - start) * height for (start, stop), height in areas),
            longest=longest,
            mean_log=mean_log,
            deviation_log=math.sqrt(
                sum(share * (log - mean_log) ** 2 for share, log in zip(shares, logs, strict=True))
            ),
            _ends=tuple(ends),
            _survival=tuple(survival),
        )

    def prob_longer_than(self, length: float, *, so_far: float = 0) -> float:
        """Return P(length > *length* | length > *so_far*), in O(log n).

        The result is 1 if *length* is not greater than *so_far*, and if no known rollout was longer than *so_far*.
        Beyond :attr:`longest` the probability does not decrease any further, because censored rollouts may have any
        length.

        Args:
            length: number of tokens.
            so_far: number of tokens that the rollout has already, without having ended.
        """
        reached = self._survival_at(so_far)
        if length <= so_far or reached == 0:
            return 1.0
        return self._survival_at(length) / reached

    def quantile(self, p: float, *, so_far: float = 0) -> float | None:
        """Return the smallest length that a rollout longer than *so_far* does not exceed with probability *p*.

        Args:
            p: probability, greater than 0 and at most 1; 0.5 gives the median.
            so_far: number of tokens that the rollout has already, without having ended.

        Returns:
            Number of tokens; None if it is beyond the observed lengths, because too many rollouts were censored or none
            was as long.

        Raises:
            ValueError: *p* is not in this range.
        """
        if not 0 < p <= 1:
            raise ValueError(f"quantile: p = {p}; it must be above 0 and at most 1")
        max_survival = (1 - p) * self._survival_at(so_far) * (1 + _TOLERANCE)
        index = bisect_left(self._survival, -max_survival, lo=bisect_right(self._ends, so_far), key=neg)
        return float(self._ends[index]) if index < len(self._ends) else None

    def length_class(self, overall: LengthStats, *, so_far: float = 0) -> LengthClass:
        """Return the most probable length class of a rollout with these statistics.

        DAS (arXiv 2511.13841) assigns a request to one of three classes by the lengths of its problem's earlier
        rollouts, reassigns it as it grows, and gives Long the largest draft budget, Medium a smaller one and Short
        none. Here, the classes are separated by the terciles of all rollouts, which is this project's choice; a length
        that many rollouts have counts as the middle of their ranks. If two classes are equally probable, the
        longer one is returned. A rollout that is longer than all in *overall* is Long, and so is a problem without
        rollouts.

        Args:
            overall: statistics of all problems.
            so_far: number of tokens that the rollout has already, without having ended.
        """
        not_short = self.prob_longer_than(overall._length_at_rank(1 / 3), so_far=so_far)
        long = self.prob_longer_than(overall._length_at_rank(2 / 3), so_far=so_far)
        probabilities = {
            LengthClass.LONG: long,
            LengthClass.MEDIUM: not_short - long,
            LengthClass.SHORT: 1 - not_short,
        }
        return max(probabilities, key=lambda one: probabilities[one])

    def _survival_at(self, length: float) -> float:
        """Return P(length > *length*)."""
        return self._survival_before(bisect_right(self._ends, length))

    def _survival_before(self, index: int) -> float:
        """Return the probability of a length greater than the end before *index*."""
        return self._survival[index - 1] if index else 1.0

    def _length_at_rank(self, share: float) -> int:
        """Return the greatest length whose rank is at most *share*; rank 0 is below all lengths, and 1 above them."""

        def rank(index: int) -> float:
            return 1 - (self._survival_before(index) + self._survival[index]) / 2

        index = bisect_right(range(len(self._ends)), share, key=rank)
        # Lengths between two ends have the rank that the survival between them implies.
        if 1 - self._survival_before(index) > share * (1 + _TOLERANCE):
            return self._ends[index - 1]
        return self._ends[index] - 1 if index < len(self._ends) else self.longest
