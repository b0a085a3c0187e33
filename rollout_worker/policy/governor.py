"""Disables drafting where measurements show that it does not pay, and detects when it would pay again.

If it has not paid for long, the engine is replaced by one without speculation.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from rollout_worker.arrays import Floats, Integers
from rollout_worker.policy.draft_policy import Column, DraftBudgets

EXPLORATION_SHARE = 0.005
"""Share of all generated tokens that may be drafted where drafting does not pay, to measure whether it would."""
_TRIAL_TOKENS = 4
"""Maximum number of tokens of a trial: a draft that is made only to explore."""
_MAX_SAVED_TRIALS = 4.0
"""Number of trials for which the exploration allowance is saved at most, so that no burst follows a long pause."""
_PRIOR_TOKENS = 4.0
"""Weight of the engine's acceptance ratio in that of one rollout, in expected tokens."""
_HALVE_ROLLOUT_AT_TOKENS, _HALVE_ENGINE_AT_TOKENS = 64.0, 4096.0
"""Numbers of expected tokens at which the observations of a rollout, or of the engine, are halved."""
_DEFAULT_MIN_SURVIVAL = 0.01
"""Threshold that is raised where a policy sets none."""
_MIN_ACCEPTANCE_RATIO = 0.8
"""Ratio of accepted to expected tokens below which thresholds are raised; smaller deviations are chance."""
_STOP_LOSS, _RESUME_GAIN = 0.005, 0.01
"""Loss beyond which drafting is disabled, and gain from which on it is enabled, as shares of a step without drafts."""
_MAX_STEP_GAIN = 0.5
"""Limit of the gain or loss of one step, as the same share, because a step that waits for something takes very long."""
_GAIN_WINDOW_STEPS = 512
"""Number of steps over which gains are averaged."""
_MIN_STEPS_TO_STOP = 24
_STOP_STANDARD_ERRORS = 2.0
"""Number of standard errors by which a loss must exceed its limit, because steps vary more than drafts gain or lose."""
_MIN_TRIALS_TO_RESUME = 8
_FIRST_RETRY_STEPS = 256
"""Number of steps after which drafting is enabled again, whatever the trials have shown; it doubles with each stop."""
MIN_DECODING_S = 1800.0
"""Seconds of decoding that are observed before an engine is replaced, because starting another takes minutes."""
ONE_VERSION_FACTOR = 4.0
"""Factor on that time while all of it was decoded with one weight version.

Drafting may begin to pay with new weights, under which rollouts may resemble earlier ones more closely."""
_MIN_VERSION_S = 60.0
"""Seconds of decoding below which a weight version is not taken into account."""
_MIN_DISABLED_SHARE = 0.95
"""Share of the decoding time in which the governor must have disabled drafting."""
_MAX_VERSIONS = 4
"""Number of weight versions that are taken into account, the newest ones."""


class Trial(NamedTuple):
    """A draft that is made only to explore."""

    row: int
    """Row of its rollout."""
    candidates: int
    """Number of rollouts from which that one was chosen."""


class Governor:
    """Limits a policy's budgets by what drafting has achieved.

    - *Per rollout*: if fewer draft tokens are accepted than their probabilities predict, the rollout's survival
      threshold is raised in proportion. A rollout of which nothing is accepted soon gets no more drafts.
    - *Per step*: drafts that are together not worth the cost of verifying any draft are not verified.
    - *Per engine*: the value of the accepted tokens is compared with the time by which steps were longer than without
      drafts. If this is a loss, all drafting is disabled. The gain from which on it is enabled again is greater, so
      that the state does not oscillate.

    While drafting is disabled, a small share of the tokens is still drafted, for one rollout at a time, to measure what
    would be accepted. An engine with few rollouts makes few such trials, and the drafter may have learned in the
    meantime. Drafting is therefore enabled again after some time, which doubles with each stop, and when the history
    has a new generation, whose drafts may be better (:meth:`retry`).
    """

    def __init__(self, *, exploration: float = EXPLORATION_SHARE) -> None:
        self.drafting_disabled = False
        """Whether drafting is disabled for all rollouts, except for trials."""
        self.num_stops = 0
        """How often drafting was disabled."""
        self.trial_tokens = 0
        """Number of tokens of all trials."""
        self._exploration = exploration
        self._allowance_tokens = 0.0
        """Number of tokens that may be spent on trials now."""
        self._engine_expected = self._engine_accepted = 0.0
        self._expected, self._accepted = Column(), Column()
        """Draft tokens of each rollout, with older ones weighted less."""
        self._mean_gain, self._mean_square, self._steps = 0.0, 0.0, 0
        """Statistics of the gains of steps with drafts."""
        self._trials, self._mean_trial_gain = 0, 0.0
        self._disabled_steps = 0
        self.trial: Trial | None = None
        """The trial among the drafts that were last chosen; pass it on when their verification is observed."""
        self._turn = 0

    def open(self, row: int) -> None:
        """Start to observe a rollout."""
        self._expected.initialize(row, 0.0)
        self._accepted.initialize(row, 0.0)

    def count_step(self) -> None:
        """Count a step. Call it once per step, whether or not its outcome is observed."""
        if self.drafting_disabled:
            self._disabled_steps += 1
            if self._disabled_steps >= _FIRST_RETRY_STEPS << (self.num_stops - 1):
                self.retry()

    def retry(self) -> None:
        """Enable drafting, and judge it by the next steps alone."""
        self.drafting_disabled = False
        self._mean_gain, self._mean_square, self._steps = 0.0, 0.0, 0

    def limit(self, rows: Integers, budgets: DraftBudgets) -> DraftBudgets:
        """Reduce budgets to what drafting has justified, and choose a rollout for a trial if the allowance suffices."""
        prior = min(1.0, (self._engine_accepted + _PRIOR_TOKENS) / (self._engine_expected + _PRIOR_TOKENS))
        ratios = (self._accepted[rows] + _PRIOR_TOKENS * prior) / (self._expected[rows] + _PRIOR_TOKENS)
        ratios /= _MIN_ACCEPTANCE_RATIO
        below = ratios < 1
        self.trial = None
        if not self.drafting_disabled and not below.any():
            return budgets
        raised = np.maximum(budgets.min_survivals, _DEFAULT_MIN_SURVIVAL) / np.maximum(ratios, 1e-9)
        survivals = np.where(below, raised, budgets.min_survivals)
        tokens = np.where((survivals > 1) | self.drafting_disabled, 0, budgets.tokens)
        survivals = np.minimum(survivals, 1.0)
        if self._allowance_tokens >= _TRIAL_TOKENS:
            candidates = np.flatnonzero((budgets.tokens > 0) & (below | self.drafting_disabled))
            if len(candidates):
                place = self._next_turn(candidates)
                self.trial = Trial(int(rows[place]), len(candidates))
                tokens[place] = min(int(budgets.tokens[place]), _TRIAL_TOKENS)
                survivals[place] = budgets.min_survivals[place]
        return budgets._replace(tokens=tokens, min_survivals=survivals)

    def select_trial(self, rows: Integers, drafted: Integers) -> int | None:
        """Choose the draft of one rollout as a trial, because all drafts together do not pay.

        Args:
            rows: the rollouts, shape (rollouts,).
            drafted: number of tokens of each rollout's draft, shape (rollouts,), not all 0.

        Returns:
            An index into *rows*, or None if no draft is to be verified.
        """
        places = np.flatnonzero(drafted)
        if self.trial is not None:
            return next((int(place) for place in places if rows[place] == self.trial.row), None)
        place = self._next_turn(places)
        if drafted[place] > self._allowance_tokens:
            return None
        self.trial = Trial(int(rows[place]), 1)
        return place

    def _next_turn(self, places: Integers) -> int:
        self._turn += 1
        return int(places[self._turn % len(places)])

    def observe_step(
        self,
        rows: Integers,
        *,
        generated: Integers,
        drafted: Integers,
        expected: Floats,
        accepted: Integers,
        trial: Trial | None,
    ) -> None:
        """Record the acceptance of one step.

        Args:
            rows: all rollouts in the step, no row twice; all arguments have the shape (rollouts,).
            generated: number of tokens that each generated, accepted draft tokens included.
            drafted: number of its draft tokens that were verified.
            expected: number of draft tokens expected to be accepted, which is the sum of their survivals.
            accepted: number of draft tokens that were accepted.
            trial: the trial among the drafts.
        """
        self._allowance_tokens = min(
            self._allowance_tokens + self._exploration * int(generated.sum()), _MAX_SAVED_TRIALS * _TRIAL_TOKENS
        )
        if not drafted.any():
            return
        self._engine_expected += float(expected.sum())
        self._engine_accepted += float(accepted.sum())
        if self._engine_expected > _HALVE_ENGINE_AT_TOKENS:
            self._engine_expected /= 2
            self._engine_accepted /= 2
        total_expected = self._expected[rows] + expected
        decay = np.where(total_expected > _HALVE_ROLLOUT_AT_TOKENS, 0.5, 1.0)
        self._expected[rows] = total_expected * decay
        self._accepted[rows] = (self._accepted[rows] + accepted) * decay
        if trial is not None:
            explored = int(drafted[rows == trial.row].sum())
            self._allowance_tokens -= explored
            self.trial_tokens += explored

    def observe_time(self, *, without_drafts_s: float, extra_s: float, saved_s: float) -> None:
        """Record the duration of a step with drafts, none of them a trial; disable drafting if it loses time.

        Args:
            without_drafts_s: predicted seconds of the step without drafts.
            extra_s: seconds by which the step was longer than that.
            saved_s: value of the accepted draft tokens, in seconds.
        """
        if without_drafts_s <= 0 or self.drafting_disabled:
            return
        gain = min(max((saved_s - extra_s) / without_drafts_s, -_MAX_STEP_GAIN), _MAX_STEP_GAIN)
        self._steps += 1
        weight = 1 / min(self._steps, _GAIN_WINDOW_STEPS)
        self._mean_gain += (gain - self._mean_gain) * weight
        self._mean_square += (gain * gain - self._mean_square) * weight
        standard_error = math.sqrt(max(self._mean_square - self._mean_gain * self._mean_gain, 0.0) * weight)
        upper_limit = self._mean_gain + _STOP_STANDARD_ERRORS * standard_error
        if self._steps >= _MIN_STEPS_TO_STOP and upper_limit < -_STOP_LOSS:
            self.drafting_disabled = True
            self.num_stops += 1
            self._disabled_steps = 0
            self._trials, self._mean_trial_gain = 0, 0.0

    def observe_trial(self, trial: Trial, *, without_drafts_s: float, gain_s: float, drafting_s: float) -> None:
        """Record the gain of a trial; enable drafting if all rollouts together would gain enough.

        The gain follows from the cost model, because the cost of one rollout's tokens cannot be measured: steps vary by
        more than that.

        Args:
            trial: the trial.
            without_drafts_s: predicted seconds of the step without drafts.
            gain_s: seconds that the accepted tokens save, minus the cost of its tokens.
            drafting_s: c_draft, the cost of verifying any drafts.
        """
        if not self.drafting_disabled or without_drafts_s <= 0:
            return
        gain = (gain_s * trial.candidates - drafting_s) / without_drafts_s
        gain = min(max(gain, -_MAX_STEP_GAIN), _MAX_STEP_GAIN)
        self._trials += 1
        self._mean_trial_gain += (gain - self._mean_trial_gain) / min(self._trials, 2 * _MIN_TRIALS_TO_RESUME)
        if self._trials >= _MIN_TRIALS_TO_RESUME and self._mean_trial_gain > _RESUME_GAIN:
            self.retry()


class SpeculationCutoff:
    """Observes for how long an engine's governor has disabled drafting, by weight version.

    With a drafter configured, an engine still looks for drafts from time to time, and its scheduler plans places for
    them. An engine without speculation may be faster, above all on CPUs, where only such an engine schedules
    asynchronously.
    """

    def __init__(
        self, *, min_decoding_s: float = MIN_DECODING_S, min_disabled_share: float = _MIN_DISABLED_SHARE
    ) -> None:
        """Create a cutoff; see :data:`MIN_DECODING_S`.

        Args:
            min_decoding_s: seconds of decoding that are observed at least.
            min_disabled_share: share of the decoding time in which drafting must have been disabled, per version.
        """
        self._min_decoding_s, self._min_disabled_share = min_decoding_s, min_disabled_share
        self._versions: OrderedDict[int, tuple[float, float]] = OrderedDict()
        """Weight version → seconds of decoding, and the part of them in which drafting was disabled."""
        self._total_s = 0.0

    def observe(self, *, weight_version: int, decoding_s: float, drafting_disabled: bool) -> None:
        """Record the engine's state.

        Args:
            weight_version: the version that the engine serves.
            decoding_s: seconds of decoding since the engine started.
            drafting_disabled: whether its governor has disabled drafting.
        """
        added_s, self._total_s = max(0.0, decoding_s - self._total_s), decoding_s
        decoded_s, disabled_s = self._versions.pop(weight_version, (0.0, 0.0))
        self._versions[weight_version] = decoded_s + added_s, disabled_s + added_s * drafting_disabled
        while len(self._versions) > _MAX_VERSIONS:
            self._versions.popitem(last=False)

    @property
    def is_reached(self) -> bool:
        """Whether the engine should be replaced by one without speculation."""
        min_version_s = min(_MIN_VERSION_S, self._min_decoding_s)
        versions = [times for times in self._versions.values() if times[0] >= min_version_s]
        total_s = sum(decoded_s for decoded_s, _ in versions)
        required_s = self._min_decoding_s * (1.0 if len(versions) > 1 else ONE_VERSION_FACTOR)
        return (
            bool(versions)
            and total_s >= required_s
            and all(disabled_s >= self._min_disabled_share * decoded_s for decoded_s, disabled_s in versions)
        )
