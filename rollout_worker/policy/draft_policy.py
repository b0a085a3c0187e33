"""The interface of draft policies and code that they share."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from rollout_worker.arrays import Floats, Integers
from rollout_worker.policy.rollout_table import LengthsByProblem, RolloutTable
from rollout_worker.policy.step_cost import StepCost

REPLAN_INTERVAL_STEPS = 16
"""Number of steps after which plans that depend on predicted lengths are computed again."""
_MIN_REPLAN_INTERVAL_STEPS = 4
"""Steps after which budgets are computed anew if rollouts have started or ended since."""


class QueueState(NamedTuple):
    """The rollouts that wait for a place in an engine's batch."""

    rollouts: int = 0
    expected_tokens: float = 0.0
    """Number of tokens that all of them together are expected to generate."""


EMPTY_QUEUE = QueueState()


class DraftBudgets(NamedTuple):
    """The draft budgets of some rollouts in one step; arrays of shape (rollouts,)."""

    tokens: Integers
    """Maximum number of draft tokens of each rollout."""
    min_survivals: Floats
    """A draft ends before the first token whose survival is below this."""
    token_values_s: Floats
    """Seconds that one accepted token saves the batch, without the c_tok that it saves in a later step."""


class DraftLimits(NamedTuple):
    """The limits of the draft tokens in one verification step."""

    per_rollout: int
    """Maximum number of draft tokens of one rollout."""
    per_step: int
    """Maximum number of draft tokens of all rollouts together."""


class DraftPolicy(Protocol):
    """Decides how many tokens to draft for each running rollout. A rollout is identified by its row."""

    def open(self, problem: str, *, prompt_tokens: int, generated: int, max_tokens: int) -> int:
        """Start to follow a rollout.

        Args:
            problem: problem id.
            prompt_tokens: length of its prompt.
            generated: number of response tokens that it has already.
            max_tokens: number of response tokens at which it is cut off.

        Returns:
            Its row: a small number that may be given to another rollout after :meth:`close`.
        """

    def advance(self, rows: Integers, tokens: Integers, drafted: Integers) -> None:
        """Record one verification step; no row may occur twice.

        Args:
            rows: the rollouts in the step, shape (rollouts,).
            tokens: number of tokens that each generated, accepted draft tokens included.
            drafted: number of draft tokens of each.
        """

    def add_unobserved(self, row: int, tokens: int) -> None:
        """Record tokens that a rollout generated in steps that were not observed."""

    def compute_budgets(self, rows: Integers, cost: StepCost, queue: QueueState = EMPTY_QUEUE) -> DraftBudgets:
        """Choose the budgets of the rollouts in the next step.

        Args:
            rows: all rollouts that are running, shape (rollouts,).
            cost: cost model of a step.
            queue: the rollouts that wait for a place in the batch.
        """

    def close(self, row: int) -> None:
        """Stop following a rollout that has ended."""


class BoundedPolicy:
    """Base class: follows the running rollouts and applies the limits of a step."""

    def __init__(self, limits: DraftLimits, lengths: LengthsByProblem) -> None:
        self._limits = limits
        self._rollouts = RolloutTable(lengths)

    def open(self, problem: str, *, prompt_tokens: int, generated: int, max_tokens: int) -> int:
        """See :meth:`DraftPolicy.open`."""
        return self._rollouts.open(problem, prompt_tokens=prompt_tokens, generated=generated, max_tokens=max_tokens)

    def advance(self, rows: Integers, tokens: Integers, drafted: Integers) -> None:
        """See :meth:`DraftPolicy.advance`."""
        self._rollouts.advance(rows, tokens)

    def add_unobserved(self, row: int, tokens: int) -> None:
        """See :meth:`DraftPolicy.add_unobserved`."""
        self._rollouts.add_unobserved(row, tokens)

    def close(self, row: int) -> None:
        """See :meth:`DraftPolicy.close`."""
        self._rollouts.close(row)

    def _max_useful(self, rows: Integers) -> Integers:
        """Return how many draft tokens each rollout can use, since every step generates one more token than it accepts.

        A rollout's limit is respected as well. Shape (rollouts,).
        """
        remaining = self._rollouts.max_tokens[rows] - self._rollouts.generated[rows] - 1
        return np.asarray(np.minimum(np.maximum(remaining, 0), self._limits.per_rollout))

    def _context_tokens(self, rows: Integers) -> Integers:
        return self._rollouts.prompt_tokens[rows] + self._rollouts.generated[rows]

    def _without_thresholds(self, rows: Integers, cost: StepCost, tokens: Integers) -> DraftBudgets:
        """Return budgets that do not end drafts by their survival.

        Such policies do not predict which rollout ends last. A saved step of one rollout is therefore worth its share
        of a step.
        """
        values = np.full(len(rows), cost.base_s / max(len(rows), 1))
        values += self._context_tokens(rows) * cost.per_context_token_s
        return DraftBudgets(tokens, np.zeros(len(rows)), values)

    def _limit_step(self, tokens: Integers, priorities: Floats | None = None) -> Integers:
        """Reduce budgets to the limit of a step; rollouts with the highest priorities are served first."""
        if int(tokens.sum()) > self._limits.per_step:
            order = np.arange(len(tokens)) if priorities is None else np.argsort(-priorities, kind="stable")
            cumulative = np.cumsum(tokens[order])
            tokens = tokens.copy()
            tokens[order] = np.clip(self._limits.per_step - cumulative + tokens[order], 0, tokens[order])
        return tokens


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
