"""Decides what one engine drafts in each step, and learns from the outcome of earlier steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from rollout_store.arrays import Integers
from rollout_worker.policy.cost_fit import CostFit, TimedStep
from rollout_worker.policy.draft_policy import Column, DraftBudgets, DraftPolicy, Position
from rollout_worker.policy.governor import TRIAL_TOKENS, Governor, StepOutcome
from rollout_worker.policy.length_classes import LengthClasses
from rollout_worker.policy.step_cost import CudaGraphs, StepCost

_STEPS_UNTIL_SKIPPING = 4
"""Number of consecutive steps without drafts after which steps are skipped."""
_STEPS_BETWEEN_SKIPS = 2
"""Number of steps that look for drafts between two series of skipped steps. It takes two to time a step."""
_MAX_SKIPPED_STEPS = 16
"""Maximum number of consecutive steps that are skipped."""
_FILLING_SURVIVAL_SHARE = 0.5
"""Factor on the survival below which a draft ends if there are CUDA graphs.

Tokens that do not pay are free where they replace padding. The others are removed when all drafts are known."""
_ACCEPTANCE_WINDOW_STEPS = 32
"""Number of steps with drafts over which a rollout's accepted tokens are averaged."""
_FIRST_STEPS = 64
"""Number of timed steps after which the fitted cost does not change much any more."""
_CHANGED_COST = 0.1
"""Change of the cost of a draft token for each rollout, as a share of a step, with which comparisons become invalid."""
_PRIOR_ACCEPTANCE_STEPS = 8
"""Number of such steps that the average of other rollouts counts as, for a new one."""
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


class DraftController:
    """Combines a draft policy, the fitted cost model and the governor of one engine."""

    def __init__(
        self,
        policy: DraftPolicy,
        prior: StepCost,
        *,
        graph_sizes: Iterable[int] = (),
        uniform_lengths: Sequence[int] = (),
        governed: bool = True,
    ) -> None:
        """Create a controller without rollouts.

        Args:
            policy: chooses the budgets.
            prior: cost model until steps were measured.
            graph_sizes: sizes of the engine's CUDA graphs in tokens.
                Drafts are shortened so that no step is larger than the largest, because the host may take longer than
                the GPU then.
            uniform_lengths: if not empty, the engine verifies one of these numbers of tokens for each rollout of a step
                with drafts.
            governed: whether drafting is disabled where it does not pay.
        """
        self.fit = CostFit(prior, CudaGraphs(graph_sizes))
        self.governor = Governor()
        self.uniform_lengths = uniform_lengths
        self.timed_s = 0.0
        """Seconds of decoding in all measured steps, that is, without reading prompts."""
        self.without_drafts_s = 0.0
        """Predicted seconds to generate the same tokens without drafts."""
        self.min_gain_s = -math.inf
        """Seconds that the next drafts must gain together to be verified; otherwise :meth:`select_trial` decides.

        The gain is what they are expected to save, minus the cost of verifying them."""
        self._policy, self._governed = policy, governed
        self._backoff = IdleBackoff()
        self._generation: int | None = None
        self._has_drafts = False
        """Whether drafts are verified whose outcome has not been observed."""
        self._waits = False
        """Whether steps wait for the drafter even if nothing is drafted, so that verifying drafts takes no longer."""
        self._is_idle = False
        """Whether none of the last drafts was worth verifying."""
        self._token_values_s, self._budgets = Column(), Column()
        """Seconds that an accepted token of each rollout saves, and the draft tokens that its next step may have."""
        self._step_values_s = Column()
        """What a step of each rollout is worth, in seconds or relative to the others."""
        self._accepted_per_step, self._steps_with_drafts = Column(), Column()
        """Average of each rollout's accepted tokens per step with drafts, and number of these steps."""
        self._mean_accepted: float | None = None
        """That average in the last batch."""
        self._micro_batches, self._num_micro_batches = Column(), 0
        """Number of the micro-batch that each rollout belongs to, from 1; 0 before its first step."""
        self.draft_costs_s = np.zeros(1)
        """Additional seconds of the next step with 0, 1, 2, … draft tokens, shape (tokens,)."""

    @property
    def length_classes(self) -> LengthClasses | None:
        """The length classes of the rollouts, if the policy determines them."""
        return self._policy.length_classes

    @property
    def explained_lengths(self) -> float:
        """See :attr:`DraftPolicy.explained_lengths`."""
        return self._policy.explained_lengths

    def open(self, problem: str, *, prompt_tokens: int, generated: int, max_tokens: int) -> int:
        """Start to follow a rollout and return its row; see :meth:`DraftPolicy.open`."""
        row = self._policy.open(problem, prompt_tokens=prompt_tokens, generated=generated, max_tokens=max_tokens)
        self.governor.open(row)
        self._token_values_s.initialize(row, 0.0)
        self._step_values_s.initialize(row, 0.0)
        self._budgets.initialize(row, 0.0)
        self._accepted_per_step.initialize(row, self._mean_accepted or 0.0)
        self._steps_with_drafts.initialize(row, 0.0 if self._mean_accepted is None else _PRIOR_ACCEPTANCE_STEPS)
        self._micro_batches.initialize(row, 0.0)
        return row

    def add_unobserved(self, row: int, tokens: int) -> None:
        """Record tokens that a rollout generated in steps that were not observed."""
        self._policy.add_unobserved(row, tokens)
        self.governor.count_tokens(tokens)

    def close(self, row: int, *, ended: bool = True) -> None:
        """Stop following a rollout; see :meth:`DraftPolicy.close`."""
        self._policy.close(row, ended=ended)

    def examine(self, rows: Integers, position_of: Callable[[int], Position]) -> int:
        """See :meth:`DraftPolicy.examine`."""
        return self._policy.examine(rows, position_of)

    def set_generation(self, generation: int) -> None:
        """Set the newest generation of the history; a new one makes the governor judge drafting anew, and soon."""
        if self._generation is not None and generation > self._generation:
            self.governor.retry_soon()
        self._generation = generation

    def skip_step(self) -> bool:
        """Return whether nothing is drafted in this step and its outcome is not observed. Call it once per step."""
        self.governor.count_step()
        if self._waits and self._governed and not self._has_drafts and not self.governor.is_worth_waiting:
            self.governor.save_time()
            return True
        return self._backoff.skip_step()

    def rest(self) -> bool:
        """Return whether the next step is for reference, and count it."""
        if not self._governed or self.governor.drafting_disabled or not self.governor.is_reference_step:
            return False
        self.governor.count_step_with_drafts()
        return True

    def compute_budgets(self, rows: Integers, step_rollouts: int | None = None) -> DraftBudgets:
        """Choose the draft budgets of the next steps, and set :attr:`min_gain_s`.

        See :meth:`DraftPolicy.compute_budgets`. A step decodes *step_rollouts* of the rollouts (default: all).
        """
        cost, graphs = self.fit.cost, self.fit.graphs
        if self._waits:
            cost = cost._replace(drafting_s=0.0)
        rollouts = len(rows) if step_rollouts is None else step_rollouts
        # With several micro-batches, a rollout shares c_base only with those of its own.
        budgets = self._policy.compute_budgets(rows, cost._replace(base_s=cost.base_s * len(rows) / rollouts))
        self._token_values_s[rows] = budgets.token_values_s
        self._step_values_s[rows] = np.ones(len(rows)) if budgets.step_values_s is None else budgets.step_values_s
        max_tokens = rollouts * self.uniform_lengths[-1] if self.uniform_lengths else int(budgets.tokens.sum())
        self.draft_costs_s = cost.draft_costs(rollouts, max_tokens, graphs)
        if budgets.shortens and rollouts <= graphs.max_tokens:
            self.draft_costs_s[graphs.max_tokens - rollouts + 1 :] = math.inf
            budgets = budgets._replace(min_survivals=_FILLING_SURVIVAL_SHARE * budgets.min_survivals)
        budgets = budgets._replace(min_survivals=np.maximum(budgets.min_survivals, self._policy.min_survival))
        if self._governed:
            budgets = self._govern(rows, budgets, cost, rollouts)
        self._budgets[rows] = budgets.tokens.astype(np.float64)
        return budgets

    def _govern(self, rows: Integers, budgets: DraftBudgets, cost: StepCost, rollouts: int) -> DraftBudgets:
        self.governor.wait_cost = self._waits * self.fit.cost.drafting_s / cost.step_time(rollouts, 0)
        trial_tokens = TRIAL_TOKENS * (rollouts if self.uniform_lengths else 1)
        self.governor.trial_cost = float(cost.draft_costs(rollouts, trial_tokens)[-1]) / cost.step_time(rollouts, 0)
        if self.governor.is_reference_step:
            self.min_gain_s = math.inf
        else:
            self.min_gain_s = 0.0 if self.fit.num_steps_with_drafts >= _FIRST_STEPS_WITH_DRAFTS else -math.inf
        return self.governor.limit(rows, budgets)

    def select_trial(self, rows: Integers, drafted: Integers, gain_s: float) -> int | None:
        """Choose the only draft to verify in a step whose drafts gain no more than :attr:`min_gain_s`.

        The drafts, not all of them empty, gain *gain_s* seconds together.

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
        has_drafts = self._has_drafts = drafts > 0 and not self._is_idle
        self._is_idle = False
        self._backoff.record_step(has_drafts)
        if has_drafts:
            self.governor.count_step_with_drafts()

    def observe_step(self, step: StepOutcome, seconds: float | None, drafting_s: float = 0.0) -> None:
        """Learn from the outcome of a step.

        Args:
            step: the outcome.
            seconds: its duration; None if it is unknown.
            drafting_s: seconds of these for which the engine waited for the drafter.
        """
        num_rollouts = len(step.rows)
        if not num_rollouts:
            return
        self._waits |= step.waited
        self._policy.advance(step.rows, step.generated, step.drafted)
        accepted = np.minimum(step.generated - 1, step.drafted)
        if self.length_classes is not None:
            self.length_classes.count_step(step.rows, self._budgets[step.rows], step.drafted, accepted)
        self.governor.observe_step(step, accepted)
        micro_batch = self._find_micro_batch(step.rows)
        if seconds is None:
            self.governor.observe_time(None, micro_batch=micro_batch)
        else:
            self._observe_time(step, accepted, micro_batch, seconds, drafting_s)

    def _find_micro_batch(self, rows: Integers) -> int:
        """Return the number of the micro-batch that most rollouts of a step belong to, and let all belong to it.

        If most rollouts are new, so is the micro-batch.
        """
        numbers, counts = np.unique(self._micro_batches[rows], return_counts=True)
        largest = int(np.argmax(counts))
        number = int(numbers[largest])
        if number == 0 or 2 * counts[largest] <= len(rows):
            self._num_micro_batches += 1
            number = self._num_micro_batches
        self._micro_batches[rows] = np.full(len(rows), float(number))
        return number

    def _saved_share(self, rows: Integers, accepted: Integers) -> float:
        """Return the share of a step with drafts that its accepted tokens have saved the batch.

        It is the mean over the rollouts, weighted by what a step of each is worth. A rollout that accepts a tokens per
        step with drafts needs 1 + a times as many steps without drafts, so that an accepted token saves 1 / (1 + a) of
        a step.
        """
        steps = self._steps_with_drafts[rows] + 1
        usual = self._accepted_per_step[rows]
        usual += (accepted - usual) / np.minimum(steps, _ACCEPTANCE_WINDOW_STEPS)
        self._steps_with_drafts[rows], self._accepted_per_step[rows] = steps, usual
        self._mean_accepted = float(usual.mean())
        saved = accepted / (1.0 + usual)
        values = self._step_values_s[rows]
        # A rollout that has just begun has no value yet.
        return float((saved * values).sum() / values.sum()) if values.any() else float(saved.mean())

    def _observe_time(
        self, step: StepOutcome, accepted: Integers, micro_batch: int, seconds: float, drafting_s: float
    ) -> None:
        num_rollouts, drafted = len(step.rows), int(step.drafted.sum())
        context_tokens, prompt_tokens = int(step.context_tokens.sum()), step.prompt_tokens
        is_uniform = bool((step.drafted == step.drafted[0]).all())
        is_slowed = drafted > 0 or step.waited
        last_cost, graphs = self.fit.cost, self.fit.graphs
        is_representative = self.fit.observe(
            TimedStep(
                num_rollouts + drafted, context_tokens, is_uniform, seconds, drafted > 0, prompt_tokens, step.waited
            )
        )
        cost = self.fit.cost
        if cost is not last_cost and self.fit.num_steps <= _FIRST_STEPS:
            before, after = (
                each.draft_costs(num_rollouts, num_rollouts)[-1] / each.step_time(num_rollouts, context_tokens)
                for each in (last_cost, cost)
            )
            if abs(after - before) > _CHANGED_COST:
                self.governor.forget_comparisons()
        decoding_s = cost.step_time(num_rollouts, context_tokens, graphs=graphs)
        without_drafts_s = cost.step_time(num_rollouts, context_tokens, prompt_tokens=prompt_tokens, graphs=graphs)
        predicted_s = cost.step_time(
            num_rollouts + drafted,
            context_tokens,
            has_drafts=is_slowed,
            prompt_tokens=prompt_tokens,
            graphs=graphs,
        )
        # The machine is as slow with drafts as without.
        slowness, reading_s = seconds / predicted_s, without_drafts_s - decoding_s
        self.timed_s += slowness * (predicted_s - reading_s)
        self.without_drafts_s += slowness * decoding_s * float(step.generated.sum()) / num_rollouts
        # Drafting may be limited for some rollouts only. The step then has a trial beside other drafts.
        is_trial = np.full(num_rollouts, False) if step.trial is None else step.rows == step.trial.row
        trial_tokens = int(step.drafted[is_trial].sum())
        # Padding is not expected to be accepted.
        others = (step.expected if self.uniform_lengths else step.drafted)[~is_trial]
        if step.trial is None or not trial_tokens or others.any():
            self.governor.observe_time(
                (seconds - reading_s) / decoding_s if is_representative else None,
                self._saved_share(step.rows, accepted) if is_slowed else None,
                predicted_time=(predicted_s - reading_s) / decoding_s,
                # The longer the prompts, the less certain is the time of decoding.
                weight=(decoding_s / without_drafts_s) ** 2,
                micro_batch=micro_batch,
                drafter_share=min(drafting_s / max(seconds - reading_s, drafting_s), 1.0) if drafting_s else 0.0,
            )
            return
        self.governor.observe_time(None, micro_batch=micro_batch)
        cost = cost.linear_between(num_rollouts, trial_tokens * step.trial.candidates)
        saved_s = float((accepted * self._token_values_s[step.rows]).sum())
        self.governor.observe_trial(
            step.trial,
            without_drafts_s=without_drafts_s,
            gain_s=saved_s - cost.per_token_s * trial_tokens,
            drafting_s=cost.drafting_s,
        )
