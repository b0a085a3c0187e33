"""Creates the draft policy that a job's manifest names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from rollout_api.length_stats import LengthStats
from rollout_worker.policy.das_policies import DasClasses, DasOptimal
from rollout_worker.policy.draft_policy import DraftLimits, DraftPolicy
from rollout_worker.policy.marginal import Marginal
from rollout_worker.policy.rollout_table import LengthsByProblem
from rollout_worker.policy.simple_policies import Fixed

PolicyName = Literal["marginal", "das-optimal", "das-classes", "fixed", "unlimited"]
"""Values of ``spec.speculation.policy`` with which anything is drafted."""

UNLIMITED_DRAFT_TOKENS = 64
"""Maximum draft length under ``unlimited``: no draft of an index is longer."""


def max_draft_length(policy: PolicyName, max_draft_tokens: int) -> int:
    """Return the maximum number of tokens of a draft, which the manifest sets for all policies but ``unlimited``."""
    return UNLIMITED_DRAFT_TOKENS if policy == "unlimited" else max_draft_tokens


def make_policy(
    name: PolicyName, limits: DraftLimits, lengths: LengthsByProblem, overall_lengths: Callable[[], LengthStats]
) -> DraftPolicy:
    """Create a policy for one engine.

    Args:
        name: name of the policy.
        limits: limits of the draft tokens in one step.
        lengths: returns the length statistics of a problem.
        overall_lengths: returns the length statistics of all problems.
    """
    if name == "das-classes":
        return DasClasses(limits, lengths, overall_lengths)
    if name == "das-optimal":
        return DasOptimal(limits, lengths)
    if name == "marginal":
        return Marginal(limits, lengths)
    return Fixed(limits, lengths)
