"""Disables drafting where measurements show that it does not pay, and detects when it would pay again.

If it has not paid for long, the engine is replaced by one without speculation.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from typing import NamedTuple

import numpy as np

from rollout_store.arrays import Floats, Integers
from rollout_worker.policy.draft_policy import Column, DraftBudgets

EXPLORATION_SHARE = 0.005
"""Share of all generated tokens that may be drafted where drafting does not pay, to measure whether it would."""
_TRIAL_TOKENS = 4
"""Maximum number of tokens of a trial: a draft that is made only to explore."""
_MAX_SAVED_TRIALS = 4.0
"""Maximum number of trials in the saved exploration allowance, so that no burst follows a long pause."""
_PRIOR_TOKENS = 4.0
"""Weight of the engine's acceptance ratio in that of one rollout, in expected tokens."""
_HALVE_ROLLOUT_AT_TOKENS, _HALVE_ENGINE_AT_TOKENS = 64.0, 4096.0
"""Numbers of expected tokens at which the observations of a rollout, or of the engine, are halved."""
_DEFAULT_MIN_SURVIVAL = 0.01
"""Threshold that is raised where a policy sets none."""
_MIN_ACCEPTANCE_RATIO = 0.8
"""Ratio of accepted to expected tokens below which thresholds are raised; smaller deviations are chance."""
_STOP_LOSS, _RESUME_GAIN = 0.005, 0.01
"""Limits of the loss that disables drafting and of the gain that enables it, as shares of a step without drafts."""
_MAX_TRIAL_GAIN = 0.5
"""Limit of the gain or loss of one trial, as the same share."""
_SAVING_WINDOW_STEPS = 64
"""Number of steps over which the value of the accepted tokens is averaged."""
_MAX_COMPARISONS = 256
"""Number of comparisons that are kept, the newest ones."""
_MIN_COMPARISONS, _MIN_COMPARISONS_TO_STOP = 4, 12
"""Numbers of comparisons that are needed to know a gain at all, and for a loss to disable drafting."""
_STANDARD_ERRORS = 2.5
"""A gain or loss must differ from 0 by this many standard errors, because steps vary more than drafts gain."""
_MIN_DEVIATION = 0.1
"""Lower limit of the deviation of a comparison, because a few may agree by chance."""
_FIRST_REFERENCE_INTERVAL, _UNCERTAIN_REFERENCE_INTERVAL, _REFERENCE_INTERVAL = 2, 16, 256
"""One of so many steps with drafts is decoded without them: at first and while drafts seem to lose time, while it is
uncertain whether they pay, and when it is certain that they do."""
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
"""Share of the decoding time that drafting must have been disabled for by the governor."""
_MAX_VERSIONS = 4
"""Number of weight versions that are taken into account, the newest ones."""


class Trial(NamedTuple):
    """A draft that is made only to explore."""

    row: int
    """Row of its rollout."""
    candidates: int
    """Number of rollouts that this one was chosen from."""


class Governor:
    """Limits a policy's budgets by what drafting has achieved.

    - *Per rollout*: if fewer draft tokens are accepted than their probabilities predict, the rollout's survival
      threshold is raised in proportion. A rollout whose drafts are always rejected soon gets none.
    - *Per step*: drafts that are together not worth the cost of verifying any draft are not verified.
    - *Per engine*: the value of the accepted tokens is compared with how much longer steps are than without
      drafts. If this is a loss, all drafting is disabled. Enabling it again takes a greater gain, so
      that the state does not oscillate.

    A machine that also does something else is slow for seconds, and then all steps are. Only steps that follow each
    other are therefore compared, one with drafts and one without. If every step has drafts, some are decoded without
    them for reference (:meth:`is_reference_step`). The median of the comparisons counts, because some fall on the
    moment when the machine becomes slow.

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
        self._slower: deque[float] = deque(maxlen=_MAX_COMPARISONS)
        """Logarithm of how many times as long a step took with drafts as without, in each comparison."""
        self._mean_saving, self._steps = 0.0, 0
        """Average value of a step's accepted tokens, as a share of a step without drafts, and its number of steps."""
        self._last: tuple[bool, float] | None = None
        """Whether the step before had drafts, and the logarithm of its relative duration; None if that is unknown."""
        self._reference_interval, self._steps_to_reference = _FIRST_REFERENCE_INTERVAL, _FIRST_REFERENCE_INTERVAL
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
        self._slower.clear()
        self._mean_saving, self._steps = 0.0, 0
        self._reference_interval = self._steps_to_reference = _FIRST_REFERENCE_INTERVAL

    @property
    def is_reference_step(self) -> bool:
        """Whether the next step with drafts is to be decoded without them."""
        return self._steps_to_reference <= 1

    def count_step_with_drafts(self) -> None:
        """Count a step that had drafts that pay, or one for reference."""
        if self.drafting_disabled:
            return
        self._steps_to_reference -= 1
        if self._steps_to_reference <= 0:
            gain, error = self._gain()
            if gain > error:
                self._reference_interval = min(4 * self._reference_interval, _REFERENCE_INTERVAL)
            elif gain < 0:
                self._reference_interval = _FIRST_REFERENCE_INTERVAL
            else:
                self._reference_interval = min(2 * self._reference_interval, _UNCERTAIN_REFERENCE_INTERVAL)
            self._steps_to_reference = self._reference_interval

    def _gain(self) -> tuple[float, float]:
        """Return the logarithm of the speed with drafts, relative to that without, and by how much it may be wrong."""
        if len(self._slower) < _MIN_COMPARISONS:
            return 0.0, math.inf
        slower = np.array(self._slower)
        median = float(np.median(slower))
        deviation = max(1.48 * float(np.median(np.abs(slower - median))), _MIN_DEVIATION)
        # A step for reference is compared with two others, and the median varies more than the mean by a quarter.
        error = _STANDARD_ERRORS * 1.25 * deviation / math.sqrt(len(slower) / 2)
        return math.log1p(self._mean_saving) - median, error

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

    def observe_time(self, relative_time: float | None, saving: float | None = None) -> None:
        """Record the duration of a step; disable drafting if it loses time.

        Args:
            relative_time: duration of the step as a multiple of what is predicted without drafts; None if it is
                unknown, or not representative, or if its only draft was a trial.
            saving: value of the accepted draft tokens, as a share of a step without drafts; None if nothing was
                drafted.
        """
        last, self._last = self._last, None
        if relative_time is None or relative_time <= 0 or self.drafting_disabled:
            return
        has_drafts = saving is not None
        if saving is not None:
            self._steps += 1
            self._mean_saving += (saving - self._mean_saving) / min(self._steps, _SAVING_WINDOW_STEPS)
        log_time = math.log(relative_time)
        self._last = has_drafts, log_time
        if last is None or last[0] == has_drafts:
            return
        self._slower.append(log_time - last[1] if has_drafts else last[1] - log_time)
        gain, error = self._gain()
        if len(self._slower) >= _MIN_COMPARISONS_TO_STOP and gain + error < -_STOP_LOSS:
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
        gain = min(max(gain, -_MAX_TRIAL_GAIN), _MAX_TRIAL_GAIN)
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
        """Weight version → seconds of decoding, and seconds of them while drafting was disabled."""
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
