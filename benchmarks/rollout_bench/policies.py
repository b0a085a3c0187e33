"""Draft policies of other systems, and variants of this project's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rollout_store.arrays import Booleans, Floats, Integers
from rollout_worker.policy.das.policies import DasClasses, DasOptimal
from rollout_worker.policy.draft_policy import DraftBudgets, DraftLimits, DraftPolicy, Fixed, Marginal, Position
from rollout_worker.policy.marginal_with_lengths import NUM_QUANTILES, MarginalWithLengths
from rollout_worker.policy.predicted_lengths import LengthSource
from rollout_worker.policy.step_cost import StepCost

MAX_BATCHED_TOKENS = 8192
"""Maximum tokens of a verification step, as vLLM sets it on an H100."""
KNOWN_END_MARGIN = 64
"""Number of tokens beyond its end at which a rollout of known length is cut off, so that drafts may exceed its end."""


class FixedBelow(Fixed):
    """Drafts equally many tokens for every rollout while few run, otherwise none (TLT, arXiv 2511.16665)."""

    def __init__(self, limits: DraftLimits, max_running: int) -> None:
        super().__init__(limits)
        self._max_running = max_running

    def compute_budgets(self, rows: Integers, cost: StepCost) -> DraftBudgets:
        """See :meth:`DraftPolicy.compute_budgets`."""
        budgets = super().compute_budgets(rows, cost)
        return budgets if len(rows) <= self._max_running else budgets._replace(tokens=np.zeros(len(rows), np.int64))


class WithKnownLengths(MarginalWithLengths):
    """Knows how long each rollout will be: it is cut off :data:`KNOWN_END_MARGIN` tokens later."""

    trust = 1.0

    def examine(self, rows: Integers, position_of: Callable[[int], Position]) -> int:
        """Do nothing."""
        return 0

    def _is_predicted(self, rows: Integers) -> Booleans:
        return np.full(len(rows), True)

    def _log_rests(self, rows: Integers) -> Floats:
        rests = self._rollouts.max_tokens[rows] - KNOWN_END_MARGIN - self._rollouts.generated[rows]
        return np.log(np.maximum(rests, 1.0))[:, None].repeat(NUM_QUANTILES, axis=1)


class PolicySettings:
    """Creates the policy of an engine."""

    def __init__(self, name: str, max_draft: int, min_survival: float = 0.0, max_running: int = 0) -> None:
        """Choose a policy.

        Args:
            name: ``marginal``, ``marginal-with-lengths``, ``known-lengths``, ``fixed``, ``fixed-below``,
                ``das-classes`` or ``das-optimal``.
            max_draft: maximum number of tokens of a draft.
            min_survival: survival below which all drafts end; 0 leaves that to the policy.
            max_running: for ``fixed-below``.
        """
        self._name, self._max_draft = name, max_draft
        self._min_survival, self._max_running = min_survival, max_running

    def make(self, lengths: LengthSource, places: int) -> DraftPolicy:
        """Create the policy of an engine that decodes up to *places* rollouts at once."""
        limits = DraftLimits(self._max_draft, MAX_BATCHED_TOKENS, self._min_survival, places)
        match self._name:
            case "marginal":
                return Marginal(limits)
            case "marginal-with-lengths":
                return MarginalWithLengths(limits, lengths)
            case "known-lengths":
                return WithKnownLengths(limits, lengths)
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
