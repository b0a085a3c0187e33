"""The per-problem suffix index: what earlier rollouts and a request's own text say about its next tokens.

A *problem* holds the responses of earlier *rollouts*, each with the *generation* of the weights that produced it. An
open *request* is a response being generated; it has a handle. After each verification step the caller reports the
tokens really sampled (`SuffixIndex.extend`) and asks for the next draft (`SuffixIndex.draft_batch`).

**Documents and contexts.** The source ``"history"`` matches START + the response so far against the documents
START + response of the problem's rollouts, so that the beginning of a response matches beginnings. The source
``"self"`` matches prompt + response so far against itself.

**Match.** The largest L, ``min_match <= L <= max_match``, for which the last L tokens of the context occur in a
document of the source with at least one more token after them. All positions of that length are its occurrences;
of more than 64, the 64 newest: higher generation first, then later added, then later in the document.

**Vote.** The next token is the one that follows the most occurrences, of equals the one that follows the newest; the
occurrences that disagree leave, and the rest go on to the next position. A draft ends with its budget, with the last
occurrence, or before the first token whose cumulative survival (the product of the probabilities up to it) would be
under ``min_survival``.

**Probabilities.** Each position's is that of being accepted given that those before it were. It is learned while
running, in buckets of (source, match length at the position, share of the votes, number of votes), from every source's
proposal, chosen or not, as far as the sampled tokens tell, and including the position at which a proposal fell under
``min_survival``, so that a bucket that is rated too low recovers.

**Arbitration.** Of the sources' proposals the one with the larger expected number of accepted tokens, the sum of its
cumulative survivals, is the draft; of equals, history's.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rollout_worker.drafting import _native
from rollout_worker.drafting._native import Draft

__all__ = ["CalibrationRow", "Draft", "Rollout", "Source", "SourceCounts", "SuffixIndex", "TokenArray", "TokenIds"]

Source: TypeAlias = Literal["history", "self"]

TokenArray: TypeAlias = npt.NDArray[np.uint32]
"""Token ids, 0 to 2^32 - 2, shape (length,). 2^32 - 1 is reserved for START."""

TokenIds: TypeAlias = TokenArray | Sequence[int]
"""Token ids as arguments: a `TokenArray` is read in place, a sequence of integers is converted."""


class Rollout(NamedTuple):
    """A finished response as `SuffixIndex.add` takes it; a plain tuple of the same shape does as well."""

    rollout_id: str
    generation: int
    tokens: TokenIds


class CalibrationRow(NamedTuple):
    """What has been learned of one bucket of draft positions.

    `match_length`, `share` (of the votes, 0 to 1) and `votes` are the lower ends of the bucket. `accepted` and
    `rejected` count observations, each fading by a factor 2047/2048 with every later one of its bucket.
    `probability` is the posterior mean that drafts carry.
    """

    source: Source
    match_length: int
    share: float
    votes: int
    accepted: float
    rejected: float
    probability: float


class SourceCounts(NamedTuple):
    """Totals over the drafts that came from one source, since the index was made.

    `drafts` that were not empty, and their tokens: `drafted`, `verified` (what the model sampled there is known and
    all drafted tokens before it were accepted) and `accepted` (it sampled that token).
    """

    drafts: int
    drafted: int
    verified: int
    accepted: int


class SuffixIndex:
    """Matches running requests against the history of their problem and against themselves; see the module.

    `max_match` is the longest context, in tokens, that is compared; `min_match` the shortest match that is drafted
    from (START counts as a token). Raises ValueError unless ``1 <= min_match <= max_match``.

    Threads: every method may be called from any thread. `add` and the `drop_*` methods build aside, without the GIL,
    and swap the result in; `extend`, `draft` and `draft_batch` never wait for them, and `open` and `close` at most for
    a look-up. A draft sees the history as it is at that moment, also for requests opened before a change.
    """

    def __init__(self, max_match: int = 64, min_match: int = 1) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(
                f"match lengths must satisfy 1 <= min_match <= max_match, got {min_match=} and {max_match=}"
            )
        self._native = _native.SuffixIndex(max_match, min_match)

    def add(self, problem: str, rollouts: Iterable[Rollout | tuple[str, int, TokenIds]]) -> int:
        """Add finished responses to a problem's history, all visible to drafts at once; return how many were new.

        A rollout id that the problem already has, or that came earlier in the same call, is ignored whatever its
        tokens. An empty response is remembered but contributes nothing. `generation` is a signed 64-bit integer.

        Raises ValueError for a token id out of range or an array that is not one-dimensional, TypeError for anything
        that is not (str, int, token ids); nothing is added then.
        """
        return self._native.add(problem, rollouts)

    def drop_rollout(self, problem: str, rollout_id: str) -> bool:
        """Forget a rollout, id and tokens; return whether it was there. Adding the id again adds it anew."""
        return self._native.drop_rollout(problem, rollout_id)

    def drop_before(self, problem: str, generation: int) -> int:
        """Forget the problem's rollouts of earlier generations than this one; return how many there were."""
        return self._native.drop_before(problem, generation)

    def drop_problem(self, problem: str) -> bool:
        """Forget a problem's rollouts; return whether it had any. Its open requests stay open."""
        return self._native.drop_problem(problem)

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

    def bytes(self, problem: str | None = None) -> int:
        """Return the bytes held now: for one problem's history, or for everything, open requests included.

        Counted is what the index asked the allocator for, with the spare capacity of its arrays: texts, sorted
        positions, look-up tables, rollout ids, segment and request records. Not counted are the allocator's own
        overhead, buffers that live only during a call, and the learned tables, whose size is fixed. History that is
        replaced counts until the last draft under way that reads it has ended. 0 for an unknown problem.
        """
        return self._native.total_bytes() if problem is None else self._native.problem_bytes(problem)

    def open(self, problem: str, prompt: TokenIds = (), sources: Collection[str] = ("history", "self")) -> int:
        """Start matching a request whose response is empty; return its handle.

        The problem need not have any history yet. `prompt` (any length) only matters to the source ``"self"``. A
        request that is resumed in the middle is opened with its prompt and extended by its tokens so far.

        Raises ValueError for a token id out of range, or when `sources` is empty or names an unknown one.
        """
        unknown = set(sources) - {"history", "self"}
        if unknown or not sources or isinstance(sources, str):
            raise ValueError(f"sources must be one or both of 'history' and 'self', got {sources!r}")
        return self._native.open(problem, prompt, "history" in sources, "self" in sources)

    def extend(self, handle: int, tokens: TokenIds) -> None:
        """Append tokens that were really sampled to a request's response, and learn from them.

        They are compared with what each source proposed at the request's last draft, from where the last `extend`
        after it stopped. Raises KeyError for a handle that is not open, ValueError for a token id out of range; the
        request is unchanged then.
        """
        self._native.extend(handle, tokens)

    def close(self, handle: int) -> None:
        """End a request and free its match state. Raises KeyError for a handle that is not open."""
        self._native.close(handle)

    def draft(self, handle: int, budget: int, min_survival: float = 0.0) -> Draft:
        """Propose up to `budget` next tokens for one request; see `draft_batch`."""
        return self._native.draft(handle, budget, min_survival)

    def draft_batch(self, handles: Sequence[int], budgets: Sequence[int], min_survival: float = 0.0) -> list[Draft]:
        """Propose next tokens for many requests, in one call without the GIL.

        `budgets` holds the largest number of tokens for each handle; 0 gives an empty draft and costs nothing.
        `min_survival` (0 to 1) ends a draft before the first token whose cumulative survival would be under it.

        A `Draft` has `tokens` and `probabilities`, lists of equal length; `source`, ``"history"`` or ``"self"``; and
        `match_length`, the length of that source's match in tokens. An empty draft has the source ``"none"`` and the
        match length 0.

        Raises KeyError for a handle that is not open, ValueError for a negative budget, a `min_survival` outside 0
        to 1, or lists of different lengths; no draft is made then.
        """
        return self._native.draft_batch(handles, budgets, min_survival)

    def calibration(self) -> list[CalibrationRow]:
        """Return what has been learned about acceptance, one row for each bucket that was observed."""
        return [CalibrationRow(*row) for row in self._native.calibration()]

    def counters(self) -> dict[Source, SourceCounts]:
        """Return how many tokens were drafted, verified and accepted from each source."""
        return {source: SourceCounts(*counts) for source, *counts in self._native.counters()}
