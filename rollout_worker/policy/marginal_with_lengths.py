"""``marginal-with-lengths``: the marginal policy, whose drafts are longer for the rollouts that a step waits for."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np

from rollout_store.arrays import Booleans, Floats, Integers, with_row
from rollout_worker.policy.draft_policy import Column, DraftBudgets, DraftLimits, Marginal, Position
from rollout_worker.policy.length_predictor import Evidence, Example, LengthPredictor
from rollout_worker.policy.predicted_lengths import LengthPredictingPolicy, LengthSource, ReplanSchedule
from rollout_worker.policy.step_cost import StepCost

_EXAMINED_PER_STEP = 1
"""Number of rollouts whose lengths are predicted in one step, because that takes a fraction of a millisecond."""
EXAMINE_FACTOR = 1.25
"""Growth factor of a rollout after which its length is predicted again."""
EXAMINE_TOKENS = 64
"""Number of tokens, in addition to that factor, after which it is predicted again."""
_REPLAN_STEPS = 64
"""Number of steps after which shares are computed again."""
_MIN_REPLAN_STEPS = 16
"""Number of steps after which they are computed again if rollouts have started or ended."""
_FREE_STEPS = 16
"""Number of steps with a free place in the batch after which no rollout is assumed to wait for one."""
_ENDED_PER_RUNNING = 8
"""Number of rollouts that have ended, for each one that is running, after which they are learned from.

The first rollouts of a training step that end are its shortest."""
NUM_QUANTILES = 16
"""Number of quantiles that describe the remaining tokens of a rollout."""
_SAMPLES = 64
"""Number of joint samples of all remaining tokens; a multiple of the number of quantiles."""
_ELASTICITY = 0.2
"""By how many per cent a rollout is assumed to generate more tokens per step if its share is one per cent larger.

A large value spreads the shares, and so loses less where predictions err."""
_LASTING_SPEED = 0.5
"""Share of the differences between the rollouts' tokens per step (in logarithms) that is expected to last."""
_MAX_FACTOR = 20.0
"""Greatest ratio of a share to the mean share, and of the mean share to a share, whose effect is extrapolated."""


class MarginalWithLengths(LengthPredictingPolicy, Marginal):
    """Weighs ``c_base`` in ``marginal`` by how likely a batch is to wait for each rollout.

    With T_i remaining steps of rollout i, and tokens per step that grow with its share of c_base to the power of ε, a
    batch ends earliest if the shares are proportional to ``T_i^(1/ε)``: rollouts that would end last all end together,
    and no others matter. These are the dual variables of the constraint that all rollouts end. T_i is uncertain, so the
    shares are averaged over joint samples of all T_i.

    All shares are the same while every place of the batch is taken, and for some steps afterwards, since others may
    wait for a place, and any rollout that ends lets one of them start. They stay so to the degree to which predictions
    have been useless.
    """

    def __init__(self, limits: DraftLimits, lengths: LengthSource) -> None:
        super().__init__(limits, lengths)
        self._predictor = LengthPredictor()
        self._examples: dict[int, list[Example]] = {}
        """By row."""
        self._ended: list[tuple[list[Example], int]] = []
        """Predictions and lengths of rollouts that may not be representative yet."""
        self._to_learn: deque[tuple[list[Example], int]] = deque()
        """Those that are, one of which is learned from in each step."""
        self._siblings: dict[str, list[int]] = {}
        """Rows of the rollouts of each problem."""
        self._examined_at = np.zeros(0, np.int64)
        """Number of response tokens at the last prediction; -1 before the first one."""
        self._log_ends = np.zeros((0, NUM_QUANTILES))
        """Quantiles of the logarithm of the remaining tokens at that number."""
        self._factors = Column()
        """Share of each rollout relative to the mean."""
        self._free_steps = _FREE_STEPS
        """Number of steps since all places of the batch were taken."""
        self._schedule = ReplanSchedule(_REPLAN_STEPS, _MIN_REPLAN_STEPS)
        self._samples = np.zeros((_SAMPLES, 0), np.int64)
        """Which quantile each sample takes of each rollout."""
        self._generator = np.random.default_rng(0)

    def open(self, problem: str, *, prompt_tokens: int, generated: int, max_tokens: int) -> int:
        """See :meth:`DraftPolicy.open`."""
        row = super().open(problem, prompt_tokens=prompt_tokens, generated=generated, max_tokens=max_tokens)
        self._examples[row] = []
        self._siblings.setdefault(problem, []).append(row)
        self._examined_at = with_row(self._examined_at, row)
        self._log_ends = with_row(self._log_ends, row)
        self._examined_at[row] = -1
        self._factors.initialize(row, 1.0)
        self._schedule.mark_changed()
        return row

    def close(self, row: int, *, ended: bool = True) -> None:
        """See :meth:`DraftPolicy.close`."""
        problem, examples = self._problems[row], self._examples.pop(row)
        super().close(row, ended=ended)
        if ended:
            self._ended.append((examples, int(self._rollouts.generated[row])))
            if len(self._ended) >= _ENDED_PER_RUNNING * len(self._problems):
                self._to_learn += self._ended
                self._ended = []
        self._siblings[problem].remove(row)
        if not self._siblings[problem]:
            del self._siblings[problem]
        self._schedule.mark_changed()

    def examine(self, rows: Integers, position_of: Callable[[int], Position]) -> int:
        """See :meth:`DraftPolicy.examine`."""
        if self._to_learn:
            self._predictor.learn(*self._to_learn.popleft())
            self.explained_lengths = self._predictor.explained
        generated, examined_at = self._rollouts.generated[rows], self._examined_at[rows]
        overdue = generated - (examined_at * EXAMINE_FACTOR + EXAMINE_TOKENS)
        overdue[examined_at < 0] = np.inf
        due = np.flatnonzero(overdue > 0)
        chosen = rows[due[np.argsort(-overdue[due], kind="stable")[:_EXAMINED_PER_STEP]]]
        for row in chosen.tolist():
            self._predict(row, position_of(row))
        return len(chosen)

    def _predict(self, row: int, position: Position) -> None:
        problem = self._problems[row]
        running = self._rollouts.generated[self._siblings[problem]].tolist()
        generated = int(self._rollouts.generated[row])
        max_tokens = max(int(self._rollouts.max_tokens[row]), generated + 1)
        of_problem, overall = self._lengths.of_problem(problem), self._lengths.overall()
        example = self._predictor.examine(Evidence(generated, max_tokens, of_problem, overall, running, *position))
        self._examples[row].append(example)
        self._log_ends[row] = self._predictor.predict(example, NUM_QUANTILES)
        self._examined_at[row] = generated

    def compute_budgets(self, rows: Integers, cost: StepCost) -> DraftBudgets:
        """See :meth:`DraftPolicy.compute_budgets`."""
        self._classify(rows)
        self._free_steps = self._free_steps + 1 if len(rows) < self._limits.places else 0
        if self._free_steps < _FREE_STEPS:
            self._factors[rows] = np.ones(len(rows))
            return self._marginal_budgets(rows, cost, None)
        if self._schedule.is_due():
            self._factors[rows] = self._compute_factors(rows)
        factors = self._factors[rows]
        return self._marginal_budgets(rows, cost, factors / factors.sum())

    @property
    def is_learning(self) -> bool:
        """Whether there are rollouts that the next call of :meth:`examine` learns from."""
        return bool(self._to_learn)

    @property
    def trust(self) -> float:
        """By how much the shares follow from predictions, from 0 to 1; otherwise they are the same."""
        return math.sqrt(self.explained_lengths)

    def _is_predicted(self, rows: Integers) -> Booleans:
        """Return whether each rollout has a prediction, shape (rollouts,)."""
        return np.asarray(self._examined_at[rows] >= 0)

    def _log_rests(self, rows: Integers) -> Floats:
        """Return quantiles of the logarithm of the remaining tokens, shape (rollouts, NUM_QUANTILES)."""
        generated = self._rollouts.generated[rows]
        rests = np.exp(self._log_ends[rows]) - (generated - self._examined_at[rows])[:, None]
        limits = np.maximum(self._rollouts.max_tokens[rows] - generated, 1.0)
        return np.asarray(np.log(np.clip(rests, 1.0, limits[:, None])))

    def _compute_factors(self, rows: Integers) -> Floats:
        """Return the shares relative to their mean; those of rollouts without a prediction are 1."""
        factors, is_predicted = np.ones(len(rows)), self._is_predicted(rows)
        if not is_predicted.any() or not self.trust:
            return factors
        rows = rows[is_predicted]
        # What the rollouts' current shares do to their speed is taken out.
        current = np.clip(self._factors[rows], 1.0 / _MAX_FACTOR, _MAX_FACTOR)
        log_speeds = np.log(self._rollouts.tokens_per_step[rows]) - _ELASTICITY * np.log(current)
        log_steps = self._log_rests(rows) - _LASTING_SPEED * log_speeds[:, None]
        shares = expected_shares(log_steps, self._samples_for(len(rows)))
        factors[is_predicted] = self.trust * shares * len(rows) + (1.0 - self.trust)
        return factors

    def _samples_for(self, rollouts: int) -> Integers:
        missing = rollouts - self._samples.shape[1]
        if missing > 0:
            quantiles = np.tile(np.arange(NUM_QUANTILES), _SAMPLES // NUM_QUANTILES)
            columns = self._generator.permuted(np.repeat(quantiles[:, None], missing, axis=1), axis=0)
            self._samples = np.concatenate([self._samples, columns], axis=1)
        return self._samples[:, :rollouts]


def expected_shares(log_steps: Floats, samples: Integers) -> Floats:
    """Return the shares of c_base that rollouts are expected to be worth; they add up to 1; shape (rollouts,).

    Args:
        log_steps: quantiles of the logarithm of the remaining steps at equal shares, shape (rollouts, quantiles).
        samples: which quantile a sample takes of each rollout, shape (samples, rollouts).
    """
    logs = log_steps[np.arange(len(log_steps)), samples] / _ELASTICITY
    shares = np.exp(logs - logs.max(axis=1, keepdims=True))
    return np.asarray((shares / shares.sum(axis=1, keepdims=True)).mean(axis=0))
