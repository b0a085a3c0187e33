"""How much may be drafted for each rollout in the next verification step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rollout_api.length_stats import LengthClass, LengthStats
from rollout_worker.policy.acceptance_curve import AcceptanceCurve, DasAcceptance
from rollout_worker.policy.das_optimal import optimal_budgets
from rollout_worker.policy.lengths_ahead import last_probabilities
from rollout_worker.policy.rollouts import Lengths, RunningRollouts
from rollout_worker.policy.step_cost import StepCost

PLAN_EVERY = 16
"""Steps after which it is worked out anew which rollouts hold the batch up."""
_PLAN_SOONEST = 4
"""Steps between, where rollouts come and go."""

Floats = npt.NDArray[np.float64]


class Waiting(NamedTuple):
    """Rollouts that wait for a place in the batch."""

    rollouts: int = 0
    tokens: float = 0.0
    """That they will say, all together, as far as is known."""


NOTHING_WAITS = Waiting()


class Allowance(NamedTuple):
    """What may be drafted for some rollouts."""

    budgets: list[int]
    """Most tokens for each."""
    min_survivals: list[float]
    """A draft ends before the token that is reached and accepted with less probability than this."""
    worths: list[float]
    """Seconds that one accepted token saves the batch, the ``c_tok`` of a later step not counted."""


class BudgetPolicy(Protocol):
    """Decides what may be drafted; is told what runs. Rollouts are known by keys of the caller's."""

    def open(self, key: str, problem: str, *, prompt: int, said: int, most: int) -> None:
        """A rollout begins, of *prompt* tokens, or goes on after *said*; it is cut off at *most* response tokens."""

    def advance(self, key: str, tokens: int, *, drafted: int = 0, step: bool = True) -> None:
        """A rollout said so many tokens; *step*: in one verification step, in which so many were *drafted*."""

    def allow(self, keys: Sequence[str], cost: StepCost, waiting: Waiting = NOTHING_WAITS) -> Allowance:
        """What may be drafted for these rollouts now, all of which run."""

    def close(self, key: str) -> None:
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

    def open(self, key: str, problem: str, *, prompt: int, said: int, most: int) -> None:
        """See :class:`BudgetPolicy`."""
        self._rollouts.open(key, problem, prompt=prompt, said=said, most=most)

    def advance(self, key: str, tokens: int, *, drafted: int = 0, step: bool = True) -> None:
        """See :class:`BudgetPolicy`."""
        self._rollouts.advance(key, tokens, step=step)

    def close(self, key: str) -> None:
        """See :class:`BudgetPolicy`."""
        self._rollouts.close(key)

    def _most(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """As much as a rollout may have accepted: one more token comes with each step."""
        left = self._rollouts.most[rows] - self._rollouts.said[rows] - 1
        return np.clip(left, 0, self._pool.draft)

    def _even_worths(self, rows: npt.NDArray[np.int64], cost: StepCost) -> list[float]:
        """Where nothing is known of who holds the batch up: a step less of one rollout is its share of a step."""
        context = self._rollouts.prompt[rows] + self._rollouts.said[rows]
        worths: list[float] = (cost.base / max(len(rows), 1) + context * cost.per_context).tolist()
        return worths

    def _within(self, wanted: npt.NDArray[np.int64], first: Floats | None = None) -> list[int]:
        """Bounded by what the step may have altogether; those with the largest *first* get theirs before others."""
        if int(wanted.sum()) > self._pool.step:
            order = np.arange(len(wanted)) if first is None else np.argsort(-first, kind="stable")
            passed = np.cumsum(wanted[order])
            wanted = wanted.copy()
            wanted[order] = np.clip(self._pool.step - passed + wanted[order], 0, wanted[order])
        return [int(one) for one in wanted]


class Off(_Bounded):
    """Nothing is drafted."""

    def allow(self, keys: Sequence[str], cost: StepCost, waiting: Waiting = NOTHING_WAITS) -> Allowance:
        """See :class:`BudgetPolicy`."""
        return Allowance([0] * len(keys), [0.0] * len(keys), [0.0] * len(keys))


class Fixed(_Bounded):
    """As many tokens for every rollout in each step, whatever they cost and however probable they are."""

    def allow(self, keys: Sequence[str], cost: StepCost, waiting: Waiting = NOTHING_WAITS) -> Allowance:
        """See :class:`BudgetPolicy`."""
        rows = self._rollouts.rows(keys)
        return Allowance(self._within(self._most(rows)), [0.0] * len(keys), self._even_worths(rows, cost))


class DasClasses(_Bounded):
    """DAS's three classes: the most for rollouts that are probably long, half of it for medium ones, none for short."""

    _SHARES: ClassVar = {LengthClass.LONG: 1.0, LengthClass.MEDIUM: 0.5, LengthClass.SHORT: 0.0}
    _STEPS = 64
    """After which a rollout's class is looked at again."""

    def __init__(self, pool: Pool, lengths: Lengths, of_all: Callable[[], LengthStats]) -> None:
        super().__init__(pool, lengths)
        self._of_all, self._lengths = of_all, lengths
        self._shares: dict[str, tuple[int, float]] = {}

    def allow(self, keys: Sequence[str], cost: StepCost, waiting: Waiting = NOTHING_WAITS) -> Allowance:
        """See :class:`BudgetPolicy`."""
        rows = self._rollouts.rows(keys)
        shares = np.array(
            [self._share(key, int(said)) for key, said in zip(keys, self._rollouts.said[rows], strict=True)]
        )
        wanted = np.ceil(self._most(rows) * shares).astype(np.int64)
        return Allowance(self._within(wanted, shares), [0.0] * len(keys), self._even_worths(rows, cost))

    def _share(self, key: str, said: int) -> float:
        at, share = self._shares.get(key, (-self._STEPS, 0.0))
        if said - at >= self._STEPS:
            stats = self._lengths(self._rollouts.problem(key))
            share = self._SHARES[stats.length_class(self._of_all(), so_far=said)]
            self._shares[key] = (said, share)
        return share

    def close(self, key: str) -> None:
        """See :class:`BudgetPolicy`."""
        super().close(key)
        self._shares.pop(key, None)


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
        self._a_step: dict[str, float] = {}
        self._credit: dict[str, float] = {}

    def open(self, key: str, problem: str, *, prompt: int, said: int, most: int) -> None:
        """See :class:`BudgetPolicy`."""
        super().open(key, problem, prompt=prompt, said=said, most=most)
        running, curve = self._of.get(problem) or (0, AcceptanceCurve(self._pool.draft, prior=self._of_all))
        self._of[problem] = (running + 1, curve)
        self._credit[key] = 0.0
        self._plans.disturb()

    def advance(self, key: str, tokens: int, *, drafted: int = 0, step: bool = True) -> None:
        """See :class:`BudgetPolicy`."""
        super().advance(key, tokens, step=step)
        if step and drafted:
            accepted = min(tokens - 1, drafted)
            self._of_all.observe(drafted, accepted)
            self._of[self._rollouts.problem(key)][1].observe(drafted, accepted)
            self._credit[key] -= drafted

    def close(self, key: str) -> None:
        """See :class:`BudgetPolicy`."""
        problem = self._rollouts.problem(key)
        super().close(key)
        running, curve = self._of.pop(problem)
        if running > 1:
            self._of[problem] = (running - 1, curve)
        del self._credit[key]
        self._a_step.pop(key, None)
        self._plans.disturb()

    def allow(self, keys: Sequence[str], cost: StepCost, waiting: Waiting = NOTHING_WAITS) -> Allowance:
        """See :class:`BudgetPolicy`."""
        rows = self._rollouts.rows(keys)
        if self._plans.due():
            das: dict[str, DasAcceptance] = {}
            for problem in {self._rollouts.problem(key) for key in keys}:
                das[problem] = self._of[problem][1].das()
            of_rollouts = [das[self._rollouts.problem(key)] for key in keys]
            best = optimal_budgets(
                self._rollouts.ahead(rows).mean(axis=1),
                np.array([one.share for one in of_rollouts]),
                np.array([one.efficiency for one in of_rollouts]),
                cost,
            )
            self._a_step = dict(zip(keys, (best.drafts / max(best.steps, 1.0)).tolist(), strict=True))
        wanted = np.zeros(len(keys), np.int64)
        for place, key in enumerate(keys):
            most = 2.0 * self._pool.draft
            self._credit[key] = min(self._credit[key] + self._a_step.get(key, 0.0), most)
            wanted[place] = max(0, int(self._credit[key]))
        budgets = self._within(np.minimum(wanted, self._most(rows)))
        return Allowance(budgets, [0.0] * len(keys), self._even_worths(rows, cost))


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
        self._last: dict[str, float] = {}

    def open(self, key: str, problem: str, *, prompt: int, said: int, most: int) -> None:
        """See :class:`BudgetPolicy`."""
        super().open(key, problem, prompt=prompt, said=said, most=most)
        self._plans.disturb()

    def close(self, key: str) -> None:
        """See :class:`BudgetPolicy`."""
        super().close(key)
        self._last.pop(key, None)
        self._plans.disturb()

    def allow(self, keys: Sequence[str], cost: StepCost, waiting: Waiting = NOTHING_WAITS) -> Allowance:
        """See :class:`BudgetPolicy`."""
        rows = self._rollouts.rows(keys)
        if self._plans.due():
            self._last = dict(zip(keys, self._probabilities(rows, waiting).tolist(), strict=True))
        share = 1.0 / max(len(keys), 1)
        last = np.array([self._last.get(key, share) for key in keys])
        context = self._rollouts.prompt[rows] + self._rollouts.said[rows]
        worth = last * cost.base + context * cost.per_context
        survivals = cost.per_token / (cost.per_token + worth) if cost.per_token > 0 else np.zeros(len(keys))
        return Allowance(self._within(self._most(rows), worth), survivals.tolist(), worth.tolist())

    def _probabilities(self, rows: npt.NDArray[np.int64], waiting: Waiting) -> Floats:
        rate = self._rollouts.rate[rows][:, None]
        steps = self._rollouts.ahead(rows) / np.maximum(rate, 1.0)
        if not waiting.rollouts or not len(rows):
            return last_probabilities(steps)
        usual = float(np.maximum(rate, 1.0).mean())
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
