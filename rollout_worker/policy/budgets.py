"""How much may be drafted for each rollout in the next verification step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from rollout_api.length_stats import LengthClass, LengthStats
from rollout_worker.policy.acceptance_curve import AcceptanceCurve, DasAcceptance
from rollout_worker.policy.das_optimal import optimal_budgets
from rollout_worker.policy.remaining_length import last_probabilities
from rollout_worker.policy.rollouts import Column, Floats, Integers, Lengths, RunningRollouts
from rollout_worker.policy.step_cost import StepCost

PLAN_EVERY = 16
"""Steps after which it is worked out anew which rollouts hold the batch up."""
_PLAN_SOONEST = 4
"""Steps between, where rollouts come and go."""


class Waiting(NamedTuple):
    """Rollouts that wait for a place in the batch."""

    rollouts: int = 0
    tokens: float = 0.0
    """That they will say, all together, as far as is known."""


NOTHING_WAITS = Waiting()


class Allowance(NamedTuple):
    """What may be drafted for some rollouts; arrays of shape (rollouts,)."""

    budgets: Integers
    """Most tokens for each."""
    min_survivals: Floats
    """A draft ends before the token that is reached and accepted with less probability than this."""
    worths: Floats
    """Seconds that one accepted token saves the batch, the ``c_tok`` of a later step not counted."""


class BudgetPolicy(Protocol):
    """Decides what may be drafted; is told what runs. A rollout is known by the row that it is given."""

    def open(self, problem: str, *, prompt: int, said: int, most: int) -> int:
        """A rollout begins, of *prompt* tokens, or goes on after *said*; it is cut off at *most* response tokens.

        Returns:
            Its row until it is closed: a small number, which another may have later.
        """

    def advance(self, rows: Integers, tokens: Integers, drafted: Integers) -> None:
        """Rollouts said so many tokens in one verification step, for which so many were drafted; no row twice."""

    def miss(self, row: int, tokens: int) -> None:
        """A rollout said tokens in steps that were not seen."""

    def allow(self, rows: Integers, cost: StepCost, waiting: Waiting = NOTHING_WAITS) -> Allowance:
        """What may be drafted for these rollouts now, all of which run."""

    def close(self, row: int) -> None:
        """A rollout ended."""


class Pool(NamedTuple):
    """The bounds of a step."""

    draft: int
    """Most tokens drafted for one rollout."""
    step: int
    """Most tokens drafted for all rollouts together."""


class _Bounded:
    """What all policies have in common."""

    def __init__(self, pool: Pool, lengths: Lengths) -> None:
        self._pool = pool
        self._rollouts = RunningRollouts(lengths)

    def open(self, problem: str, *, prompt: int, said: int, most: int) -> int:
        """See :class:`BudgetPolicy`."""
        return self._rollouts.open(problem, prompt=prompt, said=said, most=most)

    def advance(self, rows: Integers, tokens: Integers, drafted: Integers) -> None:
        """See :class:`BudgetPolicy`."""
        self._rollouts.advance(rows, tokens)

    def miss(self, row: int, tokens: int) -> None:
        """See :class:`BudgetPolicy`."""
        self._rollouts.miss(row, tokens)

    def close(self, row: int) -> None:
        """See :class:`BudgetPolicy`."""
        self._rollouts.close(row)

    def _most(self, rows: Integers) -> Integers:
        """As much as a rollout may have accepted: one more token comes with each step."""
        left = self._rollouts.most[rows] - self._rollouts.said[rows] - 1
        return np.asarray(np.minimum(np.maximum(left, 0), self._pool.draft))

    def _context(self, rows: Integers) -> Integers:
        return self._rollouts.prompt[rows] + self._rollouts.said[rows]

    def _unbounded(self, rows: Integers, cost: StepCost, budgets: Integers) -> Allowance:
        """Where drafts end with their budgets, and nothing is known of who holds the batch up.

        A step less of one rollout is then its share of a step.
        """
        worths = np.full(len(rows), cost.base / max(len(rows), 1)) + self._context(rows) * cost.per_context
        return Allowance(budgets, np.zeros(len(rows)), worths)

    def _within(self, wanted: Integers, first: Floats | None = None) -> Integers:
        """Bounded by what the step may have altogether; those with the largest *first* get theirs before others."""
        if int(wanted.sum()) > self._pool.step:
            order = np.arange(len(wanted)) if first is None else np.argsort(-first, kind="stable")
            passed = np.cumsum(wanted[order])
            wanted = wanted.copy()
            wanted[order] = np.clip(self._pool.step - passed + wanted[order], 0, wanted[order])
        return wanted


class Off(_Bounded):
    """Nothing is drafted."""

    def allow(self, rows: Integers, cost: StepCost, waiting: Waiting = NOTHING_WAITS) -> Allowance:
        """See :class:`BudgetPolicy`."""
        return Allowance(np.zeros(len(rows), np.int64), np.zeros(len(rows)), np.zeros(len(rows)))


class Fixed(_Bounded):
    """As many tokens for every rollout in each step, whatever they cost and however probable they are."""

    def allow(self, rows: Integers, cost: StepCost, waiting: Waiting = NOTHING_WAITS) -> Allowance:
        """See :class:`BudgetPolicy`."""
        return self._unbounded(rows, cost, self._within(self._most(rows)))


class DasClasses(_Bounded):
    """DAS's three classes: the most for rollouts that are probably long, half of it for medium ones, none for short."""

    _SHARES: ClassVar = {LengthClass.LONG: 1.0, LengthClass.MEDIUM: 0.5, LengthClass.SHORT: 0.0}
    _STEPS = 64
    """After which a rollout's class is looked at again."""

    def __init__(self, pool: Pool, lengths: Lengths, of_all: Callable[[], LengthStats]) -> None:
        super().__init__(pool, lengths)
        self._of_all, self._lengths = of_all, lengths
        self._share, self._again = Column(), Column()

    def open(self, problem: str, *, prompt: int, said: int, most: int) -> int:
        """See :class:`BudgetPolicy`."""
        row = super().open(problem, prompt=prompt, said=said, most=most)
        self._share.begin(row, 0.0)
        self._again.begin(row, 0.0)
        return row

    def allow(self, rows: Integers, cost: StepCost, waiting: Waiting = NOTHING_WAITS) -> Allowance:
        """See :class:`BudgetPolicy`."""
        said = self._rollouts.said[rows]
        for place in np.flatnonzero(said >= self._again[rows]):
            stats = self._lengths(self._rollouts.problem(int(rows[place])))
            found = stats.length_class(self._of_all(), so_far=int(said[place]))
            self._share.begin(int(rows[place]), self._SHARES[found])
            self._again.begin(int(rows[place]), float(said[place] + self._STEPS))
        shares = self._share[rows]
        wanted = np.ceil(self._most(rows) * shares).astype(np.int64)
        return self._unbounded(rows, cost, self._within(wanted, shares))


class DasOptimal(_Bounded):
    """DAS's optimal budgets for the lengths that are expected; see :mod:`rollout_worker.policy.das_optimal`.

    What is to be drafted for a rollout until the batch ends is spread evenly over the steps until then.
    """

    def __init__(self, pool: Pool, lengths: Lengths) -> None:
        super().__init__(pool, lengths)
        self._of_all = AcceptanceCurve(pool.draft)
        self._of: dict[str, tuple[int, AcceptanceCurve]] = {}
        """Problem → its running rollouts, and what their drafts have accepted."""
        self._plans = _Plans()
        self._a_step, self._credit = Column(), Column()

    def open(self, problem: str, *, prompt: int, said: int, most: int) -> int:
        """See :class:`BudgetPolicy`."""
        row = super().open(problem, prompt=prompt, said=said, most=most)
        running, curve = self._of.get(problem) or (0, AcceptanceCurve(self._pool.draft, prior=self._of_all))
        self._of[problem] = (running + 1, curve)
        self._a_step.begin(row, 0.0)
        self._credit.begin(row, 0.0)
        self._plans.disturb()
        return row

    def advance(self, rows: Integers, tokens: Integers, drafted: Integers) -> None:
        """See :class:`BudgetPolicy`."""
        super().advance(rows, tokens, drafted)
        self._credit[rows] -= drafted
        for row, said, verified in zip(rows.tolist(), tokens.tolist(), drafted.tolist(), strict=True):
            if verified:
                accepted = min(said - 1, verified)
                self._of_all.observe(verified, accepted)
                self._of[self._rollouts.problem(row)][1].observe(verified, accepted)

    def close(self, row: int) -> None:
        """See :class:`BudgetPolicy`."""
        problem = self._rollouts.problem(row)
        super().close(row)
        running, curve = self._of.pop(problem)
        if running > 1:
            self._of[problem] = (running - 1, curve)
        self._plans.disturb()

    def allow(self, rows: Integers, cost: StepCost, waiting: Waiting = NOTHING_WAITS) -> Allowance:
        """See :class:`BudgetPolicy`."""
        if self._plans.due():
            problems = [self._rollouts.problem(row) for row in rows.tolist()]
            das: dict[str, DasAcceptance] = {problem: self._of[problem][1].das() for problem in set(problems)}
            best = optimal_budgets(
                self._rollouts.ahead(rows).mean(axis=1),
                np.array([das[problem].share for problem in problems]),
                np.array([das[problem].efficiency for problem in problems]),
                cost,
            )
            self._a_step[rows] = best.drafts / max(best.steps, 1.0)
        self._credit[rows] = np.minimum(self._credit[rows] + self._a_step[rows], 2.0 * self._pool.draft)
        wanted = np.maximum(self._credit[rows], 0.0).astype(np.int64)
        return self._unbounded(rows, cost, self._within(np.minimum(wanted, self._most(rows))))


class Marginal(_Bounded):
    """The next draft token always to the rollout to which it is worth most, until it is not worth its cost.

    A token that is accepted saves its rollout a step. That saves reading the rollout's context once, and ``c_tok`` in
    a later step; and if the rollout is the one that ends last, the whole batch takes a step less and saves ``c_base``.
    So a token that is reached and accepted with probability s pays if
    ``s · (P(last) · c_base + c_kv · context + c_tok) > c_tok``. As a draft's tokens are less probable the farther they
    are, it ends where that no longer holds, and no order of handing tokens out is better. P(last) comes from the
    lengths of the problem's earlier rollouts, given what each has said, and from how fast it advances. What waits for a
    place counts as one more rollout, which ends when all that is running and waiting would be done; whoever makes room
    lets it begin, so that its probability of being last is divided equally.
    """

    def __init__(self, pool: Pool, lengths: Lengths) -> None:
        super().__init__(pool, lengths)
        self._plans = _Plans()
        self._last = Column()
        """P(last); not a number for those that have come since it was worked out."""

    def open(self, problem: str, *, prompt: int, said: int, most: int) -> int:
        """See :class:`BudgetPolicy`."""
        row = super().open(problem, prompt=prompt, said=said, most=most)
        self._last.begin(row, math.nan)
        self._plans.disturb()
        return row

    def close(self, row: int) -> None:
        """See :class:`BudgetPolicy`."""
        super().close(row)
        self._plans.disturb()

    def allow(self, rows: Integers, cost: StepCost, waiting: Waiting = NOTHING_WAITS) -> Allowance:
        """See :class:`BudgetPolicy`."""
        if self._plans.due():
            self._last[rows] = self._probabilities(rows, waiting)
        last = self._last[rows]
        last[np.isnan(last)] = 1.0 / max(len(rows), 1)
        worths = last * cost.base + self._context(rows) * cost.per_context
        survivals = cost.per_token / (cost.per_token + worths) if cost.per_token > 0 else np.zeros(len(rows))
        return Allowance(self._within(self._most(rows), worths), survivals, worths)

    def _probabilities(self, rows: Integers, waiting: Waiting) -> Floats:
        rate = np.maximum(self._rollouts.rate[rows], 1.0)[:, None]
        steps = self._rollouts.ahead(rows) / rate
        if not waiting.rollouts or not len(rows):
            return last_probabilities(steps)
        usual = float(rate.mean())
        done = (steps.mean(axis=1).sum() + waiting.tokens / usual) / len(rows)
        # the last to begin ends some time behind that
        own = waiting.tokens / waiting.rollouts / usual
        points = steps.shape[1]
        queue = done + own * (np.arange(points) + 0.5) / points
        found = last_probabilities(np.vstack([steps, queue]))
        return np.asarray(found[:-1] + found[-1] / len(rows))


class _Plans:
    """When to plan anew: now and then, and soon after rollouts came or went."""

    def __init__(self) -> None:
        self._steps = PLAN_EVERY
        self._disturbed = False

    def disturb(self) -> None:
        """Rollouts came or went."""
        self._disturbed = True

    def due(self) -> bool:
        """Asked once a step."""
        self._steps += 1
        if self._steps < (_PLAN_SOONEST if self._disturbed else PLAN_EVERY):
            return False
        self._steps, self._disturbed = 0, False
        return True
