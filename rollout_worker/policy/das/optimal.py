"""DAS's optimal draft budgets, in the form that satisfies DAS's own constraint.

DAS (arXiv 2511.13841) minimizes ``c_base · N + c_tok · tokens`` over the number of steps N that a batch takes and the
number of tokens p_i that are drafted for each rollout. Rollout i generates l_i tokens;
``A_i = k_i · l_i · (1 - exp(-α_i · p_i / l_i))`` of them are accepted draft tokens (Eq. 5). It therefore takes
``l_i - A_i`` steps, which must be at most N. The printed solution (Eq. 7 and 9) satisfies this constraint only for
k_i = 1; docs/budgets.md derives the solution that is used here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rollout_store.arrays import Floats
from rollout_worker.policy.step_cost import StepCost

_BISECTION_STEPS = 60
_FEASIBLE_MARGIN = 1e-9
"""Relative distance from the infeasible number of steps, at which the drafts would be infinitely long."""


class DasBudgets(NamedTuple):
    """The optimal budgets of a batch."""

    steps: float
    """N: number of steps until the batch ends."""
    draft_tokens: Floats
    """p_i: number of tokens to draft for each rollout over these steps, shape (rollouts,)."""


def optimal_budgets(lengths: Floats, capacities: Floats, efficiencies: Floats, cost: StepCost) -> DasBudgets:
    """Find the number of steps and the drafts that minimize the cost of a batch.

    Unlike DAS, this counts the token that a rollout generates in each step without a draft: a rollout that ends with
    the batch has N of them, so one step less saves c_base, and c_tok for every rollout longer than N. c_kv is not
    taken into account.

    Args:
        lengths: l_i, tokens that the rollouts still generate, greater than 0; shape (rollouts,).
        capacities: k_i, between 0 and 1, exclusive; shape (rollouts,).
        efficiencies: α_i, greater than 0; shape (rollouts,).
        cost: cost model of a step.
    """
    longest = float(lengths.max(initial=0.0))
    # No draft can make the batch take fewer steps than this.
    infeasible = float((lengths * (1 - capacities)).max(initial=0.0))
    low, high = infeasible + _FEASIBLE_MARGIN * (longest - infeasible), longest
    if not cost.per_token_s > 0 or _cost_derivative(low, lengths, capacities, efficiencies, cost) >= 0:
        high = low
    for _ in range(_BISECTION_STEPS if high > low else 0):
        middle = (low + high) / 2
        # The derivative increases with N, because the drafts that save one more step cost more the fewer steps remain.
        if _cost_derivative(middle, lengths, capacities, efficiencies, cost) < 0:
            low = middle
        else:
            high = middle
    return DasBudgets(high, draft_tokens_for(high, lengths, capacities, efficiencies))


def draft_tokens_for(steps: float, lengths: Floats, capacities: Floats, efficiencies: Floats) -> Floats:
    """Return the drafts that let all rollouts end within N = *steps* steps, shape (rollouts,).

    ``p_i = -(l_i / α_i) · ln(1 - (1 / k_i) · (1 - N / l_i))`` for l_i > N, else 0.
    """
    longer = lengths > steps
    draft_tokens = np.zeros(len(lengths))
    unsaturated = 1 - (1 - steps / lengths[longer]) / capacities[longer]
    draft_tokens[longer] = -lengths[longer] / efficiencies[longer] * np.log(np.maximum(unsaturated, 1e-300))
    return draft_tokens


def _cost_derivative(steps: float, lengths: Floats, capacities: Floats, efficiencies: Floats, cost: StepCost) -> float:
    """Return the derivative of the batch's cost with respect to N, in seconds per step.

    ``c_base + c_tok · (#{i: l_i > N} - Σ_{l_i > N} 1 / (α_i · (k_i - 1 + N / l_i)))``
    """
    longer = lengths > steps
    saved_drafts = 1 / (efficiencies[longer] * (capacities[longer] - 1 + steps / lengths[longer]))
    return float(cost.base_s + cost.per_token_s * (longer.sum() - saved_drafts.sum()))
