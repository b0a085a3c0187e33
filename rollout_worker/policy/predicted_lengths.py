"""Predicted lengths of running rollouts, for draft policies that depend on them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from rollout_api.length_stats import LengthStats
from rollout_store.arrays import Floats, Integers, with_row
from rollout_store.history.remaining_length import remaining_quantiles
from rollout_worker.policy.draft_policy import Column, DraftBudgets, DraftLimits, DraftPolicy
from rollout_worker.policy.step_cost import StepCost

LENGTH_QUANTILES = 8
"""Number of quantiles that describe the remaining length of a rollout."""
_REPREDICT_FACTOR = 1.1
"""Growth factor of a rollout after which its length is predicted again."""
_REPREDICT_TOKENS = 32
"""Number of tokens, in addition to that factor, after which the length is predicted again."""
REPLAN_INTERVAL_STEPS = 16
"""Number of steps after which plans that depend on predicted lengths are computed again."""
_MIN_REPLAN_INTERVAL_STEPS = 4
"""Steps after which budgets are computed anew if rollouts have started or ended since."""
_PREDICTED_SHARE = 0.5
"""Share of P(last) that follows from predicted lengths; the rest is the same for all rollouts."""


class LengthSource(Protocol):
    """The lengths of earlier rollouts. No method waits for anything."""

    def of_problem(self, problem: str) -> LengthStats:
        """Return the length statistics of a problem, by problem id."""
        ...

    def overall(self) -> LengthStats:
        """Return those of all problems."""
        ...


class QueueState(NamedTuple):
    """The rollouts that wait for a place in an engine's batch."""

    rollouts: int = 0
    expected_tokens: float = 0.0
    """Number of tokens that all of them together are expected to generate."""


class ReplanSchedule:
    """Decides when to plan again: periodically, and earlier when rollouts have started or ended."""

    def __init__(self) -> None:
        self._steps = REPLAN_INTERVAL_STEPS
        self._changed = False

    def mark_changed(self) -> None:
        """Note that a rollout has started or ended."""
        self._changed = True

    def is_due(self) -> bool:
        """Return whether to plan again in this step. Call it once per step."""
        self._steps += 1
        if self._steps < (_MIN_REPLAN_INTERVAL_STEPS if self._changed else REPLAN_INTERVAL_STEPS):
            return False
        self._steps, self._changed = 0, False
        return True


class LengthPredictingPolicy(DraftPolicy):
    """Base class of policies that predict the lengths of the running rollouts."""

    def __init__(self, limits: DraftLimits, lengths: LengthSource) -> None:
        super().__init__(limits)
        self._lengths = lengths
        self._problems: dict[int, str] = {}
        """By row."""
        self._predicted_ends = np.zeros((0, LENGTH_QUANTILES))
        """Quantiles of the total number of response tokens."""
        self._predicted_at = np.zeros(0, np.int64)
        """Number of response tokens at the last prediction; -1 before the first one."""

    def open(self, problem: str, *, prompt_tokens: int, generated: int, max_tokens: int) -> int:
        """See :meth:`DraftPolicy.open`."""
        row = super().open(problem, prompt_tokens=prompt_tokens, generated=generated, max_tokens=max_tokens)
        self._predicted_ends = with_row(self._predicted_ends, row)
        self._predicted_at = with_row(self._predicted_at, row)
        self._problems[row], self._predicted_at[row] = problem, -1
        return row

    def _remaining_quantiles(self, rows: Integers) -> Floats:
        """Return quantiles of the tokens that rollouts still generate, at least 1; shape (rows, LENGTH_QUANTILES)."""
        generated = self._rollouts.generated[rows]
        due = (
            (self._predicted_at[rows] < 0)
            | (generated >= self._predicted_ends[rows, 0])
            | (generated > self._predicted_at[rows] * _REPREDICT_FACTOR + _REPREDICT_TOKENS)
        )
        for row in rows[due].tolist():
            so_far, max_tokens = int(self._rollouts.generated[row]), int(self._rollouts.max_tokens[row])
            self._predicted_ends[row] = so_far + remaining_quantiles(
                self._lengths.of_problem(self._problems[row]),
                generated=so_far,
                max_tokens=max(max_tokens, so_far + 1),
                count=LENGTH_QUANTILES,
            )
            self._predicted_at[row] = so_far
        return np.maximum(self._predicted_ends[rows] - generated[:, None], 1.0)


class MarginalWithLengths(LengthPredictingPolicy):
    """``marginal``, but a step of a rollout is worth P(last), its probability to end last, of c_base instead of 1/n.

    P(last) follows from the lengths of the problem's earlier rollouts, the number of tokens that each rollout has
    generated, and its tokens per step. The queue counts as one more rollout, which ends when all running and queued
    rollouts would have ended. Any rollout that ends lets a queued one start, so that the queue's P(last) is divided
    equally among the running rollouts. Because such predictions are uncertain, above all before rollouts of a problem
    have ended, each rollout keeps at least half of 1/n.
    """

    def __init__(self, limits: DraftLimits, lengths: LengthSource) -> None:
        super().__init__(limits, lengths)
        self.queue = QueueState()
        """The rollouts that wait for a place in the batch."""
        self._schedule = ReplanSchedule()
        self._last_probability = Column()
        """P(last); NaN for rollouts that have started since it was computed."""

    def open(self, problem: str, *, prompt_tokens: int, generated: int, max_tokens: int) -> int:
        """See :meth:`DraftPolicy.open`."""
        row = super().open(problem, prompt_tokens=prompt_tokens, generated=generated, max_tokens=max_tokens)
        self._last_probability.initialize(row, np.nan)
        self._schedule.mark_changed()
        return row

    def close(self, row: int) -> None:
        """See :meth:`DraftPolicy.close`."""
        super().close(row)
        self._schedule.mark_changed()

    def compute_budgets(self, rows: Integers, cost: StepCost) -> DraftBudgets:
        """See :meth:`DraftPolicy.compute_budgets`."""
        uniform = 1.0 / max(len(rows), 1)
        if self._schedule.is_due():
            predicted = self._compute_last_probabilities(rows)
            self._last_probability[rows] = _PREDICTED_SHARE * predicted + (1.0 - _PREDICTED_SHARE) * uniform
        last = self._last_probability[rows]
        last[np.isnan(last)] = uniform
        values = self._token_values(rows, cost, last)
        tokens = self._limit_step(self._max_useful(rows), values)
        min_survivals = np.minimum(cost.per_token_s / np.maximum(values, 1e-12), 1.0)
        return DraftBudgets(tokens, min_survivals, values, shortens=True)

    def _compute_last_probabilities(self, rows: Integers) -> Floats:
        """Return P(last) of each rollout, shape (rollouts,)."""
        tokens_per_step = np.maximum(self._rollouts.tokens_per_step[rows], 1.0)[:, None]
        steps = self._remaining_quantiles(rows) / tokens_per_step
        if not self.queue.rollouts or not len(rows):
            return last_probabilities(steps)
        mean_rate = float(tokens_per_step.mean())
        all_done = (steps.mean(axis=1).sum() + self.queue.expected_tokens / mean_rate) / len(rows)
        # The queued rollout that starts last ends up to its own duration after that.
        own_steps = self.queue.expected_tokens / self.queue.rollouts / mean_rate
        points = steps.shape[1]
        queue_ends = all_done + own_steps * (np.arange(points) + 0.5) / points
        probabilities = last_probabilities(np.vstack([steps, queue_ends]))
        return np.asarray(probabilities[:-1] + probabilities[-1] / len(rows))


def last_probabilities(ends: Floats) -> Floats:
    """Return P(last) of each rollout: the probability that it ends last.

    Args:
        ends: possible end times of each rollout, shape (rollouts, points). The points of a row are equally probable,
            and rows are independent of each other. Of rollouts that end at the same time, the one with the highest
            index counts as the last.

    Returns:
        Probabilities that add up to 1, shape (rollouts,). The computation takes O(n log n) for n points in total.
    """
    rollouts, points = ends.shape
    if rollouts == 0:
        return np.zeros(0)
    # Points in the order of time, ties by row. F_j is the share of row j's points that have passed.
    order = np.argsort(ends, axis=None, kind="stable")
    rows = order // points
    passed = np.empty(rollouts * points)
    by_row = np.argsort(rows, kind="stable")
    passed[by_row] = np.tile(np.arange(1, points + 1), rollouts)
    # The product of all F_j just after each point; it is 0 until at least one point of every row has passed.
    log_growth = np.where(passed > 1, np.log(passed) - np.log(np.maximum(passed - 1, 1)), -np.log(points))
    num_begun = np.cumsum(passed == 1)
    product = np.where(num_begun == rollouts, np.exp(np.cumsum(log_growth)), 0.0)
    # P(i ends at this point and all others have ended) is 1/points times the product without F_i.
    shares = product / passed
    probabilities = np.bincount(rows, weights=shares, minlength=rollouts)
    total = float(probabilities.sum())
    return probabilities / total if total > 0 else np.full(rollouts, 1.0 / rollouts)
