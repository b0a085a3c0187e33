"""Creates the draft policy that a job's manifest names."""

from __future__ import annotations

from typing import Literal

from rollout_worker.policy.draft_policy import DraftLimits, DraftPolicy
from rollout_worker.policy.marginal import Marginal
from rollout_worker.policy.simple_policies import Fixed

PolicyName = Literal["marginal", "fixed", "unlimited"]
"""Values of ``spec.speculation.policy`` with which anything is drafted."""

UNLIMITED_DRAFT_TOKENS = 64
"""Maximum draft length under ``unlimited``: no draft of an index is longer."""


def max_draft_length(policy: PolicyName, max_draft_tokens: int) -> int:
    """Return the maximum number of tokens of a draft, which the manifest sets for all policies but ``unlimited``."""
    return UNLIMITED_DRAFT_TOKENS if policy == "unlimited" else max_draft_tokens


def make_policy(name: PolicyName, limits: DraftLimits) -> DraftPolicy:
    """Create a policy for one engine.

    Args:
        name: name of the policy.
        limits: limits of the draft tokens in one step.
    """
    return Marginal(limits) if name == "marginal" else Fixed(limits)
