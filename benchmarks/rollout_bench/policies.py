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


class WithThreshold(DraftPolicy):
    """A policy whose drafts end before the first token whose survival is below a constant."""

    def __init__(self, policy: DraftPolicy, min_survival: float) -> None:
        self._policy, self._min_survival = policy, min_survival

    def open(self, problem: str, *, prompt_tokens: int, generated: int, max_tokens: int) -> int:
        """See :meth:`DraftPolicy.open`."""
        return self._policy.open(problem, prompt_tokens=prompt_tokens, generated=generated, max_tokens=max_tokens)

    def advance(self, rows: Integers, tokens: Integers, drafted: Integers) -> None:
        """See :meth:`DraftPolicy.advance`."""
        self._policy.advance(rows, tokens, drafted)

    def add_unobserved(self, row: int, tokens: int) -> None:
        """See :meth:`DraftPolicy.add_unobserved`."""
        self._policy.add_unobserved(row, tokens)

    def close(self, row: int) -> None:
        """See :meth:`DraftPolicy.close`."""
        self._policy.close(row)

    def compute_budgets(self, rows: Integers, cost: StepCost) -> DraftBudgets:
        """See :meth:`DraftPolicy.compute_budgets`."""
        budgets = self._policy.compute_budgets(rows, cost)
        return budgets._replace(min_survivals=np.full(len(rows), self._min_survival))


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
        limits = DraftLimits(self._max_draft, MAX_BATCHED_TOKENS)
        policy: DraftPolicy
        match self._name:
            case "marginal":
                policy = Marginal(limits)
            case "marginal-with-lengths":
                policy = MarginalWithLengths(limits, lengths)
            case "fixed":
                policy = Fixed(limits)
            case "fixed-below":
                policy = FixedBelow(limits, self._max_running)
            case "das-classes":
                policy = DasClasses(limits, lengths)
            case "das-optimal":
                policy = DasOptimal(limits, lengths)
            case name:
                raise ValueError(f"unknown policy {name!r}")
        return WithThreshold(policy, self._min_survival) if self._min_survival else policy
