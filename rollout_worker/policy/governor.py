"""Disables drafting where measurements show that it does not pay, and detects when it would pay again.

If it has not paid for long, the engine is replaced by one without speculation.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from typing import NamedTuple

import numpy as np

from rollout_store.arrays import Floats, Integers
from rollout_worker.policy.draft_policy import Column, DraftBudgets

EXPLORATION_SHARE = 0.005
"""Share of all generated tokens that may be drafted where drafting does not pay, to measure whether it would.

It is also the share of the time that this may take."""
TRIAL_TOKENS = 4
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
_SAVING_WINDOW_STEPS = 256
"""Number of steps over which the saving is averaged."""
_MAX_COMPARISONS = 256
"""Number of comparisons that are kept, the newest ones."""
_MIN_COMPARISONS, _MIN_COMPARISONS_TO_STOP = 4, 12
"""Numbers of comparisons that are needed to know a gain at all, and for a loss to disable drafting."""
_STANDARD_ERRORS = 2.5
"""A gain or loss must differ from 0 by this many standard errors, because steps vary more than drafts gain."""
_MEDIAN_ERROR = 1.25
"""Standard error of a median, as a multiple of that of the mean of normally distributed values."""
_MIN_DEVIATION, _MIN_DEVIATION_OF_FEW = 0.03, 0.1
"""Lower limits of the deviation of a comparison. The second one applies to fewer comparisons than stop drafting, which
may agree by chance."""
_FEW_REFERENCES = 6.0
"""Number of steps for reference with which the error is taken to be twice as large as with many.

A few steps may be without the rare delays that others have."""
_MIN_LOSS_ERROR = 1.2
"""A loss that n steps for reference show must exceed this divided by n."""
_MAX_DIFFERENCE = 1.0
"""Limit of the difference of two steps, as a share of usual ones: one of them may have waited for something else."""
_MIN_SCALE = 0.1
"""Lower limit of the usual duration of steps, as a multiple of what is predicted."""
_MAX_SHARE = 0.95
"""Limit of the mean saving and of the mean difference, which are shares of a step with drafts."""
_USUAL_STEPS = 6
"""Number of steps with drafts that show how long steps are at the moment."""
_MAX_MICRO_BATCHES = 16
"""Number of micro-batches whose last steps are remembered. A pipeline has one for each of its stages."""
_FIRST_REFERENCE_INTERVAL, _UNCERTAIN_REFERENCE_INTERVAL, _REFERENCE_INTERVAL = 2, 16, 256
"""One of so many steps with drafts is decoded without them: at first and while drafts seem to lose time, while it is
uncertain whether they pay, and when it is certain that they do."""
_KNOWN_REFERENCE_INTERVAL = 64
"""Number of steps with drafts before the first such step of an engine, if an earlier one was certain."""
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


class StepOutcome(NamedTuple):
    """The outcome of one verification step; arrays of shape (rollouts,)."""

    rows: Integers
    """Rows of the rollouts, each once."""
    generated: Integers
    """Number of tokens that each generated, accepted draft tokens included."""
    drafted: Integers
    """Number of verified draft tokens."""
    expected: Floats
    """Number of draft tokens expected to be accepted, which is the sum of their survivals."""
    context_tokens: Integers
    """Number of tokens of prompt and response that attention read."""
    trial: Trial | None = None
    """:attr:`Governor.trial` after the drafts of this step were selected."""
    prompt_tokens: int = 0
    """Number of tokens of prompts that the step read besides."""
    waited: bool = False
    """Whether it waited for the drafter, although an engine without drafts would have launched it before."""


class Gain(NamedTuple):
    """What drafting gains, as the logarithm of the speed with drafts relative to that without."""

    value: float
    error: float
    """By how much the value may be wrong; infinite while nothing was compared."""

    @property
    def is_known(self) -> bool:
        """Whether anything was compared."""
        return self.error < math.inf


_UNKNOWN = Gain(0.0, math.inf)


class _MicroBatch:
    """The last steps of the rollouts that an engine decodes together."""

    def __init__(self) -> None:
        self.last: tuple[bool, float, float] | None = None
        """Whether the last step had drafts, its duration as a multiple of the predicted one, and its weight; None if
        these are unknown."""
        self.usual: deque[float] = deque(maxlen=_USUAL_STEPS)
        """Durations of the last steps with drafts, as multiples of the predicted ones."""

    def compare(self, has_drafts: bool, relative_time: float, weight: float) -> tuple[float, float] | None:
        """Compare a step with the one before it; return None if both or neither had drafts.

        Returns:
            By how much the one with drafts was longer, as a share of a usual step with drafts, and the weight of that.
        """
        last, self.last = self.last, (has_drafts, relative_time, weight)
        # The scale must not depend on the two steps, or steps that vary more would seem to be faster.
        usual = list(self.usual) if has_drafts else list(self.usual)[:-1]
        if has_drafts:
            self.usual.append(relative_time)
        if last is None or last[0] == has_drafts:
            return None
        with_drafts, without = (relative_time, last[1]) if has_drafts else (last[1], relative_time)
        scale = max(statistics.median(usual) if usual else (with_drafts + without) / 2, _MIN_SCALE)
        difference = min(max((with_drafts - without) / scale, -_MAX_DIFFERENCE), _MAX_DIFFERENCE)
        return difference, min(weight, last[2])


class Governor:
    """Limits a policy's budgets by what drafting has achieved.

    - *Per rollout*: if fewer draft tokens are accepted than their probabilities predict, the rollout's survival
      threshold is raised in proportion. A rollout whose drafts are always rejected soon gets none.
    - *Per step*: drafts that are together not worth the cost of verifying any draft are not verified.
    - *Per engine*: the number of steps that the accepted tokens save is compared with how much longer steps are than
      without drafts. If this is a loss, all drafting is disabled. Enabling it again takes a greater gain, so that the
      state does not oscillate.

    A machine that also does something else is slow for seconds, and then all steps are. Only steps of the same
    micro-batch that follow each other are therefore compared, one with drafts and one without. If every step has
    drafts, some are decoded without them for reference (:meth:`is_reference_step`). An engine that waits for the
    drafter before it launches a step launches these at once, as it would without drafting. Drafting is disabled if both
    the mean and the median of the comparisons show a loss. Rare long delays affect only the mean, although they
    cost time, and one kind of step may have more of them. Where the speed of the machine often changes, the mean is
    less certain. The difference of two steps is limited, because some fall on such a change. Steps vary with their
    numbers of draft tokens by more than drafts gain. Each is therefore divided by its predicted duration, so that
    the comparisons measure only by how much the prediction is wrong, and the average prediction is added. A
    disabled drafter takes no time, so that the time that it takes in steps without drafts counts as well.

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
        self.trial_cost = 0.0
        """Duration that a trial adds to a step, as a share of a step without drafts."""
        self.wait_cost = 0.0
        """Duration that waiting for the drafter adds to a step, as the same share."""
        self._exploration = exploration
        self._allowance_tokens = 0.0
        """Number of tokens that may be spent on trials now."""
        self._allowance_steps = 0.0
        """Time that may be spent on trials now, in steps without drafts."""
        self._engine_expected = self._engine_accepted = 0.0
        self._expected, self._accepted = Column(), Column()
        """Draft tokens of each rollout, with older ones weighted less."""
        self.gain = self._median_gain = _UNKNOWN
        """The measured gain, by the mean and by the median of the comparisons."""
        self._slower: deque[tuple[float, float]] = deque(maxlen=_MAX_COMPARISONS)
        """By how much drafts prolonged a step more than predicted in each comparison, as a share of a usual step with
        drafts, and its weight."""
        self._mean_saving, self._saving_variance, self._steps = 0.0, 0.0, 0
        """Average and variance of the share of a step with drafts that its accepted tokens save, and its number of
        steps."""
        self._searches = self._steps_with_drafts = 0.0
        """Time of the drafter in steps that verified no drafts, as a multiple of such a step, and number of steps with
        drafts. Older steps count less."""
        self._mean_predicted_time = 1.0
        """Average predicted duration of a step with drafts, as a multiple of the one without."""
        self._references = 0.0
        """Number of steps for reference that the comparisons amount to, given their weights."""
        self._micro_batches: OrderedDict[int, _MicroBatch] = OrderedDict()
        self._reference_interval, self._steps_to_reference = _FIRST_REFERENCE_INTERVAL, _FIRST_REFERENCE_INTERVAL
        self._num_references = 0
        self._trials, self._mean_trial_gain = 0, 0.0
        self._steps_to_retry = 0
        """Number of steps for which drafting remains disabled."""
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
            self._steps_to_retry -= 1
            if self._steps_to_retry <= 0:
                self.retry()

    def save_time(self) -> None:
        """Save time for a trial by a step without drafts."""
        self._allowance_steps = min(self._allowance_steps + self._exploration, _MAX_SAVED_TRIALS * self._look_cost)

    def count_tokens(self, tokens: int) -> None:
        """Count generated tokens."""
        limit = _MAX_SAVED_TRIALS * TRIAL_TOKENS
        self._allowance_tokens = min(self._allowance_tokens + self._exploration * tokens, limit)

    @property
    def is_worth_waiting(self) -> bool:
        """Whether steps may wait for the drafter, because drafting is not disabled, or there is time for a trial."""
        return not self.drafting_disabled or self._allowance_steps >= self._look_cost

    @property
    def _look_cost(self) -> float:
        """Time that a trial takes, in steps without drafts; the engine waits before and after it."""
        return self.trial_cost + 2 * self.wait_cost

    def retry_soon(self) -> None:
        """If drafting is disabled, enable it after as many steps as after the first stop, or earlier.

        New rollouts in the history may make drafts better. Drafting is not enabled at once, because there may be new
        ones every few hundred steps.
        """
        self._steps_to_retry = min(self._steps_to_retry, _FIRST_RETRY_STEPS)

    def retry(self) -> None:
        """Enable drafting, and judge it by the next steps alone."""
        self.drafting_disabled = False
        self.forget_comparisons()
        self._mean_saving, self._saving_variance, self._steps = 0.0, 0.0, 0
        self._searches = self._steps_with_drafts = 0.0
        self._reference_interval = self._steps_to_reference = _FIRST_REFERENCE_INTERVAL

    def forget_comparisons(self) -> None:
        """Measure the gain anew, because durations were predicted from another cost so far."""
        self.gain = self._median_gain = _UNKNOWN
        self._slower.clear()
        self._micro_batches.clear()

    def expect(self, gain: Gain) -> None:
        """Expect the gain that an earlier engine has measured, so that fewer steps are needed for reference at first.

        It does not count as a measurement of this engine.
        """
        if self._slower or gain.value <= 0:
            return
        is_certain = gain.value > gain.error
        self._reference_interval = _KNOWN_REFERENCE_INTERVAL if is_certain else _UNCERTAIN_REFERENCE_INTERVAL
        self._steps_to_reference = self._reference_interval

    @property
    def is_certain(self) -> bool:
        """Whether it is certain that drafting gains or loses time: mean and median agree, and one exceeds its error."""
        gains = self.gain, self._median_gain
        return gains[0].value * gains[1].value > 0 and any(abs(gain.value) > gain.error for gain in gains)

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
            if self.is_certain and self.gain.value > 0:
                self._reference_interval = min(4 * self._reference_interval, _REFERENCE_INTERVAL)
            elif max(self.gain.value, self._median_gain.value) < 0:
                self._reference_interval = _FIRST_REFERENCE_INTERVAL
            else:
                self._reference_interval = min(2 * self._reference_interval, _UNCERTAIN_REFERENCE_INTERVAL)
            # Two micro-batches alternate, and each must have steps of both kinds.
            self._num_references += 1
            self._steps_to_reference = self._reference_interval + self._num_references % 2

    def _measure_gain(self) -> None:
        """Set the gain by the mean and by the median of the comparisons."""
        if len(self._slower) < _MIN_COMPARISONS:
            return
        slower, weights = np.array(self._slower).T
        order = np.argsort(slower)
        slower, weights = slower[order], weights[order] / weights.sum()
        # A step for reference is compared with two others.
        self._references = 1 / float(weights @ weights) / 2
        mean, median = float(weights @ slower), _median(slower, weights)
        self.gain = self._gain(mean, math.sqrt(weights @ (slower - mean) ** 2))
        distances = np.abs(slower - median)
        order = np.argsort(distances)
        self._median_gain = self._gain(median, _MEDIAN_ERROR * 1.48 * _median(distances[order], weights[order]))

    def _gain(self, slower: float, deviation: float) -> Gain:
        """Return the gain if steps with drafts are longer than predicted by the share *slower*.

        This is the mean of terms with the given *deviation*.
        """
        slower, saving = min(slower, _MAX_SHARE), min(self._mean_saving, _MAX_SHARE)
        few = len(self._slower) < _MIN_COMPARISONS_TO_STOP
        deviation = max(deviation, _MIN_DEVIATION_OF_FEW if few else _MIN_DEVIATION)
        error = deviation / math.sqrt(self._references) / (1 - slower)
        saving_error = math.sqrt(self._saving_variance / min(self._steps, _SAVING_WINDOW_STEPS)) / (1 - saving)
        searches = self._searches / max(self._steps_with_drafts, 1.0)
        gain = math.log1p(-slower) - math.log(self._mean_predicted_time + searches) - math.log1p(-saving)
        return Gain(gain, _STANDARD_ERRORS * math.hypot(error, saving_error))

    def _is_loss(self, gain: Gain) -> bool:
        """Return whether a gain is certainly negative, although the steps for reference may lack rare delays."""
        error = gain.error * (1 + _FEW_REFERENCES / self._references)
        return gain.value + max(error, _MIN_LOSS_ERROR / self._references) < -_STOP_LOSS

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
        if self._allowance_tokens >= TRIAL_TOKENS and self._allowance_steps >= self.trial_cost:
            candidates = np.flatnonzero((budgets.tokens > 0) & (below | self.drafting_disabled))
            if len(candidates):
                place = self._next_turn(candidates)
                self.trial = Trial(int(rows[place]), len(candidates))
                tokens[place] = min(int(budgets.tokens[place]), TRIAL_TOKENS)
                survivals[place] = budgets.min_survivals[place]
        return budgets._replace(tokens=tokens, min_survivals=survivals)

    def select_trial(self, rows: Integers, drafted: Integers) -> int | None:
        """Choose the draft of one rollout as a trial, because all drafts together do not pay. Not all drafts are empty.

        Returns:
            An index into *rows*, or None if no draft is to be verified.
        """
        places = np.flatnonzero(drafted)
        if self.trial is not None:
            return next((int(place) for place in places if rows[place] == self.trial.row), None)
        place = self._next_turn(places)
        if drafted[place] > self._allowance_tokens or self._allowance_steps < self.trial_cost:
            return None
        self.trial = Trial(int(rows[place]), 1)
        return place

    def _next_turn(self, places: Integers) -> int:
        self._turn += 1
        return int(places[self._turn % len(places)])

    def observe_step(self, step: StepOutcome, accepted: Integers) -> None:
        """Record how many draft tokens of each rollout were accepted in one step, shape (rollouts,)."""
        rows, drafted, expected = step.rows, step.drafted, step.expected
        self.count_tokens(int(step.generated.sum()))
        self.save_time()
        if step.waited:
            self._allowance_steps -= self.wait_cost
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
        if step.trial is not None:
            explored = int(drafted[rows == step.trial.row].sum())
            self._allowance_tokens -= explored
            self._allowance_steps -= self.trial_cost
            self.trial_tokens += explored

    def observe_time(
        self,
        relative_time: float | None,
        saving: float | None = None,
        *,
        predicted_time: float = 1.0,
        weight: float = 1.0,
        micro_batch: int = 0,
        drafter_share: float = 0.0,
    ) -> None:
        """Record the duration of a step; disable drafting if it loses time.

        Args:
            relative_time: duration of the decoding as a multiple of what is predicted without drafts; None if it is
                unknown, or not representative, or if its only draft was a trial.
            saving: share of a step with drafts that the accepted tokens have saved; None if it is a step for reference,
                because nothing was drafted and it did not wait for the drafter longer than *drafter_share* says.
            predicted_time: the same duration as predicted with its drafts, if there are any.
            weight: weight of the step in comparisons with others.
            micro_batch: number of the micro-batch that the step decoded.
            drafter_share: share of the duration that the drafter took. Without drafting, it takes none.
        """
        batch = self._micro_batches.setdefault(micro_batch, _MicroBatch())
        if len(self._micro_batches) > _MAX_MICRO_BATCHES:
            self._micro_batches.popitem(last=False)
        if saving is None:
            self._searches += drafter_share
        else:
            self._searches *= 1 - 1 / _SAVING_WINDOW_STEPS
            self._steps_with_drafts += 1 - self._steps_with_drafts / _SAVING_WINDOW_STEPS
        if relative_time is None or self.drafting_disabled:
            batch.last = None
            return
        if saving is None:
            relative_time *= 1 - drafter_share
        else:
            self._steps += 1
            newest, deviation = 1 / min(self._steps, _SAVING_WINDOW_STEPS), saving - self._mean_saving
            self._mean_saving += newest * deviation
            self._mean_predicted_time += newest * (predicted_time - self._mean_predicted_time)
            relative_time /= predicted_time
            self._saving_variance = (1 - newest) * (self._saving_variance + newest * deviation**2)
        slower = batch.compare(saving is not None, relative_time, weight)
        if slower is None:
            return
        self._slower.append(slower)
        self._measure_gain()
        if len(self._slower) < _MIN_COMPARISONS_TO_STOP:
            return
        if self._is_loss(self.gain) and self._is_loss(self._median_gain):
            self.drafting_disabled = True
            self.num_stops += 1
            self._steps_to_retry = _FIRST_RETRY_STEPS << (self.num_stops - 1)
            self._trials, self._mean_trial_gain = 0, 0.0

    def observe_trial(self, trial: Trial, *, without_drafts_s: float, gain_s: float, drafting_s: float) -> None:
        """Record the gain of a trial; enable drafting if all rollouts together would gain enough.

        The gain follows from the cost model, because the cost of one rollout's tokens cannot be measured: steps vary by
        more than that. *without_drafts_s* is predicted for the step; *gain_s* is what the accepted tokens save, minus
        the cost of the trial's tokens; and *drafting_s* is c_draft.
        """
        if not self.drafting_disabled or without_drafts_s <= 0:
            return
        gain = (gain_s * trial.candidates - drafting_s) / without_drafts_s
        gain = min(max(gain, -_MAX_TRIAL_GAIN), _MAX_TRIAL_GAIN)
        self._trials += 1
        self._mean_trial_gain += (gain - self._mean_trial_gain) / min(self._trials, 2 * _MIN_TRIALS_TO_RESUME)
        if self._trials >= _MIN_TRIALS_TO_RESUME and self._mean_trial_gain > _RESUME_GAIN:
            self.retry()


def _median(values: Floats, weights: Floats) -> float:
    """Return the weighted median of ascending values."""
    return float(values[np.searchsorted(np.cumsum(weights), weights.sum() / 2)])


class SpeculationCutoff:
    """Observes for how long an engine's governor has disabled drafting, by weight version.

    With a drafter configured, an engine still looks for drafts from time to time, and its scheduler plans places for
    them. An engine without speculation may be faster, above all on CPUs, where only such an engine schedules
    asynchronously.
    """

    def __init__(
        self, *, min_decoding_s: float = MIN_DECODING_S, min_disabled_share: float = _MIN_DISABLED_SHARE
    ) -> None:
        """Create a cutoff; see :data:`MIN_DECODING_S`."""
        self._min_decoding_s, self._min_disabled_share = min_decoding_s, min_disabled_share
        self._versions: OrderedDict[int, tuple[float, float]] = OrderedDict()
        """Weight version → seconds of decoding, and seconds of them while drafting was disabled."""
        self._total_s = 0.0

    def observe(self, *, weight_version: int, decoding_s: float, drafting_disabled: bool) -> None:
        """Record the engine's state. *decoding_s* counts from the start of the engine."""
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
