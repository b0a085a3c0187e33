"""Decides, for one engine, what is drafted in each step, and learns from how the steps before it went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rollout_worker.policy.budgets import NOTHING_WAITS, Allowance, BudgetPolicy, Waiting
from rollout_worker.policy.cost_fit import CostFit, Step
from rollout_worker.policy.governor import EXPLORATION, Governor, Verified
from rollout_worker.policy.step_cost import StepCost


class Outcome(NamedTuple):
    """What one verification step brought a rollout."""

    key: str
    said: int
    """Tokens, accepted drafts among them."""
    drafted: int
    expected: float
    """Tokens of the draft that were to be accepted, by their probabilities."""
    context: int
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
        self._worth: dict[str, float] = {}

    def open(self, key: str, problem: str, *, prompt: int, said: int, most: int) -> None:
        """As :meth:`BudgetPolicy.open`."""
        self._policy.open(key, problem, prompt=prompt, said=said, most=most)

    def missed(self, key: str, tokens: int) -> None:
        """A rollout said tokens in steps that were not seen."""
        self._policy.advance(key, tokens, step=False)

    def close(self, key: str) -> None:
        """A rollout ended."""
        self._policy.close(key)
        self.governor.close(key)
        self._worth.pop(key, None)

    def allow(self, keys: Sequence[str], waiting: Waiting = NOTHING_WAITS) -> Allowance:
        """What may be drafted for these rollouts now."""
        allowed = self._policy.allow(keys, self.fit.cost, waiting)
        self._worth.update(zip(keys, allowed.worths, strict=True))
        return self.governor.limit(keys, allowed) if self._governed else allowed

    def verified(self, outcomes: Sequence[Outcome], seconds: float | None) -> None:
        """A step ended.

        Args:
            outcomes: of all rollouts that were in it.
            seconds: that it took; None if it also did something else, such as read a prompt.
        """
        for one in outcomes:
            self._policy.advance(one.key, one.said, drafted=one.drafted)
        said = sum(one.said for one in outcomes)
        self.governor.verified(
            [Verified(one.key, one.drafted, one.expected, min(one.said - 1, one.drafted)) for one in outcomes], said
        )
        if seconds is None or not outcomes:
            return
        rollouts, drafted = len(outcomes), sum(one.drafted for one in outcomes)
        context = sum(one.context for one in outcomes)
        lengths = {one.drafted for one in outcomes}
        self.fit.observe(Step(rollouts + drafted, context, len(lengths) == 1, seconds))
        without = self.fit.predict(rollouts, context, uniform=True)
        self.seconds += seconds
        self.seconds_without += without * said / rollouts
        if drafted:
            cost = self.fit.cost
            saved = sum(
                min(one.said - 1, one.drafted) * (self._worth.get(one.key, 0.0) + cost.per_token) for one in outcomes
            )
            # what a few exploring tokens cost drowns in what steps differ by anyway
            extra = cost.per_token * drafted if self.governor.stopped else seconds - without
            self.governor.timed(without=without, extra=extra, saved=saved)

    @property
    def saved(self) -> float:
        """Share of the time without drafts that they saved, by the cost of steps; negative if they cost time."""
        return 1 - self.seconds / self.seconds_without if self.seconds_without > 0 else 0.0
