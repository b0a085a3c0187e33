"""Drafting for a running batch, and counting of accepted draft tokens; independent of the engine that verifies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollout_worker.arrays import Floats, Integers, with_row
from rollout_worker.drafting.index import Draft, DraftCounts, SuffixIndex, TokenArray, TokenIds

__all__ = ["DraftCounts", "Drafter"]


class Drafter:
    """Drafts for all running rollouts of a batch.

    Rollouts are identified by small integers that the caller chooses, their rows. An instance must be used by one
    thread at a time, while other threads may change the index at any time.
    """

    def __init__(self, index: SuffixIndex) -> None:
        """Draft from *index*, which holds the history and the running rollouts."""
        self._index = index
        self._handles = np.zeros(0, np.int64)
        self._counts = np.zeros((0, 3), np.int64)
        """Numbers of drafted, accepted and generated tokens, shape (rows, 3)."""

    def open(
        self,
        row: int,
        problem: str,
        prompt: TokenArray,
        sources: Sequence[str],
        *,
        later_turn: bool = False,
        stop_tokens: Sequence[int] = (),
    ) -> None:
        """Start a rollout of *problem*.

        Args:
            row: identifies the rollout until it is closed; must not be in use.
            problem: the id of its problem.
            prompt: token ids, shape (length,), uint32.
            sources: the sources of its drafts; see :mod:`rollout_worker.drafting.index`.
            later_turn: whether this is not the first turn of a trajectory, so that the end of the prompt is context.
            stop_tokens: tokens after which nothing is sampled.
        """
        context_length = len(prompt) if later_turn else 0
        handle = self._index.open(
            problem, prompt, sources=tuple(sources), context_length=context_length, stop_tokens=list(stop_tokens)
        )
        self._handles, self._counts = with_row(self._handles, row), with_row(self._counts, row)
        self._handles[row], self._counts[row] = handle, 0

    def advance(self, rows: Integers, tokens: Sequence[TokenIds], drafted: Integers) -> None:
        """Append the tokens that the model sampled since the last call.

        Args:
            rows: the rollouts, shape (rollouts,), without duplicates.
            tokens: the sampled tokens of each; lists are fastest.
            drafted: how many tokens of the last draft of each were verified, shape (rollouts,). If any were, all but
                the last of its sampled tokens are accepted draft tokens.
        """
        generated = np.fromiter(map(len, tokens), np.int64, len(tokens))
        accepted = np.minimum(np.maximum(generated - 1, 0), drafted)
        self._counts[rows] += np.stack([drafted, accepted, generated], axis=1)
        self._index.extend_batch(self._handles[rows].tolist(), tokens)

    def draft(self, rows: Integers, budgets: Integers, min_survivals: Floats) -> list[Draft]:
        """Draft up to ``budgets[i]`` tokens for the rollout of ``rows[i]``.

        A draft ends before the first token whose survival is below ``min_survivals[i]``. All arguments have the shape
        (rollouts,).
        """
        return self._index.draft_batch(self._handles[rows].tolist(), budgets.tolist(), min_survivals.tolist())

    def close(self, row: int) -> DraftCounts:
        """Close a rollout and return its token counts."""
        self._index.close(int(self._handles[row]))
        return DraftCounts(*self._counts[row].tolist())
