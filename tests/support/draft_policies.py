"""Cost models and checks for tests of draft policies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from hypothesis import strategies as st

from rollout_api.length_stats import LengthStats
from rollout_worker.policy.draft_policy import DraftLimits, DraftPolicy, Position
from rollout_worker.policy.step_cost import StepCost

COSTS = st.builds(
    StepCost,
    st.floats(1e-4, 0.1),
    st.floats(1e-6, 1e-2),
    st.floats(0, 1e-6),
    st.floats(0, 1e-2),
    st.floats(0, 0.1),
    st.floats(0, 0.5),
    st.floats(0, 1e-2),
)


def length_stats_of(*lengths: int) -> LengthStats:
    return LengthStats.from_lengths([(0, length, False) for length in lengths])


class FixedLengths:
    """Lengths of earlier rollouts, by problem."""

    def __init__(self, lengths: Mapping[str, Sequence[int]]) -> None:
        self._problems = {problem: length_stats_of(*of_problem) for problem, of_problem in lengths.items()}
        self._overall = length_stats_of(*itertools.chain.from_iterable(lengths.values()))

    def of_problem(self, problem: str) -> LengthStats:
        return self._problems[problem]

    def overall(self) -> LengthStats:
        return self._overall


def draft_length(budget: int, min_survival: float, probability: float) -> int:
    """Return the length of a draft whose tokens all have the same acceptance probability."""
    length = 0
    while length < budget and probability ** (length + 1) >= min_survival:
        length += 1
    return length


def assert_limits_are_respected(
    make: Callable[[DraftLimits], DraftPolicy], num_problems: int, data: st.DataObject
) -> None:
    """The limit of a rollout, the limit of a step, and the number of tokens that the rollout may still generate."""
    limits = DraftLimits(data.draw(st.integers(1, 64)), data.draw(st.integers(0, 200)))
    policy, cost = make(limits), data.draw(COSTS)
    progress: dict[int, list[int]] = {}
    """Row → generated tokens, maximum number of tokens."""
    for _ in range(data.draw(st.integers(1, 12))):
        problem = data.draw(st.integers(0, num_problems - 1))
        generated, more = data.draw(st.integers(0, 400)), data.draw(st.integers(1, 60))
        row = policy.open(str(problem), prompt_tokens=10, generated=generated, max_tokens=generated + more)
        progress[row] = [generated, generated + more]
    while progress:
        rows = list(progress)
        while policy.examine(np.array(rows), lambda row: Position(None, 0, 0)):
            pass
        budgets = policy.compute_budgets(np.array(rows), cost)
        assert len(rows) == len(budgets.tokens) == len(budgets.min_survivals)
        assert budgets.tokens.sum() <= limits.per_step
        assert all(0 <= survival <= 1 for survival in budgets.min_survivals)
        assert all(value > 0 for value in budgets.token_values_s)
        new_tokens = []
        for row, budget in zip(rows, budgets.tokens.tolist(), strict=True):
            generated, max_tokens = progress[row]
            assert 0 <= budget <= min(limits.per_rollout, max_tokens - generated - 1)
            new_tokens.append(data.draw(st.integers(0, budget)) + 1)
            progress[row][0] = generated + new_tokens[-1]
        policy.advance(np.array(rows), np.array(new_tokens), budgets.tokens)
        for row in rows:
            if progress[row][0] == progress[row][1] or data.draw(st.booleans()):
                policy.close(row)
                del progress[row]
