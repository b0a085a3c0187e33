"""The draft policies that a manifest can name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rollout_api.manifest.spec import PolicyName
from rollout_worker.policy.das.policies import DasClasses, DasOptimal
from rollout_worker.policy.draft_policy import DraftLimits, DraftPolicy, Fixed, Marginal
from rollout_worker.policy.marginal_with_lengths import MarginalWithLengths
from rollout_worker.policy.predicted_lengths import LengthSource

_WITH_LENGTHS: Mapping[PolicyName, Callable[[DraftLimits, LengthSource], DraftPolicy]] = {
    "das-classes": DasClasses,
    "das-optimal": DasOptimal,
    "marginal-with-lengths": MarginalWithLengths,
}


def uses_lengths(name: PolicyName) -> bool:
    """Return whether a policy predicts lengths."""
    return name in _WITH_LENGTHS


def make_policy(name: PolicyName, limits: DraftLimits, lengths: LengthSource | None = None) -> DraftPolicy:
    """Create a policy for one engine. It needs *lengths* if :func:`uses_lengths`."""
    if (make := _WITH_LENGTHS.get(name)) is not None:
        if lengths is None:
            raise ValueError(f"The draft policy {name} needs the lengths of earlier rollouts")
        return make(limits, lengths)
    return Marginal(limits) if name == "marginal" else Fixed(limits)
