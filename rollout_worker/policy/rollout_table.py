"""The running rollouts of an engine as rows of arrays, because budgets must be computed within microseconds."""

from __future__ import annotations

import numpy as np

from rollout_worker.arrays import Floats, Integers, with_row

_RATE_WINDOW_STEPS = 32
"""Number of steps over which a rollout's tokens and draft tokens per step are averaged."""


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
    """Progress of every running rollout.

    A rollout keeps its row while it runs. Afterwards, the row may be given to another rollout.
    """

    def __init__(self) -> None:
        self.generated = np.zeros(0, np.int64)
        """Number of response tokens."""
        self.prompt_tokens = np.zeros(0, np.int64)
        """Number of tokens in front of the response."""
        self.max_tokens = np.zeros(0, np.int64)
        """Number of response tokens at which the rollout is cut off."""
        self.tokens_per_step = np.ones(0)
        """Moving average of the tokens that the rollout generates per step."""
        self.drafted_per_step = np.zeros(0)
        """Moving average of its draft tokens per step."""
        self._steps = np.zeros(0, np.int64)
        self._running: set[int] = set()
        self._free: list[int] = []

    def open(self, *, prompt_tokens: int, generated: int, max_tokens: int) -> int:
        """Add a rollout that has generated *generated* tokens so far, and return its row.

        It is assumed to be as fast as the average of the rollouts that are running.
        """
        if not self._free:
            self._grow()
        running = np.array([*self._running], dtype=np.int64)
        row = self._free.pop()
        self._running.add(row)
        self.generated[row], self.prompt_tokens[row] = generated, prompt_tokens
        self.max_tokens[row] = max(max_tokens, generated + 1)
        self.tokens_per_step[row] = float(self.tokens_per_step[running].mean()) if len(running) else 1.0
        self.drafted_per_step[row] = float(self.drafted_per_step[running].mean()) if len(running) else 0.0
        self._steps[row] = 0
        return row

    def _grow(self) -> None:
        allocated = len(self.generated)
        self.generated = with_row(self.generated, allocated)
        self.prompt_tokens = with_row(self.prompt_tokens, allocated)
        self.max_tokens = with_row(self.max_tokens, allocated)
        self.tokens_per_step = with_row(self.tokens_per_step, allocated)
        self.drafted_per_step = with_row(self.drafted_per_step, allocated)
        self._steps = with_row(self._steps, allocated)
        self._free += range(len(self.generated) - 1, allocated - 1, -1)

    def advance(self, rows: Integers, tokens: Integers, drafted: Integers) -> None:
        """Record one verification step: the tokens that each rollout generated, and its draft tokens.

        No row may occur twice.
        """
        self.generated[rows] += tokens
        steps = self._steps[rows] + 1
        self._steps[rows] = steps
        weights = 1 / np.minimum(steps + 4, _RATE_WINDOW_STEPS)
        for averages, values in ((self.tokens_per_step, tokens), (self.drafted_per_step, drafted)):
            averages[rows] += (values - averages[rows]) * weights

    def add_unobserved(self, row: int, tokens: int) -> None:
        """Record tokens that a rollout generated in steps that were not observed."""
        self.generated[row] += tokens

    def close(self, row: int) -> None:
        """Remove a rollout."""
        self._running.remove(row)
        self._free.append(row)
