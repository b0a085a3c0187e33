"""How long rollouts will be, judged by how long earlier ones were."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from operator import neg
from typing import Self

HALF_LIFE = 4
"""Generations with rollouts after which one counts half: the policy moves on, and with it the lengths."""
_LEAST_WEIGHT = 2.0**-64
"""Of the oldest: what is nearly nothing beside newer rollouts still tells where there are none."""
_ROUNDING = 1e-9
"""A share that is this much too small is taken for equal: a third of three rollouts is one of them."""


class LengthClass(StrEnum):
    """How long a problem's rollouts are beside those of other problems; see :meth:`LengthStats.length_class`."""

    LONG = "long"
    MEDIUM = "medium"
    SHORT = "short"


@dataclass(frozen=True)
class LengthStats:
    """The distribution of rollouts' lengths, in tokens, of one problem or of all.

    A Kaplan–Meier estimate: a rollout that was cut off says only that its length would have been greater. A rollout
    weighs 0.5 ** (age / 4), where its age is how many of the newer generations have rollouts here: a problem that comes
    up every hundred generations is known by its last rounds, not by the first rollout of this one. Where nothing is
    known (no rollout was as long, or there is none at all), any rollout is expected to go on: taking a short rollout
    for a long one costs less than the reverse.
    """

    count: int
    """Rollouts."""
    weight: float
    """Sum of their weights: as many rollouts of the newest generation would say as much."""
    cut_off: float
    """Share of *weight* that was cut off; 0 without rollouts."""
    mean: float
    """Mean length as far as :attr:`longest`: the mean of min(length, longest). 0 without rollouts."""
    longest: int
    """Greatest length that was seen, of a rollout that ended or was cut off; 0 without rollouts."""
    _ends: tuple[int, ...] = field(repr=False)
    """Lengths at which rollouts ended by themselves, rising."""
    _survival: tuple[float, ...] = field(repr=False)
    """For each of them, the probability of a greater length."""

    @classmethod
    def of(cls, lengths: Iterable[tuple[int, int, bool]]) -> Self:
        """The statistics of some rollouts, in O(n log n).

        Args:
            lengths: generation, length in tokens, and whether it was cut off, of each rollout.
        """
        known = list(lengths)
        generations = sorted({generation for generation, _, _ in known}, reverse=True)
        weights = {
            generation: max(_LEAST_WEIGHT, 0.5 ** (age / HALF_LIFE)) for age, generation in enumerate(generations)
        }
        ended: defaultdict[int, float] = defaultdict(float)
        cut: defaultdict[int, float] = defaultdict(float)
        for generation, length, cut_off in known:
            (cut if cut_off else ended)[length] += weights[generation]
        steps: list[tuple[int, float]] = []
        # from the longest down, so that the weights of the few that were long are not lost beside the sum of all
        longer = 0.0
        for length in sorted(ended.keys() | cut.keys(), reverse=True):
            longer += cut.get(length, 0.0)
            if length in ended:
                steps.append((length, longer / (longer + ended[length])))
                longer += ended[length]
        ends, survival, left = [], [], 1.0
        for length, share in reversed(steps):
            left *= share
            ends.append(length)
            survival.append(left)
        longest = max((length for _, length, _ in known), default=0)
        areas = zip(pairwise([0, *ends, longest]), [1.0, *survival], strict=True)
        return cls(
            count=len(known),
            weight=longer,
            cut_off=sum(cut.values()) / longer if known else 0.0,
            mean=sum((until - since) * share for (since, until), share in areas),
            longest=longest,
            _ends=tuple(ends),
            _survival=tuple(survival),
        )

    def longer(self, than: float, *, so_far: float = 0) -> float:
        """P(length > *than* | length > *so_far*), in O(log n).

        1 where *than* is no more than *so_far*, and where no rollout is known to have been longer than *so_far*. What
        was cut off goes on for ever, so beyond :attr:`longest` the probability falls no further.

        Args:
            than: tokens.
            so_far: tokens that the rollout has and did not end at.
        """
        reached = self._longer(so_far)
        if than <= so_far or reached == 0:
            return 1.0
        return self._longer(than) / reached

    def quantile(self, p: float, *, so_far: float = 0) -> float | None:
        """The least length that a rollout does not exceed with probability *p*, given that it exceeds *so_far*.

        Args:
            p: above 0, at most 1; 0.5 is the median.
            so_far: tokens that the rollout has and did not end at.

        Returns:
            Tokens; None if that lies beyond what was seen: too many were cut off before, or there is none as long.

        Raises:
            ValueError: if *p* is no such probability.
        """
        if not 0 < p <= 1:
            raise ValueError(f"quantile: p = {p}; it must be above 0 and at most 1")
        most = (1 - p) * self._longer(so_far) * (1 + _ROUNDING)
        at = bisect_left(self._survival, -most, lo=bisect_right(self._ends, so_far), key=neg)
        return float(self._ends[at]) if at < len(self._ends) else None

    def length_class(self, of_all: LengthStats, *, so_far: float = 0) -> LengthClass:
        """Whether a rollout with these statistics will be long beside *of_all*.

        DAS (arXiv 2511.13841) puts a request into one of these three classes by the lengths of its problem's earlier
        rollouts, moves it to another as it grows, and gives Long the largest draft budget, Medium some, Short none.
        Here the class is the one into which a rollout of the problem that has *so_far* tokens falls most probably,
        between two equal ones the longer. The limits of the classes are this project's own: the thirds of all rollouts,
        a length that many have counting as the middle of them. Longer than anything in *of_all* is Long, and so is a
        problem that has no rollouts.

        Args:
            of_all: the rollouts of all problems.
            so_far: tokens that the rollout has and did not end at.
        """
        not_short = self.longer(of_all._up_to(1 / 3), so_far=so_far)
        long = self.longer(of_all._up_to(2 / 3), so_far=so_far)
        probabilities = {
            LengthClass.LONG: long,
            LengthClass.MEDIUM: not_short - long,
            LengthClass.SHORT: 1 - not_short,
        }
        return max(probabilities, key=lambda one: probabilities[one])

    def _longer(self, than: float) -> float:
        return self._before(bisect_right(self._ends, than))

    def _before(self, at: int) -> float:
        """The probability of a length greater than that of the end before *at*."""
        return self._survival[at - 1] if at else 1.0

    def _up_to(self, share: float) -> int:
        """The greatest length whose rank is at most *share*: 0 is shorter than all, 1 longer than all."""

        def rank(at: int) -> float:
            return 1 - (self._before(at) + self._survival[at]) / 2

        at = bisect_right(range(len(self._ends)), share, key=rank)
        if 1 - self._before(at) > share * (1 + _ROUNDING):  # so is the rank of what lies between two ends
            return self._ends[at - 1]
        return self._ends[at] - 1 if at < len(self._ends) else self.longest
