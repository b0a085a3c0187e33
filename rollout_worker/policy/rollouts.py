"""The running rollouts of an engine, as budgets are made from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from rollout_api.length_stats import LengthStats
from rollout_worker.policy.lengths_ahead import remaining

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


class RunningRollouts:
    """Rows of arrays; a rollout keeps its row while it runs."""

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
        self._row: dict[str, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._row)

    def open(self, key: str, problem: str, *, prompt: int, said: int, most: int) -> None:
        """A rollout begins, or goes on after *said* tokens."""
        if not self._free:
            self._grow()
        running = self.rows()
        row = self._free.pop()
        self._row[key] = row
        self._problems[row] = problem
        self.said[row], self.prompt[row], self.most[row] = said, prompt, max(most, said + 1)
        self.rate[row] = float(self.rate[running].mean()) if len(running) else 1.0
        self._steps[row] = 0
        self._predicted_at[row] = -1

    def _grow(self) -> None:
        held = len(self.said)
        more = max(16, held)
        for name in ("said", "prompt", "most", "rate", "_predicted_at", "_steps"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros(more, array.dtype)]))
        self._ends = np.concatenate([self._ends, np.zeros((more, POINTS))])
        self._problems += [""] * more
        self._free += range(held + more - 1, held - 1, -1)

    def advance(self, key: str, tokens: int, *, step: bool = True) -> None:
        """A rollout said so many tokens; *step*: in one verification step."""
        row = self._row[key]
        self.said[row] += tokens
        if step:
            self._steps[row] += 1
            self.rate[row] += (tokens - self.rate[row]) / min(int(self._steps[row]) + 4, _RATE_STEPS)

    def close(self, key: str) -> None:
        """A rollout ended."""
        self._free.append(self._row.pop(key))

    def problem(self, key: str) -> str:
        """Of a rollout."""
        return self._problems[self._row[key]]

    def rows(self, keys: Sequence[str] | None = None) -> Integers:
        """Rows of some rollouts, or of all."""
        return np.array([*self._row.values()] if keys is None else [self._row[key] for key in keys], dtype=np.int64)

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
