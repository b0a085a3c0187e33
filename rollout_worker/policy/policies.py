"""The policies by the names that a job's manifest has for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from rollout_api.length_stats import LengthStats
from rollout_worker.policy.budgets import BudgetPolicy, DasClasses, DasOptimal, Fixed, Marginal, Pool
from rollout_worker.policy.rollouts import Lengths

PolicyName = Literal["marginal", "das-optimal", "das-classes", "fixed", "unlimited"]
"""Of ``spec.speculation.policy``, where anything is drafted."""

UNLIMITED_DRAFT = 64
"""Most tokens of a draft under ``unlimited``: as far as any index matches."""


def longest_draft(name: PolicyName, most: int) -> int:
    """Most tokens of a draft of a policy, of a job in which others may draft *most*."""
    return UNLIMITED_DRAFT if name == "unlimited" else most


def make_policy(name: PolicyName, pool: Pool, lengths: Lengths, of_all: Callable[[], LengthStats]) -> BudgetPolicy:
    """A policy for one engine.

    Args:
        name: which.
        pool: what a step may have.
        lengths: of problems' rollouts.
        of_all: lengths of all rollouts.
    """
    if name == "das-classes":
        return DasClasses(pool, lengths, of_all)
    if name == "das-optimal":
        return DasOptimal(pool, lengths)
    if name == "marginal":
        return Marginal(pool, lengths)
    return Fixed(pool, lengths)
