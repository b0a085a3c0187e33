"""Drafts for a running batch, and what became of them; knows nothing of the engine that verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_worker.drafting.index import Draft, SuffixIndex, TokenArray, TokenIds


def break_even(running: int, base_tokens: float) -> float:
    """Least probability of being accepted at which drafting a token makes a batch faster.

    A step costs ``c_base + c_tok · tokens`` (DAS, arXiv 2511.13841). Verifying one more token costs c_tok; if it is
    accepted, one rollout needs one step less, which is worth its share of the base, ``c_base / running``, and the
    token itself, c_tok. So the token pays if its probability is above ``running / (running + c_base / c_tok)``.

    Args:
        running: rollouts in the batch.
        base_tokens: ``c_base / c_tok``: how many tokens cost as much as a step has before the first.
    """
    return running / (running + base_tokens)


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

    def __init__(self, index: SuffixIndex, *, max_draft_tokens: int, base_tokens: float) -> None:
        """Draft from *index*.

        Args:
            index: history and running rollouts.
            max_draft_tokens: most tokens of one draft.
            base_tokens: see :func:`break_even`.
        """
        self.max_draft_tokens = max_draft_tokens
        self._index = index
        self._base_tokens = base_tokens
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

    def advance(self, key: str, tokens: TokenIds, *, new_step: bool = True) -> None:
        """Tokens that the model sampled since the last call, in one verification step; a list is taken fastest.

        All but the last of them are draft tokens that were accepted; *new_step* is false for tokens that were
        sampled before this drafter saw the rollout.
        """
        state = self._running[key]
        if new_step:
            state.counts.drafted += state.pending
            state.counts.accepted += min(max(len(tokens) - 1, 0), state.pending)
        state.counts.produced += len(tokens)
        state.pending = 0
        self._said.append((state.handle, tokens))

    def _tell(self) -> None:
        if self._said:
            handles, tokens = zip(*self._said, strict=True)
            self._said = []
            self._index.extend_batch(handles, tokens)

    def draft(self, keys: Sequence[str], budgets: Sequence[int]) -> list[list[int]]:
        """At most ``budgets[i]`` tokens (and never more than ``max_draft_tokens``) that may follow rollout i.

        A draft ends before the token whose probability of being reached and accepted no longer pays.
        """
        self._tell()
        states = [self._running[key] for key in keys]
        drafts: list[Draft] = self._index.draft_batch(
            [state.handle for state in states],
            [max(0, min(budget, self.max_draft_tokens)) for budget in budgets],
            min_survival=break_even(len(self._running), self._base_tokens),
        )
        for state, draft in zip(states, drafts, strict=True):
            state.pending = len(draft)  # counted once it is verified
        return [draft.tokens for draft in drafts]

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
    __slots__ = ("counts", "handle", "pending")

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.counts = DraftCounts()
        self.pending = 0
