"""Decides what one engine drafts in each step, and learns from the outcome of earlier steps."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from rollout_store.arrays import Floats, Integers
from rollout_worker.policy.cost_fit import CostFit, TimedStep
from rollout_worker.policy.draft_policy import Column, DraftBudgets, DraftPolicy
from rollout_worker.policy.governor import EXPLORATION_SHARE, Governor, Trial
from rollout_worker.policy.step_cost import StepCost

_STEPS_UNTIL_SKIPPING = 4
"""Number of consecutive steps without drafts after which steps are skipped."""
_STEPS_BETWEEN_SKIPS = 2
"""Number of steps that look for drafts between two series of skipped steps. It takes two to time a step."""
_MAX_SKIPPED_STEPS = 16
"""Maximum number of consecutive steps that are skipped."""
_FIRST_STEPS_WITH_DRAFTS = 8
"""Number of steps with drafts that are measured even if the prior predicts a loss, because it may be wrong."""


class IdleBackoff:
    """Lets the drafter skip steps while nothing is drafted, because looking for drafts takes time, too.

    The number of skipped steps doubles up to 16 while nothing is drafted. As soon as something is drafted, no step is
    skipped.
    """

    def __init__(self) -> None:
        self._steps_left = _STEPS_UNTIL_SKIPPING
        """Number of steps without drafts until steps are skipped again."""
        self._series_length = 1
        self._skips_left = 0

    def skip_step(self) -> bool:
        """Return whether the drafter skips this step. Call it once per step."""
        if self._skips_left:
            self._skips_left -= 1
            return True
        return False

    def record_step(self, drafted: bool) -> None:
        """Record whether anything was drafted in a step that was not skipped."""
        if drafted:
            self._steps_left, self._series_length = _STEPS_UNTIL_SKIPPING, 1
            return
        self._steps_left -= 1
        if self._steps_left <= 0:
            self._series_length = min(2 * self._series_length, _MAX_SKIPPED_STEPS)
            self._steps_left, self._skips_left = _STEPS_BETWEEN_SKIPS, self._series_length


class StepOutcome(NamedTuple):
    """The outcome of one verification step; arrays of shape (rollouts,)."""

    rows: Integers
    """Rows of the rollouts, each once."""
    generated: Integers
    """Number of tokens that each generated, accepted draft tokens included."""
    drafted: Integers
    """Number of verified draft tokens."""
    expected: Floats
    """Number of draft tokens expected to be accepted, which is the sum of their survivals."""
    context_tokens: Integers
    """Number of tokens of prompt and response that attention read."""
    trial: Trial | None = None
    """:attr:`Governor.trial` after the drafts of this step were selected."""


class DraftController:
    """Combines a draft policy, the fitted cost model and the governor of one engine."""

    def __init__(
        self,
        policy: DraftPolicy,
        prior: StepCost,
        *,
        graph_tokens: int = 0,
        exploration: float = EXPLORATION_SHARE,
        governed: bool = True,
    ) -> None:
        """Create a controller without rollouts.

        Args:
            policy: chooses the budgets.
            prior: cost model until steps were measured.
            graph_tokens: number of tokens of the largest CUDA graph; 0 if there are none.
                Drafts are shortened so that steps are not larger, because the host may take longer than the GPU then.
            exploration: share of all tokens that may be drafted where drafting does not pay.
            governed: whether drafting is disabled where it does not pay.
        """
        self.fit = CostFit(prior)
        self.governor = Governor(exploration=exploration)
        self.timed_s = 0.0
        """Seconds of all measured steps."""
        self.without_drafts_s = 0.0
        """Predicted seconds to generate the same tokens without drafts."""
        self.min_gain_s = -math.inf
        """Seconds that the next drafts must gain together to be verified; otherwise :meth:`select_trial` decides.

        The gain is what they are expected to save, minus the cost of verifying them."""
        self._policy, self._governed, self._graph_tokens = policy, governed, graph_tokens
        self._backoff = IdleBackoff()
        self._generation: int | None = None
        self._is_idle = False
        """Whether none of the last drafts was worth verifying."""
        self._token_values_s = Column()
        self.draft_costs_s = np.zeros(1)
        """Additional seconds of the next step with 0, 1, 2, … draft tokens, shape (tokens,)."""

    def open(self, problem: str, *, prompt_tokens: int, generated: int, max_tokens: int) -> int:
        """Start to follow a rollout and return its row; see :meth:`DraftPolicy.open`."""
        row = self._policy.open(problem, prompt_tokens=prompt_tokens, generated=generated, max_tokens=max_tokens)
        self.governor.open(row)
        self._token_values_s.initialize(row, 0.0)
        return row

    def add_unobserved(self, row: int, tokens: int) -> None:
        """Record tokens that a rollout generated in steps that were not observed."""
        self._policy.add_unobserved(row, tokens)

    def close(self, row: int) -> None:
        """Stop following a rollout that has ended."""
        self._policy.close(row)

    def set_generation(self, generation: int) -> None:
        """Set the newest generation of the history; a new one makes the governor judge drafting anew."""
        if self._generation is not None and generation > self._generation and self.governor.drafting_disabled:
            self.governor.retry()
        self._generation = generation

    def skip_step(self) -> bool:
        """Return whether nothing is drafted in this step and its outcome is not observed. Call it once per step."""
        self.governor.count_step()
        return self._backoff.skip_step()

    def compute_budgets(self, rows: Integers) -> DraftBudgets:
        """Choose the draft budgets of the next step, and set :attr:`min_gain_s`.

        See :meth:`DraftPolicy.compute_budgets`.
        """
        cost = self.fit.cost
        budgets = self._policy.compute_budgets(rows, cost)
        self._token_values_s[rows] = budgets.token_values_s
        self.draft_costs_s = cost.draft_costs(len(rows), int(budgets.tokens.sum()))
        if budgets.shortens and len(rows) <= self._graph_tokens:
            self.draft_costs_s[self._graph_tokens - len(rows) + 1 :] = math.inf
        if not self._governed:
            return budgets
        if self.governor.is_reference_step:
            self.min_gain_s = math.inf
        else:
            self.min_gain_s = 0.0 if self.fit.num_steps_with_drafts >= _FIRST_STEPS_WITH_DRAFTS else -math.inf
        return self.governor.limit(rows, budgets)

    def linear_cost(self, rollouts: int) -> StepCost:
        """Return the cost model of a step with about one draft token for each rollout, without experts."""
        return self.fit.cost.linear_between(rollouts, rollouts)

    def select_trial(self, rows: Integers, drafted: Integers, gain_s: float) -> int | None:
        """Choose the only draft to verify in a step whose drafts gain no more than :attr:`min_gain_s`.

        Args:
            rows: the rollouts, each once, shape (rollouts,).
            drafted: number of tokens of each draft, shape (rollouts,), not all 0.
            gain_s: seconds that the drafts gain together.

        Returns:
            An index into *rows*, or None if no draft is verified.
        """
        if gain_s > 0:
            return None  # This is a step for reference.
        selected = self.governor.select_trial(rows, drafted)
        self._is_idle = selected is None
        return None if self.governor.is_reference_step else selected

    def record_drafts(self, drafts: int) -> None:
        """Record how many drafts there were before :meth:`select_trial` chose among them. Call it once per step."""
        if not self._governed:
            return
        has_drafts = drafts > 0 and not self._is_idle
        self._is_idle = False
        self._backoff.record_step(has_drafts)
        if has_drafts:
            self.governor.count_step_with_drafts()

    def observe_step(self, step: StepOutcome, seconds: float | None) -> None:
        """Learn from the outcome of a step.

        Args:
            step: the outcome.
            seconds: duration of the step; None if it also did something else, such as reading a prompt.
        """
        num_rollouts = len(step.rows)
        if not num_rollouts:
            return
        self._policy.advance(step.rows, step.generated, step.drafted)
        accepted = np.minimum(step.generated - 1, step.drafted)
        self.governor.observe_step(
            step.rows,
            generated=step.generated,
            drafted=step.drafted,
            expected=step.expected,
            accepted=accepted,
            trial=step.trial,
        )
        if seconds is None:
            self.governor.observe_time(None)
        else:
            self._observe_time(step, accepted, num_rollouts, seconds)

    def _observe_time(self, step: StepOutcome, accepted: Integers, num_rollouts: int, seconds: float) -> None:
        drafted, context_tokens = int(step.drafted.sum()), int(step.context_tokens.sum())
        is_uniform = bool((step.drafted == step.drafted[0]).all())
        is_representative = self.fit.observe(
            TimedStep(num_rollouts + drafted, context_tokens, is_uniform, seconds, drafted > 0)
        )
        cost = self.fit.cost
        without_drafts_s = cost.step_time(num_rollouts, context_tokens)
        # The machine is as slow with drafts as without.
        slowness = seconds / cost.step_time(num_rollouts + drafted, context_tokens, has_drafts=drafted > 0)
        self.timed_s += seconds
        self.without_drafts_s += slowness * without_drafts_s * float(step.generated.sum()) / num_rollouts
        saved_s = float((accepted * self._token_values_s[step.rows]).sum())
        if step.trial is None or not drafted:
            relative_time = seconds / without_drafts_s if is_representative else None
            self.governor.observe_time(relative_time, saved_s / without_drafts_s if drafted else None)
            return
        self.governor.observe_time(None)
        cost = cost.linear_between(num_rollouts, drafted * step.trial.candidates)
        self.governor.observe_trial(
            step.trial,
            without_drafts_s=without_drafts_s,
            gain_s=saved_s - cost.per_token_s * drafted,
            drafting_s=cost.drafting_s,
        )
