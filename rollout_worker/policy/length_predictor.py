"""Predicts how many tokens running rollouts still generate, and how certain that is.

The logarithm of the remaining tokens is a linear function of what several sources say about it, whose coefficients are
learned from the rollouts that end. A source that says nothing here therefore gets no weight, and the quantiles of a
prediction are those of the errors of earlier ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from statistics import NormalDist

import numpy as np

from rollout_api.length_stats import LengthStats
from rollout_store.arrays import Floats

_QUANTILES = 8
"""Number of quantiles from whose logarithms the expectation of a source follows."""
_FEW_LENGTHS = 1.0
"""Number of known lengths of a problem whose mean counts as much as that of all problems."""
_PROBLEM_DEVIATION = 0.75
"""Standard deviation of the logarithm of the lengths of a problem, as a share of that of all rollouts."""
_MATCHES = (4, 16, 64)
"""Lengths of matches in tokens from which on they are believed to different degrees."""
_LOOP_MATCH = 48
"""Number of tokens at the end of a response that occur earlier in it, from which on it may have begun to loop."""
_PRIOR_ROLLOUTS = 8.0
"""Number of rollouts that the first coefficients count as."""
_DECAY = 0.999
"""Weight of a rollout relative to the next one, so that about the last 1,000 rollouts count."""
_FIRST_LENGTHS = (6.5, 1.0)
"""Mean and standard deviation of the logarithm of lengths that are assumed before any are known."""
_ITERATIONS = 3
_MAX_POINT = 6.0
_MIN_DEVIATION = 0.1
_MIN_PROBABILITY = 1e-9
_MAX_LOG = 20.0
_NORMAL = NormalDist()
_TRUST_DECAY = 0.995
"""The same for the measurement of what predictions explain, so that about the last 200 count."""
_MEAN_DECAY = 0.95
"""The same for the mean error at a stage, so that about the last 20 count."""
_STAGES = 8
"""Number of stages of a rollout with errors of their own: below 128 tokens, 256, …, and above."""
_ERRORS = 1024
"""Number of errors of each stage that are kept."""
_FIRST_ERRORS = (-1.2, -0.6, -0.2, 0.1, 0.4, 0.7, 1.0, 1.4)
"""Errors that are assumed before any are known."""


class Source(IntEnum):
    """What a prediction may use."""

    LENGTHS = 1
    """Lengths of earlier rollouts of the problem that were longer than this one is."""
    TEXT = 2
    """How many tokens follow the end of the response in earlier rollouts of the problem."""
    LOOPS = 3
    """Whether the response repeats itself, so that it may run until it is cut off."""


_FIRST_FEATURES = {Source.LENGTHS: _STAGES, Source.TEXT: _STAGES + 1, Source.LOOPS: _STAGES + 1 + len(_MATCHES)}
_NUM_FEATURES = _STAGES + 2 + len(_MATCHES)


@dataclass(frozen=True)
class Evidence:
    """What is known about a rollout."""

    generated: int
    """Number of its tokens so far."""
    max_tokens: int
    """Number of tokens at which it is cut off, above *generated*."""
    of_problem: LengthStats
    """Lengths of earlier rollouts of its problem."""
    overall: LengthStats
    """Lengths of earlier rollouts of all problems."""
    running: Sequence[int] = ()
    """Numbers of tokens of all rollouts of the problem that are running, this one included."""
    text_rest: float | None = None
    """Number of tokens that follow the end of the response in earlier rollouts, the last one of which ends them."""
    match: int = 0
    """Number of tokens that these have in common with the end of the response."""
    own_match: int = 0
    """Number of tokens at the end of the response that occur earlier in it."""


@dataclass(frozen=True)
class Example:
    """A prediction that is compared with the outcome."""

    generated: int
    baseline: float
    """Logarithm of the remaining tokens according to the lengths of all problems."""
    features: Floats
    """By how much the sources differ from it, shape (features,)."""
    difference: float
    """By how much the prediction differs from it."""


class LengthPredictor:
    """Learns from rollouts that have ended how many tokens others still generate."""

    def __init__(self, sources: Iterable[Source] = tuple(Source)) -> None:
        """Create a predictor that has seen no rollouts, and that believes in the lengths of the problem."""
        prior = np.zeros(_NUM_FEATURES)
        prior[_FIRST_FEATURES[Source.LENGTHS]] = 1.0
        self._is_used = np.zeros(_NUM_FEATURES)
        self._is_used[:_STAGES] = 1.0
        for source in sources:
            width = len(_MATCHES) if source is Source.TEXT else 1
            self._is_used[_FIRST_FEATURES[source] : _FIRST_FEATURES[source] + width] = 1.0
        self._precision: Floats = np.eye(_NUM_FEATURES) * _PRIOR_ROLLOUTS
        self._moments = prior * self._is_used * _PRIOR_ROLLOUTS
        self._coefficients: Floats = prior * self._is_used
        self._errors = [deque(_FIRST_ERRORS, maxlen=_ERRORS) for _ in range(_STAGES)]
        """The last errors of the logarithm at each stage."""
        self._means = np.zeros((2, _STAGES))
        """Recent means of the errors, and of the differences from the baseline, at each stage."""
        self._squares = np.ones(2)
        """Decaying sums of the squares of deviations from these means."""

    def examine(self, evidence: Evidence) -> Example:
        """Compare what the sources say."""
        generated, limit, overall = evidence.generated, evidence.max_tokens, evidence.overall
        mean, deviation = (overall.mean_log, overall.deviation_log) if overall.count else _FIRST_LENGTHS
        baseline = _mean_log_rest(mean, deviation, generated, limit)
        features = np.zeros(_NUM_FEATURES)
        features[_stage(generated)] = 1.0
        mean = _mean_of_problem(mean, deviation, evidence)
        of_problem = _mean_log_rest(mean, _PROBLEM_DEVIATION * deviation, generated, limit)
        features[_FIRST_FEATURES[Source.LENGTHS]] = of_problem - baseline
        if evidence.text_rest is not None and evidence.match >= _MATCHES[0]:
            degree = sum(evidence.match >= length for length in _MATCHES) - 1
            difference = math.log(max(evidence.text_rest, 1.0)) - baseline
            features[_FIRST_FEATURES[Source.TEXT] + degree] = difference
        if evidence.own_match >= _LOOP_MATCH:
            features[_FIRST_FEATURES[Source.LOOPS]] = math.log(limit - generated) - baseline
        features *= self._is_used
        return Example(generated, baseline, features, float(features @ self._coefficients))

    def predict(self, example: Example, count: int) -> Floats:
        """Return quantiles of the logarithm of the remaining tokens: those in the middle of *count* equal parts."""
        errors = self._errors[_stage(example.generated)]
        quantiles = np.quantile(errors, (np.arange(count) + 0.5) / count)
        return np.asarray(example.baseline + example.difference + quantiles)

    @property
    def explained(self) -> float:
        """The share of the variance between rollouts that earlier predictions have explained; 0 if they are useless.

        What all predictions at a stage are wrong by makes no difference between rollouts, and does not count.
        """
        return max(0.0, 1.0 - float(self._squares[0] / self._squares[1]))

    def learn(self, examples: Sequence[Example], length: int) -> None:
        """Compare the predictions of a rollout with its number of tokens when it ended."""
        if not examples:
            return
        baselines = np.array([example.baseline for example in examples])
        features = np.stack([example.features for example in examples])
        rests = np.array([max(length - example.generated, 1) for example in examples])
        targets = np.log(rests) - baselines
        errors = targets - np.array([example.difference for example in examples])
        stages = np.array([_stage(example.generated) for example in examples])
        weight = 1.0 / len(examples)
        values = np.stack([errors, targets])
        deviations = values - self._means[:, stages]
        self._squares = _TRUST_DECAY * self._squares + weight * (deviations**2).sum(axis=1)
        for stage in set(stages.tolist()):
            self._means[:, stage] += (1.0 - _MEAN_DECAY) * deviations[:, stages == stage].mean(axis=1)
        self._precision = np.asarray(_DECAY * self._precision + weight * features.T @ features, np.float64)
        self._moments = _DECAY * self._moments + weight * features.T @ targets
        # Quantiles are those of the errors that the present coefficients would have made.
        for stage, error in zip(stages.tolist(), (targets - features @ self._coefficients).tolist(), strict=True):
            self._errors[stage].append(error)
        self._coefficients = np.asarray(np.linalg.solve(self._precision, self._moments), np.float64)


def _stage(generated: int) -> int:
    return min(max(generated.bit_length() - 7, 0), _STAGES - 1)


def _mean_of_problem(mean: float, deviation: float, evidence: Evidence) -> float:
    """Return the mean of the logarithm of the lengths of a problem's rollouts, most probably.

    A running rollout shows that it is longer than it is. As in an expectation-maximization algorithm, its length is
    replaced by its expectation, given the mean, several times.

    Args:
        mean: mean of all problems, which counts as several lengths.
        deviation: standard deviation of the logarithm of all lengths.
        evidence: the lengths that are known.
    """
    known, of_problem = evidence.of_problem.weight, evidence.of_problem.mean_log
    deviation = max(_PROBLEM_DEVIATION * deviation, _MIN_DEVIATION)
    logs = [math.log(max(generated, 1)) for generated in evidence.running]
    total = _FEW_LENGTHS * mean + known * of_problem
    result = total / (_FEW_LENGTHS + known)
    for _ in range(_ITERATIONS):
        expected = 0.0
        for log in logs:
            point = min((log - result) / deviation, _MAX_POINT)
            expected += result + deviation * _NORMAL.pdf(point) / _NORMAL.cdf(-point)
        result = (total + expected) / (_FEW_LENGTHS + known + len(logs))
    return result


def _mean_log_rest(mean: float, deviation: float, generated: int, max_tokens: int) -> float:
    """Return the mean of the logarithm of the remaining tokens of a rollout whose length is log-normal.

    Args:
        mean: mean of the logarithm of the length.
        deviation: its standard deviation.
        generated: number of tokens so far.
        max_tokens: number of tokens at which the rollout is cut off.
    """
    longer = 1.0 - _NORMAL.cdf((math.log(max(generated, 1)) - mean) / max(deviation, _MIN_DEVIATION))
    total = 0.0
    for point in range(_QUANTILES):
        shorter = max(longer * (1.0 - (point + 0.5) / _QUANTILES), _MIN_PROBABILITY)
        length = math.exp(min(mean - max(deviation, _MIN_DEVIATION) * _NORMAL.inv_cdf(shorter), _MAX_LOG))
        total += math.log(max(min(length, max_tokens) - generated, 1.0))
    return total / _QUANTILES
