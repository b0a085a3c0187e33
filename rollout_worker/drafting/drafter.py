"""Drafts for a running batch, and what became of them; knows nothing of the engine that verifies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_worker.drafting.index import Draft, SuffixIndex, TokenArray, TokenIds

Integers = npt.NDArray[np.int64]


class DraftCounts(NamedTuple):
    """What was drafted for one rollout."""

    drafted: int
    """Draft tokens given to verification."""
    accepted: int
    """Draft tokens that the model accepted."""
    produced: int
    """Response tokens seen."""


class Drafter:
    """Keeps the match state of every running rollout and drafts for all of them at once.

    Rollouts are known by small numbers of the caller's, their rows. Not safe for several threads; the index may be
    written by others at any time.
    """

    def __init__(self, index: SuffixIndex) -> None:
        """Draft from *index*, which has history and running rollouts."""
        self._index = index
        self._handles = np.zeros(0, np.int64)
        self._counts = np.zeros((0, 3), np.int64)
        """Of each row: drafted, accepted and produced tokens."""

    def open(
        self,
        row: int,
        problem: str,
        prompt: TokenArray,
        sources: Sequence[str],
        *,
        later_turn: bool = False,
        ends: Sequence[int] = (),
    ) -> None:
        """Begin a rollout of *problem*.

        Args:
            row: names it from now on; none that is open.
            problem: its problem's id.
            prompt: token ids, shape (length,), uint32.
            sources: of its drafts, as the index names them.
            later_turn: whether it goes on a trajectory, so that the end of its prompt is context.
            ends: tokens behind which nothing is sampled.
        """
        context = len(prompt) if later_turn else 0
        handle = self._index.open(problem, prompt, sources=tuple(sources), context=context, ends=list(ends))
        if row >= len(self._handles):
            more = max(16, 2 * row) - len(self._handles)
            self._handles = np.concatenate([self._handles, np.zeros(more, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros((more, 3), np.int64)])
        self._handles[row], self._counts[row] = handle, 0

    def advance(self, rows: Integers, tokens: Sequence[TokenIds], drafted: Integers) -> None:
        """Tokens that the model sampled since the last call.

        Args:
            rows: of rollouts, shape (rollouts,), no row twice.
            tokens: of each; lists are taken fastest.
            drafted: how many tokens of the last draft of each were verified; if any were, all but the last of its
                tokens are those that were accepted.
        """
        produced = np.fromiter(map(len, tokens), np.int64, len(tokens))
        accepted = np.minimum(np.maximum(produced - 1, 0), drafted)
        self._counts[rows] += np.stack([drafted, accepted, produced], axis=1)
        self._index.extend_batch(self._handles[rows].tolist(), tokens)

    def draft(self, rows: Integers, budgets: Integers, min_survivals: npt.NDArray[np.float64]) -> list[Draft]:
        """At most ``budgets[i]`` tokens that may follow the rollout of ``rows[i]``.

        A draft ends before the token whose probability of being reached and accepted is under ``min_survivals[i]``.
        """
        return self._index.draft_batch(self._handles[rows].tolist(), budgets.tolist(), min_survivals.tolist())

    def close(self, row: int) -> DraftCounts:
        """Forget a rollout; what was drafted and accepted for it."""
        self._index.close(int(self._handles[row]))
        return DraftCounts(*self._counts[row].tolist())
