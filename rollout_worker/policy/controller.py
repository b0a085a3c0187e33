"""Decides, for one engine, what is drafted in each step, and learns from how the steps before it went."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rollout_worker.policy.budgets import NOTHING_WAITS, Allowance, BudgetPolicy, Waiting
from rollout_worker.policy.cost_fit import CostFit, Step
from rollout_worker.policy.governor import EXPLORATION, Governor
from rollout_worker.policy.idle_backoff import IdleBackoff
from rollout_worker.policy.rollouts import Column, Floats, Integers
from rollout_worker.policy.step_cost import StepCost

_WITHOUT_EVERY = 256
"""Of steps that could verify drafts one does not, so that it stays known what a step without any takes."""
_FIRST_WITHOUT = (64, 128)


class Outcomes(NamedTuple):
    """What one verification step brought its rollouts; arrays of shape (rollouts,)."""

    rows: Integers
    """Each once."""
    said: Integers
    """Tokens, accepted drafts among them."""
    drafted: Integers
    expected: Floats
    """Tokens of the draft that were to be accepted, by their probabilities."""
    context: Integers
    """Tokens of prompt and response that attention read."""


class DraftController:
    """A policy, the cost that it goes by, and the governor over it."""

    def __init__(
        self, policy: BudgetPolicy, prior: StepCost, *, exploration: float = EXPLORATION, governed: bool = True
    ) -> None:
        """Nothing runs yet.

        Args:
            policy: says what is to be drafted.
            prior: what steps cost, until they were seen.
            exploration: share of all tokens that may be drafted where drafting does not pay.
            governed: whether drafting that does not pay is stopped.
        """
        self.fit = CostFit(prior)
        self.governor = Governor(exploration=exploration)
        self.seconds = 0.0
        """Of all steps that were timed."""
        self.seconds_without = 0.0
        """That the same tokens would have taken without drafts, by the cost of steps."""
        self._policy, self._governed = policy, governed
        self._rests = IdleBackoff()
        self._with_drafts = 0
        """Steps."""
        self._worth = Column()

    def open(self, problem: str, *, prompt: int, said: int, most: int) -> int:
        """As :meth:`BudgetPolicy.open`."""
        row = self._policy.open(problem, prompt=prompt, said=said, most=most)
        self.governor.open(row)
        self._worth.begin(row, 0.0)
        return row

    def miss(self, row: int, tokens: int) -> None:
        """A rollout said tokens in steps that were not seen."""
        self._policy.miss(row, tokens)

    def close(self, row: int) -> None:
        """A rollout ended."""
        self._policy.close(row)

    def allow(self, rows: Integers, waiting: Waiting = NOTHING_WAITS) -> Allowance:
        """What may be drafted for these rollouts now."""
        allowed = self._policy.allow(rows, self.fit.cost, waiting)
        self._worth[rows] = allowed.worths
        return self.governor.limit(rows, allowed) if self._governed else allowed

    def keep(self, rows: Integers, drafted: Integers, expected: Floats) -> Integers:
        """Which of the drafts that were found for these rollouts are to be verified, as places in *rows*.

        Args:
            rows: each once.
            drafted: tokens of each draft.
            expected: of these, tokens that are to be accepted, by their probabilities.
        """
        if not self._governed:
            return np.flatnonzero(drafted)
        cost = self.fit.cost
        gains = expected * (self._worth[rows] + cost.per_token) - cost.per_token * drafted
        kept = self.governor.keep(rows, drafted, float(gains.sum()) - cost.drafting)
        self._rests.looked(len(kept) > 0)
        if len(kept):
            self._with_drafts += 1
            if self._with_drafts in _FIRST_WITHOUT or self._with_drafts % _WITHOUT_EVERY == 0:
                return kept[:0]
        return kept

    def sleeps(self) -> bool:
        """Asked once a step: whether nothing is drafted in it, and nobody looks how it went."""
        return self._rests.sleeps()

    def verified(self, step: Outcomes, seconds: float | None) -> None:
        """A step ended.

        Args:
            step: what it brought.
            seconds: that it took; None if it also did something else, such as read a prompt.
        """
        rollouts = len(step.rows)
        if not rollouts:
            return
        self._policy.advance(step.rows, step.said, step.drafted)
        accepted = np.minimum(step.said - 1, step.drafted)
        self.governor.verified(
            step.rows, said=step.said, drafted=step.drafted, expected=step.expected, accepted=accepted
        )
        if seconds is None:
            return
        drafted, context = int(step.drafted.sum()), int(step.context.sum())
        uniform = bool((step.drafted == step.drafted[0]).all())
        usual = self.fit.observe(Step(rollouts + drafted, context, uniform, seconds, drafted > 0))
        without = self.fit.predict(rollouts, context, uniform=True)
        self.seconds += seconds
        self.seconds_without += without * float(step.said.sum()) / rollouts
        if drafted:
            cost = self.fit.cost
            saved = float((accepted * (self._worth[step.rows] + cost.per_token)).sum())
            if usual:
                self.governor.timed(without=without, extra=seconds - without, saved=saved)
            self.governor.explored_one(without=without, gain=saved - cost.per_token * drafted, drafting=cost.drafting)

    @property
    def saved(self) -> float:
        """Share of the time without drafts that they saved, by the cost of steps; negative if they cost time."""
        return 1 - self.seconds / self.seconds_without if self.seconds_without > 0 else 0.0
