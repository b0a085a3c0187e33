"""The running rollouts of an engine as rows of arrays, because budgets must be computed within microseconds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rollout_api.length_stats import LengthStats
from rollout_worker.arrays import Floats, Integers, with_row
from rollout_worker.policy.remaining_length import remaining_quantiles

LENGTH_QUANTILES = 8
"""Number of quantiles that describe the remaining length of a rollout."""
_RATE_WINDOW_STEPS = 32
"""Number of steps over which a rollout's tokens per step are averaged."""
_REPREDICT_FACTOR = 1.1
"""Growth factor of a rollout after which its length is predicted again."""
_REPREDICT_TOKENS = 32
"""Number of tokens, in addition to that factor, after which the length is predicted again."""

LengthsByProblem = Callable[[str], LengthStats]
"""Returns the length statistics of a problem, by problem id."""


class Column:
    """A number for each row of a :class:`RolloutTable`."""

    def __init__(self) -> None:
        self._values = np.zeros(0)

    def initialize(self, row: int, value: float) -> None:
        """Set the value of a row, which may not exist yet."""
        self._values = with_row(self._values, row)
        self._values[row] = value

    def __getitem__(self, rows: Integers) -> Floats:
        return self._values[rows]

    def __setitem__(self, rows: Integers, values: Floats) -> None:
        self._values[rows] = values


class RolloutTable:
    """Progress and predicted length of every running rollout.

    A rollout keeps its row while it runs. Afterwards, the row may be given to another rollout.
    """

    def __init__(self, lengths: LengthsByProblem) -> None:
        self.generated = np.zeros(0, np.int64)
        """Number of response tokens."""
        self.prompt_tokens = np.zeros(0, np.int64)
        """Number of tokens in front of the response."""
        self.max_tokens = np.zeros(0, np.int64)
        """Number of response tokens at which the rollout is cut off."""
        self.tokens_per_step = np.ones(0)
        """Moving average of the tokens that the rollout generates per step."""
        self._lengths = lengths
        self._predicted_ends = np.zeros((0, LENGTH_QUANTILES))
        """Quantiles of the total number of response tokens."""
        self._predicted_at = np.zeros(0, np.int64)
        """Number of response tokens at the last prediction; -1 before the first one."""
        self._steps = np.zeros(0, np.int64)
        self._problems: list[str] = []
        self._running: set[int] = set()
        self._free: list[int] = []

    def open(self, problem: str, *, prompt_tokens: int, generated: int, max_tokens: int) -> int:
        """Add a rollout that has generated *generated* tokens so far, and return its row.

        It is assumed to be as fast as the average of the rollouts that are running.
        """
        if not self._free:
            self._grow()
        running = np.array([*self._running], dtype=np.int64)
        row = self._free.pop()
        self._running.add(row)
        self._problems[row] = problem
        self.generated[row], self.prompt_tokens[row] = generated, prompt_tokens
        self.max_tokens[row] = max(max_tokens, generated + 1)
        self.tokens_per_step[row] = float(self.tokens_per_step[running].mean()) if len(running) else 1.0
        self._steps[row] = 0
        self._predicted_at[row] = -1
        return row

    def _grow(self) -> None:
        allocated = len(self.generated)
        self.generated = with_row(self.generated, allocated)
        self.prompt_tokens = with_row(self.prompt_tokens, allocated)
        self.max_tokens = with_row(self.max_tokens, allocated)
        self.tokens_per_step = with_row(self.tokens_per_step, allocated)
        self._predicted_ends = with_row(self._predicted_ends, allocated)
        self._predicted_at = with_row(self._predicted_at, allocated)
        self._steps = with_row(self._steps, allocated)
        self._problems += [""] * (len(self.generated) - allocated)
        self._free += range(len(self.generated) - 1, allocated - 1, -1)

    def advance(self, rows: Integers, tokens: Integers) -> None:
        """Record the number of tokens that each rollout generated in one verification step; no row may occur twice."""
        self.generated[rows] += tokens
        steps = self._steps[rows] + 1
        self._steps[rows] = steps
        rate = self.tokens_per_step[rows]
        self.tokens_per_step[rows] = rate + (tokens - rate) / np.minimum(steps + 4, _RATE_WINDOW_STEPS)

    def add_unobserved(self, row: int, tokens: int) -> None:
        """Record tokens that a rollout generated in steps that were not observed."""
        self.generated[row] += tokens

    def close(self, row: int) -> None:
        """Remove a rollout."""
        self._running.remove(row)
        self._free.append(row)

    def problem(self, row: int) -> str:
        """Return the problem id of a rollout."""
        return self._problems[row]

    def remaining_quantiles(self, rows: Integers) -> Floats:
        """Return quantiles of the tokens that rollouts still generate, at least 1; shape (rows, LENGTH_QUANTILES)."""
        generated = self.generated[rows]
        due = (
            (self._predicted_at[rows] < 0)
            | (generated >= self._predicted_ends[rows, 0])
            | (generated > self._predicted_at[rows] * _REPREDICT_FACTOR + _REPREDICT_TOKENS)
        )
        for row in rows[due]:
            so_far, max_tokens = int(self.generated[row]), int(self.max_tokens[row])
            self._predicted_ends[row] = so_far + remaining_quantiles(
                self._lengths(self._problems[row]),
                generated=so_far,
                max_tokens=max(max_tokens, so_far + 1),
                count=LENGTH_QUANTILES,
            )
            self._predicted_at[row] = so_far
        return np.maximum(self._predicted_ends[rows] - generated[:, None], 1.0)
