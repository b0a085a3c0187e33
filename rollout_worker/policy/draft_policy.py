"""The draft policies: they choose how many tokens to draft for each rollout of an engine.

Running rollouts are rows of arrays, because budgets must be computed within microseconds. docs/budgets.md explains the
policies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rollout_store.arrays import Floats, Integers, with_row
from rollout_worker.policy.step_cost import StepCost

if TYPE_CHECKING:
    from rollout_worker.policy.length_classes import LengthClasses

_RATE_WINDOW_STEPS = 32
"""Number of steps over which a rollout's tokens and draft tokens per step are averaged."""


class Column:
    """A number for each row of a :class:`RolloutTable`."""

    def __init__(self) -> None:
        self._values = np.zeros(0)

    def initialize(self, row: int, value: float) -> None:
        """Set the value of a row, which may not exist yet."""
        self._values = with_row(self._values, row)
        self._values[row] = value

    def __getitem__(self, rows: Integers) -> Floats:
        return self._values[rows]

    def __setitem__(self, rows: Integers, values: Floats) -> None:
        self._values[rows] = values


class RolloutTable:
    """Progress of every running rollout.

    A rollout keeps its row while it runs. Afterwards, the row may be given to another rollout.
    """

    def __init__(self) -> None:
        self.generated = np.zeros(0, np.int64)
        """Number of response tokens."""
        self.prompt_tokens = np.zeros(0, np.int64)
        """Number of tokens in front of the response."""
        self.max_tokens = np.zeros(0, np.int64)
        """Number of response tokens at which the rollout is cut off."""
        self.tokens_per_step = np.ones(0)
        """Moving average of the tokens that the rollout generates per step."""
        self.drafted_per_step = np.zeros(0)
        """Moving average of its draft tokens per step."""
        self._steps = np.zeros(0, np.int64)
        self._running: set[int] = set()
        self._free: list[int] = []

    def open(self, *, prompt_tokens: int, generated: int, max_tokens: int) -> int:
        """Add a rollout that has generated *generated* tokens so far, and return its row.

        It is assumed to be as fast as the average of the rollouts that are running.
        """
        if not self._free:
            self._grow()
        running = np.array([*self._running], dtype=np.int64)
        row = self._free.pop()
        self._running.add(row)
        self.generated[row], self.prompt_tokens[row] = generated, prompt_tokens
        self.max_tokens[row] = max(max_tokens, generated + 1)
        self.tokens_per_step[row] = float(self.tokens_per_step[running].mean()) if len(running) else 1.0
        self.drafted_per_step[row] = float(self.drafted_per_step[running].mean()) if len(running) else 0.0
        self._steps[row] = 0
        return row

    def _grow(self) -> None:
        allocated = len(self.generated)
        self.generated = with_row(self.generated, allocated)
        self.prompt_tokens = with_row(self.prompt_tokens, allocated)
        self.max_tokens = with_row(self.max_tokens, allocated)
        self.tokens_per_step = with_row(self.tokens_per_step, allocated)
        self.drafted_per_step = with_row(self.drafted_per_step, allocated)
        self._steps = with_row(self._steps, allocated)
        self._free += range(len(self.generated) - 1, allocated - 1, -1)

    def advance(self, rows: Integers, tokens: Integers, drafted: Integers) -> None:
        """See :meth:`DraftPolicy.advance`."""
        self.generated[rows] += tokens
        steps = self._steps[rows] + 1
        self._steps[rows] = steps
        weights = 1 / np.minimum(steps + 4, _RATE_WINDOW_STEPS)
        for averages, values in ((self.tokens_per_step, tokens), (self.drafted_per_step, drafted)):
            averages[rows] += (values - averages[rows]) * weights

    def close(self, row: int) -> None:
        """Remove a rollout."""
        self._running.remove(row)
        self._free.append(row)


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
    step_values_s: Floats | None = None
    """Seconds that the batch is shorter if one of them needs one step less; None: the same for all."""


class DraftLimits(NamedTuple):
    """The limits of the draft tokens in one verification step."""

    per_rollout: int
    """Maximum number of draft tokens of one rollout."""
    per_step: int
    """Maximum number of draft tokens of all rollouts together."""
    min_survival: float = 0.0
    """A draft ends before the first token whose survival is below this, whatever the policy decides."""
    places: int = 1 << 30
    """Maximum number of rollouts that run at the same time."""


class Position(NamedTuple):
    """Where a response is in comparison with earlier rollouts of its problem, and with itself."""

    rest: float | None
    """Number of tokens that follow the end of the response in earlier rollouts, the last one of which ends them.

    None if it does not occur in them."""
    match: int
    """Number of tokens that these have in common with the end of the response."""
    own_match: int
    """Number of tokens at its end that occur earlier in the response."""


class DraftPolicy(ABC):
    """Decides how many tokens to draft for each running rollout. A rollout is identified by its row."""

    explained_lengths: float = 0.0
    """Share of the variance of remaining lengths that predictions have explained so far; 0 without predictions."""

    def __init__(self, limits: DraftLimits) -> None:
        self._limits = limits
        self._rollouts = RolloutTable()
        self.length_classes: LengthClasses | None = None
        """The length classes of the rollouts, if the policy determines them."""

    @property
    def min_survival(self) -> float:
        """See :attr:`DraftLimits.min_survival`; the controller applies it to all budgets."""
        return self._limits.min_survival

    def open(self, problem: str, *, prompt_tokens: int, generated: int, max_tokens: int) -> int:
        """Start to follow a rollout. It has *generated* response tokens already, and is cut off at *max_tokens*.

        Returns:
            Its row: a small number that may be given to another rollout after :meth:`close`.
        """
        return self._rollouts.open(prompt_tokens=prompt_tokens, generated=generated, max_tokens=max_tokens)

    def advance(self, rows: Integers, tokens: Integers, drafted: Integers) -> None:
        """Record one verification step: the tokens that each rollout generated, and its draft tokens.

        No row may occur twice.
        """
        self._rollouts.advance(rows, tokens, drafted)

    def add_unobserved(self, row: int, tokens: int) -> None:
        """Record tokens that a rollout generated in steps that were not observed."""
        self._rollouts.generated[row] += tokens

    @abstractmethod
    def compute_budgets(self, rows: Integers, cost: StepCost) -> DraftBudgets:
        """Choose the budgets of the rollouts in the next step."""

    def close(self, row: int, *, ended: bool = True) -> None:
        """Stop following a rollout, which has *ended*, or was aborted, or is followed again later."""
        self._rollouts.close(row)

    def examine(self, rows: Integers, position_of: Callable[[int], Position]) -> int:
        """Predict the lengths of some of the running rollouts anew, and return of how many.

        Args:
            rows: all rollouts that are running, shape (rollouts,).
            position_of: returns where the response of a rollout is, given its row; takes about 0.1 ms.
        """
        return 0

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


class Fixed(DraftPolicy):
    """``fixed`` and ``unlimited``: drafts equally many tokens for every rollout, regardless of cost and survival."""

    def compute_budgets(self, rows: Integers, cost: StepCost) -> DraftBudgets:
        """See :meth:`DraftPolicy.compute_budgets`."""
        return self._without_thresholds(rows, cost, self._limit_step(self._max_useful(rows)))


class Marginal(DraftPolicy):
    """Ends each draft where the expected benefit of its next token no longer exceeds the token's cost.

    A rollout that generates r tokens per step needs 1/r fewer steps for each accepted token. A step of one of n
    rollouts costs c_base/n, reading its context, and verifying its tokens: one, and d of its draft. A draft token with
    survival s therefore pays if ``s · (c_base/n + c_kv · context + c_tok · (1 + d)) / r > c_tok``. Survival decreases
    along a draft, so the draft ends at the first token that does not pay. r and d are averages over the rollout's
    recent steps.

    In a mixture of experts, draft tokens cost more the fewer of them there are. Drafts end at the first token that does
    not even pay c_tok. When those of all rollouts are known, they are shortened to what pays together.
    """

    def compute_budgets(self, rows: Integers, cost: StepCost) -> DraftBudgets:
        """See :meth:`DraftPolicy.compute_budgets`."""
        return self._marginal_budgets(rows, cost, None)

    def _marginal_budgets(self, rows: Integers, cost: StepCost, base_shares: Floats | None) -> DraftBudgets:
        """Return the budgets if the rollouts' steps are worth shares of c_base; see :meth:`_token_values`."""
        values = self._token_values(rows, cost, base_shares)
        tokens = self._limit_step(self._max_useful(rows), values)
        min_survivals = np.minimum(cost.per_token_s / np.maximum(values, 1e-12), 1.0)
        step_values = None if base_shares is None else values * np.maximum(self._rollouts.tokens_per_step[rows], 1.0)
        return DraftBudgets(tokens, min_survivals, values, shortens=True, step_values_s=step_values)
