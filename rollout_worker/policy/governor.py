"""Stops drafting that does not pay, by what is measured, and notices when it would pay again."""

from __future__ import annotations

import math

import numpy as np

from rollout_worker.policy.budgets import Allowance
from rollout_worker.policy.rollouts import Column, Floats, Integers

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
_STEPS = 512
"""Over which gains and losses are averaged."""
_LEAST_STEPS = 24
_SURE = 2.0
"""Standard errors by which a loss must exceed what is allowed: steps differ by far more than drafts gain or lose."""
_LEAST_PROBES = 8


class Governor:
    """Stands between a policy and the drafter.

    *Per request*: a rollout whose drafts have less accepted than their probabilities promise has its threshold raised
    by as much, so that one of which nothing is accepted is soon drafted for no more. *Per step*: drafts that are
    together not worth what it costs to verify any are not verified. *Per batch*: what drafts saved, by the worth of
    accepted tokens, is compared with what steps took longer than they would have without drafts. Where that loses, all
    drafting stops; between stopping and beginning again lies a margin, so that it does not flicker. Meanwhile a small
    share of the tokens is drafted, for one rollout at a time, to see what would be accepted.
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
        self._expected_of_all = self._accepted_of_all = 0.0
        self._expected, self._accepted = Column(), Column()
        """Of each rollout's drafts, older ones counting less."""
        self._gain, self._square, self._steps = 0.0, 0.0, 0
        """Of steps with drafts: mean gain, mean square, and how many they were."""
        self._probes, self._probed_gain = 0, 0.0
        self._exploring: int | None = None
        self._alike = 1
        """Rollouts that would be drafted for, of which one explores."""
        self._turn = 0

    def open(self, row: int) -> None:
        """A rollout begins."""
        self._expected.begin(row, 0.0)
        self._accepted.begin(row, 0.0)

    def limit(self, rows: Integers, allowed: Allowance) -> Allowance:
        """What of an allowance is left."""
        prior = min(1.0, (self._accepted_of_all + _PRIOR) / (self._expected_of_all + _PRIOR))
        ratios = (self._accepted[rows] + _PRIOR * prior) / (self._expected[rows] + _PRIOR) / _DOUBT
        doubted = ratios < 1
        self._exploring = None
        if not self.stopped and not doubted.any():
            return allowed
        raised = np.maximum(allowed.min_survivals, _LEAST_SURVIVAL) / np.maximum(ratios, 1e-9)
        survivals = np.where(doubted, raised, allowed.min_survivals)
        budgets = np.zeros_like(allowed.budgets) if self.stopped else np.where(survivals > 1, 0, allowed.budgets)
        survivals = np.minimum(survivals, 1.0)
        if self._bank >= _PROBE:
            places = np.flatnonzero((allowed.budgets > 0) & (doubted | self.stopped))
            if len(places):
                self._turn += 1
                self._alike = len(places)
                place = int(places[self._turn % len(places)])
                self._exploring = int(rows[place])
                budgets[place] = min(int(allowed.budgets[place]), _PROBE)
                survivals[place] = allowed.min_survivals[place]
        return Allowance(budgets, survivals, allowed.worths)

    def keep(self, rows: Integers, drafted: Integers, gain: float) -> Integers:
        """Which drafts are to be verified: all, none, or that of one rollout, to explore.

        Args:
            rows: of the rollouts.
            drafted: tokens that the drafter found for each.
            gain: seconds that they are expected to save together, less what it costs to verify them.

        Returns:
            Places in *rows*.
        """
        places = np.flatnonzero(drafted)
        if gain > 0 or not len(places):
            return places
        if self._exploring is not None:
            return np.asarray(places[rows[places] == self._exploring])
        self._turn += 1
        place = int(places[self._turn % len(places)])
        if drafted[place] > self._bank:
            return places[:0]
        self._exploring = int(rows[place])
        return np.array([place])

    def verified(
        self, rows: Integers, *, said: Integers, drafted: Integers, expected: Floats, accepted: Integers
    ) -> None:
        """A step verified drafts.

        Args:
            rows: of all rollouts that were in it, no row twice.
            said: tokens of each, those accepted among them.
            drafted: tokens that were verified.
            expected: of these, tokens that were to be accepted by the probabilities said: the sum of their cumulative
                products.
            accepted: of these.
        """
        # never more saved up than some probes, lest a long rest is followed by a burst
        self._bank = min(self._bank + self._exploration * int(said.sum()), 4.0 * _PROBE)
        if not drafted.any():
            return
        self._expected_of_all += float(expected.sum())
        self._accepted_of_all += float(accepted.sum())
        if self._expected_of_all > _KEPT_OF_ALL:
            self._expected_of_all /= 2
            self._accepted_of_all /= 2
        promised = self._expected[rows] + expected
        kept = np.where(promised > _KEPT, 0.5, 1.0)
        self._expected[rows] = promised * kept
        self._accepted[rows] = (self._accepted[rows] + accepted) * kept
        if self._exploring is not None:
            explored = int(drafted[rows == self._exploring].sum())
            self._bank -= explored
            self.explored += explored

    def timed(self, *, without: float, extra: float, saved: float) -> None:
        """A step took *extra* seconds more than the *without* that it would have taken without drafts.

        Args:
            without: seconds.
            extra: seconds.
            saved: seconds that the tokens accepted in it are worth.
        """
        if without <= 0 or self.stopped or self._exploring is not None:
            return
        # a step that waits for something else takes many times as long
        gain = min(max((saved - extra) / without, -_MOST), _MOST)
        self._steps += 1
        share = 1 / min(self._steps, _STEPS)
        self._gain += (gain - self._gain) * share
        self._square += (gain * gain - self._square) * share
        error = math.sqrt(max(self._square - self._gain * self._gain, 0.0) * share)
        if self._steps >= _LEAST_STEPS and self._gain + _SURE * error < -_LOSS:
            self.stopped = True
            self.stops += 1
            self._probes, self._probed_gain = 0, 0.0

    def explored_one(self, *, without: float, gain: float, drafting: float) -> None:
        """A rollout explored: by it is judged what all would gain.

        Args:
            without: seconds of the step without drafts.
            gain: seconds, by the cost model: what one rollout's tokens cost drowns in what steps differ by anyway.
            drafting: seconds that it costs to verify any drafts.
        """
        if not self.stopped or self._exploring is None or without <= 0:
            return
        all_gain = min(max((gain * self._alike - drafting) / without, -_MOST), _MOST)
        self._probes += 1
        self._probed_gain += (all_gain - self._probed_gain) / min(self._probes, 2 * _LEAST_PROBES)
        if self._probes >= _LEAST_PROBES and self._probed_gain > _GAIN:
            self.stopped = False
            self._gain, self._square, self._steps = 0.0, 0.0, 0
