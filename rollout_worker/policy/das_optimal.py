"""DAS's optimal draft budgets, in the form that satisfies DAS's own constraint.

DAS (arXiv 2511.13841) minimises ``c_base · N + c_tok · tokens`` over how many steps N a batch takes and how many tokens
p_i it drafts for each rollout, where rollout i says l_i tokens and drafts have
``A_i = k_i · l_i · (1 - exp(-α_i · p_i / l_i))`` of them accepted, so that it takes ``l_i - A_i`` steps, which must not
be more than N. The printed solution (Eq. 7 and 9) meets that only for k_i = 1; docs/budgets.md derives this one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_worker.policy.step_cost import StepCost

Floats = npt.NDArray[np.float64]

_HALVINGS = 60
_INSIDE = 1e-9


class DasBudgets(NamedTuple):
    """What is best for a batch."""

    steps: float
    """N."""
    drafts: Floats
    """p_i: tokens to draft for each rollout over these steps, shape (rollouts,)."""


def optimal_budgets(lengths: Floats, shares: Floats, efficiencies: Floats, cost: StepCost) -> DasBudgets:
    """The number of steps and the drafts that make a batch cheapest.

    The token that a rollout gets in each step without a draft costs ``c_tok`` as well: a rollout that ends with the
    batch has N of them, so that each step less saves ``c_base`` and ``c_tok`` for every rollout longer than N. (DAS
    leaves these out.) ``c_kv`` has no part in it.

    Args:
        lengths: l_i, tokens that rollouts have to say, above 0; shape (rollouts,).
        shares: k_i, between 0 and 1, exclusive; shape (rollouts,).
        efficiencies: α_i, above 0; shape (rollouts,).
        cost: of a step.
    """
    longest = float(lengths.max(initial=0.0))
    # fewer steps than this no budget reaches
    least = float((lengths * (1 - shares)).max(initial=0.0))
    low, high = least + _INSIDE * (longest - least), longest
    if not cost.per_token > 0 or _slope(low, lengths, shares, efficiencies, cost) >= 0:
        high = low
    for _ in range(_HALVINGS if high > low else 0):
        middle = (low + high) / 2
        # drafts for one step less cost more, the fewer steps there are
        if _slope(middle, lengths, shares, efficiencies, cost) < 0:
            low = middle
        else:
            high = middle
    return DasBudgets(high, drafts_for(high, lengths, shares, efficiencies))


def drafts_for(steps: float, lengths: Floats, shares: Floats, efficiencies: Floats) -> Floats:
    """p_i: ``-(l_i / α_i) · ln(1 - (1 / k_i) · (1 - N / l_i))`` for l_i > N, else 0; shape (rollouts,)."""
    longer = lengths > steps
    found = np.zeros(len(lengths))
    left = 1 - (1 - steps / lengths[longer]) / shares[longer]
    found[longer] = -lengths[longer] / efficiencies[longer] * np.log(np.maximum(left, 1e-300))
    return found


def _slope(steps: float, lengths: Floats, shares: Floats, efficiencies: Floats, cost: StepCost) -> float:
    """What one step more costs: its base, the tokens without a draft, less the drafts that it makes unnecessary."""
    longer = lengths > steps
    drafts = 1 / (efficiencies[longer] * (shares[longer] - 1 + steps / lengths[longer]))
    return float(cost.base + cost.per_token * (longer.sum() - drafts.sum()))
