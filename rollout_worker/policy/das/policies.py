"""The two policies of DAS (arXiv 2511.13841): length classes, and optimal budgets."""

from __future__ import annotations

import numpy as np

from rollout_api.length_stats import LengthClass
from rollout_store.arrays import Floats, Integers, with_row
from rollout_store.history.remaining_length import remaining_quantiles
from rollout_worker.policy.das.acceptance_curve import AcceptanceCurve, DasAcceptance
from rollout_worker.policy.das.optimal import optimal_budgets
from rollout_worker.policy.draft_policy import Column, DraftBudgets, DraftLimits
from rollout_worker.policy.length_classes import CLASSES
from rollout_worker.policy.predicted_lengths import LengthPredictingPolicy, LengthSource, ReplanSchedule
from rollout_worker.policy.step_cost import StepCost

LENGTH_QUANTILES = 8
"""Number of quantiles that describe the remaining length of a rollout."""
_REPREDICT_FACTOR = 1.1
"""Growth factor of a rollout after which its length is predicted again."""
_REPREDICT_TOKENS = 32
"""Number of tokens, in addition to that factor, after which the length is predicted again."""
_REPLAN_STEPS = 16
"""Number of steps after which ``das-optimal`` computes its plan again."""
_MIN_REPLAN_STEPS = 4
"""Number of steps after which it does so if rollouts have started or ended."""
_SHARES = {LengthClass.LONG: 1.0, LengthClass.MEDIUM: 0.5, LengthClass.SHORT: 0.0}
"""Share of the draft length that ``das-classes`` gives to a rollout, by length class."""
_SHARES_BY_NUMBER = np.array([_SHARES[one] for one in CLASSES])


class DasClasses(LengthPredictingPolicy):
    """``das-classes``: the full draft length for long rollouts, half of it for medium ones, and none for short ones."""

    def compute_budgets(self, rows: Integers, cost: StepCost) -> DraftBudgets:
        """See :meth:`DraftPolicy.compute_budgets`."""
        shares = _SHARES_BY_NUMBER[self._classify(rows)]
        tokens = np.ceil(self._max_useful(rows) * shares).astype(np.int64)
        return self._without_thresholds(rows, cost, self._limit_step(tokens, shares))


class DasOptimal(LengthPredictingPolicy):
    """``das-optimal``: DAS's optimal budgets for the expected lengths; see :mod:`rollout_worker.policy.das.optimal`.

    The draft tokens p_i of a rollout are spread evenly over the N steps until the batch ends. k_i and α_i are fitted to
    the drafts of its problem.
    """

    def __init__(self, limits: DraftLimits, lengths: LengthSource) -> None:
        super().__init__(limits, lengths)
        self._predicted_ends = np.zeros((0, LENGTH_QUANTILES))
        """Quantiles of the total number of response tokens."""
        self._predicted_at = np.zeros(0, np.int64)
        """Number of response tokens at the last prediction; -1 before the first one."""
        self._overall_curve = AcceptanceCurve(limits.per_rollout)
        self._problem_curves: dict[str, tuple[int, AcceptanceCurve]] = {}
        """Problem id → the number of its running rollouts, and their acceptance."""
        self._schedule = ReplanSchedule(_REPLAN_STEPS, _MIN_REPLAN_STEPS)
        self._tokens_per_step, self._unspent_tokens = Column(), Column()

    def open(self, problem: str, *, prompt_tokens: int, generated: int, max_tokens: int) -> int:
        """See :meth:`DraftPolicy.open`."""
        row = super().open(problem, prompt_tokens=prompt_tokens, generated=generated, max_tokens=max_tokens)
        self._predicted_ends = with_row(self._predicted_ends, row)
        self._predicted_at = with_row(self._predicted_at, row)
        self._predicted_at[row] = -1
        running, curve = self._problem_curves.get(problem) or (
            0,
            AcceptanceCurve(self._limits.per_rollout, prior=self._overall_curve),
        )
        self._problem_curves[problem] = (running + 1, curve)
        self._tokens_per_step.initialize(row, 0.0)
        self._unspent_tokens.initialize(row, 0.0)
        self._schedule.mark_changed()
        return row

    def advance(self, rows: Integers, tokens: Integers, drafted: Integers) -> None:
        """See :meth:`DraftPolicy.advance`."""
        super().advance(rows, tokens, drafted)
        unspent = self._unspent_tokens[rows] + self._tokens_per_step[rows] - drafted
        self._unspent_tokens[rows] = np.minimum(unspent, 2.0 * self._limits.per_rollout)
        for row, generated, verified in zip(rows.tolist(), tokens.tolist(), drafted.tolist(), strict=True):
            if verified:
                accepted = min(generated - 1, verified)
                self._overall_curve.observe(verified, accepted)
                self._problem_curves[self._problems[row]][1].observe(verified, accepted)

    def close(self, row: int, *, ended: bool = True) -> None:
        """See :meth:`DraftPolicy.close`."""
        problem = self._problems[row]
        super().close(row, ended=ended)
        running, curve = self._problem_curves.pop(problem)
        if running > 1:
            self._problem_curves[problem] = (running - 1, curve)
        self._schedule.mark_changed()

    def compute_budgets(self, rows: Integers, cost: StepCost) -> DraftBudgets:
        """See :meth:`DraftPolicy.compute_budgets`."""
        self._classify(rows)
        if self._schedule.is_due():
            self._plan(rows, cost)
        tokens = np.maximum(self._unspent_tokens[rows] + self._tokens_per_step[rows], 0.0).astype(np.int64)
        return self._without_thresholds(rows, cost, self._limit_step(np.minimum(tokens, self._max_useful(rows))))

    def _plan(self, rows: Integers, cost: StepCost) -> None:
        problems = [self._problems[row] for row in rows.tolist()]
        fits: dict[str, DasAcceptance] = {
            problem: self._problem_curves[problem][1].fit_das() for problem in set(problems)
        }
        optimum = optimal_budgets(
            self._remaining_quantiles(rows).mean(axis=1),
            np.array([fits[problem].capacity for problem in problems]),
            np.array([fits[problem].efficiency for problem in problems]),
            cost.linear_between(len(rows), float(len(rows))),
        )
        self._tokens_per_step[rows] = optimum.draft_tokens / max(optimum.steps, 1.0)

    def _remaining_quantiles(self, rows: Integers) -> Floats:
        """Return quantiles of the tokens that rollouts still generate, at least 1; shape (rows, LENGTH_QUANTILES)."""
        generated = self._rollouts.generated[rows]
        due = (
            (self._predicted_at[rows] < 0)
            | (generated >= self._predicted_ends[rows, 0])
            | (generated > self._predicted_at[rows] * _REPREDICT_FACTOR + _REPREDICT_TOKENS)
        )
        for row in rows[due].tolist():
            so_far, max_tokens = int(self._rollouts.generated[row]), int(self._rollouts.max_tokens[row])
            self._predicted_ends[row] = so_far + remaining_quantiles(
                self._lengths.of_problem(self._problems[row]),
                generated=so_far,
                max_tokens=max(max_tokens, so_far + 1),
                count=LENGTH_QUANTILES,
            )
            self._predicted_at[row] = so_far
        return np.maximum(self._predicted_ends[rows] - generated[:, None], 1.0)
