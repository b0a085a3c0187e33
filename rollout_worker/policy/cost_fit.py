"""Fits the cost model to the measured durations of verification steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rollout_store.arrays import Floats
from rollout_worker.policy.step_cost import NO_GRAPHS, CudaGraphs, StepCost, used_experts

_COEFFICIENTS = ("base_s", "per_token_s", "per_context_token_s", "drafting_s", "experts_s", "per_prompt_token_s")
"""The fitted fields of :class:`StepCost`: all but the share of the experts."""
_STEPS_PER_KIND = 64
"""Number of steps of each kind that are kept, so that frequent kinds do not displace rare ones."""
_REFIT_INTERVAL_STEPS = 32
_EARLY_REFITS = (4, 8, 16)
"""Numbers of steps after which the model is fitted as well, because each step is informative while there are few."""
_REWEIGHTING_ROUNDS = 4
_HUBER_THRESHOLD = 1.5
"""Error, in multiples of the typical error, beyond which a step's weight decreases."""
_PRIOR_WEIGHT = 0.1
"""Weight of each coefficient's prior, in equations that consist of that coefficient's term."""
_USUAL_RELATIVE_ERROR = 0.07
"""Typical relative error beyond which the weight of the priors grows with its cube.

Few drafts are verified once they seem to cost more than they save, so that it would take long to notice an error."""
_MIN_RELATIVE_ERROR = 0.01
"""Lower limit of the typical relative error."""
_MIN_COEFFICIENT_SHARE = 0.01
"""Lower limit of a coefficient, as a share of its prior; it must not be 0, or drafts would appear to be free."""
_DEFAULT_DRAFTING_SHARE = 0.02
"""Prior of c_draft as a share of c_base, where the prior does not contain it."""
_IGNORED_FIRST_STEPS = 16
"""Number of steps that are ignored because they are the first of their size, even if no other step was fitted yet."""
_CLIP_FACTOR = 100
"""No step is taken to be more than so many times as fast as it was or as is usual, or it would outweigh all others."""


class TimedStep(NamedTuple):
    """A verification step whose duration was measured."""

    tokens: int
    """Number of verified tokens: all draft tokens, and one more for each rollout."""
    context_tokens: int
    """Number of tokens of the prompts and responses of all its rollouts together."""
    is_uniform: bool
    """Whether all its rollouts had equally many tokens to verify. Other steps run other CUDA graphs: in vLLM's V2 model
    runner those for queries of different lengths, in V1 none that contain attention."""
    seconds: float
    has_drafts: bool = False
    prompt_tokens: int = 0
    """Number of tokens of prompts that the step read besides."""
    waited: bool = False
    """Whether it waited for the drafter, which then counts as part of the cost of drafting, without drafts as well."""


class _KeptSteps:
    """The newest steps of one kind, each with the step before it."""

    def __init__(self) -> None:
        self._features = np.empty((_STEPS_PER_KIND, 2, len(_COEFFICIENTS)))
        self._seconds = np.empty((_STEPS_PER_KIND, 2))
        self._count = 0
        """Number of steps that were added."""

    def add(self, features: Sequence[Sequence[float]], seconds: Sequence[float]) -> None:
        place = self._count % _STEPS_PER_KIND
        self._features[place], self._seconds[place] = features, seconds
        self._count += 1

    @property
    def features(self) -> Floats:
        """By how much of each coefficient the steps consist, shape (steps, 2, coefficients)."""
        return self._features[: self._count]

    @property
    def seconds(self) -> Floats:
        """The durations, shape (steps, 2)."""
        return self._seconds[: self._count]


class CostFit:
    """Fits :class:`StepCost` to the observed steps.

    A kind is a range of token counts between two powers of two, together with whether the step is uniform and whether
    it reads prompts. The newest steps of each kind are kept and fitted periodically: by relative error, because longer
    steps vary more, and robustly (Huber weights), because some steps wait for something else. Every coefficient is
    positive. A coefficient about which the steps say nothing keeps its proportion to the others from the prior.

    A machine that also does something else is slow for seconds, and the kept steps are of different times. Each step is
    therefore also compared with the step before it: the model must predict their ratio. The typical errors of the
    durations and of the ratios determine how much either counts. On a quiet machine they count about equally. Beside a
    noisy neighbour, only the ratios do.

    The first step of each size is ignored, because it may prepare what later steps use. With vLLM 0.32 on CPUs, oneDNN
    then creates kernels for the number of tokens, which took up to twice as long as the step itself. With CUDA graphs,
    the size is that of the graph. If most steps are the first of their size, such work is no exception, and every
    second one of them counts.
    """

    def __init__(self, prior: StepCost, graphs: CudaGraphs = NO_GRAPHS) -> None:
        if min(prior[:3]) <= 0:
            raise ValueError(f"every coefficient of the prior must be positive except drafting_s, got {prior}")
        if prior.drafting_s <= 0:
            prior = prior._replace(drafting_s=_DEFAULT_DRAFTING_SHARE * prior.base_s)
        if prior.per_prompt_token_s <= 0:
            prior = prior._replace(per_prompt_token_s=prior.per_token_s)
        self.cost = prior
        """The fitted cost model."""
        self.graphs = graphs
        """The engine's CUDA graphs, to whose sizes steps are padded."""
        self.median_relative_error = 0.0
        """Median relative error of the steps that were fitted."""
        self.num_steps = 0
        """Number of steps that were fitted, those of all times included."""
        self.num_steps_with_drafts = 0
        """Number of those with drafts."""
        # c_draft and c_experts are measured in units of the prior's c_base, which is known well after a few steps.
        self._units = _coefficients(prior._replace(drafting_s=prior.base_s, experts_s=prior.base_s))
        self._prior = _coefficients(prior) / self._units
        self._seen_sizes: set[int] = set()
        self._num_ignored = 0
        """Number of steps that were ignored because they were the first of their size."""
        self._steps: dict[tuple[int, bool, bool], _KeptSteps] = {}
        self._last: tuple[Sequence[float], float] | None = None
        """Features and duration of the last step."""

    def observe(self, step: TimedStep) -> bool:
        """Add a step. Every 32nd call fits the model.

        Returns:
            Whether the step's duration is representative of such steps.
        """
        tokens = step.tokens + step.prompt_tokens
        if self._is_to_ignore(tokens) or step.seconds <= 0:
            return False
        padded = self.graphs.pad(tokens) - step.prompt_tokens
        used = used_experts(tokens, self.cost.expert_share)
        features = (1.0, padded, step.context_tokens, step.has_drafts or step.waited, used, step.prompt_tokens)
        last_features, last_seconds = self._last or (features, step.seconds)
        self._last = features, step.seconds
        kind = _power_of_two(tokens), step.is_uniform, step.prompt_tokens > 0
        kept = self._steps.setdefault(kind, _KeptSteps())
        kept.add((features, last_features), (step.seconds, last_seconds))
        self.num_steps += 1
        self.num_steps_with_drafts += step.has_drafts
        if self.num_steps % _REFIT_INTERVAL_STEPS == 0 or self.num_steps in _EARLY_REFITS:
            self._fit()
        return True

    def _is_to_ignore(self, tokens: int) -> bool:
        """Return whether a step of so many tokens is the first of its size, and such steps are exceptions."""
        size = self.graphs.pad(tokens)
        if 0 < self.graphs.max_tokens < tokens:
            size = -_power_of_two(tokens)  # Kernels that do not belong to a graph are not prepared for one size alone.
        is_first = size not in self._seen_sizes
        self._seen_sizes.add(size)
        is_to_ignore = is_first and self._num_ignored < self.num_steps + _IGNORED_FIRST_STEPS
        self._num_ignored += is_to_ignore
        return is_to_ignore

    def _fit(self) -> None:
        features = np.concatenate([kept.features for kept in self._steps.values()])
        seconds = np.concatenate([kept.seconds for kept in self._steps.values()])
        by_prior = features @ (self._prior * self._units)
        units = self._units * float(np.median(seconds / by_prior))
        floor = np.maximum(seconds, features @ (self._prior * units)) / _CLIP_FACTOR
        predicted = np.maximum(seconds, floor)
        # The first half of the equations is about durations, the other one about the logarithms of ratios, which are
        # linear only near the solution.
        weights, prior_weight = np.repeat([1.0, 0.0], len(seconds)), _PRIOR_WEIGHT
        for _ in range(_REWEIGHTING_ROUNDS):
            scaled, relative = features * units / predicted[:, :, None], seconds / predicted
            rows = np.concatenate([scaled[:, 0], scaled[:, 0] - scaled[:, 1]])
            values = np.concatenate([relative[:, 0], np.log(relative[:, 0] / relative[:, 1])])
            coefficients = units * _solve(rows, values, weights, self._prior, prior_weight)
            predicted = np.maximum(features @ coefficients, floor)
            relative = seconds / predicted
            errors = np.abs([relative[:, 0] - 1, np.log(relative[:, 0] / relative[:, 1])])
            typical = np.maximum(_MIN_RELATIVE_ERROR, 1.48 * np.median(errors, axis=1, keepdims=True))
            huber = np.minimum(1.0, _HUBER_THRESHOLD * typical / np.maximum(errors, 1e-12))
            weights = (huber * (typical.min() / typical) ** 2).ravel()
            prior_weight = _PRIOR_WEIGHT * max(1.0, (float(typical.min()) / _USUAL_RELATIVE_ERROR) ** 3)
        self.cost = self.cost._replace(**dict(zip(_COEFFICIENTS, coefficients.tolist(), strict=True)))
        self.median_relative_error = float(np.median(errors[0]))


def _coefficients(cost: StepCost) -> Floats:
    return np.array([getattr(cost, name) for name in _COEFFICIENTS])


def _power_of_two(tokens: int) -> int:
    """Return the exponent of the smallest power of two that is not below *tokens*."""
    return max(0, tokens - 1).bit_length()


def _solve(features: Floats, values: Floats, weights: Floats, prior: Floats, prior_weight: float) -> Floats:
    """Solve weighted least squares with a weighted pull towards the prior and a lower limit of each coefficient.

    Coefficients that would fall below their limit are fixed there, and the others are solved again.
    """
    floor = _MIN_COEFFICIENT_SHARE * prior
    left = (features * weights[:, None]).T @ features + prior_weight * np.eye(len(prior))
    right = (features * weights[:, None]).T @ (values - features @ floor) + prior_weight * (prior - floor)
    active = np.ones(len(prior), dtype=bool)
    solution = np.zeros(len(prior))
    while active.any():
        solution[:] = 0.0
        solution[active] = np.linalg.solve(left[np.ix_(active, active)], right[active])
        if (solution >= 0).all():
            break
        active &= solution > 0
    else:  # all of them are at their limits
        solution[:] = 0.0
    return solution + floor
