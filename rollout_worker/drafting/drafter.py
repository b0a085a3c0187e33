"""Drafts for a running batch, and what became of them; knows nothing of the engine that verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_worker.drafting.index import Draft, SuffixIndex, TokenArray, TokenIds


@dataclass
class DraftCounts:
    """What was drafted for one rollout, or for many."""

    drafted: int = 0
    """Draft tokens given to verification."""
    accepted: int = 0
    """Draft tokens that the model accepted."""
    produced: int = 0
    """Response tokens seen."""


class Drafter:
    """Keeps the match state of every running rollout and drafts for all of them at once.

    Rollouts are known by a key of the caller's. Not safe for several threads; the index may be written by others
    at any time.
    """

    def __init__(self, index: SuffixIndex) -> None:
        """Draft from *index*, which has history and running rollouts."""
        self._index = index
        self._running: dict[str, _Running] = {}
        self._said: list[tuple[int, TokenIds]] = []
        """What the index has not been told yet; one call tells it all of a step."""

    def open(
        self,
        key: str,
        problem: str,
        prompt: TokenArray,
        sources: Sequence[str],
        *,
        later_turn: bool = False,
        ends: Sequence[int] = (),
    ) -> None:
        """Begin a rollout of *problem*.

        Args:
            key: names it from now on.
            problem: its problem's id.
            prompt: token ids, shape (length,), uint32.
            sources: of its drafts, as the index names them.
            later_turn: whether it goes on a trajectory, so that the end of its prompt is context.
            ends: tokens behind which nothing is sampled.
        """
        context = len(prompt) if later_turn else 0
        handle = self._index.open(problem, prompt, sources=tuple(sources), context=context, ends=list(ends))
        self._running[key] = _Running(handle)

    def advance(self, key: str, tokens: TokenIds, *, drafted: int = 0) -> None:
        """Tokens that the model sampled since the last call; a list is taken fastest.

        If *drafted* tokens of the last draft were verified, all but the last of *tokens* are those of them that were
        accepted.
        """
        state = self._running[key]
        state.counts.drafted += drafted
        state.counts.accepted += min(max(len(tokens) - 1, 0), drafted)
        state.counts.produced += len(tokens)
        self._said.append((state.handle, tokens))

    def _tell(self) -> None:
        if self._said:
            handles, tokens = zip(*self._said, strict=True)
            self._said = []
            self._index.extend_batch(handles, tokens)

    def draft(self, keys: Sequence[str], budgets: Sequence[int], min_survivals: Sequence[float]) -> list[Draft]:
        """At most ``budgets[i]`` tokens that may follow rollout i.

        A draft ends before the token whose probability of being reached and accepted is under ``min_survivals[i]``.
        """
        self._tell()
        handles = [self._running[key].handle for key in keys]
        return self._index.draft_batch(handles, budgets, min_survivals)

    def close(self, key: str) -> DraftCounts:
        """Forget a rollout; what was drafted and accepted for it."""
        self._tell()
        state = self._running.pop(key)
        self._index.close(state.handle)
        return state.counts

    def running(self) -> set[str]:
        """Keys of the rollouts that were begun and not closed."""
        return set(self._running)


class _Running:
    __slots__ = ("counts", "handle")

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.counts = DraftCounts()
