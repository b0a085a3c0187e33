"""The running rollouts of an engine, as budgets are made from them: in rows of arrays, since a step has no time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from rollout_api.length_stats import LengthStats
from rollout_worker.policy.remaining_length import remaining

POINTS = 8
"""Quantiles of a rollout's length."""
_RATE_STEPS = 32
"""Over which a rollout's tokens a step are averaged."""
_PREDICT_AGAIN = 1.1
"""Growth after which a rollout's length is predicted anew."""
_FIRST_GROWTH = 32

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

Lengths = Callable[[str], LengthStats]
"""What is known of the lengths of a problem's rollouts now."""


class Column:
    """A number for each row."""

    def __init__(self) -> None:
        self._values = np.zeros(0)

    def begin(self, row: int, value: float) -> None:
        """Of a rollout that begins, in a row that may be new."""
        if row >= len(self._values):
            self._values = np.concatenate([self._values, np.zeros(max(16, 2 * row) - len(self._values))])
        self._values[row] = value

    def __getitem__(self, rows: Integers) -> Floats:
        return self._values[rows]

    def __setitem__(self, rows: Integers, values: Floats) -> None:
        self._values[rows] = values


class RunningRollouts:
    """A rollout keeps its row while it runs; another has it later."""

    def __init__(self, lengths: Lengths) -> None:
        self.said = np.zeros(0, np.int64)
        """Response tokens."""
        self.prompt = np.zeros(0, np.int64)
        """Tokens before the response."""
        self.most = np.zeros(0, np.int64)
        """Response tokens at which it is cut off."""
        self.rate = np.ones(0)
        """Tokens a step, lately."""
        self._lengths = lengths
        self._ends = np.zeros((0, POINTS))
        self._predicted_at = np.zeros(0, np.int64)
        self._steps = np.zeros(0, np.int64)
        self._problems: list[str] = []
        self._running: set[int] = set()
        self._free: list[int] = []

    def open(self, problem: str, *, prompt: int, said: int, most: int) -> int:
        """A rollout begins, or goes on after *said* tokens; its row."""
        if not self._free:
            self._grow()
        running = np.array([*self._running], dtype=np.int64)
        row = self._free.pop()
        self._running.add(row)
        self._problems[row] = problem
        self.said[row], self.prompt[row], self.most[row] = said, prompt, max(most, said + 1)
        self.rate[row] = float(self.rate[running].mean()) if len(running) else 1.0
        self._steps[row] = 0
        self._predicted_at[row] = -1
        return row

    def _grow(self) -> None:
        held = len(self.said)
        more = max(16, held)
        for name in ("said", "prompt", "most", "rate", "_predicted_at", "_steps"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros(more, array.dtype)]))
        self._ends = np.concatenate([self._ends, np.zeros((more, POINTS))])
        self._problems += [""] * more
        self._free += range(held + more - 1, held - 1, -1)

    def advance(self, rows: Integers, tokens: Integers) -> None:
        """Rollouts said so many tokens in one verification step; no row twice."""
        self.said[rows] += tokens
        steps = self._steps[rows] + 1
        self._steps[rows] = steps
        rate = self.rate[rows]
        self.rate[rows] = rate + (tokens - rate) / np.minimum(steps + 4, _RATE_STEPS)

    def miss(self, row: int, tokens: int) -> None:
        """A rollout said tokens in steps that were not seen."""
        self.said[row] += tokens

    def close(self, row: int) -> None:
        """A rollout ended."""
        self._running.remove(row)
        self._free.append(row)

    def problem(self, row: int) -> str:
        """Of a rollout."""
        return self._problems[row]

    def ahead(self, rows: Integers) -> Floats:
        """Quantiles of the tokens that rollouts still have to say, at least 1; shape (rows, POINTS)."""
        said = self.said[rows]
        due = (
            (self._predicted_at[rows] < 0)
            | (said >= self._ends[rows, 0])
            | (said > self._predicted_at[rows] * _PREDICT_AGAIN + _FIRST_GROWTH)
        )
        for row in rows[due]:
            so_far, most = int(self.said[row]), int(self.most[row])
            stats = self._lengths(self._problems[row])
            self._ends[row] = so_far + remaining(stats, so_far=so_far, most=max(most, so_far + 1), points=POINTS)
            self._predicted_at[row] = so_far
        return np.maximum(self._ends[rows] - said[:, None], 1.0)
