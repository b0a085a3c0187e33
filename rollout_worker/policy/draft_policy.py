"""The interface of draft policies and code that they share."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from rollout_worker.arrays import Floats, Integers
from rollout_worker.policy.rollout_table import RolloutTable
from rollout_worker.policy.step_cost import StepCost


class DraftBudgets(NamedTuple):
    """The draft budgets of some rollouts in one step; arrays of shape (rollouts,)."""

    tokens: Integers
    """Maximum number of draft tokens of each rollout."""
    min_survivals: Floats
    """A draft ends before the first token whose survival is below this."""
    token_values_s: Floats
    """Seconds that one accepted token saves the batch."""
    shortens: bool = False
    """Whether drafts may be shorter, so that all of them together save most time."""


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

    def compute_budgets(self, rows: Integers, cost: StepCost) -> DraftBudgets:
        """Choose the budgets of the rollouts in the next step.

        Args:
            rows: all rollouts that are running, shape (rollouts,).
            cost: cost model of a step.
        """

    def close(self, row: int) -> None:
        """Stop following a rollout that has ended."""


class BoundedPolicy:
    """Base class: follows the running rollouts and applies the limits of a step."""

    def __init__(self, limits: DraftLimits) -> None:
        self._limits = limits
        self._rollouts = RolloutTable()

    def open(self, problem: str, *, prompt_tokens: int, generated: int, max_tokens: int) -> int:
        """See :meth:`DraftPolicy.open`."""
        return self._rollouts.open(prompt_tokens=prompt_tokens, generated=generated, max_tokens=max_tokens)

    def advance(self, rows: Integers, tokens: Integers, drafted: Integers) -> None:
        """See :meth:`DraftPolicy.advance`."""
        self._rollouts.advance(rows, tokens, drafted)

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

    def _token_values(self, rows: Integers, cost: StepCost, base_shares: Floats | None = None) -> Floats:
        """Return the seconds that one accepted token of each rollout saves the batch, shape (rollouts,).

        An accepted token saves a rollout that generates r tokens per step 1/r of a step. That is worth a share of
        c_base, the time to read the rollout's context, and c_tok for each token that is verified for it: one, and those
        of its draft.

        Args:
            rows: all rollouts that are running, shape (rollouts,).
            cost: cost model of a step.
            base_shares: share of c_base that each rollout's steps are worth, shape (rollouts,); None: all the same.
        """
        rollouts = self._rollouts
        drafted = rollouts.drafted_per_step[rows]
        cost = cost.linear_between(len(rows), float(drafted.sum()))
        base_s = cost.base_s / max(len(rows), 1) if base_shares is None else cost.base_s * base_shares
        context_tokens = rollouts.prompt_tokens[rows] + rollouts.generated[rows]
        step_s = base_s + context_tokens * cost.per_context_token_s
        step_s += (1.0 + drafted) * cost.per_token_s
        return np.asarray(step_s / np.maximum(rollouts.tokens_per_step[rows], 1.0))

    def _without_thresholds(self, rows: Integers, cost: StepCost, tokens: Integers) -> DraftBudgets:
        """Return budgets that do not end drafts by their survival."""
        return DraftBudgets(tokens, np.zeros(len(rows)), self._token_values(rows, cost))

    def _limit_step(self, tokens: Integers, priorities: Floats | None = None) -> Integers:
        """Reduce budgets to the limit of a step; rollouts with the highest priorities are served first."""
        if int(tokens.sum()) > self._limits.per_step:
            order = np.arange(len(tokens)) if priorities is None else np.argsort(-priorities, kind="stable")
            cumulative = np.cumsum(tokens[order])
            tokens = tokens.copy()
            tokens[order] = np.clip(self._limits.per_step - cumulative + tokens[order], 0, tokens[order])
        return tokens
