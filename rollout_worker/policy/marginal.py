"""The ``marginal`` policy: drafts each token as long as its expected benefit exceeds its cost."""

from __future__ import annotations

import math

import numpy as np

from rollout_worker.arrays import Floats, Integers
from rollout_worker.policy.draft_policy import (
    EMPTY_QUEUE,
    BoundedPolicy,
    DraftBudgets,
    DraftLimits,
    QueueState,
    ReplanSchedule,
)
from rollout_worker.policy.remaining_length import last_probabilities
from rollout_worker.policy.rollout_table import Column, LengthsByProblem
from rollout_worker.policy.step_cost import StepCost

_PREDICTED_SHARE = 0.5
"""Share of P(last) that follows from predicted lengths; the rest is the same for all rollouts."""


class Marginal(BoundedPolicy):
    """Ends each draft where the expected benefit of its next token no longer exceeds the token's cost.

    An accepted token saves its rollout one step. This saves reading the rollout's context once, and c_tok in a later
    step. If the rollout is the one that ends last, the whole batch takes one step less, which saves c_base. A token
    with survival s therefore pays if ``s · (P(last) · c_base + c_kv · context + c_tok) > c_tok``. Survival decreases
    along a draft, so the draft ends at the first token that does not pay.

    P(last) follows from the lengths of the problem's earlier rollouts, the number of tokens that each rollout has
    generated, and its tokens per step. The queue counts as one more rollout, which ends when all running and queued
    rollouts would have ended. Any rollout that ends lets a queued one start, so that the queue's P(last) is divided
    equally among the running rollouts. Because such predictions are uncertain, above all before rollouts of a problem
    have ended, each rollout keeps at least half of the probability that it would have without any.
    """

    def __init__(self, limits: DraftLimits, lengths: LengthsByProblem) -> None:
        super().__init__(limits, lengths)
        self._schedule = ReplanSchedule()
        self._last_probability = Column()
        """P(last); NaN for rollouts that have started since it was computed."""

    def open(self, problem: str, *, prompt_tokens: int, generated: int, max_tokens: int) -> int:
        """See :meth:`DraftPolicy.open`."""
        row = super().open(problem, prompt_tokens=prompt_tokens, generated=generated, max_tokens=max_tokens)
        self._last_probability.initialize(row, math.nan)
        self._schedule.mark_changed()
        return row

    def close(self, row: int) -> None:
        """See :meth:`DraftPolicy.close`."""
        super().close(row)
        self._schedule.mark_changed()

    def compute_budgets(self, rows: Integers, cost: StepCost, queue: QueueState = EMPTY_QUEUE) -> DraftBudgets:
        """See :meth:`DraftPolicy.compute_budgets`."""
        if self._schedule.is_due():
            predicted = self._compute_last_probabilities(rows, queue)
            uniform = 1.0 / max(len(rows), 1)
            self._last_probability[rows] = _PREDICTED_SHARE * predicted + (1.0 - _PREDICTED_SHARE) * uniform
        last = self._last_probability[rows]
        last[np.isnan(last)] = 1.0 / max(len(rows), 1)
        values = last * cost.base_s + self._context_tokens(rows) * cost.per_context_token_s
        tokens = self._limit_step(self._max_useful(rows), values)
        if cost.per_token_s <= 0:
            return DraftBudgets(tokens, np.zeros(len(rows)), values)
        return DraftBudgets(tokens, cost.per_token_s / (cost.per_token_s + values), values)

    def _compute_last_probabilities(self, rows: Integers, queue: QueueState) -> Floats:
        """Return P(last) of each rollout, shape (rollouts,)."""
        tokens_per_step = np.maximum(self._rollouts.tokens_per_step[rows], 1.0)[:, None]
        steps = self._rollouts.remaining_quantiles(rows) / tokens_per_step
        if not queue.rollouts or not len(rows):
            return last_probabilities(steps)
        mean_rate = float(tokens_per_step.mean())
        all_done = (steps.mean(axis=1).sum() + queue.expected_tokens / mean_rate) / len(rows)
        # The queued rollout that starts last ends up to its own duration after that.
        own_steps = queue.expected_tokens / queue.rollouts / mean_rate
        points = steps.shape[1]
        queue_ends = all_done + own_steps * (np.arange(points) + 0.5) / points
        probabilities = last_probabilities(np.vstack([steps, queue_ends]))
        return np.asarray(probabilities[:-1] + probabilities[-1] / len(rows))
