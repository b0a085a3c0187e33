"""The per-problem suffix index: what earlier rollouts, siblings and a request's own text say of its next tokens.

A *problem* holds the responses of earlier *rollouts*, each with the *generation* of the weights that produced it. An
open *request* is a response being generated; it has a handle. After each verification step the caller reports the
tokens really sampled (`SuffixIndex.extend`) and asks for the next draft (`SuffixIndex.draft_batch`).

**Contexts.** What a request has said is matched, from its end backwards, in four places, its *sources*:
``"history"``, the responses of the problem's earlier rollouts; ``"siblings"``, what the problem's other open requests
have said so far; ``"self"``, the request's own response and, besides, its prompt; ``"foreign"``, the last rollouts of
other problems, in a pool. A response begins with START, so that its beginning matches beginnings; in later turns of a
trajectory it begins with its *context*, the last tokens before it (the environment's answer, mostly), which are matched
and never drafted.

**Occurrences.** The places where the end of the context stood before, each with the length of its match, at most
`depth` tokens: of the history the 32 with the longest matches, of the request's response, its prompt and its siblings
24 each, of what is alive by a bounded search in chains of recent places that share 2, 4 or 8 tokens; and of the pool 16
where none of the others shares 16 tokens.

**Probabilities.** The occurrences with the longest match say with some probability what comes next, else those with the
next shorter match do, and so on, of all sources in one chain. Rollouts of the history that a request has gone along
with lately speak in it for themselves: of the last 4 that shared 4 tokens or more, the best match within 32 tokens of
where the request would stand in them is looked at, however short it is, for 64 tokens. These probabilities are learned
while running, by online expectation maximisation in buckets of (source, match length, votes, share of the votes for the
favourite, place in the draft). Votes of finished rollouts weigh by their age in weight versions behind the newest (up
to 1, 3, 7, more) and by their reward (unknown, below the problem's mean, not below), as gradient ascent on the
likelihood of what was sampled finds. Then online logistic regression corrects and calibrates the probabilities, for the
token, the token with the one before it, the longest match and the place. The token that is likeliest then is drafted,
and the occurrences that say so go on to the next place. A draft ends with its budget, with a token behind which nothing
is sampled, where nothing was ever said next, or before the first token whose cumulative survival (the product of the
probabilities up to it) would be under ``min_survival``. That token is learned from as well, so that what is rated too
low recovers.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rollout_worker.drafting import _native
from rollout_worker.drafting._native import Draft

__all__ = [
    "POOL_TOKENS",
    "SOURCES",
    "Draft",
    "Learned",
    "Occurrence",
    "Rollout",
    "Source",
    "SourceCounts",
    "SuffixIndex",
    "TokenArray",
    "TokenIds",
]

Source: TypeAlias = Literal["history", "self", "siblings", "foreign"]

Learned: TypeAlias = bytes
"""What an index has learned of drafts, for another index of the same version."""

SOURCES: tuple[Source, ...] = ("history", "self", "siblings", "foreign")

POOL_TOKENS = 2**20
"""As large a foreign pool as engines have."""

TokenArray: TypeAlias = npt.NDArray[np.uint32]
"""Token ids, 0 to 2^32 - 2, shape (length,). 2^32 - 1 is reserved for START."""

TokenIds: TypeAlias = TokenArray | Sequence[int]
"""Token ids as arguments: a `TokenArray` is read in place and must not change during the call, a list is copied."""


class Rollout(NamedTuple):
    """A finished response as `SuffixIndex.add` takes it; a plain tuple of the same shape does as well.

    `context` is what stood before it in later turns of a trajectory, of which as much is used as is compared. `reward`
    is None where it is not known (yet).
    """

    rollout_id: str
    generation: int
    tokens: TokenIds
    context: TokenIds = ()
    reward: float | None = None


class Occurrence(NamedTuple):
    """A place where the end of what a request has said stood before.

    `match_length` is how many tokens before it are the same, at most the index's depth; `tokens` follow it, fewer than
    asked for at the end of a text. `generation` and `reward` are the rollout's, 0 and None for what is alive;
    of foreign ones the reward is that with which they were added. `anchored` tells that the request has gone along with
    that rollout lately.
    """

    source: Source
    match_length: int
    generation: int
    tokens: list[int]
    reward: float | None = None
    anchored: bool = False


class SourceCounts(NamedTuple):
    """Tokens for which one source spoke most, since the index was made.

    `drafted`; `verified` (what the model sampled there is known and all drafted tokens before it were accepted) and
    `accepted` (it sampled that token).
    """

    drafted: int
    verified: int
    accepted: int


class SuffixIndex:
    """Matches running requests against the history of their problem and against themselves; see the module.

    `depth` is how many tokens of a context are compared, 1 to 255; START counts as one. Batches are drafted by
    `threads` threads, one of them the caller's. The foreign pool holds the last `pool_tokens` tokens of all problems'
    rollouts, at most a sixteenth of them, or one rollout, from one call of `add`; with 0 there is none, and the source
    ``"foreign"`` says nothing. ValueError for other numbers.

    `max_bytes` caps `bytes`, running requests included: beyond it, what is least recently used, opened or added to, is
    thrown out, a problem's whole history at a time, of problems with open requests last; then the pool. `take_evicted`
    tells which, so that they can be added again when they are needed. What is being built aside counts as well, and may
    exceed the cap until the background gets to it; an `add` that is over the cap waits for that. None: no cap.

    Threads: every method may be called from any thread. `add` and the `drop_*` methods build aside, without the GIL,
    and swap the result in; segments are merged by a thread in the background. `extend`, `draft` and `draft_batch`
    never wait for any of them, and `open` and `close` at most for a look-up. A draft sees the history as it is at that
    moment, also for requests opened before a change.
    """

    def __init__(
        self, depth: int = 64, threads: int = 1, *, max_bytes: int | None = None, pool_tokens: int = 0
    ) -> None:
        if threads < 1:
            raise ValueError(f"threads must be 1 or more, got {threads}")
        if not 1 <= depth <= 255:
            raise ValueError(f"contexts can be compared 1 to 255 tokens deep, not {depth}")
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes must be 1 or more, or None for no cap, got {max_bytes}")
        if pool_tokens < 0:
            raise ValueError(f"pool_tokens must be 0 or more, got {pool_tokens}")
        self._native = _native.SuffixIndex(depth, threads, max_bytes or 0, pool_tokens)

    def add(
        self,
        problem: str,
        rollouts: Iterable[
            Rollout
            | tuple[str, int, TokenIds]
            | tuple[str, int, TokenIds, TokenIds]
            | tuple[str, int, TokenIds, TokenIds, float | None]
        ],
    ) -> int:
        """Add finished responses to a problem's history, all visible to drafts at once; return how many were new.

        A rollout id that the problem already has, or that came earlier in the same call, is ignored whatever its
        tokens. An empty response is remembered but contributes nothing. `generation` is a signed 64-bit integer.

        Raises ValueError for a token id out of range, an array that is not one-dimensional or a reward that is not
        finite, TypeError for anything that is not (str, int, token ids), with context and reward or without; nothing is
        added then.
        """
        return self._native.add(problem, rollouts)

    def reward(self, problem: str, rewards: Mapping[str, float]) -> int:
        """Set rewards of a problem's rollouts, by rollout id; return how many of them the problem has.

        Unknown ids are ignored. Raises TypeError for keys and values that are no ids and numbers, ValueError for a
        reward that is not finite; nothing is set then.
        """
        return self._native.set_rewards(problem, dict(rewards))

    def drop_rollout(self, problem: str, rollout_id: str) -> bool:
        """Forget a rollout, id and tokens; return whether it was there. Adding the id again adds it anew."""
        return self._native.drop_rollout(problem, rollout_id)

    def drop_before(self, problem: str, generation: int) -> int:
        """Forget the problem's rollouts of earlier generations than this one; return how many there were."""
        return self._native.drop_before(problem, generation)

    def drop_problem(self, problem: str) -> bool:
        """Forget a problem's rollouts; return whether it had any. Its open requests stay open."""
        return self._native.drop_problem(problem)

    def take_evicted(self) -> list[str]:
        """List the problems whose history was thrown out for `max_bytes` since the last call, the first first."""
        return self._native.take_evicted()

    def settle(self) -> None:
        """Wait until nothing is left to merge in the background."""
        self._native.settle()

    def problems(self) -> list[str]:
        """List the problems that have rollouts, sorted."""
        return self._native.problems()

    def rollouts(self, problem: str) -> list[str]:
        """List a problem's rollout ids in the order they were added; empty for an unknown problem.

        Waits for an `add` or drop of the same problem that is under way.
        """
        return self._native.rollouts(problem)

    def tokens(self, problem: str) -> int:
        """Return how many response tokens of a problem are indexed; 0 for an unknown problem."""
        return self._native.tokens(problem)

    def pool_tokens(self) -> int:
        """Return how many tokens the foreign pool holds, with those of dropped rollouts that still take room."""
        return self._native.pool_tokens()

    def bytes(self, problem: str | None = None) -> int:
        """Return the bytes held now: for one problem (its history and what its siblings say), or for everything.

        Counted is what the index asked the allocator for, with the spare capacity of its arrays: texts, sorted
        positions, look-up tables, rollout ids, segment and request records. Not counted are the allocator's own
        overhead, buffers that live only during a call, and the learned tables, whose size is fixed. History that is
        replaced counts until the last draft under way that reads it has ended. 0 for an unknown problem.
        """
        return self._native.total_bytes() if problem is None else self._native.problem_bytes(problem)

    def open(
        self,
        problem: str,
        prompt: TokenIds = (),
        sources: Collection[str] = SOURCES,
        *,
        context: int = 0,
        ends: TokenIds = (),
    ) -> int:
        """Start matching a request whose response is empty; return its handle.

        The problem need not have any history yet. `prompt` (any length) is what stands before the response; only the
        source ``"self"`` looks into it, but the last `context` tokens of it are the response's context: 0 for the first
        turn of a trajectory, the length of what came after the trajectory's prompt for later ones. A request that is
        resumed in the middle is opened with its prompt and extended by its tokens so far.

        `ends` are tokens behind which nothing is sampled, so that no draft goes on behind one.

        Raises ValueError for a token id out of range, a negative `context`, or when `sources` is empty or names an
        unknown one.
        """
        unknown = set(sources) - set(SOURCES)
        if unknown or not sources or isinstance(sources, str):
            raise ValueError(f"sources must be some of {', '.join(map(repr, SOURCES))}, got {sources!r}")
        if context < 0:
            raise ValueError(f"context is a number of tokens, 0 or more, got {context}")
        return self._native.open(problem, prompt, context, [one in sources for one in SOURCES], ends)

    def extend(self, handle: int, tokens: TokenIds) -> None:
        """Append tokens that were really sampled to a request's response, and learn from them.

        They are compared with the request's last draft, from where the last `extend` after it stopped.

        Raises KeyError for a handle that is not open, ValueError for a token id out of range; the request is unchanged
        then.
        """
        self._native.extend(handle, tokens)

    def extend_batch(self, handles: Sequence[int], tokens: Iterable[TokenIds]) -> None:
        """As `extend`, for many requests in one call without the GIL: ``tokens[i]`` belong to ``handles[i]``.

        Raises as `extend` does, and ValueError for lists of different lengths; all requests are unchanged then.
        """
        self._native.extend_batch(handles, tokens)

    def close(self, handle: int) -> None:
        """End a request and free its match state. Raises KeyError for a handle that is not open."""
        self._native.close(handle)

    def draft(self, handle: int, budget: int, min_survival: float = 0.0) -> Draft:
        """Propose up to `budget` next tokens for one request; see `draft_batch`."""
        return self._native.draft(handle, budget, min_survival)

    def draft_batch(
        self, handles: Sequence[int], budgets: Sequence[int], min_survival: float | Sequence[float] = 0.0
    ) -> list[Draft]:
        """Propose next tokens for many requests, in one call without the GIL.

        `budgets` holds the largest number of tokens for each handle; 0 gives an empty draft and costs nothing.
        `min_survival` (0 to 1; one for all, or one for each) ends a draft before the first token whose cumulative
        survival would be under it.

        A `Draft` has `tokens`, `probabilities` (of being accepted if those before are), `sources` (which speak most
        for each) and `ages` (how many weight versions ago the finished rollout that speaks was made; None where nothing
        finished does), lists of equal length; `expected`, how many of them are to be accepted by these probabilities;
        and `match_length`, the longest match in tokens, 0 for an empty draft.

        Raises KeyError for a handle that is not open, ValueError for a negative budget, a `min_survival` outside 0
        to 1, or lists of different lengths; no draft is made then.
        """
        return self._native.draft_batch(handles, budgets, min_survival)

    def occurrences(self, handle: int, *, length: int = 16) -> list[Occurrence]:
        """Return what a draft of this request would be made of, at most `length` tokens of each.

        Raises KeyError for a handle that is not open, ValueError for a negative `length`.
        """
        return [Occurrence(*row) for row in self._native.occurrences(handle, length)]

    def learned(self) -> Learned:
        """Return what was learned of drafts: how likely each kind of occurrence is right, and each token.

        Some 450 kB, mostly of one value, for `take` of another index of the same version.
        """
        return self._native.learned()

    def take(self, learned: Learned) -> None:
        """Go on from what another index has learned, in place of what this one has.

        The law may have changed since: of each number 256 observations count at most, however many there were.

        Raises ValueError for bytes that are nothing `learned` of this version returned; nothing changes then.
        """
        self._native.take(learned)

    def counters(self) -> dict[Source, SourceCounts]:
        """Return how many tokens were drafted, verified and accepted from each source."""
        return {source: SourceCounts(*counts) for source, *counts in self._native.counters()}

    def verified(self) -> int:
        """Return how many drafted tokens were verified, from all sources."""
        return sum(counts.verified for counts in self.counters().values())

    def accepted_by_age(self) -> dict[int, tuple[float, float]]:
        """Return how well history of each age spoke: tokens drafted from it, and how many of them were accepted.

        An age is the newest generation that the index knew when it drafted, less that of the rollouts behind the token;
        63 stands for 63 and more. Both numbers are sums since the index was made: what happened in between is the
        difference of two answers.

        Counted are the tokens for which ``"history"`` spoke most, once verified (see `SourceCounts`): behind a token
        that was refused nothing is known, so it counts for nobody. A token counts as one, in equal parts for each age
        at which some rollout says it, and so the parts of all ages add up to what `counters` has of ``"history"``. It
        is not left to the youngest: to the old would then fall only what no young rollout says, which is accepted
        seldom even while the policy stands still.

        Ages without such tokens are left out; drafts and `extend` under way never wait.
        """
        return self._native.accepted_by_age()
