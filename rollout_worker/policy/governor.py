"""Stops drafting that does not pay, by what is measured, and notices when it would pay again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rollout_worker.policy.budgets import Allowance

EXPLORATION = 0.005
"""Share of all tokens that may be drafted where drafting does not pay, to see whether that is still so."""
_PROBE = 4
"""Tokens of an exploring draft."""
_PRIOR = 4.0
"""Expected tokens that count half of what a rollout's own drafts have shown."""
_KEPT, _KEPT_OF_ALL = 64.0, 4096.0
"""Expected tokens after which what was seen counts half."""
_LEAST_SURVIVAL = 0.01
"""Where a policy ends drafts nowhere."""
_DOUBT = 0.8
"""Below this share of what was promised, thresholds are raised: less is chance."""
_LOSS, _GAIN = 0.005, 0.01
"""Of a step's time without drafts: what loses more stops drafting, what gains more lets it begin again."""
_MOST = 0.5
"""What one step may say."""
_STEPS = 48
"""Over which gains and losses are averaged."""
_LEAST_STEPS = 24
_LEAST_PROBES = 16


class Verified(NamedTuple):
    """What became of one draft."""

    key: str
    drafted: int
    expected: float
    """Tokens that were to be accepted by the probabilities said: the sum of their cumulative products."""
    accepted: int


class _Record:
    """Expected and accepted draft tokens, older ones counting less."""

    __slots__ = ("_kept", "accepted", "expected")

    def __init__(self, kept: float) -> None:
        self._kept = kept
        self.expected = self.accepted = 0.0

    def add(self, expected: float, accepted: float) -> None:
        self.expected += expected
        self.accepted += accepted
        if self.expected > self._kept:
            self.expected /= 2
            self.accepted /= 2

    def ratio(self, prior: float) -> float:
        return (self.accepted + _PRIOR * prior) / (self.expected + _PRIOR)


class Governor:
    """Stands between a policy and the drafter.

    *Per request*: a rollout whose drafts have less accepted than their probabilities promise has its threshold raised
    by as much, so that one of which nothing is accepted is soon drafted for no more. *Per batch*: what drafts saved,
    by the worth of accepted tokens, is compared with what steps took longer than they would have without drafts. Where
    that loses, all drafting stops; between stopping and beginning again lies a margin, so that it does not flicker.
    Meanwhile a small share of the tokens is drafted, for one rollout at a time, to see what would be accepted.
    """

    def __init__(self, *, exploration: float = EXPLORATION) -> None:
        self.stopped = False
        """Whether drafting is off for all, but for exploring."""
        self.stops = 0
        """How often it was stopped."""
        self.explored = 0
        """Tokens drafted to explore."""
        self._exploration = exploration
        self._bank = 0.0
        self._all = _Record(_KEPT_OF_ALL)
        self._of: dict[str, _Record] = {}
        self._gain, self._steps = 0.0, 0
        self._probes, self._probed_gain = 0, 0.0
        self._exploring: str | None = None
        self._turn = 0

    def close(self, key: str) -> None:
        """A rollout ended."""
        self._of.pop(key, None)

    def limit(self, keys: Sequence[str], allowed: Allowance) -> Allowance:
        """What of an allowance is left."""
        budgets, survivals = [], []
        doubted = []
        prior = min(1.0, self._all.ratio(1.0))
        for place, (key, budget, survival) in enumerate(zip(keys, allowed.budgets, allowed.min_survivals, strict=True)):
            record = self._of.get(key)
            ratio = (prior if record is None else record.ratio(prior)) / _DOUBT
            raised = survival if ratio >= 1 else max(survival, _LEAST_SURVIVAL) / ratio
            if budget and (self.stopped or ratio < 1):
                doubted.append(place)
            if self.stopped or raised > 1:
                budget = 0
            budgets.append(budget)
            survivals.append(min(raised, 1.0))
        self._exploring = None
        if doubted and self._bank >= _PROBE:
            self._turn += 1
            place = doubted[self._turn % len(doubted)]
            self._exploring = keys[place]
            budgets[place] = min(allowed.budgets[place], _PROBE)
            survivals[place] = allowed.min_survivals[place]
        return Allowance(budgets, survivals, allowed.worths)

    def verified(self, drafts: Sequence[Verified], said: int) -> None:
        """A step verified these drafts (those of no tokens may be left out), and rollouts said so many tokens in it."""
        # never more saved up than some probes, lest a long rest is followed by a burst
        self._bank = min(self._bank + self._exploration * said, 4.0 * _PROBE)
        for one in drafts:
            if one.drafted:
                self._all.add(one.expected, one.accepted)
                self._of.setdefault(one.key, _Record(_KEPT)).add(one.expected, one.accepted)
            if one.key == self._exploring:
                self._bank -= one.drafted
                self.explored += one.drafted

    def timed(self, *, without: float, extra: float, saved: float) -> None:
        """A step took *extra* seconds more than the *without* that it would have taken without drafts.

        Args:
            without: seconds.
            extra: seconds; of a step in which a rollout explored, by the cost model.
            saved: seconds that the tokens accepted in it are worth.
        """
        if without <= 0:
            return
        # a step that waits for something else takes many times as long
        gain = min(max((saved - extra) / without, -_MOST), _MOST)
        if self.stopped:
            if self._exploring is not None:
                self._probes += 1
                self._probed_gain += (gain - self._probed_gain) / min(self._probes, 2 * _LEAST_PROBES)
                if self._probes >= _LEAST_PROBES and self._probed_gain > _GAIN:
                    self._begin()
            return
        self._steps += 1
        self._gain += (gain - self._gain) / min(self._steps, _STEPS)
        if self._steps >= _LEAST_STEPS and self._gain < -_LOSS:
            self.stopped = True
            self.stops += 1
            self._probes, self._probed_gain = 0, 0.0

    def _begin(self) -> None:
        self.stopped = False
        self._gain, self._steps = 0.0, 0
