"""Decides which rollouts of a problem are kept: its window, and the cutoff generation that follows the policy's drift.

**The window** is counted per problem: it holds the rollouts of the newest generations when *this problem* was
sampled. A problem that is sampled once per epoch therefore keeps the rollouts of several epochs, however many weight
versions each epoch has.

**The cutoff generation** follows the policy's drift. While the policy changes quickly, rollouts from many generations
ago predict little of what it generates now, and only take space and time. The history therefore has an *age limit*, in
generations: rollouts of that age and older, that is from before the cutoff generation, are deleted even within the
window. The age limit is set where old rollouts are accepted much less often than young ones, and is raised and finally
removed when that is no longer so. The decision is based on how often draft tokens from rollouts of each age were
accepted (``SuffixIndex.accepted_by_age``). The two newest generations of a problem are always kept, because the problem
has nothing better.

**The rule.** The ages below the age limit (without a limit: the ages that nearly all draft tokens come from) are split
in the middle into *young* and *old* ages.

- *Lower the limit* if old rollouts are accepted less than 0.5 times as often as the youngest. The rule assumes that
  acceptance does not rise with age. The youngest rollouts are then accepted at least as often as any range of young
  ages that starts at the youngest; and if a range of old ages is accepted too rarely, so are the last age of this
  range and all older ones. These are deleted.
- *Raise the limit* by half if rollouts of the old ages, or those that are kept beyond the limit, are accepted more than
  0.8 times as often as rollouts of the young ages, because slightly older rollouts may then help, too. Also raise it
  if next to nothing is drafted from the old ages, because the limit is then not what keeps such drafts away. The limit
  is not raised beyond ages that are known to be too old, if there are counts of them from a time with a higher limit.
- *Otherwise* keep the limit. If acceptance halves every h generations, this is the case between about 0.6 h and h
  generations. A limit that was raised by half still lies in this range, so that it does not oscillate.

"Less" and "more" must be statistically significant: the Wilson bounds (99.5 % on each side) of both rates must not
overlap. The tokens of one draft are accepted or rejected together, so 16 tokens count as one trial, and fewer than 32
trials are not evidence of anything. One call changes the limit by a factor of two at most, and never below two
generations.

**The counts** should cover several generations before the call, and old ones should decay. With too few counts nothing
is ever significant; with all counts since the beginning, changes are noticed late. If counts from before a change of
the limit remain for a while, ages that were found too old are tried again less often.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import accumulate

ALWAYS_KEPT = 2
"""Number of a problem's newest generations that are kept however old they are."""
_MIN_AGE_LIMIT = 2
"""Smallest age limit, in generations."""
_MAX_AGE = 63
"""Oldest age that is counted separately; it includes all older ones."""
_NEGLIGIBLE_SHARE = 0.01
"""Share of all draft tokens that the oldest ages may have without being considered."""
_TOO_OLD_RATIO = 0.5
"""Acceptance relative to the youngest rollouts below which an age is too old."""
_STILL_USEFUL_RATIO = 0.8
"""Acceptance of old relative to young ages above which the limit is raised."""
_TOKENS_PER_TRIAL = 16
"""Draft tokens that count as one trial, because the tokens of one draft are accepted or rejected together."""
_MIN_TRIALS = 32
"""Number of trials below which counts are not evidence of anything."""
_STANDARD_DEVIATIONS = 2.58
"""Width of the Wilson bounds: 99.5 % on each side."""


def oldest_kept(generations: Iterable[int], window: int, cutoff: int) -> int:
    """Return the oldest generation of a problem that is kept. ``append.lua`` implements the same rule.

    Args:
        generations: generations that sampled the problem.
        window: number of its newest generations that are kept, at least 1.
        cutoff: the cutoff generation; of older generations, at most :data:`ALWAYS_KEPT` are kept.

    Returns:
        One of *generations*; 0 if there is none.
    """
    oldest = 0
    for rank, generation in enumerate(sorted(set(generations), reverse=True)[:window]):
        if rank >= ALWAYS_KEPT and generation < cutoff:
            break
        oldest = generation
    return oldest


def cutoff_generation(newest: int, age_limit: int | None) -> int:
    """Return the oldest generation below the age limit if *newest* is the newest one; 0 without a limit."""
    return 0 if age_limit is None else max(0, newest - age_limit + 1)


def describe_age_limit(age_limit: int | None) -> str:
    """Return which rollouts an age limit keeps, in words."""
    return "any age" if age_limit is None else f"the last {age_limit} generations"


def next_age_limit(current: int | None, by_age: Mapping[int, tuple[float, float]]) -> int | None:
    """Return the age limit to use from now on, by the rule in this module's documentation.

    Args:
        current: the current limit in generations, at least 1; None if there is none.
        by_age: age in generations → verified draft tokens from rollouts of that age, and how many of them were
            accepted. Ages of 63 and more count as one, negative ages as 0; ages without tokens may be missing.

    Returns:
        A number of generations from 2 to 63; None for no limit.

    Raises:
        ValueError: *current* is less than one generation.
    """
    if current is not None and current < 1:
        raise ValueError(f"an age limit is at least 1 generation, got {current}")
    counts = _AcceptanceCounts(by_age)
    limit = max(_MIN_AGE_LIMIT, counts.age_range() if current is None else min(current, _MAX_AGE + 1))
    first_old = (limit + 1) // 2
    too_old = counts.first_age_below(_TOO_OLD_RATIO * counts.youngest_rate(first_old), first_old)
    if too_old is not None and too_old < limit:
        return max(too_old, first_old, _MIN_AGE_LIMIT)
    if current is None:
        return None
    young = counts.rate_bounds(0, first_old)
    # Generations that are always kept count, too, even beyond the limit: often there are no other old rollouts.
    old_ranges = [counts.rate_bounds(first_old, end) for end in (limit, _MAX_AGE + 1)]
    if young is not None and (
        any(old is not None and old[0] >= _STILL_USEFUL_RATIO * young[1] for old in old_ranges)
        or counts.age_range() <= first_old
    ):
        limit = min(limit + limit // 2, _MAX_AGE + 1 if too_old is None else too_old)
    return limit if limit <= _MAX_AGE else None


class _AcceptanceCounts:
    """Drafted and accepted tokens of ranges of ages."""

    def __init__(self, by_age: Mapping[int, tuple[float, float]]) -> None:
        drafted, accepted = [0.0] * (_MAX_AGE + 1), [0.0] * (_MAX_AGE + 1)
        for age, (drafted_tokens, accepted_tokens) in by_age.items():
            counted_age = min(max(age, 0), _MAX_AGE)
            drafted[counted_age] += drafted_tokens
            accepted[counted_age] += accepted_tokens
        self._drafted, self._accepted = [0.0, *accumulate(drafted)], [0.0, *accumulate(accepted)]

    def age_range(self) -> int:
        """Return the age below which nearly all draft tokens lie; 0 if there are none."""
        nearly_all = (1 - _NEGLIGIBLE_SHARE) * self._drafted[-1]
        return next((age for age, younger in enumerate(self._drafted) if younger >= nearly_all), 0)

    def rate_bounds(self, first: int, end: int) -> tuple[float, float] | None:
        """Return bounds of the acceptance rate of ages from *first* to before *end*; None without enough trials."""
        end = min(end, _MAX_AGE + 1)
        drafted = self._drafted[end] - self._drafted[first]
        trials = drafted / _TOKENS_PER_TRIAL
        if trials < _MIN_TRIALS:
            return None
        rate = (self._accepted[end] - self._accepted[first]) / drafted
        return _wilson_bounds(min(max(rate, 0.0), 1.0), trials)  # clipped, because the sums are rounded

    def youngest_rate(self, end: int) -> float:
        """Return a lower bound of the acceptance rate of the youngest rollouts, from the ages before *end*."""
        bounds = [self.rate_bounds(0, age + 1) for age in range(end)]
        return max((bound[0] for bound in bounds if bound is not None), default=0.0)

    def first_age_below(self, rate: float, first: int) -> int | None:
        """Return the first age, from *first* on, whose acceptance rate is significantly lower than *rate*."""
        for age in range(first, _MAX_AGE + 1):
            for start in range(first, age + 1):
                bounds = self.rate_bounds(start, age + 1)
                if bounds is not None and bounds[1] < rate:
                    return age
        return None


def _wilson_bounds(rate: float, trials: float) -> tuple[float, float]:
    """Return the Wilson score interval (1927) of a probability, from the observed rate in a number of trials."""
    square = _STANDARD_DEVIATIONS**2
    center = rate + square / (2 * trials)
    spread = _STANDARD_DEVIATIONS * math.sqrt(rate * (1 - rate) / trials + square / (4 * trials**2))
    return (center - spread) / (1 + square / trials), (center + spread) / (1 + square / trials)
