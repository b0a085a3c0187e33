"""How far back drafts look: so many generations of each problem, and none that the policy has drifted away from.

**The window** is counted by each problem: it keeps the rollouts of the newest generations in which *it* was sampled.
One that comes up once an epoch finds those of the epochs before, however many weight versions each of them has.

**The horizon** follows the policy's drift. While the policy changes fast, what it wrote some generations ago says
little of what it writes now, and only takes room and time. So there is a limit of age, in generations of the history,
where old history is accepted much less often than young history; it moves away again, at last out of sight, when not.
What decides is how often tokens that were drafted from history of each age were accepted
(``SuffixIndex.accepted_by_age``). A problem's newest two generations stay however old they are: it has nothing better.

**The rule.** The ages up to the horizon (without one, those of nearly all drafts) are cut in half: *young* are those in
the first half, *old* those in the second.

- *Draw it nearer*, if old history is accepted less than 0.5 times as often as the youngest. Acceptance does not rise
  with age: the youngest is accepted at least as often as any run of young ages that begins with it; and where a run of
  old ages is accepted too seldom, the last of them is, and all that are older are. Those are dropped.
- *Move it away* by half, if history of the old half, or what is kept behind it, is accepted more than 0.8 times as
  often as that of the young half: then what is a little older is worth a try; or if next to nothing is drafted from
  the old half: then the horizon is not what keeps it away. It stops before ages that are known to be too old, where
  there are counts of such from a time when it was further away.
- Else leave it. If acceptance halves every h generations, that is between about 0.6 h and h generations; a horizon
  that has moved away by half is still inside, so that it does not go back and forth.

"Less" and "more" are meant beyond doubt: the Wilson bounds (99.5 % on each side) of both must be apart. The tokens of a
draft stand or fall together, so that 16 count as one trial, and with fewer than 32 trials nothing is said at all. One
call moves the horizon by a factor of two at most, and never nearer than two generations.

**The counts** should be of some generations before the call, and old ones should fade: too few, and nothing is ever
sure; all there ever were, and what has changed is seen late. If counts from before a move of the horizon stay among
them for a while, ages that were found too old are tried again that much more seldom.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import accumulate

ALWAYS_KEPT = 2
"""Generations of a problem that stay, however old they are."""
_NEAREST = 2
_LAST_AGE = 63
"""Stands for all that are older as well."""
_RARE = 0.01
"""Of all drafted tokens: the oldest history says so few that the ages of drafts end before it."""
_TOO_OLD = 0.5
_NEARLY_AS_GOOD = 0.8
_TOKENS_OF_A_TRIAL = 16
_LEAST_TRIALS = 32
_DEVIATIONS = 2.58


def oldest_kept(generations: Iterable[int], window: int, since: int) -> int:
    """The oldest generation of a problem that is kept; ``append.lua`` has the same rule.

    Args:
        generations: in which the problem was sampled.
        window: how many of them are kept, the newest, 1 or more.
        since: the oldest within the horizon; of older ones, no more than :data:`ALWAYS_KEPT` are kept.

    Returns:
        One of *generations*; 0 if there is none.
    """
    oldest = 0
    for place, generation in enumerate(sorted(set(generations), reverse=True)[:window]):
        if place >= ALWAYS_KEPT and generation < since:
            break
        oldest = generation
    return oldest


def next_horizon(current: int | None, by_age: Mapping[int, tuple[float, float]]) -> int | None:
    """The horizon to use from now on; see the module for the rule.

    Args:
        current: the horizon in use, in generations, 1 or more; None: there is none.
        by_age: age in generations → tokens drafted from history of that age and verified, and how many of them were
            accepted. Ages of 63 and more count together, those below 0 as 0; ages without a token may be missing.

    Returns:
        Generations, from 2 to 63; None: as far as the window reaches.

    Raises:
        ValueError: a horizon of less than one generation.
    """
    if current is not None and current < 1:
        raise ValueError(f"a horizon is 1 or more generations, got {current}")
    counts = _Counts(by_age)
    reach = max(_NEAREST, counts.reach() if current is None else min(current, _LAST_AGE + 1))
    old = (reach + 1) // 2
    too_old = counts.first_below(_TOO_OLD * counts.at_least(old), old)
    if too_old is not None and too_old < reach:
        return max(too_old, old, _NEAREST)
    if current is None:
        return None
    young = counts.bounds(0, old)
    # also what always stays, though it lies behind the horizon: often that is all there is of old history
    old_ones = [counts.bounds(old, end) for end in (reach, _LAST_AGE + 1)]
    if young is not None and (
        any(one is not None and one[0] >= _NEARLY_AS_GOOD * young[1] for one in old_ones) or counts.reach() <= old
    ):
        reach = min(reach + reach // 2, _LAST_AGE + 1 if too_old is None else too_old)
    return reach if reach <= _LAST_AGE else None


class _Counts:
    """Drafted and accepted tokens of runs of ages."""

    def __init__(self, by_age: Mapping[int, tuple[float, float]]) -> None:
        drafted, accepted = [0.0] * (_LAST_AGE + 1), [0.0] * (_LAST_AGE + 1)
        for age, (tokens, right) in by_age.items():
            place = min(max(age, 0), _LAST_AGE)
            drafted[place] += tokens
            accepted[place] += right
        self._drafted, self._accepted = [0.0, *accumulate(drafted)], [0.0, *accumulate(accepted)]

    def reach(self) -> int:
        """The age before which nearly all tokens were drafted from; 0 if none were."""
        enough = (1 - _RARE) * self._drafted[-1]
        return next((age for age, before in enumerate(self._drafted) if before >= enough), 0)

    def bounds(self, first: int, end: int) -> tuple[float, float] | None:
        """Between what the acceptance rate of the ages from *first* to before *end* is; None: they say too little."""
        end = min(end, _LAST_AGE + 1)
        drafted = self._drafted[end] - self._drafted[first]
        trials = drafted / _TOKENS_OF_A_TRIAL
        if trials < _LEAST_TRIALS:
            return None
        share = (self._accepted[end] - self._accepted[first]) / drafted
        return _wilson(min(max(share, 0.0), 1.0), trials)  # sums round

    def at_least(self, end: int) -> float:
        """How often the youngest history is accepted, by the ages before *end*."""
        found = [self.bounds(0, age + 1) for age in range(end)]
        return max((bounds[0] for bounds in found if bounds is not None), default=0.0)

    def first_below(self, rate: float, first: int) -> int | None:
        """The first age, from *first* on, whose history is accepted less often than *rate* for sure."""
        for age in range(first, _LAST_AGE + 1):
            for begin in range(first, age + 1):
                found = self.bounds(begin, age + 1)
                if found is not None and found[1] < rate:
                    return age
        return None


def _wilson(share: float, trials: float) -> tuple[float, float]:
    """Bounds of a probability, by the share of *trials* that came out so (Wilson 1927)."""
    square = _DEVIATIONS**2
    middle = share + square / (2 * trials)
    spread = _DEVIATIONS * math.sqrt(share * (1 - share) / trials + square / (4 * trials**2))
    return (middle - spread) / (1 + square / trials), (middle + spread) / (1 + square / trials)
