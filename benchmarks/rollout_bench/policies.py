"""Draft policies of other systems, and variants of this project's."""

from __future__ import annotations

import numpy as np

from rollout_store.arrays import Integers
from rollout_worker.policy.das.policies import DasClasses, DasOptimal
from rollout_worker.policy.draft_policy import DraftBudgets, DraftLimits, DraftPolicy, Fixed, Marginal
from rollout_worker.policy.predicted_lengths import LengthSource, MarginalWithLengths
from rollout_worker.policy.step_cost import StepCost

MAX_BATCHED_TOKENS = 8192
"""Maximum tokens of a verification step, as vLLM sets it on an H100."""


class FixedBelow(Fixed):
    """Drafts equally many tokens for every rollout while few run, otherwise none (TLT, arXiv 2511.16665)."""

    def __init__(self, limits: DraftLimits, max_running: int) -> None:
        super().__init__(limits)
        self._max_running = max_running

    def compute_budgets(self, rows: Integers, cost: StepCost) -> DraftBudgets:
        """See :meth:`DraftPolicy.compute_budgets`."""
        budgets = super().compute_budgets(rows, cost)
        return budgets if len(rows) <= self._max_running else budgets._replace(tokens=np.zeros(len(rows), np.int64))


class PolicySettings:
    """Creates the policy of an engine."""

    def __init__(self, name: str, max_draft: int, min_survival: float = 0.0, max_running: int = 0) -> None:
        """Choose a policy.

        Args:
            name: ``marginal``, ``marginal-with-lengths``, ``fixed``, ``fixed-below``, ``das-classes`` or
                ``das-optimal``.
            max_draft: maximum number of tokens of a draft.
            min_survival: survival below which all drafts end; 0 leaves that to the policy.
            max_running: for ``fixed-below``.
        """
        self._name, self._max_draft = name, max_draft
        self._min_survival, self._max_running = min_survival, max_running

    def make(self, lengths: LengthSource) -> DraftPolicy:
        """Create the policy."""
        limits = DraftLimits(self._max_draft, MAX_BATCHED_TOKENS, self._min_survival)
        match self._name:
            case "marginal":
                return Marginal(limits)
            case "marginal-with-lengths":
                return MarginalWithLengths(limits, lengths)
            case "fixed":
                return Fixed(limits)
            case "fixed-below":
                return FixedBelow(limits, self._max_running)
            case "das-classes":
                return DasClasses(limits, lengths)
            case "das-optimal":
                return DasOptimal(limits, lengths)
            case name:
                raise ValueError(f"unknown policy {name!r}")
