"""What steps cost, learned from how long they take."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_worker.policy.step_cost import StepCost

_KEPT = 64
"""Newest steps of a kind that are kept: kinds that are seldom are not forgotten over those that are frequent."""
_REFIT_EVERY = 32
_ROUNDS = 4
_HUBER = 1.5
"""In scales of the typical error: beyond it a step counts less, the less the farther it is away."""
_PRIOR_WEIGHT = 0.1
"""Each coefficient's prior is worth as much as this share of one step that would tell it alone."""
_KIND_PRIOR = 16
"""Steps of a kind that count half of what is peculiar to it."""
_LEAST_SCALE = 0.01
_LEAST_SHARE = 0.01
"""Of its prior's proportion to the others: no coefficient is taken for less, or what it is of would be free."""
_DRAFTING = 0.02
"""Of a step's base: what drafts cost at all, where the prior says nothing of it."""

_Floats = npt.NDArray[np.float64]


class Step(NamedTuple):
    """One verification step that was timed."""

    tokens: int
    """Verified: drafts, and one of each rollout."""
    context: int
    """Tokens of prompt and response of all its rollouts together."""
    uniform: bool
    """All its rollouts had as many tokens to verify: such steps run as full CUDA graphs, others in pieces."""
    seconds: float
    drafts: bool = False
    """There were any."""


class CostFit:
    """Fits :class:`StepCost`, and how kinds of steps differ from it.

    A kind is a power of two of tokens, about as CUDA graphs are captured, together with whether the step is uniform.
    Of each the newest steps are kept and fitted anew now and then, by relative errors, since a long step errs by more,
    and robustly (Huber), since now and then one waits for something else. Every coefficient is positive, and one of
    which the steps say nothing stays in the proportion to the others that it had in *prior*. The first step of each
    number of tokens tells nothing: it may make what later ones use (seen with vLLM 0.32 on CPUs: oneDNN's kernels of a
    shape, which took up to twice as long as the step), and at first most steps are the first of their number.
    """

    def __init__(self, prior: StepCost) -> None:
        if min(prior[:3]) <= 0:
            raise ValueError(f"no part of a prior may be free: {prior}")
        prior = prior if prior.drafting > 0 else prior._replace(drafting=_DRAFTING * prior.base)
        self.cost = prior
        self.error = 0.0
        """Median relative error of the steps that are kept."""
        self.steps = 0
        """Steps that told something."""
        # what drafts cost at all is measured by a step's base: of that much more is known after a few steps
        self._scales = np.array(prior._replace(drafting=prior.base))
        self._prior = np.array(prior) / self._scales
        self._counts: set[int] = set()
        """Numbers of tokens that there was a step of."""
        self._kept: dict[tuple[int, bool], deque[Step]] = {}
        self._peculiar: dict[tuple[int, bool], float] = {}

    def observe(self, step: Step) -> bool:
        """A step ended. Some hundred microseconds every 32nd time.

        Returns:
            Whether it tells what such steps take.
        """
        first = step.tokens not in self._counts
        self._counts.add(step.tokens)
        if first or step.seconds <= 0:
            return False
        self._kept.setdefault(_kind(step.tokens, step.uniform), deque(maxlen=_KEPT)).append(step)
        self.steps += 1
        # at first of so few steps that each one tells much
        if self.steps % _REFIT_EVERY == 0 or self.steps in (4, 8, 16):
            self._fit()
        return True

    def predict(self, tokens: int, context: int, *, uniform: bool) -> float:
        """Seconds of such a step, by the cost and by what is peculiar to its kind."""
        return self.cost.time(tokens, context) * self._peculiar.get(_kind(tokens, uniform), 1.0)

    def _fit(self) -> None:
        kinds = [(kind, len(steps)) for kind, steps in self._kept.items()]
        steps = [step for kept in self._kept.values() for step in kept]
        seconds = np.array([step.seconds for step in steps])
        features = np.array([(1.0, step.tokens, step.context, step.drafts) for step in steps])
        usual = features @ (self._prior * self._scales)
        scales = self._scales * float(np.median(seconds / usual))
        # no step is taken for a hundred times cheaper than it was or is usual, or it would count for all others
        least = np.maximum(seconds, features @ (self._prior * scales)) / 100
        expected = np.maximum(seconds, least)
        weights = np.ones(len(steps))
        for _ in range(_ROUNDS):
            fitted = scales * _solve(features * scales / expected[:, None], seconds / expected, weights, self._prior)
            expected = np.maximum(features @ fitted, least)
            off = np.abs(seconds / expected - 1)
            scale = max(_LEAST_SCALE, 1.48 * float(np.median(off)))
            weights = np.minimum(1.0, _HUBER * scale / np.maximum(off, 1e-12))
        self.cost = StepCost(*(float(one) for one in fitted))
        self.error = float(np.median(np.abs(seconds / expected - 1)))
        at = 0
        for kind, count in kinds:
            ratio = float(np.median(seconds[at : at + count] / expected[at : at + count]))
            self._peculiar[kind] = (count * ratio + _KIND_PRIOR) / (count + _KIND_PRIOR)
            at += count


def _kind(tokens: int, uniform: bool) -> tuple[int, bool]:
    return (max(0, tokens - 1).bit_length(), uniform)


def _solve(features: _Floats, values: _Floats, weights: _Floats, prior: _Floats) -> _Floats:
    """Least squares with a weak pull to the prior; each coefficient is a hundredth of its prior at least."""
    least = _LEAST_SHARE * prior
    left = (features * weights[:, None]).T @ features + _PRIOR_WEIGHT * np.eye(len(prior))
    right = (features * weights[:, None]).T @ (values - features @ least) + _PRIOR_WEIGHT * (prior - least)
    active = np.ones(len(prior), dtype=bool)
    solution = np.zeros(len(prior))
    while active.any():
        solution[:] = 0.0
        solution[active] = np.linalg.solve(left[np.ix_(active, active)], right[active])
        if (solution >= 0).all():
            break
        active &= solution > 0
    return solution + least
